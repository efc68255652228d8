"""Who waits for whom: operations that some rank is inside of, and that cannot end."""

from __future__ import annotations

import heapq
import signal
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np

from dlearn.events.event import Collective, Event, PointToPoint, RpcCall
from dlearn.events.job_facts import RETURNED
from dlearn.join.ends import End, Group
from dlearn.join.joining import operations
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.trace import Trace


class Hang(msgspec.Struct, frozen=True):
    """`waiting` ranks are inside `operation`; the ranks in `operation.missing` never called it."""

    operation: Operation
    waiting: tuple[int, ...]


SOON_NS = 500_000_000
"""On a busy machine a rank may wait so long for a core: shorter is no hang."""
CALLS_SEEN, WAITS_SEEN = 10, 3
"""How many calls a rank must have come out of, before the longest of them tell which wait is usual there."""


class Pace(msgspec.Struct, frozen=True):
    """How a job went on until its cluster stopped it: `ended` operations in `duration_ns`, and then nothing for
    `silence_ns`. `slow`: it was still going on, for nothing had been under way for longer than is usual there."""

    ended: int
    duration_ns: int
    silence_ns: int
    slow: bool


@once
def hangs(trace: Trace) -> tuple[Hang, ...]:
    """Every operation that is stuck, the first called first. Empty where all that was begun has ended.

    Of a job that was stopped at work: less those that had not waited longer than usual.
    """
    usual = _usual_until_ns(trace) if any(process.stopped_ns is not None for process in trace.processes) else {}
    stuck = [each for each in operations(trace).unusual() if _is_stuck(each) and not _is_under_way(each, usual)]
    return tuple(Hang(each, tuple(end.rank for end in each.ends if _is_open(end))) for each in stuck)


@once
def pace(trace: Trace) -> Pace | None:
    """How a job went on until its cluster stopped it; None where that did not happen, or nothing had ended."""
    stops = [process.clock.to_reference(process.stopped_ns) for process in trace.processes if process.stopped_ns]
    asked = operations(trace.whole) if stops else ()
    ended = [each for each in asked if ended_well(each) and not each.missing]
    if not ended:
        return None
    last_ns = max(each.end_ns or 0 for each in ended)
    stopped_ns = max(*stops, last_ns)
    silence_ns = stopped_ns - last_ns
    goes_on = silence_ns < SOON_NS or any(each.pending for each in asked)
    return Pace(
        ended=len(ended),
        duration_ns=stopped_ns - trace.first_ns,
        silence_ns=silence_ns,
        slow=goes_on and len(ended) >= CALLS_SEEN and not hangs(trace.whole),
    )


def inside(trace: Trace, rank: int) -> Collective | PointToPoint | None:
    """The call that this rank is inside of: the first that it began and that has not ended."""
    return _open_calls(trace).get(rank)


def group_of(trace: Trace, call: Event) -> Group | None:
    """The process group of a collective, a send or a recv."""
    matches = (each for each in trace.whole.matches.unusual() if any(end is call for end in each.ends))
    return next((each.group for each in matches), None)


@once
def refusals(trace: Trace) -> dict[tuple[int, Group], End]:
    """The last call of each rank in each group that was refused."""
    ends = ((end, each.group) for each in trace.whole.matches.unusual() if each.ends[0].refused for end in each.ends)
    return {(end.rank, group): end for end, group in ends}


@once
def places(trace: Trace) -> dict[int, str]:
    """What is known of ranks outside any call: how they ended, or where they were when nothing came for a while."""
    table = trace.table
    last = {rank: trace.whole.events[int(np.flatnonzero(table.rank == rank)[-1])] for rank in np.unique(table.rank)}
    some_go_on = not all(process.closed for process in trace.processes)
    found: dict[int, str] = {}
    for process in trace.processes:
        event, place = last.get(process.rank), process.place
        if process.exit_status is not None:
            found[process.rank] = exit_text(process.exit_status)
        elif place is not None and place.ended:
            texts = {RETURNED: "has returned from its function", SystemExit.__name__: "has called sys.exit"}
            found[process.rank] = texts.get(place.ended, f"has raised {place.ended}")
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
    broken = operation.failed and not operation.missing and operation.misfit is None
    return (operation.pending or operation.failed) and not broken


def _is_under_way(operation: Operation, usual: Mapping[int, int]) -> bool:
    """Whether each rank that waits in it could as well have come out of it soon."""
    if operation.failed or operation.misfit is not None:
        return False
    return all(end.rank in usual and end.start_ns >= usual[end.rank] for end in operation.ends if _is_open(end))


def _usual_until_ns(trace: Trace) -> dict[int, int]:
    """For each rank that was stopped: what it called since then was not under way for longer than calls often are.

    As long as three calls were that ended; the longest is often a single one, which waits for data to be loaded.
    """
    durations: dict[int, list[int]] = defaultdict(list)
    for event in trace.whole.of(Collective, PointToPoint, RpcCall):
        if event.end_ns is not None and not event.failed:
            durations[event.rank].append(event.end_ns - event.start_ns)
    since = {}
    for process in trace.processes:
        calls = durations[process.rank]
        if process.stopped_ns is not None and len(calls) >= CALLS_SEEN:
            usual_ns = max(SOON_NS, heapq.nlargest(WAITS_SEEN, calls)[-1])
            since[process.rank] = process.clock.to_reference(process.stopped_ns) - usual_ns
    return since


def came_out(operation: Operation, trace: Trace) -> tuple[int, ...]:
    """Members who are known to have come out of a collective whose end others wait for: then it is on their own
    GPUs that those wait."""
    if operation.is_message:
        return ()
    others = (process for process in trace.processes if process.rank in operation.group.members)
    name = operation.ends[0].group if isinstance(operation.ends[0], Collective) else ""
    return tuple(each.rank for each in others if name in each.reached and each.reached[name].ended >= operation.seq)


def ended_well(operation: Operation) -> bool:
    """Every rank that called it was seen coming out of it, and not by an error: quick to see, of millions."""
    for end in operation.ends:  # noqa: SIM110 (a generator takes three times as long)
        if end.end_ns is None or end.error:
            return False
    return True


@once
def _open_calls(trace: Trace) -> dict[int, Collective | PointToPoint]:
    calls: dict[int, Collective | PointToPoint] = {}
    table = trace.table
    not_over = table.pending | table.of_firsts(lambda first: bool(first.error))
    for event in trace.whole.rows.where(not_over):
        if isinstance(event, Collective | PointToPoint) and _is_open(event):
            calls.setdefault(event.rank, event)
    return calls


def _is_open(event: Event) -> bool:
    return event.pending or (event.failed and not event.refused)
