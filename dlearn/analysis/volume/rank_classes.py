"""Equivalent ranks: they send and receive the same, to and from ranks that are equivalent themselves."""

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
Roles = dict[int, list[Role]]  # Those of each rank in one operation.
Colors = dict[int, int]  # The class of each rank: the first rank that is in it.


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
        refined = _firsts({rank: frozenset(seen.items()) for rank, seen in signatures.items()})
        if len({*refined.values()}) == len({*color.values()}):
            break
        color = refined
    sizes = Counter(color.values())
    some = [rank for rank in ranks if 1 < sizes[color[rank]] < len(ranks)]
    firsts = _firsts({rank: (color[rank], _in_order(shown, roles, rank, color)) for rank in some})
    sizes = Counter(firsts.values())
    return {rank: first for rank, first in firsts.items() if sizes[first] > 1}


def _roles(one: Operation) -> Roles:
    """Return what each rank sends and receives in it, without control messages; or its call."""
    roles: Roles = defaultdict(list)

    def add(src: int, dst: int, *what: Hashable) -> None:
        roles[src].append((what, True, dst))
        roles[dst].append((what, False, src))

    if one.exchange is not None:
        for message in messages_of(one):
            if not message.control:
                add(message.src, message.dst, message.op, message.what, message.payload_bytes)
        return roles
    for pair in sums_of(one):
        if pair.payload_bytes or pair.how == "missing":
            add(pair.src, pair.dst, one.op, one.what, pair.how, pair.payload_bytes)
    return roles or {rank: [(one.op, True, rank)] for rank in one.ranks}


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


def _firsts(signatures: dict[int, Hashable]) -> Colors:
    firsts: dict[Hashable, int] = {}
    return {rank: firsts.setdefault(signature, rank) for rank, signature in signatures.items()}
