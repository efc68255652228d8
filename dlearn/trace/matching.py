"""Which events of different processes are the ends of one exchange.

Collectives meet by their number in the process group, as gloo itself matches them (its tag is a counter). Sends and
receives meet first-in first-out between the same two ranks with the same tag, as MPI and gloo promise. A pair
that does not fit (another op, another size) is still one exchange: that is what went wrong in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlearn.trace.event import Collective, GroupFact, PointToPoint
from dlearn.trace.message import Group

if TYPE_CHECKING:
    from dlearn.trace.trace import Process


@dataclass(frozen=True)
class Match:
    """The ends of one exchange, in the order of ranks, and the ranks whose end is not there."""

    group: Group
    seq: int
    ends: tuple[Collective | PointToPoint, ...]
    missing: tuple[int, ...]
    sender: int | None = None
    receiver: int | None = None


def match(processes: Sequence[Process], events: Iterable[Collective | PointToPoint]) -> tuple[Match, ...]:
    """Every event belongs to exactly one match; nothing is dropped. Ordered by first start."""
    groups = join_groups(processes)
    collectives: dict[tuple[str, Group, int], list[Collective]] = defaultdict(list)
    channels: dict[tuple[Group, int, int, int], tuple[list[PointToPoint], list[PointToPoint]]] = defaultdict(
        lambda: ([], [])
    )
    matches: list[Match] = []
    for event in events:
        group = groups.get((event.rank, event.group)) or _unknown_group(event)
        if isinstance(event, Collective):
            collectives[event.group, group, event.seq].append(event)
            continue
        peer = _member(group, event.peer)
        if peer is None:
            receiver = event.rank if event.op == "recv" else None
            sender = event.rank if event.op == "send" else None
            matches.append(Match(group, event.seq, (event,), (), sender=sender, receiver=receiver))
        elif event.op == "send":
            channels[group, event.rank, peer, event.tag][0].append(event)
        else:
            channels[group, peer, event.rank, event.tag][1].append(event)
    matches += [_collective(group, seq, ends) for (_, group, seq), ends in collectives.items()]
    for (group, sender, receiver, _), (sends, recvs) in channels.items():
        matches += _channel(group, sender, receiver, sends, recvs)
    return tuple(sorted(matches, key=lambda each: min(end.start_ns for end in each.ends)))


def join_groups(processes: Sequence[Process]) -> dict[tuple[int, str], Group]:
    """(rank, the process's name of the group) -> the group, one value for all its members."""
    facts: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[int, GroupFact]]] = defaultdict(dict)
    for process in processes:
        for fact in process.groups.values():
            facts[fact.name, fact.ranks, fact.size].setdefault(fact.rank, (process.rank, fact))
    joined: dict[tuple[int, str], Group] = {}
    for (name, ranks, size), found in facts.items():
        # A member whose file is missing is known by its global rank, which `ranks` gives.
        members = tuple(
            found[i][0] if i in found else (ranks[i] if ranks else i)
            for i in range(size if len(found) == size or ranks else min(size, 4096))
        )
        fact = next(iter(found.values()))[1]
        group = Group(name, fact.backend, members, fact.default)
        for rank, _ in found.values():
            joined[rank, name] = group
    return joined


def _unknown_group(event: Collective | PointToPoint) -> Group:
    """The line that described the group is lost: the event stays, alone."""
    return Group(event.group, "unknown", (event.rank,), default=False)


def _member(group: Group, index: int | None) -> int | None:
    return group.members[index] if index is not None and index < len(group.members) else None


def _collective(group: Group, seq: int, ends: list[Collective]) -> Match:
    came = {end.rank for end in ends}
    return Match(
        group,
        seq,
        tuple(sorted(ends, key=lambda end: (end.rank, end.number))),
        tuple(sorted(set(group.members) - came)),
    )


def _channel(
    group: Group, sender: int, receiver: int, sends: list[PointToPoint], recvs: list[PointToPoint]
) -> Iterable[Match]:
    sends.sort(key=lambda event: event.number)
    recvs.sort(key=lambda event: event.number)
    for i in range(max(len(sends), len(recvs))):
        send, recv = sends[i : i + 1], recvs[i : i + 1]
        missing = (() if send else (sender,)) + (() if recv else (receiver,))
        seq = (send or recv)[0].seq
        yield Match(group, seq, tuple(send + recv), missing, sender=sender, receiver=receiver)
