"""Equivalent ranks: they send and receive the same, to and from ranks that are equivalent themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from dlearn.join.joining import operations
from dlearn.join.operation_messages import messages_of, sums_of
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.trace import Trace

Role = tuple[Hashable, bool, int]
"""Data that a rank sends (True) or receives in an operation, and its peer."""
Roles = dict[int, list[Role]]
"""Those of each rank in one operation."""
Colors = dict[int, int]
"""The number of each rank's class."""


def rank_classes(trace: Trace, ranks: Sequence[int]) -> dict[int, int]:
    """Map each rank to the first that does the same in the same order; leave out those without an equal.

    Colour refinement (1-dimensional Weisfeiler-Leman). Where all are equal, as in a ring, the map is empty.
    """
    shown = operations(trace)
    roles = [_roles(one) for one, _ in shown.groups()]
    color = dict.fromkeys(ranks, 0)
    while True:
        signatures: dict[int, Counter[Hashable]] = {rank: Counter([color[rank]]) for rank in ranks}
        for by_rank, (_, indices) in zip(roles, shown.groups(), strict=True):
            for rank in by_rank.keys() & color.keys():
                signatures[rank][_signature(by_rank[rank], color)] += len(indices)
        refined = _numbered({rank: frozenset(signature.items()) for rank, signature in signatures.items()})
        if len({*refined.values()}) == len({*color.values()}):
            break
        color = refined
    some = [rank for same in _groups(color) if 1 < len(same) < len(ranks) for rank in same]
    groups = _groups(_numbered({rank: (color[rank], _in_order(shown, roles, rank, color)) for rank in some}))
    return {rank: same[0] for same in groups if len(same) > 1 for rank in same}


def _roles(one: Operation) -> Roles:
    """Return what each rank sends and receives in it, without control messages; or its call."""
    found: Roles = defaultdict(list)
    sent: list[tuple[int, int, Hashable]]
    if one.exchange is not None:
        asked = [each for each in messages_of(one) if not each.control]
        sent = [(each.src, each.dst, (each.op, each.what, each.payload_bytes)) for each in asked]
    else:
        sums = [each for each in sums_of(one) if each.payload_bytes or each.how == "missing"]
        sent = [(each.src, each.dst, (one.op, one.what, each.how, each.payload_bytes)) for each in sums]
    for src, dst, what in sent:
        found[src].append((what, True, dst))
        found[dst].append((what, False, src))
    for rank in () if sent or one.exchange is not None else one.ranks:
        found[rank].append((one.op, True, rank))
    return found


def _signature(roles: Iterable[Role], color: Colors) -> Hashable:
    return frozenset((what, sends, color.get(peer)) for what, sends, peer in roles)


def _in_order(shown: Operations, roles: Sequence[Roles], rank: int, color: Colors) -> Hashable:
    """Return what this rank does, in the order of its own calls."""
    kind = np.empty(len(shown), np.intp)
    for number, (_, indices) in enumerate(shown.groups()):
        kind[indices] = number
    own = np.flatnonzero(shown.calls.rank == rank)
    own = own[np.argsort(shown.calls.start_ns[own], kind="stable")]
    numbers = kind[shown.calls.operation[own]].tolist()
    by_class = {number: _signature(roles[number].get(rank, ()), color) for number in {*numbers}}
    return tuple(by_class[number] for number in numbers if by_class[number])


def _numbered(signatures: dict[int, Hashable]) -> Colors:
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(signature, len(numbers)) for rank, signature in signatures.items()}


def _groups(color: Colors) -> list[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, number in color.items():
        groups[number].append(rank)
    return list(groups.values())
