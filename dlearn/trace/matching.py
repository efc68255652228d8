"""Which events of different processes are the ends of one exchange.

Collectives meet by their number in the process group, as gloo itself matches them (its tag is a counter). Sends and
receives meet first-in first-out between the same two ranks with the same tag, as MPI and gloo promise: a receive from
anyone, or with any tag, stands in the line of what it got, by its own place among the receives. A pair that does not
fit (another op, another size) is still one exchange: that is what went wrong in it. A call that was refused meets none:
it takes no number, and beside it stand only calls of the same op that other ranks were refused in the same place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from dlearn.trace.event import Collective, Event, GroupFact, PointToPoint
from dlearn.trace.message import End, Group, Operation, payload_bytes, tensors_of
from dlearn.trace.mpi_facts import CANCELLED, PICKLED
from dlearn.trace.wording import Reason, ReasonKind

if TYPE_CHECKING:
    from dlearn.trace.trace import Process

_set = msgspec.structs.force_setattr
_EQUAL_SIZES = {
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
}
"""Collectives that every rank must call with as many bytes as the others."""
_TOLD = 8
"""Sizes or dtypes in the reason why calls do not fit together."""


def match(processes: Sequence[Process], events: Iterable[Collective | PointToPoint]) -> tuple[Operation, ...]:
    """Every event belongs to exactly one operation; nothing is dropped. Ordered by first start.

    A rank counts as missing only if every line that it wrote is here; of others nobody knows.
    """
    groups = join_groups(processes)
    complete = {process.rank for process in processes if process.complete}
    exchanges: dict[tuple[object, ...], list[Collective]] = defaultdict(list)
    refusals: Counter[tuple[object, ...]] = Counter()
    posted: dict[tuple[int, str, str, int | None, int, bool], list[PointToPoint]] = defaultdict(list)
    for event in events:
        if isinstance(event, Collective):
            key = (event.rank, event.group)
            group = groups[key] if key in groups else groups.setdefault(key, _unknown_group(event))
            # The keys hold a group's identity, not its value: to hash a large one takes long.
            place: tuple[object, ...] = (id(group), event.seq - refusals[key])
            if event.refused:
                place = (*place, event.op, refusals[event.rank, *place, event.op])
                refusals.update([key, (event.rank, *place[:-1])])
            exchanges[place].append(event)
        else:
            meets_none = event.refused or event.error == CANCELLED
            posted[event.rank, event.group, event.op, event.peer, event.tag, meets_none].append(event)
    matches, channels = _open_channels(posted.values(), groups)
    matches += _join_collectives(exchanges.values(), groups, complete)
    for channel in channels:
        matches += _join_channel(channel, complete)
    return tuple(sorted(matches, key=lambda each: each.start_ns))


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


def _unknown_group(event: Collective | PointToPoint) -> Group:
    """The line that described the group is lost: the event stays, alone."""
    return Group(event.group, "unknown", (), default=False)


def _member(group: Group, index: int | None) -> int | None:
    return group.members[index] if index is not None and index < len(group.members) else None


def _join_collectives(
    exchanges: Iterable[list[Collective]], groups: dict[tuple[int, str], Group], complete: set[int]
) -> Iterator[Operation]:
    # Once for each group and not for each exchange: a group may have many members that left no file.
    witnesses = {id(group): sorted(complete.intersection(group.members)) for group in groups.values()}
    for ends in exchanges:
        group = groups[ends[0].rank, ends[0].group]
        came = {end.rank for end in ends}
        missing = () if ends[0].refused else tuple(rank for rank in witnesses[id(group)] if rank not in came)
        ends.sort(key=lambda end: (end.rank, end.number))
        yield _collective(group, tuple(ends), missing)


def _collective(group: Group, ends: tuple[Collective, ...], missing: tuple[int, ...]) -> Operation:
    ops = list(dict.fromkeys([end.op for end in ends]))
    first = next((end for end in ends if end.inputs), ends[0])
    return Operation(
        op="/".join(ops),
        group=group,
        seq=ends[0].seq,
        ends=ends,
        missing=missing,
        misfit=_misfit_of_calls(ends, ops),
        role=first.role,
    )


@dataclass
class _Channel:
    """All sends and recvs between two ranks with the same tag: the first send meets the first recv, and so on."""

    group: Group
    sender: int
    receiver: int
    sends: list[PointToPoint] = field(default_factory=list)
    recvs: list[PointToPoint] = field(default_factory=list)


def _open_channels(
    posted: Iterable[list[PointToPoint]], groups: dict[tuple[int, str], Group]
) -> tuple[list[Operation], list[_Channel]]:
    """Each list holds what one rank posted alike: the same op, group, peer and tag. Where no rank is the peer, the
    calls stay alone, and so do those that were refused."""
    alone: list[Operation] = []
    channels: dict[tuple[int, int, int, int], _Channel] = {}
    for calls in posted:
        first = calls[0]
        key = (first.rank, first.group)
        group = groups[key] if key in groups else groups.setdefault(key, _unknown_group(first))
        peer = _member(group, first.peer) if first.error != CANCELLED else None
        sender, receiver = (first.rank, peer) if first.op == "send" else (peer, first.rank)
        if sender is None or receiver is None or first.refused:
            alone += [_send(group, (call,), (), sender, receiver) for call in calls]
            continue
        channel = channels.setdefault((id(group), sender, receiver, first.tag), _Channel(group, sender, receiver))
        (channel.sends if first.op == "send" else channel.recvs).extend(calls)
    return alone, list(channels.values())


def _join_channel(channel: _Channel, complete: set[int]) -> Iterator[Operation]:
    group, sender, receiver = channel.group, channel.sender, channel.receiver
    for send, recv in _paired(channel):
        if send is not None and recv is not None:
            yield _send(group, (send, recv), (), sender, receiver)
        elif (alone := send or recv) is not None:
            absent = sender if send is None else receiver
            # Where only some steps were recorded, the other end may be in another.
            missing = (absent,) if absent in complete and not alone.place else ()
            yield _send(group, (alone,), missing, sender, receiver)


def _paired(channel: _Channel) -> Iterator[tuple[PointToPoint | None, PointToPoint | None]]:
    sends = sorted(channel.sends, key=attrgetter("number"))
    recvs = sorted(channel.recvs, key=attrgetter("number"))
    if not any(event.place for event in (*sends, *recvs)):
        yield from zip_longest(sends, recvs)
        return
    # A receive from anyone has no place among those from one rank: of it nobody knows which other end is in this trace.
    yield from ((send, None) for send in sends if not send.place)
    yield from ((None, recv) for recv in recvs if not recv.place)
    by_place = [{event.place: event for event in events if event.place} for events in (sends, recvs)]
    for place in sorted(by_place[0].keys() | by_place[1].keys()):
        yield by_place[0].get(place), by_place[1].get(place)


def _send(
    group: Group,
    ends: tuple[PointToPoint, ...],
    missing: tuple[int, ...],
    sender: int | None,
    receiver: int | None,
) -> Operation:
    first = ends[0]
    return Operation(
        op="send" if sender is not None and receiver is not None else first.op,
        group=group,
        seq=first.seq,
        ends=ends,
        missing=missing,
        misfit=_misfit_of_send(*ends) if len(ends) == 2 else None,
        sender=sender,
        receiver=receiver,
        payload_bytes=payload_bytes(first),
    )


# Do the ends fit together? --------------------------------------------------------------------------------------------


def _misfit_of_send(send: End, recv: End) -> Reason | None:
    """Why a send does not fit its recv; None where it does."""
    if tensors_of(send) == tensors_of(recv):  # Of a million, nearly all.
        return None
    given, room = payload_bytes(send), payload_bytes(recv)
    return Reason.of(ReasonKind.SMALL_BUFFER, given, room) if given > room else None


def _misfit_of_calls(ends: Sequence[End], ops: Sequence[str]) -> Reason | None:
    """Why the calls of a collective do not fit together; None where they do. `ops` are their different ops."""
    if len({end.rank for end in ends}) < len(ends):
        return Reason.of(ReasonKind.RANK_TWICE)
    if len(ops) > 1:
        return Reason.of(ReasonKind.DIFFERENT_OPS, tuple(ops))
    comparable = ops[0] in _EQUAL_SIZES and not _of_objects(ends)
    if comparable and len({_logical_bytes(end) for end in ends}) > 1:
        sizes = [_logical_bytes(end) for end in ends[:_TOLD]]
        return Reason.of(ReasonKind.DIFFERENT_SIZES, tuple(sizes))
    first = tensors_of(ends[0])
    if comparable and any(tensors_of(end) != first for end in ends):
        types = list(dict.fromkeys(map(_dtypes, ends)))
        if len(types) > 1:
            return Reason.of(ReasonKind.DIFFERENT_DTYPES, tuple(types[:_TOLD]))
    if len({end.root for end in ends if isinstance(end, Collective)}) > 1:
        return Reason.of(ReasonKind.DIFFERENT_ROOTS)
    return None


def _of_objects(ends: Sequence[End]) -> bool:
    """Python objects: each rank's are as large as they are."""
    return any(tensor.dtype == PICKLED for end in ends for tensor in tensors_of(end))


def _logical_bytes(call: End) -> int:
    """Of sparse tensors the same on all ranks, however many values each has."""
    return sum([tensor.logical_bytes for tensor in tensors_of(call)])


def _dtypes(call: End) -> str:
    return "+".join(dict.fromkeys(tensor.dtype for tensor in tensors_of(call)))
