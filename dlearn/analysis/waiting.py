"""How long operations waited for the rank that came last."""

from __future__ import annotations

from collections import defaultdict

from dlearn.analysis.intervals import length_ns, union
from dlearn.analysis.joining import operations
from dlearn.trace.event import PointToPoint
from dlearn.trace.message import End, Operation
from dlearn.trace.trace import Trace


def waited_until_ns(operation: Operation, end: End) -> int | None:
    """Until when this rank's part could not begin: the last rank's call. None where that did not come, or nobody knows.

    A rank that was done before the last one called has waited for nobody: its data went ahead into a buffer.
    """
    if operation.exchange is not None:
        return end.start_ns  # Nobody is late: a callee begins when it is asked.
    nobody_knows = operation.unseen or (isinstance(end, PointToPoint) and len(operation.ends) == 1)
    if operation.missing or (nobody_knows and end.end_ns is None):
        return None
    done_before = end.end_ns is not None and end.end_ns <= operation.transfer_ns
    return end.start_ns if done_before else operation.transfer_ns


def waiting(trace: Trace) -> dict[int, int]:
    """Nanoseconds in which at least one operation waited for this rank, for each rank that was waited for."""
    stretches: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations(trace):
        for end in operation.ends:
            until = waited_until_ns(operation, end)
            if until is not None and until > end.start_ns:
                stretches[operation.last_rank].append((end.start_ns, until))
    return {rank: length_ns(union(found)) for rank, found in stretches.items()}
