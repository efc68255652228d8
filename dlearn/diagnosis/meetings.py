"""Calls in which processes wait for others to come: which have come, and which are missing.

torch names a new group by a count. Where not every rank calls new_group for every group, two groups
have one name and meet in one store: whom a member connects to is chance.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from dlearn.events.event import Counters
from dlearn.events.process import Process
from dlearn.events.rendezvous import Rendezvous
from dlearn.join.columns import grouped
from dlearn.join.matching import join_groups
from dlearn.join.selection import once
from dlearn.join.wire import peers_by_group
from dlearn.trace import Trace

_IN_VAIN = ("DistStoreError", "KeyboardInterrupt")
"""Errors of a call that has waited until its timeout, or until the job was ended."""


class Absent(NamedTuple):
    """A rank, or worker of RPC, that has not come; `rank` is its process's, if there is one."""

    who: int | str
    rank: int | None


class Meeting(msgspec.Struct, frozen=True):
    """The `calls` of processes that wait for each other, and for those `absent`.

    `known`: who is wanted. Of `unseen` ranks, as on another host, no file is here. Calls are
    `apart` if all have come, and name their group differently; `namesakes` made another group of
    the same name last.
    """

    calls: tuple[Rendezvous, ...]
    absent: tuple[Absent, ...]
    unseen: tuple[int, ...]
    known: bool
    apart: bool
    namesakes: tuple[int, ...]

    @property
    def inside(self) -> tuple[int, ...]:
        return tuple(call.rank for call in self.calls)


@once
def open_rendezvous(trace: Trace) -> dict[int, Rendezvous]:
    """Return by rank the call in which a process waits for others, or waited until its end."""
    found: dict[int, Rendezvous] = {}
    for process in trace.processes:
        for call in process.rendezvous:
            if call.pending or (call.error in _IN_VAIN and _was_last(call, trace)):
                found.setdefault(process.rank, call)
    return found


def _was_last(call: Rendezvous, trace: Trace) -> bool:
    """Return whether its process has begun nothing else after it."""
    table = trace.table
    later = (table.rank == call.rank) & (table.start_ns > (call.end_ns or call.start_ns))
    return not np.any(later & ~table.is_a(Counters))


@once
def meetings(trace: Trace) -> tuple[Meeting, ...]:
    by_rank = {process.rank: process for process in trace.processes}
    calls = [call for _, call in sorted(open_rendezvous(trace).items())]
    met = grouped(calls, lambda call: (_what(call), _count(by_rank[call.rank], call)))
    return tuple(_meeting(together, times, trace) for (_, times), together in met.items())


def _meeting(calls: list[Rendezvous], times: int, trace: Trace) -> Meeting:
    first = calls[0]
    wanted: Iterable[int | str] = first.names or first.ranks or range(first.size)
    people = _people(first, trace)
    inside = {call.rank for call in calls}
    launched = any(process.header.world_size for process in trace.processes)
    absent, unseen = [], []
    for who in wanted:
        process = people.get(who)
        if process is None and launched and isinstance(who, int):
            unseen.append(who)
        elif process is None:
            absent.append(Absent(who, None))
        elif process.rank not in inside and _count(process, first) <= times:
            absent.append(Absent(who, process.rank))
    apart = len({call.group for call in calls}) > 1 and not (absent or unseen)
    lasts = [process.rendezvous[-1] for process in trace.processes if process.rendezvous]
    of_name = [last for last in lasts if first.group and last.group == first.group]
    namesakes = tuple(last.rank for last in of_name if last.ranks != first.ranks)
    called = (tuple(calls), tuple(absent), tuple(unseen))
    return Meeting(*called, bool(wanted), apart, namesakes)


def _what(call: Rendezvous) -> tuple[object, ...]:
    """Return what is equal in the calls that are to meet."""
    return call.names, call.ranks, call.size, bool(call.name)


def _count(process: Process, call: Rendezvous) -> int:
    """Count the rendezvous of this kind that a process has come out of."""
    over = (each for each in process.rendezvous if each.end_ns is not None and not each.failed)
    return sum(_what(each) == _what(call) for each in over)


def _people(call: Rendezvous, trace: Trace) -> dict[int | str, Process]:
    """Return the processes by name of a worker, or by rank: of RPC, or of the job."""
    if call.names:
        workers = ((each.worker, each) for each in trace.processes)
        return {worker.name: each for worker, each in workers if worker is not None}
    found: dict[int | str, Process] = {each.rank: each for each in trace.processes}
    for process in trace.processes:
        for made in process.rendezvous:
            if made.as_rank is not None and bool(made.name) == bool(call.name):
                found[made.as_rank] = process
    return found


class GroupClash(msgspec.Struct, frozen=True):
    """Groups of one name in one store, by members; `crossed`: connections to another's ranks."""

    name: str
    members: tuple[tuple[int, ...], ...]
    crossed: tuple[tuple[int, int], ...]


@once
def group_clashes(trace: Trace) -> tuple[GroupClash, ...]:
    """Find groups that share a name and the word in their store, and have different members."""
    groups, peers = join_groups(trace.processes), peers_by_group(trace)
    made: dict[tuple[str, str], dict[tuple[int, ...], None]] = defaultdict(dict)
    crossed: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for process in trace.processes:
        for fact in process.groups.values():
            key, members = (fact.name, fact.made), groups[process.rank, fact.name].members
            if fact.made and fact.ranks:
                made[key][members] = None
                others = peers[process.rank, fact.name].difference(members)
                crossed[key] += [(process.rank, other) for other in sorted(others)]
    several = [(key, tuple(members)) for key, members in made.items() if len(members) > 1]
    return tuple(GroupClash(key[0], members, tuple(crossed[key])) for key, members in several)
