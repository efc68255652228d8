"""Who waits for the ranks that hold a job up, and through whom.

A rank waits in a call that has not ended: for those who have not made it, else for those who are in it too, or the
peer of its send or recv. Who of them is held up in an earlier call of its own comes to this one after that: so the
chain goes on there, until it comes to a root. It is inferred from the order of calls, not seen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from dlearn.analysis.hanging.hang_words import call_text, listed
from dlearn.analysis.hanging.roots import WaitsFor, is_of, roots
from dlearn.analysis.hanging.stuck import Hang, hangs
from dlearn.join.ends import End
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import count_text
from dlearn.trace import Trace

_CHAINS_TOLD = 4
_NUMBER = re.compile(r" \d+$")
"""Of a group, behind what it is for: "PIPELINE_MODEL_PARALLEL_GROUP 43"."""


class Victim(msgspec.Struct, frozen=True):
    """`rank` waits for the ranks of `chain`, one after another: the last of them is a root."""

    rank: int
    chain: tuple[WaitsFor, ...]


@once
def victims(trace: Trace) -> tuple[Victim, ...]:
    """Every rank that waits for a root, by the shortest chain, by rank. Empty where there are no roots."""
    chains: dict[int, tuple[WaitsFor, ...]] = {root.rank: () for root in roots(trace)}
    waits = list(_waits(trace)) if chains else []
    while True:
        found: dict[int, tuple[WaitsFor, ...]] = {}
        for wait in waits:
            if wait.rank not in chains and wait.other in chains and _after(wait, chains[wait.other]):
                found.setdefault(wait.rank, (wait, *chains[wait.other]))
        if not found:
            return tuple(Victim(rank, chain) for rank, chain in sorted(chains.items()) if chain)
        chains |= found


def _waits(trace: Trace) -> Iterator[WaitsFor]:
    """For whom a rank may wait in each of its calls that have not ended; first those who have not made one."""
    stuck = sorted(hangs(trace), key=lambda hang: not hang.operation.missing)
    for hang in stuck:
        for rank in hang.waiting:
            for other in hang.operation.missing or _others(hang, rank):
                yield WaitsFor(rank, hang.operation, other)


def _others(hang: Hang, rank: int) -> tuple[int, ...]:
    peers = (hang.operation.sender, hang.operation.receiver) if hang.operation.is_message else hang.waiting
    return tuple(each for each in peers if each is not None and each != rank)


def _after(wait: WaitsFor, chain: tuple[WaitsFor, ...]) -> bool:
    """Whether `wait.other` made its call in this, if it did, after the one that it is held up in itself."""
    mine = _end(wait.operation, wait.other)
    held = _end(chain[0].operation, wait.other) if chain else None
    return mine is None or held is None or held.start_ns < mine.start_ns


def _end(operation: Operation, rank: int) -> End | None:
    return next((end for end in operation.ends if end.rank == rank), None)


def victim_sentences(trace: Trace) -> list[str]:
    """ "rank 3 waits for rank 2 in send #4 of A 7, which waits for rank 1 in all_reduce #5 of B 1; rank 5 waits in the
    same way", for a few; and how many more."""
    alike: dict[tuple[tuple[str, str], ...], list[Victim]] = defaultdict(list)
    for victim in victims(trace):
        calls = [wait.operation for wait in victim.chain]
        alike[tuple((call.op, _NUMBER.sub("", call.group.name)) for call in calls)].append(victim)
    # Long chains first: what is next to a root, the sentence of the root says already.
    groups = sorted(alike.values(), key=lambda group: (-len(group[0].chain), group[0].rank))
    told = [_sentence(group, trace) for group in groups[:_CHAINS_TOLD]]
    if more := sum(map(len, groups[_CHAINS_TOLD:])):
        told.append(f"{count_text(more, 'more rank')} {_wait(more)} by such chains")
    return told + _unexplained(trace)


def _sentence(group: list[Victim], trace: Trace) -> str:
    first, *others = group
    links = [
        f"for {trace.label(wait.other)} in {call_text(wait.operation.ends[0])} of {wait.operation.group.name}"
        for wait in first.chain
    ]
    told = f"{trace.label(first.rank)} waits {', which waits '.join(links)}"
    if others:
        told += f"; {listed([trace.label(each.rank) for each in others])} {_wait(len(others))} in the same way"
    seen = all(wait.other in wait.operation.missing for wait in first.chain)
    return told if seen else f"{told} (inferred from the order of calls)"


def _wait(many: int) -> str:
    return "waits" if many == 1 else "wait"


def _unexplained(trace: Trace) -> list[str]:
    """What else did not end, of ranks of which no chain is known."""
    named = {root.rank for root in roots(trace)}
    known = named | {victim.rank for victim in victims(trace)}
    others = [hang for hang in hangs(trace) if not is_of(hang, named, trace) and not known.issuperset(hang.waiting)]
    if not named or not others:
        return []
    who = count_text(len({rank for hang in others for rank in hang.waiting} - known), "more rank")
    return [f"{count_text(len(others), 'more call')} of {who} did not end; nobody is seen to hold those up"]
