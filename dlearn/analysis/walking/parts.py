"""Where in the program something happens: in which span of the user's, in which phase of a training step."""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.analysis.rpc import phase_of
from dlearn.trace.event import Event, Span
from dlearn.trace.message import Message
from dlearn.trace.trace import Trace


class Parts:
    """The outermost span around an event, and its phase; of a message those of its sender's call."""

    def __init__(self, trace: Trace) -> None:
        self._spans = {(each.rank, each.number): each for each in trace.whole.events if isinstance(each, Span)}

    def of_message(self, message: Message) -> tuple[str, str]:
        ends: Sequence[Event] = message.operation.ends
        end = next((each for each in ends if each.rank == message.src), ends[0])
        exchange = message.operation.exchange
        return self._joined(end, end.phase if exchange is None else phase_of(exchange))

    def of_event(self, event: Event) -> tuple[str, str]:
        return self._joined(event, event.phase)

    def _joined(self, event: Event, phase: str) -> tuple[str, str]:
        name, around = "", self._spans.get((event.rank, event.parent if event.parent is not None else -1))
        while around is not None:
            name, around = (
                around.name,
                self._spans.get((around.rank, around.parent if around.parent is not None else -1)),
            )
        return name, phase if phase != "none" else ""
