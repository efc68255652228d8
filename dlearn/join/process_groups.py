"""One process group, one name, one list of members: what the processes of a job say of their groups, joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count

from dlearn.events.event import GroupFact
from dlearn.events.process import Process
from dlearn.events.wiring import Wiring
from dlearn.join.ends import Group


def join_groups(processes: Sequence[Process]) -> dict[tuple[int, str], Group]:
    """(rank, the process's name of the group) -> the group, one value for all its members."""
    facts: dict[tuple[str, tuple[int, ...], int, int], dict[int, tuple[int, GroupFact]]] = defaultdict(dict)
    for process in processes:
        for fact in process.groups.values():
            same = facts[fact.name, fact.ranks, fact.size, process.header.restart]
            same.setdefault(fact.rank, (process.rank, fact))
    absent = (
        ranks[i] if ranks else i for (_, ranks, size, _), found in facts.items() for i in range(size) if i not in found
    )
    rank_of = _ranks_in_trace(absent, processes)
    wired_by = {process.rank: process.wired for process in processes}
    joined: dict[tuple[int, str], Group] = {}
    for (name, ranks, size, _), found in facts.items():
        # Of a member that wrote no line about the group, the others know its global rank.
        members = tuple(found[i][0] if i in found else rank_of[ranks[i] if ranks else i] for i in range(size))
        fact = next(iter(found.values()))[1]
        wired = {i: one for i, (rank, _) in found.items() if (one := wired_by[rank].get(name)) is not None}
        group = Group(name, fact.backend, members, fact.default, Wiring(wired) if wired else None)
        for rank, _ in found.values():
            joined[rank, name] = group
    return joined


def _ranks_in_trace(absent: Iterable[int], processes: Sequence[Process]) -> dict[int, int]:
    """Global rank -> rank in the trace: as its process says; of the absent the same number, or the next free one."""
    known: dict[int, int] = {}
    for process in processes:
        for fact in process.groups.values():
            if fact.default and process.rank not in known.values():
                known.setdefault(fact.rank, process.rank)
    free = count(max((process.rank for process in processes), default=-1) + 1)
    taken = set(known.values())
    for each in absent:
        if each not in known:
            known[each] = each if each not in taken else next(rank for rank in free if rank not in taken)
            taken.add(known[each])
    return known


def member(group: Group, index: int | None) -> int | None:
    """Return the rank of this member; None where there is none."""
    return group.members[index] if index is not None and index < len(group.members) else None
