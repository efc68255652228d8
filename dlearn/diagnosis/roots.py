"""The ranks that hold a hung job up, and those that wait for them, by how far each came.

A root has not made a call that another rank of the group has made, or is still in one that another
has come out of. (torch's own analyser names innocent ranks: tests/test_flight_recorder.py.) All
others are victims: they wait for ranks that have not made a call, else for those that are in it
too. Where an earlier call holds such a rank up, the chain goes on there, until it comes to a root.
It is inferred from the order of calls, not seen.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from dlearn.diagnosis.hang_detection import Hang, came_out, hangs
from dlearn.join.ends import End
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Findings, RankNames
from dlearn.trace import Trace

How = Literal["never", "stuck"]


class Root(msgspec.Struct, frozen=True):
    """A rank that has `never` made the call of `operation`, its first, or is `stuck` in it; and in `more` others."""

    rank: int
    how: How
    operation: Operation
    more: int

    def row(self, labels: RankNames) -> dict[str, object]:
        found = self.operation.row(labels) | {"how": self.how, "more": self.more}
        return {"rank": labels[self.rank], **found}


class WaitsFor(msgspec.Struct, frozen=True):
    """A `rank` inside `operation`, which `other` has not called, or has not come to yet."""

    rank: int
    operation: Operation
    other: int


Chain = tuple[WaitsFor, ...]  # Each waits for the next one's rank.


class Victim(msgspec.Struct, frozen=True):
    """A rank that waits for the ranks of `chain`, one after another: the last of them is a root."""

    rank: int
    chain: Chain

    def row(self, labels: RankNames) -> dict[str, object]:
        waits_for = ", ".join(labels[wait.other] for wait in self.chain)
        found = self.chain[0].operation.row(labels) | {"waits_for": waits_for}
        return {"rank": labels[self.rank], **found}


@once
def roots(trace: Trace) -> Findings[Root]:
    """Find the ranks that hold the others up, by rank; none where no file says how far ranks came."""
    if not any(process.reached for process in trace.processes):
        return Findings.of((), trace.labels)
    held_up: dict[tuple[int, How], list[Operation]] = defaultdict(list)
    for hang in hangs(trace):
        for rank in hang.operation.missing:
            held_up[rank, "never"].append(hang.operation)
        for rank in hang.waiting if came_out(hang.operation, trace) else ():
            held_up[rank, "stuck"].append(hang.operation)
    first = sorted(held_up.items(), key=lambda item: (item[0][0], item[1][0].start_ns))
    found = [Root(rank, how, calls[0], len(calls) - 1) for (rank, how), calls in first]
    return Findings.of(found, trace.labels)


def deadlock(trace: Trace) -> Chain:
    """Find a shortest ring of ranks that wait for each other to make a call; empty where there is none."""
    waits = waits_of(hangs(trace))
    rings = [ring for rank in sorted(waits) if (ring := ring_from(rank, waits))]
    return min(rings, key=len, default=())


def waits_of(stuck: Iterable[Hang]) -> dict[int, dict[int, WaitsFor]]:
    """Return the first call in which a rank waits for another one that has not made it, by both."""
    waits: dict[int, dict[int, WaitsFor]] = defaultdict(dict)
    for wait in _waits(hang for hang in stuck if hang.operation.missing):
        waits[wait.rank].setdefault(wait.other, wait)
    return waits


def ring_from(start: int, waits: dict[int, dict[int, WaitsFor]]) -> Chain:
    """Return the shortest path through others' waits back to `start`, by breadth-first search."""
    paths: dict[int, Chain] = {start: ()}
    ahead = [start]
    while ahead:
        rank = ahead.pop(0)
        for other, wait in waits.get(rank, {}).items():
            if other == start:
                return (*paths[rank], wait)
            if other not in paths:
                paths[other] = (*paths[rank], wait)
                ahead.append(other)
    return ()


@once
def victims(trace: Trace) -> Findings[Victim]:
    """Find every rank that waits for a root, by the shortest chain, by rank; none without roots."""
    chains: dict[int, Chain] = {root.rank: () for root in roots(trace)}
    # First the calls that a rank has not made.
    stuck = sorted(hangs(trace), key=lambda hang: not hang.operation.missing)
    waits = list(_waits(stuck)) if chains else []
    while True:
        longer: dict[int, Chain] = {}
        for wait in waits:
            new = wait.rank not in chains and wait.other in chains
            if new and _after(wait, chains[wait.other]):
                longer.setdefault(wait.rank, (wait, *chains[wait.other]))
        if not longer:
            found = [Victim(rank, chain) for rank, chain in sorted(chains.items()) if chain]
            return Findings.of(found, trace.labels)
        chains |= longer


def _waits(stuck: Iterable[Hang]) -> Iterator[WaitsFor]:
    """Yield the ranks that a rank may wait for in each open call: those that have not made it, if any."""
    for hang in stuck:
        operation, inside = hang.operation, hang.waiting
        if operation.is_message:
            ends = (operation.sender, operation.receiver)
            inside = tuple(rank for rank in ends if rank is not None)
        for rank in hang.waiting:
            for other in operation.missing or inside:
                if other != rank:
                    yield WaitsFor(rank, operation, other)


def _after(wait: WaitsFor, chain: Chain) -> bool:
    """Return whether `wait.other` made this call, if it did, after the one that it is held up in."""
    call = _end(wait.operation, wait.other)
    earlier = _end(chain[0].operation, wait.other) if chain else None
    return call is None or earlier is None or earlier.start_ns < call.start_ns


def _end(operation: Operation, rank: int) -> End | None:
    return next((end for end in operation.ends if end.rank == rank), None)


def follows_from(hang: Hang, ranks: set[int], trace: Trace) -> bool:
    """Return whether one of these ranks never came to it, or is stuck in what others came out of."""
    stuck = hang.waiting if came_out(hang.operation, trace) else ()
    return not ranks.isdisjoint((*hang.operation.missing, *stuck))
