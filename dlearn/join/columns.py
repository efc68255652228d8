"""The calls of a trace as columns of numbers, so that what is asked of millions of them is answered at once."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from dlearn.join.joining import once, operations
from dlearn.trace.message import End, Operation
from dlearn.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class CallColumns:
    """Place i of each column is of `ends[i]`; the ends of one operation stand together. Times in ns."""

    operations: tuple[Operation, ...]
    ends: list[End]
    operation: np.ndarray
    """Which of the operations it belongs to."""
    rank: np.ndarray
    start_ns: np.ndarray
    transfer_ns: np.ndarray
    """When the last rank called: before this, the others wait."""
    end_ns: np.ndarray
    """Its start where `ended` is False."""
    ended: np.ndarray
    """Whether its end was seen."""


@once
def calls_of(trace: Trace) -> CallColumns:
    """Every call that is an end of an operation of this trace."""
    asked = operations(trace)
    ends = [end for operation in asked for end in operation.ends]
    counts = np.array([len(operation.ends) for operation in asked], dtype=np.int64)
    start_ns = np.fromiter(map(attrgetter("start_ns"), ends), np.int64, len(ends))
    seen = list(map(attrgetter("end_ns"), ends))
    ended = np.array([end_ns is not None for end_ns in seen], dtype=bool)
    if not ended.all():
        seen = [end.start_ns if end.end_ns is None else end.end_ns for end in ends]
    first = np.cumsum(counts) - counts
    latest = np.maximum.reduceat(start_ns, first) if ends else start_ns
    return CallColumns(
        operations=asked,
        ends=ends,
        operation=np.repeat(np.arange(len(asked)), counts),
        rank=np.fromiter(map(attrgetter("rank"), ends), np.int64, len(ends)),
        start_ns=start_ns,
        transfer_ns=np.repeat(latest, counts),
        end_ns=np.array(seen, dtype=np.int64),
        ended=ended,
    )


def disjoint(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches that cover the same time, none of them twice; some are empty."""
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    begun = start[order]
    begun[1:] = np.maximum(begun[1:], reached[:-1])
    return begun, np.maximum(begun, reached)


def spread(start: np.ndarray, end: np.ndarray, amount: np.ndarray, *, bins: int) -> np.ndarray:
    """How much of all amounts falls into each bin, each spread evenly from `start` to `end` (both in bins)."""
    first, last = (np.clip(at.astype(np.int64), 0, bins - 1) for at in (start, end))
    within = first == last
    total = np.bincount(first[within], amount[within], bins).astype(float)
    start, end, first, last = start[~within], end[~within], first[~within], last[~within]
    rate = amount[~within] / (end - start)
    total += np.bincount(first, rate * (first + 1 - start), bins) + np.bincount(last, rate * (end - last), bins)
    # The bins between the first and the last are full: the rate begins in one and stops in the other.
    steps = np.bincount(first + 1, rate, bins) - np.bincount(last, rate, bins)
    return np.asarray(total + np.cumsum(steps))
