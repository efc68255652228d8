"""Operations that some rank is inside of, and that cannot end; and calls that ended and may be wrong.

The latter are observations, not verdicts: a program may well call all_reduce from one line on rank 0
and from another on rank 1."""

import signal
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np

from dlearn.diagnosis.meetings import open_rendezvous
from dlearn.events.event import Collective, Event, PointToPoint, RpcCall
from dlearn.events.event_table import NONE
from dlearn.events.job_facts import EXITED, RETURNED
from dlearn.events.process import Process
from dlearn.join.ends import End, Group
from dlearn.join.joining import operations
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Findings, RankNames
from dlearn.trace import Trace


class Hang(msgspec.Struct, frozen=True):
    """Ranks `waiting` inside an operation; the ranks in `operation.missing` never called it."""

    operation: Operation
    waiting: tuple[int, ...]

    def row(self, labels: RankNames) -> dict[str, object]:
        waiting = ", ".join(labels[rank] for rank in self.waiting)
        return self.operation.row(labels) | {"waiting": waiting}


SOON_NS = 500_000_000
"""On a busy machine a rank may wait so long for a core: shorter is no hang."""
CALLS_SEEN, WAITS_SEEN = 10, 3
"""How many calls a rank must have come out of, before the longest of them tell which wait is usual there."""


class Pace(msgspec.Struct, frozen=True):
    """A job's pace until its cluster stopped it; `slow`: no call was under way unusually long."""

    ended: int
    duration_ns: int
    silence_ns: int
    slow: bool


@once
def hangs(trace: Trace) -> Findings[Hang]:
    """Find every operation that is stuck, by first call. Empty where all that was begun has ended.

    Of a job that was stopped at work, calls that had not waited longer than usual are left out.
    """
    usual, found = _usual_until_ns(trace), []
    for operation in operations(trace).unusual():
        if _is_stuck(operation) and not _is_under_way(operation, usual):
            found.append(Hang(operation, tuple(end.rank for end in operation.ends if _is_open(end))))
    return Findings.of(found, trace.labels)


@once
def pace(trace: Trace) -> Pace | None:
    """Measure a job until its cluster stopped it; None of any other, and where no operation had ended."""
    stops, asked = _stops_ns(trace).values(), operations(trace.whole)
    ends_ns = asked.end_ns[~asked.table.failed[asked.rows]]
    ends_ns = ends_ns[ends_ns != NONE]
    if not stops or not len(ends_ns):
        return None
    last_ns, count = int(ends_ns.max()), len(ends_ns)
    stopped_ns = max(*stops, last_ns)
    silence_ns = stopped_ns - last_ns
    goes_on = silence_ns < SOON_NS or bool(asked.table.pending[asked.rows].any())
    slow = goes_on and count >= CALLS_SEEN and not hangs(trace.whole)
    return Pace(count, stopped_ns - trace.first_ns, silence_ns, slow)


@once
def inside(trace: Trace) -> dict[int, Collective | PointToPoint]:
    """Return by rank the first call that it began and that has not ended."""
    calls: dict[int, Collective | PointToPoint] = {}
    table = trace.table
    not_over = table.pending | table.of_firsts(lambda first: bool(first.error))
    for event in trace.whole.rows.where(not_over):
        if isinstance(event, Collective | PointToPoint) and _is_open(event):
            calls.setdefault(event.rank, event)
    return calls


def other_tags(operation: Operation, trace: Trace) -> tuple[Operation, ...]:
    """Return the sends of which a receive that waits has only another tag, or the receives of a send."""
    if not (operation.is_message and operation.missing):
        return ()
    pair = (operation.group, operation.sender, operation.receiver)
    unusual = operations(trace.whole).unusual()
    same = (each for each in unusual if (each.group, each.sender, each.receiver) == pair)
    return tuple(each for each in same if each.missing not in ((), operation.missing))


@once
def refusals(trace: Trace) -> dict[tuple[int, Group], End]:
    """Return the last call of each rank in each group that was refused."""
    refused = [each for each in trace.whole.matches.unusual() if each.ends[0].refused]
    return {(end.rank, each.group): end for each in refused for end in each.ends}


@once
def last_seen(trace: Trace) -> dict[int, str]:
    """Say of ranks outside any call how they ended, or at which line they were when nothing came for a while."""
    some_go_on = not all(process.closed for process in trace.processes)
    found: dict[int, str] = {}
    for process in trace.processes:
        beat, raised = process.heartbeat, raised_text(process)
        if raised:
            found[process.rank] = f"has {raised}"
        elif process.exit_status == -signal.SIGTERM and (place := _at(process, trace)):
            found[process.rank] = place  # There it was asked to end.
        elif process.exit_status is not None:
            found[process.rank] = exit_text(process.exit_status)
        elif beat is not None and beat.ended:
            found[process.rank] = _ENDED.get(beat.ended, f"has raised {beat.ended}")
        elif process.closed and some_go_on:
            found[process.rank] = "closed its recording, which a process that dies does not"
        elif place := _at(process, trace):
            found[process.rank] = place
    return found


def _at(process: Process, trace: Trace) -> str:
    """Return in which call a process waits for others to come, or at which line it was."""
    call, place = open_rendezvous(trace).get(process.rank), place_of(process, trace)
    if call is not None:
        return f"is in {call.op} ({call.site})"
    return f"is at {place}" if place else ""


_ENDED = {
    RETURNED: "has returned from its function",
    EXITED: "has ended",
    SystemExit.__name__: "has called sys.exit",
}


def raised_text(process: Process) -> str:
    """Write "raised ValueError at a.py:12" of a script that an exception ended; "" of any other."""
    beat = process.heartbeat
    if beat is None or not (beat.ended and beat.site):
        return ""
    return f"raised {beat.ended} at {beat.site}"


def place_of(process: Process, trace: Trace) -> str:
    """Return the line at which a process was when nothing came; "" if it has made a call since."""
    beat, table = process.heartbeat, trace.whole.table
    if beat is None or beat.ended:
        return ""
    last = np.flatnonzero(table.rank == process.rank)[-1:]
    last_ns = np.maximum(table.start_ns[last], table.end_ns[last])
    return beat.site if (process.clock.to_reference(beat.at_ns) >= last_ns).all() else ""


def exit_text(status: int) -> str:
    """Return "was killed by SIGKILL", "ended with status 1"."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _is_stuck(operation: Operation) -> bool:
    if operation.refused or not any(end.end_ns is None or end.error for end in operation.ends):
        return False
    # If all came and it failed all the same, a connection broke below it: a consequence, not a wait for a call.
    broken = operation.failed and not operation.missing and operation.mismatch is None
    return (operation.pending or operation.failed) and not broken


def _is_under_way(operation: Operation, usual: Mapping[int, int]) -> bool:
    """Return whether each rank that waits in it could as well have come out of it soon."""
    if operation.failed or operation.mismatch is not None:
        return False
    return all(end.rank in usual and end.start_ns >= usual[end.rank] for end in operation.ends if _is_open(end))


def _usual_until_ns(trace: Trace) -> dict[int, int]:
    """Return since when a call of each stopped rank lasts no longer than its third-longest did."""
    table, since = trace.whole.table, {}
    ended = table.is_a(Collective, PointToPoint, RpcCall) & (table.end_ns != NONE)
    ended &= ~table.of_firsts(lambda first: first.failed)
    for rank, stopped_ns in _stops_ns(trace).items():
        calls = np.flatnonzero(ended & (table.rank == rank))
        if len(calls) >= CALLS_SEEN:
            longest_ns = np.sort(table.end_ns[calls] - table.start_ns[calls])[-WAITS_SEEN]
            since[rank] = stopped_ns - max(SOON_NS, int(longest_ns))
    return since


def _stops_ns(trace: Trace) -> dict[int, int]:
    """Return when the cluster stopped each rank that was still at work, on the trace's clock."""
    stopped = [each for each in trace.processes if each.stopped_ns is not None]
    return {each.rank: each.clock.to_reference(each.stopped_ns or 0) for each in stopped}


def came_out(operation: Operation, trace: Trace) -> tuple[int, ...]:
    """Return the members that came out of a collective in which others wait: those wait for their own GPUs."""
    if operation.is_message:
        return ()
    others = (process for process in trace.processes if process.rank in operation.group.members)
    name = operation.ends[0].group if isinstance(operation.ends[0], Collective) else ""
    return tuple(each.rank for each in others if name in each.reached and each.reached[name].ended >= operation.seq)


def _is_open(event: Event) -> bool:
    return event.pending or (event.failed and not event.refused)


_ROOTED = {"broadcast", "reduce", "gather", "gather_single", "scatter", "barrier", "monitored_barrier"}
"""Here the root may well stand in a branch of its own, or nothing is computed."""
_THREAD_OF_CPP = "Dummy-"
"""The name that Python gives to a thread that it has not started begins so."""
Suspicion = Literal["calls", "message", "sites", "data"]


class Mismatch(msgspec.Struct, frozen=True):
    """A suspicion: "calls" or a "message" that do not fit · different "sites" · the same "data".

    "data" needs `record(checksums=True)`, and an all-reduce before it in which the ranks gave different data of that
    size: it may have summed them already.
    """

    operation: Operation
    why: Suspicion

    def row(self, labels: RankNames) -> dict[str, object]:
        return self.operation.row(labels) | {"why": self.why}


def mismatches(trace: Trace) -> Findings[Mismatch]:
    """Find collectives and messages that ended on all ranks and yet may be wrong, by first call."""
    stuck = {id(hang.operation) for hang in hangs(trace)}
    summed: set[tuple[str, int]] = set()
    found = []
    asked = operations(trace)
    for operation in asked.at(np.flatnonzero(asked.ask_each_group(_may_be_wrong))):
        why = _why(operation, summed) if id(operation) not in stuck else None
        if why is not None:
            found.append(Mismatch(operation, why))
    return Findings.of(found, trace.labels)


def _may_be_wrong(one: Operation) -> bool:
    """Return whether an operation, and so all of its class, has anything to look at."""
    calls = [end for end in one.ends if isinstance(end, Collective)]
    checked = any(call.checksum is not None for call in calls)
    return one.mismatch is not None or checked or len({call.site for call in calls}) > 1


def _why(operation: Operation, summed: set[tuple[str, int]]) -> Suspicion | None:
    """Say what is suspicious; note each sum of different data by group and size in `summed`."""
    if operation.is_message:
        return None if operation.failed else "message"
    calls = [end for end in operation.ends if isinstance(end, Collective)]
    if len(calls) < 2 or operation.missing or operation.refused:
        return None
    if operation.mismatch is not None:
        return "calls"
    if operation.op == "all_reduce" and calls[0].checksum is not None:
        sums = {call.checksum for call in calls}
        key = (operation.group.name, sum(tensor.logical_bytes for tensor in calls[0].inputs))
        if len(sums) == 1 and key in summed:
            return "data"
        if len(sums) > 1 and None not in sums:
            summed.add(key)
    if operation.op in _ROOTED or len({call.site for call in calls}) == 1:
        return None
    return "sites" if all(map(_of_the_program, calls)) else None


def _of_the_program(call: Collective) -> bool:
    """Return whether a line of the program made it, on a thread that Python has started."""
    by_cpp = call.launcher or call.role or call.thread.startswith(_THREAD_OF_CPP)
    return bool(call.site) and not by_cpp
