"""One process group, one name, one list of members: what the processes of a job say of their groups, joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

from dlearn.trace.ends import Group
from dlearn.trace.event import Collective, Event, GroupFact, Line, PointToPoint
from dlearn.trace.process import Process
from dlearn.trace.wiring import Wiring

_set = msgspec.structs.force_setattr


def agree_on_names(processes: Sequence[Process], events: Iterable[Event]) -> None:
    """Give each group one name, in place: a process counts those of one name that it has seen itself, so that one that
    was made again may be "1~2" for one member and "1" for another."""
    members: dict[str, list[tuple[int, str]]] = defaultdict(list)
    taken: set[str] = set()
    for process in processes:
        for fact in process.groups.values():
            if fact.made:
                members[fact.made].append((process.rank, fact.name))
            else:
                taken.add(fact.name)
    names: dict[tuple[int, str], str] = {}
    for ends in members.values():
        name = max((name for _, name in ends), key=lambda name: (len(name), name))
        while name in taken:
            name += "~2"
        taken.add(name)
        names |= {end: name for end in ends if end[1] != name}

    def rename(line: Line, rank: int, *fields: str) -> None:
        for field in fields:
            old = getattr(line, field)
            _set(line, field, names.get((rank, old), old))

    for event in events if names else ():
        if isinstance(event, Collective | PointToPoint):
            rename(event, event.rank, "group")
    for process in processes if names else ():
        for fact in process.groups.values():
            rename(fact, process.rank, "name", "within")
        for socket in process.sockets.values():
            rename(socket, process.rank, "group")
        process.groups = {fact.name: fact for fact in process.groups.values()}


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
    """The rank of this member; None where there is none."""
    return group.members[index] if index is not None and index < len(group.members) else None
