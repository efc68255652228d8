"""The values of a walk through a trace, and where in the program a step happens."""

from collections import defaultdict
from itertools import chain

import msgspec
import numpy as np

from dlearn.events.event import Event, Span
from dlearn.join.autograd_graph import AutogradGraph
from dlearn.join.selection import once
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import RankNames
from dlearn.trace import Trace

EventKey = tuple[int, int | None]
"""The rank and the number of an event; None: there is none."""


class Change(msgspec.Struct, frozen=True):
    """A change of what `rank` holds at an index of a panel: "" is nothing, `share` is 0 to 1."""

    panel: str
    rank: int
    index: int
    text: str
    share: float
    owners: tuple[int, ...] = ()


class StatePanel(msgspec.Struct, frozen=True):
    """The state of one thing on each rank, by index: pieces of a tensor, or buckets of a model.

    `start` is before the first step. Unless it is `lasting`, a panel belongs to one `operation`.
    """

    title: str
    start: tuple[Change, ...] = ()
    lasting: bool = False
    operation: Operation | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A message, or local activity of `rank` from `at_ns` to `until_ns`, with a `mark` for pictures.

    `span` is the user's outermost span around it, `phase` that of the training step. `highlighted`
    are a graph of the walk and a node in it that runs now. Of a hang, `waiting` ranks wait for
    `absent` ones, and `rank` is the first of them; `never` are the pairs of ranks between which
    nothing was sent.
    """

    rank: int
    sentence: str
    at_ns: int
    until_ns: int | None = None
    message: Message | None = None
    mark: str = ""
    op: str = ""
    span: str = ""
    phase: str = ""
    control: bool = False
    changes: tuple[Change, ...] = ()
    highlighted: tuple[int, int] | None = None
    waiting: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    never: tuple[tuple[int, int], ...] = ()

    @property
    def part(self) -> str:
        """Return where in the program it is: "step 3 · backward"."""
        return " · ".join(filter(None, (self.span, self.phase)))

    @property
    def moment(self) -> tuple[object, ...]:
        """Return what is equal for steps of one moment: operation and step; of activity, (None,)."""
        sent = self.message
        return (None,) if sent is None else (id(sent.operation), sent.step)


class Walkthrough(msgspec.Struct, frozen=True, kw_only=True):
    """All steps in their order; `notes` say what signs mean, and what is inferred or left out."""

    title: str
    steps: tuple[Step, ...]
    panels: tuple[StatePanel, ...]
    graphs: tuple[AutogradGraph, ...]
    notes: tuple[str, ...]
    labels: RankNames

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(step.message for step in self.steps if step.message is not None)

    def held(self, panel: StatePanel, count: int) -> dict[tuple[int, int], Change]:
        """Return the state of a panel after `count` steps, by rank and index."""
        later = chain.from_iterable(step.changes for step in self.steps[:count])
        changes = chain(panel.start, (each for each in later if each.panel == panel.title))
        return {(change.rank, change.index): change for change in changes}


class WalkParts:
    """A walk while it is made; `changes`, and `words` after a sentence, go by a message's index."""

    def __init__(self) -> None:
        self.panels: list[StatePanel] = []
        self.changes: dict[int, list[Change]] = defaultdict(list)
        self.words: dict[int, str] = {}
        self.steps: list[Step] = []
        self.graphs: list[AutogradGraph] = []
        self.notes: list[str] = []


class ProgramParts:
    """The outermost span around events and messages, and their phases; "" where there is none."""

    def __init__(self, whole: Trace) -> None:
        enclosing = np.setdiff1d(whole.table.parent_row, [-1])
        self._names: dict[EventKey, str] = {}
        # A parent has the lower number.
        for event in whole.table.made(enclosing[np.argsort(whole.table.number[enclosing])]):
            own = event.name if isinstance(event, Span) else ""
            self._names[event.rank, event.number] = self._around(event) or own
        exchanges, events = whole.rpc.exchanges.table, whole.rpc.exchanges.table.events
        seen = (exchanges.run >= 0) & (exchanges.call >= 0)
        run, call = exchanges.run[seen], exchanges.call[seen]
        runs = zip(events.rank[run].tolist(), events.number[run].tolist(), strict=True)
        around = zip(events.rank[call].tolist(), events.parent[call].tolist(), strict=True)
        self._around_caller: dict[EventKey, EventKey] = dict(zip(runs, around, strict=True))

    def of_event(self, event: Event) -> tuple[str, str]:
        """Return span and phase of an event; of what an RPC runs, its caller's span."""
        around = self._around_caller.get((event.rank, event.number), (event.rank, event.parent))
        return self._names.get(around, ""), event.phase.removeprefix("none")

    def of_message(self, message: Message) -> tuple[str, str]:
        """Return span and phase of its sender's call; of RPC the span of the request's cause."""
        operation = message.operation
        end = next((each for each in operation.ends if each.rank == message.src), operation.ends[0])
        span = self._around(end) if operation.exchange is None else self.span_of(operation)
        return span, end.phase.removeprefix("none")

    def span_of(self, operation: Operation) -> str:
        """Return its span on the first rank that called or caused it in one."""
        if operation.exchange is not None:
            cause = operation.exchange.cause
            return "" if cause is None else self._around(cause)
        return next(filter(None, map(self._around, operation.ends)), "")

    def _around(self, event: Event) -> str:
        return self._names.get((event.rank, event.parent), "")


program_parts = once(ProgramParts)  # Made once for all pictures of a whole trace.
