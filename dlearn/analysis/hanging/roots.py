"""Whose fault a hang is, where every rank says how far it came in each group: most of those who wait are victims.

Who has not made a call that another rank of the group has made; and who has made one that another has come out of, and
is still in it. All others wait for one of these, or for somebody who does. The rule is tried on jobs that were broken
on purpose (tests/test_flight_recorder.py); torch's own analyser names innocent ranks there.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dlearn.analysis.hanging.hang_words import call_text, listed
from dlearn.analysis.hanging.stuck import Hang, came_out, hangs
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import count_text
from dlearn.trace import Trace


class Root(msgspec.Struct, frozen=True):
    """`rank` has `never` made the call of `operation`, the first of its kind, or is `stuck` in it; and so many more."""

    rank: int
    how: Literal["never", "stuck"]
    operation: Operation
    more: int


@once
def roots(trace: Trace) -> tuple[Root, ...]:
    """The ranks that hold the others up, by rank. Empty where the trace does not say how far ranks came."""
    if not any(process.reached for process in trace.processes):
        return ()
    found: dict[tuple[int, Literal["never", "stuck"]], list[Operation]] = {}
    for hang in hangs(trace):
        for rank in hang.operation.missing:
            found.setdefault((rank, "never"), []).append(hang.operation)
        for rank in hang.waiting if came_out(hang.operation, trace) else ():
            found.setdefault((rank, "stuck"), []).append(hang.operation)
    first = sorted(found.items(), key=lambda item: (item[0][0], item[1][0].start_ns))
    return tuple(Root(rank, how, calls[0], len(calls) - 1) for (rank, how), calls in first)


class WaitsFor(msgspec.Struct, frozen=True):
    """`rank` is inside `operation`, which `other` has not called, or has not come to yet."""

    rank: int
    operation: Operation
    other: int


def deadlock(trace: Trace) -> tuple[WaitsFor, ...]:
    """A shortest ring of ranks each of which waits for the next to make a call; empty where there is none."""
    waits: dict[int, dict[int, WaitsFor]] = {}
    for hang in hangs(trace):
        for rank in hang.waiting:
            for other in hang.operation.missing:
                waits.setdefault(rank, {}).setdefault(other, WaitsFor(rank, hang.operation, other))
    rings = [ring for rank in sorted(waits) if (ring := _ring_from(rank, waits))]
    return min(rings, key=len, default=())


def _ring_from(start: int, waits: dict[int, dict[int, WaitsFor]]) -> tuple[WaitsFor, ...]:
    """The shortest way through others' waits back to `start`."""
    ways: dict[int, tuple[WaitsFor, ...]] = {start: ()}
    ahead = [start]
    while ahead:
        rank = ahead.pop(0)
        for other, wait in waits.get(rank, {}).items():
            if other == start:
                return (*ways[rank], wait)
            if other not in ways:
                ways[other] = (*ways[rank], wait)
                ahead.append(other)
    return ()


def roots_title(trace: Trace) -> str:
    """ "Rank 9 and rank 14 hold the others up"; nothing where the trace does not tell."""
    names = listed([trace.label(rank) for rank in dict.fromkeys(root.rank for root in roots(trace))])
    return f"{names} hold{'s' * (' and ' not in names)} the others up" if roots(trace) else ""


def root_sentences(trace: Trace) -> list[str]:
    """ "rank 12 is stuck in all_gather_single #42806 of TENSOR_MODEL_PARALLEL_GROUP 41: rank 13 came out of it",
    each."""
    told = [_sentence(root, trace) for root in roots(trace)]
    ring = deadlock(trace) if told else ()
    if ring:
        links = [
            f"waits in {call_text(wait.operation.ends[0])} of {wait.operation.group.name} for {trace.label(wait.other)}"
            for wait in ring
        ]
        told.insert(0, f"a deadlock: {trace.label(ring[0].rank)} {', which '.join(links)}")
    return told


def _sentence(root: Root, trace: Trace) -> str:
    operation = root.operation
    end = next((end for end in operation.ends if end.rank == root.rank), operation.ends[0])
    call = f"{call_text(end)} of {operation.group.name}"
    more = count_text(root.more, "more call")
    if root.how == "never":
        waiting = listed([trace.label(each.rank) for each in operation.ends])
        return f"{trace.label(root.rank)} never called {call}{f', nor {more}' if root.more else ''}; {waiting} did"
    out = listed([trace.label(rank) for rank in came_out(operation, trace)])
    more = f", and in {more}" if root.more else ""
    return f"{trace.label(root.rank)} is stuck in {call}{more}; {out} came out of it"


def is_of(hang: Hang, named: set[int], trace: Trace) -> bool:
    """Whether it is told with a rank that is named."""
    missing, stuck = {*hang.operation.missing}, {*hang.waiting} if came_out(hang.operation, trace) else set()
    return bool((missing | stuck) & named)
