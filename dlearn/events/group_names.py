"""One process group, one name: the processes of a job may have counted those of one name differently."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from dlearn.events.event import Collective, Event, Line, PointToPoint
from dlearn.events.process import Process

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
