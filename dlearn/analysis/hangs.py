"""Who waits for whom: operations that some rank is inside of, and that cannot end."""

from __future__ import annotations

import signal

import msgspec

from dlearn.analysis.joining import once, operations
from dlearn.trace.event import Collective, Event, PointToPoint
from dlearn.trace.job_facts import RETURNED
from dlearn.trace.message import Group, Operation
from dlearn.trace.trace import Trace


class Hang(msgspec.Struct, frozen=True):
    """`waiting` ranks are inside `operation`; the ranks in `operation.missing` never called it.

    `elsewhere` gives, for each of those, the call that it is inside of instead, or None if it waits for no message.
    """

    operation: Operation
    waiting: tuple[int, ...]
    elsewhere: dict[int, Collective | PointToPoint | None]


@once
def hangs(trace: Trace) -> tuple[Hang, ...]:
    """Every operation that is stuck, the first called first. Empty where all that was begun has ended."""
    stuck = [operation for operation in operations(trace) if _is_stuck(operation)]
    calls = _open_calls(trace) if stuck else {}
    return tuple(
        Hang(
            operation,
            tuple(end.rank for end in operation.ends if _is_open(end)),
            {rank: calls.get(rank) for rank in operation.missing},
        )
        for operation in stuck
    )


def inside(trace: Trace, rank: int) -> Collective | PointToPoint | None:
    """The call that this rank is inside of: the first that it began and that has not ended."""
    return _open_calls(trace).get(rank)


def group_of(trace: Trace, call: Event) -> Group | None:
    """The process group of a collective, a send or a recv."""
    matches = (each for each in trace.whole.matches if any(end is call for end in each.ends))
    return next((each.group for each in matches), None)


@once
def refusals(trace: Trace) -> dict[tuple[int, Group], Collective | PointToPoint]:
    """The last call of each rank in each group that was refused."""
    ends = ((end, each.group) for each in trace.whole.matches if each.ends[0].refused for end in each.ends)
    return {(end.rank, group): end for end, group in ends}


@once
def places(trace: Trace) -> dict[int, str]:
    """What is known of ranks outside any call: how they ended, or where they were when nothing came for a while."""
    last = {event.rank: event for event in trace.whole.events}
    some_go_on = not all(process.closed for process in trace.processes)
    found: dict[int, str] = {}
    for process in trace.processes:
        event, place = last.get(process.rank), process.place
        if process.exit_status is not None:
            found[process.rank] = exit_text(process.exit_status)
        elif place is not None and place.ended:
            raised = place.ended != RETURNED
            found[process.rank] = f"has raised {place.ended}" if raised else "has returned from its function"
        elif process.closed and some_go_on:
            found[process.rank] = "closed its recording, which a process that dies does not"
        elif place is not None:
            at_ns = process.clock.to_reference(place.at_ns)
            if event is None or at_ns >= max(event.start_ns, event.end_ns or 0):
                found[process.rank] = f"is at {place.site}"
    return found


def exit_text(status: int) -> str:
    """ "was killed by SIGKILL", "ended with status 1"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _is_stuck(operation: Operation) -> bool:
    if ended_well(operation) or operation.refused:
        return False
    # If all came and it failed all the same, a connection broke below it: a consequence, not a wait for a call.
    broken = operation.failed and not operation.missing and not operation.problem
    return (operation.pending or operation.failed) and not broken


def ended_well(operation: Operation) -> bool:
    """Every rank that called it was seen coming out of it, and not by an error: quick to see, of millions."""
    for end in operation.ends:  # noqa: SIM110 (a generator takes three times as long)
        if end.end_ns is None or end.error:
            return False
    return True


@once
def _open_calls(trace: Trace) -> dict[int, Collective | PointToPoint]:
    calls: dict[int, Collective | PointToPoint] = {}
    for event in trace.whole.events:
        if isinstance(event, Collective | PointToPoint) and _is_open(event):
            calls.setdefault(event.rank, event)
    return calls


def _is_open(event: Event) -> bool:
    return event.pending or (event.failed and not event.refused)
