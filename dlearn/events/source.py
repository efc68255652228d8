"""Where a new recorder begins: `Source`, what it reports to (`Emit`), and its kinds of events in files and readers.

docs/new-recorder.md walks through one, dlearn/sources/tcp_store.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from typing import Any, ClassVar, Protocol

import msgspec

from dlearn.errors import SetupError
from dlearn.events.event import Collective, Event, Line, TensorInfo

ENTRY_POINTS = "dlearn.sources"
"""The group of entry points by which an installed package offers its Sources."""

OFF_BY_DEFAULT = {"memory": "dlearn.sources.memory:SOURCE", "tcp_store": "dlearn.sources.tcp_store:SOURCE"}

Undo = Callable[[], None]
Step = tuple[int, int, int, int, int]
"""One message of a schedule: number of the step, sender and receiver (group ranks), offset and length in bytes."""


class Emit(Protocol):
    """What a Source reports to. The recording implements it."""

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        """Report an event that starts now; returns its number. Time, thread and enclosing span are filled in."""

    def end(self, number: int, *, by: str, error: str = "", **facts: Any) -> None:
        """Report that event `number` ends now; `facts` are known only now, as the `outputs` of a `ServiceCall`.

        With `by=NOT_OBSERVED` its end is never seen.
        """

    def enter(self, number: int) -> None:
        """Put what this thread reports from now on inside event `number`."""

    def leave(self, number: int) -> None:
        """Undo `enter`."""

    def fact(self, line: Line) -> None:
        """Report something about this process that is no event: a process group, a connection."""

    def failed(self, where: str, error: Exception) -> None:
        """Report that the hook itself failed; the user is told once, and the program goes on."""

    def dropped(self) -> None:
        """Report that a point-to-point work was let go unfinished, because too many were held."""


class ServiceCall(Event, frozen=True, kw_only=True):
    """A call of a service that another process offers: a store, a queue. Give a subclass a tag and columns of its own.

    It begins when `tensors` are sent; `about` says what it asks for. It ends when `outputs` have come back, or, if it
    is `one_way`, when they were handed over.
    """

    group: ClassVar[str] = ""

    op: str
    about: str = ""
    tensors: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    one_way: bool = False

    @property
    def seq(self) -> int:
        return self.number


def byte_strings(value: Any) -> tuple[TensorInfo, ...]:
    """Describe each string of a value, also in lists, as a tensor of as many bytes: what is sent of it."""
    if isinstance(value, list | tuple):
        found = map(byte_strings, value)
        return tuple(chain.from_iterable(found))
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        return ()
    return (TensorInfo((len(value),), "uint8", "cpu", len(value), len(value)),)


@dataclass(frozen=True)
class Kind:
    """A class of events, its columns, and how operations look whose op begins with `label` ("store", "store get")."""

    columns: type[Event]
    label: str = ""
    color: str = ""

    @property
    def tag(self) -> str:
        return str(self.columns.__struct_config__.tag)


@dataclass(frozen=True)
class Source:
    """One recorder: `install(emit)` reports to `emit` until the function is called that it returns.

    `kinds` are the classes of its events; docs/new-recorder.md says how the ends of each meet.
    `hosts(trace)` tells which rank a `ServiceCall` asked, by the event's rank and number.

    `schedule(calls, ranks)` gives the messages of a collective of the groups whose backend is this Source's name, or
    says why there are none; it may be that sentence itself.
    """

    name: str
    install: Callable[[Any], Undo]
    kinds: tuple[Kind, ...] = ()
    hosts: Callable[[Any], Mapping[tuple[int, int], int]] | None = None
    schedule: Callable[[Sequence[Collective], int], Iterable[Step] | str] | str = ""


in_use: dict[str, Source] = {}
"""By name, the Sources that this process has recorded with or read a trace of."""


def find(name: str) -> Source:
    """Load dlearn's own Source of this name, an installed one, or "module:NAME"; else SetupError."""
    offered = OFF_BY_DEFAULT | {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    if ":" not in name and name not in offered:
        raise SetupError(f"no source {name!r} is installed; there are: {', '.join(offered)}. Or give 'module:NAME'.")
    try:
        source = EntryPoint(name, offered.get(name, name), ENTRY_POINTS).load()
    except Exception as error:  # Importing a package may raise anything.
        raise SetupError(f"the source {name!r} cannot be loaded: {error}") from None
    if not isinstance(source, Source):
        raise SetupError(f"{name!r} names a {type(source).__name__}, and no dlearn.events.source.Source.")
    in_use[source.name] = source
    return source


# In a file ------------------------------------------------------------------------------------------------------------


class KindFact(msgspec.Struct, frozen=True):
    """A kind in a file: its columns, and whether events of it last."""

    columns: tuple[str, ...]
    ends: bool


class SourceFact(Line, tag="source", frozen=True, kw_only=True):
    """The Source `name` has written events of these kinds into this file, after this line."""

    name: str
    kinds: dict[str, KindFact]


def describe(source: Source) -> SourceFact:
    """Return what a file says of a Source before its first event."""
    facts = {kind.tag: KindFact(kind.columns.__struct_fields__, kind.columns.ends) for kind in source.kinds}
    return SourceFact(name=source.name, kinds=facts)


def classes(fact: SourceFact) -> dict[str, type[Event] | str]:
    """Return the classes of these kinds; the Source's name where its columns differ here."""
    source = in_use.get(fact.name)
    if source is None:
        with suppress(SetupError):
            source = find(fact.name) if ":" not in fact.name else None  # A file is to name no module to load.
    found: dict[str, type[Event] | str] = dict.fromkeys(fact.kinds, fact.name)
    for kind in source.kinds if source is not None else ():
        if kind.tag in fact.kinds and fact.kinds[kind.tag].columns == kind.columns.__struct_fields__:
            found[kind.tag] = kind.columns
    return found
