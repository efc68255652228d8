"""Which events of different processes are the ends of one exchange.

Collectives meet by their number in the process group, as gloo itself matches them (its tag is a counter). Sends and
receives meet first-in first-out between the same two ranks with the same tag, as MPI and gloo promise: a receive from
anyone, or with any tag, stands in the line of what it got, by its own place among the receives. A pair that does not
fit (another op, another size) is still one exchange: that is what went wrong in it. A call that was refused meets none:
it takes no number, and beside it stand only calls of the same op that other ranks were refused in the same place.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from dlearn.events.event import Collective, GroupFact, PointToPoint
from dlearn.events.event_table import WAS_REFUSED, EventTable, Mask, Rows
from dlearn.events.mpi_facts import CANCELLED, OtherMpiCall
from dlearn.events.process import Process
from dlearn.events.wiring import Wiring
from dlearn.join.columns import is_new, number_rows
from dlearn.join.ends import Group, OperationClass, payload_bytes
from dlearn.join.mismatch import mismatch_of_calls, mismatch_of_message
from dlearn.join.tables.operation_table import OperationTable
from dlearn.join.wording import modules_text

Groups = dict[tuple[int, str], Group]  # By rank and by its name there.


class _MatchedEnds(NamedTuple):
    """Operations of one sort: where each begins among the rows of their ends, and where nothing else decides, which of
    two that begin together stands first."""

    first: Rows
    end_row: Rows
    missing: dict[int, tuple[int, ...]]
    order: Rows


def match(processes: Sequence[Process], table: EventTable) -> OperationTable:
    """Return operations, by first start: every call belongs to exactly one of them.

    A rank counts as missing only if every line that it wrote is here; of others it is not known.
    """
    groups = join_groups(processes)
    for event in table.firsts:
        if isinstance(event, Collective | PointToPoint) and (event.rank, event.group) not in groups:
            # The line that described the group is lost: the event stays, alone.
            groups[event.rank, event.group] = Group(event.group, "unknown", (), default=False)
    complete = {process.rank for process in processes if process.complete}
    complete -= {*table.rank[table.is_a(OtherMpiCall)].tolist()}  # It may be one that was not read.
    alone, paired = _match_sends(table, groups, complete)
    came = _collectives(table, groups, complete)
    came.missing.update(_not_reached(table, groups, processes, came))
    return _ordered(table, groups, (alone, came, paired))


def _ordered(table: EventTable, groups: Groups, met: Sequence[_MatchedEnds]) -> OperationTable:
    end_row = np.concatenate([each.end_row for each in met])
    counts = np.concatenate([np.diff(each.first) for each in met])
    first = np.append(0, np.cumsum(counts))
    start_ns = np.minimum.reduceat(table.start_ns[end_row], first[:-1]) if len(counts) else np.empty(0, np.int64)
    sort = np.repeat(np.arange(len(met)), [len(each.order) for each in met])
    order = np.lexsort((np.concatenate([each.order for each in met]), sort, start_ns))
    place = np.argsort(order)
    shifts = np.cumsum([0, *(len(each.order) for each in met)]).tolist()
    missing = {
        int(place[number + shift]): ranks
        for each, shift in zip(met, shifts, strict=False)
        for number, ranks in each.missing.items()
    }
    before, counts = first[order], counts[order]
    first = np.append(0, np.cumsum(counts))
    ends = end_row[np.repeat(before - first[:-1], counts) + np.arange(len(end_row))]
    like, classes = _classes(table, groups, first, ends)
    return OperationTable(table, classes, like, first, ends, missing)


# Process groups -------------------------------------------------------------------------------------------------------


def join_groups(processes: Sequence[Process]) -> Groups:
    """Return the group by rank and the process's name of it: one value for all its members."""
    facts: dict[tuple[str, tuple[int, ...], int, int], dict[int, tuple[int, GroupFact]]] = defaultdict(dict)
    dimensions: dict[tuple[int, str], tuple[str, ...]] = {}
    for process in processes:
        for fact in process.groups.values():
            same = facts[fact.name, fact.ranks, fact.size, process.header.restart]
            same.setdefault(fact.rank, (process.rank, fact))
            dimensions[process.rank, fact.name] = process.dimensions(fact)
    absent = (
        ranks[i] if ranks else i for (_, ranks, size, _), found in facts.items() for i in range(size) if i not in found
    )
    rank_of = _ranks_in_trace(absent, processes)
    wired_by = {process.rank: process.wired for process in processes}
    joined: Groups = {}
    for (name, ranks, size, _), found in facts.items():
        # Of a member that wrote no line about the group, the others know its global rank.
        members = tuple(found[i][0] if i in found else rank_of[ranks[i] if ranks else i] for i in range(size))
        fact = next(iter(found.values()))[1]
        named = dict.fromkeys(each for rank, _ in found.values() for each in dimensions[rank, name])
        wired = {i: one for i, (rank, _) in found.items() if (one := wired_by[rank].get(name)) is not None}
        wiring = Wiring(wired) if wired else None
        group = Group(name, fact.backend, members, fact.default, wiring, tuple(named))
        for rank, _ in found.values():
            joined[rank, name] = group
    return joined


def _ranks_in_trace(absent: Iterable[int], processes: Sequence[Process]) -> dict[int, int]:
    """Map global ranks to the trace's; an absent one keeps its number, or gets a free one."""
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


# Collectives ----------------------------------------------------------------------------------------------------------


def _collectives(table: EventTable, groups: Groups, complete: set[int]) -> _MatchedEnds:
    rows = np.flatnonzero(table.is_a(Collective))
    of_firsts = [groups[e.rank, e.group] if isinstance(e, Collective) else None for e in table.firsts]
    numbers = _numbered([None if group is None else id(group) for group in of_firsts])
    group = numbers[table.like[rows]]
    exchange = _exchanges(table, rows, group)
    order = np.lexsort((table.number[rows], table.rank[rows], exchange))
    ends, exchange = rows[order], exchange[order]
    begins = np.flatnonzero(np.diff(exchange, prepend=-1))
    first = np.append(begins, len(ends))
    if not len(ends):
        return _MatchedEnds(first, ends, {}, begins)
    # Once for each group and not for each exchange: a group may have many members that left no file.
    of_group = {number: group for number, group in zip(numbers.tolist(), of_firsts, strict=True) if group is not None}
    witnesses = {number: sorted(complete.intersection(each.members)) for number, each in of_group.items()}
    rank = table.rank[ends]
    came = np.add.reduceat(is_new(rank, exchange) & np.isin(rank, list(complete)), begins)
    expected = np.array([len(witnesses.get(number, ())) for number in range(max(witnesses) + 1)])
    group = group[order][begins]
    late = np.flatnonzero((came < expected[group]) & (table.ended_by[ends[begins]] != WAS_REFUSED))
    missing: dict[int, tuple[int, ...]] = {}
    for number in late.tolist():
        here = set(rank[first[number] : first[number + 1]].tolist())
        missing[number] = tuple(each for each in witnesses[int(group[number])] if each not in here)
    return _MatchedEnds(first, ends, missing, np.minimum.reduceat(ends, begins))


def _not_reached(
    table: EventTable, groups: Groups, processes: Sequence[Process], met: _MatchedEnds
) -> dict[int, tuple[int, ...]]:
    """Return which ranks had not come as far as a collective, by what their processes say."""
    called = {(id(groups[process.rank, name]), process.rank): each.called
              for process in processes for name, each in process.reached.items()
              if not process.complete and (process.rank, name) in groups}  # fmt: skip
    missing: dict[int, tuple[int, ...]] = {}
    for number in range(len(met.order)) if called else ():
        rows = met.end_row[met.first[number] : met.first[number + 1]]
        event = table.firsts[table.like[rows[0]]]
        assert isinstance(event, Collective)
        group, here = groups[event.rank, event.group], set(table.rank[rows].tolist())
        seq = int(table.column("seq")[rows[0]])
        late = (rank for rank in group.members if called.get((id(group), rank), seq) < seq and rank not in here)
        if absent := {*late, *met.missing.get(number, ())}:
            missing[number] = tuple(sorted(absent))
    return missing


def _exchanges(table: EventTable, rows: Rows, group: Rows) -> Rows:
    """Return a number for each of these calls, the same for those with one number in their group."""
    refused = table.ended_by[rows] == WAS_REFUSED
    seq = table.column("seq")[rows]
    if refused.any():
        # A refused call takes no number: those after it have come one too far.
        for one in {(rank, number) for rank, number in zip(table.rank[rows[refused]], group[refused], strict=True)}:
            mine = (table.rank[rows] == one[0]) & (group == one[1])
            seq[mine] -= np.cumsum(refused[mine]) - refused[mine]
    exchange, _ = number_rows(group, seq)
    again: Counter[tuple[object, ...]] = Counter()
    apart: dict[tuple[object, ...], int] = {}
    for refusal in np.flatnonzero(refused).tolist():
        event = table.firsts[table.like[rows[refusal]]]
        assert isinstance(event, Collective)
        call = (int(exchange[refusal]), event.op)
        apart_from = (*call, again[event.rank, *call])
        again[event.rank, *call] += 1
        exchange[refusal] = apart.setdefault(apart_from, len(rows) + len(apart))
    return np.asarray(exchange)


# Sends and receives ---------------------------------------------------------------------------------------------------


Channel = tuple[int, int, int, int]
"""Group, sender, receiver and tag: the first send there meets the first recv, and so on."""


def _match_sends(table: EventTable, groups: Groups, complete: set[int]) -> tuple[_MatchedEnds, _MatchedEnds]:
    """Match sends and receives; return the calls that stay alone (refused, or without a peer), and the others."""
    rows = np.flatnonzero(table.is_a(PointToPoint))
    channels = [
        _channel(event, groups[event.rank, event.group]) if isinstance(event, PointToPoint) else None
        for event in table.firsts
    ]
    channel = _numbered(channels)[table.like[rows]]
    meets_none = (channel == 0) | (table.ended_by[rows] == WAS_REFUSED)
    lone = rows[meets_none]
    alone = _MatchedEnds(np.arange(len(lone) + 1), lone, {}, np.arange(len(lone)))
    rows, channel = rows[~meets_none], channel[~meets_none]
    is_recv = table.of_firsts(lambda first: isinstance(first, PointToPoint) and first.op == "recv")[rows]
    order = np.lexsort((table.number[rows], is_recv, channel))
    rows, channel, is_recv = rows[order], channel[order], is_recv[order]
    line = channel * 2 + is_recv
    turn = np.arange(len(line)) - np.searchsorted(line, line)
    turn = _by_place(table, rows, channel, is_recv, turn)
    order = np.lexsort((is_recv, turn, channel))
    rows, channel, is_recv, turn = rows[order], channel[order], is_recv[order], turn[order]
    begins = np.flatnonzero(is_new(channel, turn))
    first = np.append(begins, len(rows))
    missing: dict[int, tuple[int, ...]] = {}
    for number in np.flatnonzero(np.diff(first) == 1).tolist():
        event = table.firsts[table.like[rows[begins[number]]]]
        found = channels[table.like[rows[begins[number]]]]
        assert isinstance(event, PointToPoint)
        assert found is not None
        absent = found[1] if event.op == "recv" else found[2]
        # Where only some steps were recorded, the other end may be in another.
        if absent in complete and not event.place:
            missing[number] = (absent,)
    if len(rows):
        # In the order of the first call of each channel.
        opened = np.full(int(channel.max()) + 1, len(table))
        np.minimum.at(opened, channel, rows)
        begins = np.lexsort((turn[begins], opened[channel[begins]])).argsort()
    return alone, _MatchedEnds(first, rows, missing, begins)


def _channel(event: PointToPoint, group: Group) -> Channel | None:
    """Return the channel of a call; None where no rank is the peer."""
    sender, receiver = sides(event, group)
    if sender is None or receiver is None:
        return None
    return id(group), sender, receiver, event.tag


def sides(event: PointToPoint, group: Group) -> tuple[int | None, int | None]:
    """Return sender and receiver of a call, as far as they are known."""
    peer = None
    if event.peer is not None and event.peer < len(group.members) and event.error != CANCELLED:
        peer = group.members[event.peer]
    return (event.rank, peer) if event.op == "send" else (peer, event.rank)


def _by_place(table: EventTable, rows: Rows, channel: Rows, is_recv: Mask, turn: Rows) -> Rows:
    """Return the turn of each call; in a recording of some steps, its index among all calls, if it has one."""
    place = table.of_firsts(lambda first: getattr(first, "place", 0), np.int64)[rows]
    if not place.any():
        return turn
    # A receive from any rank has no place among those from one rank: its other end may not be in this trace.
    placed = np.isin(channel, channel[place > 0])
    lonely = np.where(is_recv, turn - len(rows), turn - 2 * len(rows))
    return np.where(placed, np.where(place > 0, place, lonely), turn)


def _numbered(values: Sequence[Any]) -> Rows:
    """Return a number for each different value, from 1 in the order of appearance; 0 for None."""
    numbers: dict[Any, int] = {}
    found = (0 if value is None else numbers.setdefault(value, len(numbers) + 1) for value in values)
    return np.fromiter(found, np.intp, len(values))


# What operations with the same ends share -----------------------------------------------------------------------------


def _classes(table: EventTable, groups: Groups, first: Rows, ends: Rows) -> tuple[Rows, list[OperationClass]]:
    """Return the class of each operation, as an index, and all classes."""
    counts, of_ends = np.diff(first), table.like[ends]
    like, classes = np.empty(len(counts), np.intp), list[OperationClass]()
    for ends_each in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == ends_each)
        keys = of_ends[first[rows][:, None] + np.arange(ends_each)]
        number, examples = number_rows(*keys.T)
        like[rows] = number + len(classes)
        for example in keys[examples].tolist():
            classes.append(_class_of([table.firsts[each] for each in example], groups))
    return like, classes


def _class_of(ends: Sequence[Collective | PointToPoint], groups: Groups) -> OperationClass:
    first = ends[0]
    group = groups[first.rank, first.group]
    if isinstance(first, PointToPoint):
        sender, receiver = sides(first, group)
        return OperationClass(
            op="send" if sender is not None and receiver is not None else first.op,
            group=group,
            mismatch=mismatch_of_message(first, ends[1], group.backend) if len(ends) == 2 else None,
            sender=sender,
            receiver=receiver,
            payload_bytes=payload_bytes(first),
        )
    calls = [end for end in ends if isinstance(end, Collective)]
    op = "/".join(dict.fromkeys([end.op for end in calls]))
    giver = next((end for end in calls if end.inputs), calls[0])
    role = giver.role or modules_text([giver])
    mismatch = mismatch_of_calls(calls, group.members)
    return OperationClass(op=op, group=group, mismatch=mismatch, role=role)
