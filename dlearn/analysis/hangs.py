"""Who waits for whom: operations that some rank is inside of, and that cannot end."""

from __future__ import annotations

import msgspec

from dlearn.analysis.joining import operations
from dlearn.trace.event import Collective, Event, PointToPoint
from dlearn.trace.message import Operation
from dlearn.trace.trace import Trace


class Hang(msgspec.Struct, frozen=True):
    """`waiting` ranks are inside `operation`; the ranks in `operation.missing` never called it.

    `elsewhere` gives, for each of those, the call that it is inside of instead, or None if it waits for no message.
    """

    operation: Operation
    waiting: tuple[int, ...]
    elsewhere: dict[int, Collective | PointToPoint | None]


def hangs(trace: Trace) -> tuple[Hang, ...]:
    """Every operation that is stuck, the first called first. Empty where all that was begun has ended."""
    return tuple(
        Hang(
            operation,
            tuple(end.rank for end in operation.ends if end.pending or end.failed),
            {rank: inside(trace, rank) for rank in operation.missing},
        )
        for operation in operations(trace)
        if (operation.pending or operation.failed) and not _ended_by_other(operation)
    )


def _ended_by_other(operation: Operation) -> bool:
    """All came and it failed all the same: a connection broke below it. A consequence, not a wait for a call."""
    return operation.failed and not operation.missing and not operation.problem


def inside(trace: Trace, rank: int) -> Collective | PointToPoint | None:
    """The call that this rank is inside of: the first that it began and that has not ended."""
    calls = (event for event in trace.whole.events if event.rank == rank and _is_open(event))
    return next((event for event in calls if isinstance(event, Collective | PointToPoint)), None)


def _is_open(event: Event) -> bool:
    return event.pending or event.failed
