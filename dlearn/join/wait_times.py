"""How long operations waited for the rank that came last."""

from __future__ import annotations

import numpy as np

from dlearn.events.event import PointToPoint
from dlearn.join.columns import disjoint
from dlearn.join.ends import End
from dlearn.join.joining import operations
from dlearn.join.selection import Selection, once
from dlearn.join.tables.operation_table import Operation


def waited_until_ns(operation: Operation, end: End) -> int | None:
    """Return until when this rank waited: the last rank's call. None where that did not come, or is not known.

    A rank that was done before the last one called did not wait: its data went ahead into a buffer.
    """
    if operation.is_call or operation.refused:
        return end.start_ns  # A callee begins when it is asked, and what is refused waits for no rank.
    may_be_unseen = operation.unseen or (isinstance(end, PointToPoint) and len(operation.ends) == 1)
    if operation.missing or (may_be_unseen and end.end_ns is None):
        return None
    done_before = end.end_ns is not None and end.end_ns <= operation.last_arrival_ns
    return end.start_ns if done_before else operation.last_arrival_ns


@once
def waiting(trace: Selection) -> dict[int, int]:
    """Return the ns in which at least one operation waited for a rank, for each such rank."""
    asked = operations(trace)
    calls = asked.calls
    came_later = calls.last_arrival_ns > calls.start_ns
    waited = came_later & (calls.end_ns > calls.last_arrival_ns)
    for place in np.flatnonzero(came_later & ~calls.ended).tolist():
        operation = asked[int(calls.operation[place])]
        end = operation.ends[place - int(np.searchsorted(calls.operation, calls.operation[place]))]
        waited[place] = waited_until_ns(operation, end) is not None
    waited &= ~asked.table.waits_for_none[asked.rows][calls.operation]
    last_rank = calls.last_rank[calls.operation[waited]]
    start_ns, until_ns = calls.start_ns[waited], calls.last_arrival_ns[waited]
    ranks, seen_first = np.unique(last_rank, return_index=True)
    covered: dict[int, int] = {}
    for rank in ranks[np.argsort(seen_first)]:
        begun, over = disjoint(start_ns[last_rank == rank], until_ns[last_rank == rank])
        covered[int(rank)] = int((over - begun).sum())
    return covered
