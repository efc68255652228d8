"""Where in the program something happens: in which span of the user's, in which phase of a training step."""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.join.joining import once
from dlearn.trace.event import Event, Span
from dlearn.trace.message import Message, Operation
from dlearn.trace.trace import Trace


class WalkParts:
    """The outermost span around it, and its phase; both are empty where there is none."""

    def __init__(self, trace: Trace) -> None:
        self._names = _outermost(trace.whole)
        self._callers = {
            (each.run.rank, each.run.number): each.call
            for each in trace.whole.rpc.exchanges
            if each.run is not None and each.call is not None
        }

    def of_event(self, event: Event) -> tuple[str, str]:
        """Of what an RPC runs, the span of its caller."""
        return self._around(self._callers.get((event.rank, event.number), event)), _plain(event.phase)

    def of_message(self, message: Message) -> tuple[str, str]:
        """Of its sender's call; of an RPC the span of what caused it, for its reply too."""
        operation = message.operation
        end = next((each for each in operation.ends if each.rank == message.src), operation.ends[0])
        return self._around(end) if operation.exchange is None else self.span_of(operation), _plain(end.phase)

    def span_of(self, operation: Operation) -> str:
        """On the first rank that called or caused it in a span."""
        calls: Sequence[Event] = operation.ends
        if operation.exchange is not None:
            calls = (operation.exchange.cause,) if operation.exchange.cause is not None else ()
        return next((name for call in calls if (name := self._around(call))), "")

    def _around(self, event: Event) -> str:
        return self._names.get((event.rank, event.parent), "") if event.parent is not None else ""


@once
def _outermost(whole: Trace) -> dict[tuple[int, int], str]:
    """Rank and number of an event -> the outermost span that it is, or is in. A parent has the lower number."""
    names: dict[tuple[int, int], str] = {}
    for event in sorted(whole.events, key=lambda event: event.number) if whole.spans else ():
        above = names.get((event.rank, event.parent), "") if event.parent is not None else ""
        names[event.rank, event.number] = above or (event.name if isinstance(event, Span) else "")
    return names


def _plain(phase: str) -> str:
    return "" if phase == "none" else phase
