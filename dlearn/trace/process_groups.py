"""One process group, one name, one list of members: what the processes of a job say of their groups, joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from dlearn.trace.event import Collective, Event, GroupFact, PointToPoint
from dlearn.trace.message import Group
from dlearn.trace.process import Process

_set = msgspec.structs.force_setattr


def agree_on_names(processes: Sequence[Process], events: Iterable[Event]) -> tuple[Process, ...]:
    """The processes, and in place the events, with one name for each group: a process counts those of one name that it
    has seen itself, so that one that was made again may be "1~2" for one member and "1" for another."""
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
    if not names:
        return tuple(processes)
    for event in events:
        if isinstance(event, Collective | PointToPoint) and (event.rank, event.group) in names:
            _set(event, "group", names[event.rank, event.group])
    return tuple(
        _renamed(process, {old: new for (rank, old), new in names.items() if rank == process.rank})
        for process in processes
    )


def _renamed(process: Process, names: dict[str, str]) -> Process:
    facts = (
        msgspec.structs.replace(fact, name=names.get(fact.name, fact.name), within=names.get(fact.within, fact.within))
        for fact in process.groups.values()
    )
    sockets = {
        number: msgspec.structs.replace(each, group=names.get(each.group, each.group))
        for number, each in process.sockets.items()
    }
    return replace(process, groups={fact.name: fact for fact in facts}, sockets=sockets)


def join_groups(processes: Sequence[Process]) -> dict[tuple[int, str], Group]:
    """(rank, the process's name of the group) -> the group, one value for all its members."""
    facts: dict[tuple[str, tuple[int, ...], int, int], dict[int, tuple[int, GroupFact]]] = defaultdict(dict)
    for process in processes:
        for fact in process.groups.values():
            same = facts[fact.name, fact.ranks, fact.size, process.header.restart]
            same.setdefault(fact.rank, (process.rank, fact))
    rank_of = _GlobalRanks(processes)
    joined: dict[tuple[int, str], Group] = {}
    for (name, ranks, size, _), found in facts.items():
        # Of a member that wrote no line about the group, the others know its global rank.
        members = tuple(found[i][0] if i in found else rank_of[ranks[i] if ranks else i] for i in range(size))
        fact = next(iter(found.values()))[1]
        group = Group(name, fact.backend, members, fact.default)
        for rank, _ in found.values():
            joined[rank, name] = group
    return joined


class _GlobalRanks(dict[int, int]):
    """Global rank -> rank in the trace: as its process says, else the same number, else the next free one."""

    def __init__(self, processes: Sequence[Process]) -> None:
        for process in processes:
            for fact in process.groups.values():
                if fact.default and process.rank not in self.values():
                    self.setdefault(fact.rank, process.rank)
        self._taken = set(self.values())
        self._next = max((process.rank for process in processes), default=-1) + 1

    def __missing__(self, global_rank: int) -> int:
        rank = global_rank
        while rank in self._taken:
            rank, self._next = self._next, self._next + 1
        self._taken.add(rank)
        self[global_rank] = rank
        return rank


def member(group: Group, index: int | None) -> int | None:
    """The rank of this member; None where there is none."""
    return group.members[index] if index is not None and index < len(group.members) else None
