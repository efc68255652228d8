"""Of many ranks that call the same at almost the same times, one lane stands for all; whoever is odd has its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dlearn.trace.tables.event_table import NONE
from dlearn.trace.tables.operations import Calls

MOST_LANES = 24
"""Up to so many ranks each has a lane."""
ALIKE = 0.03
"""Calls of ranks that are alike begin and end within this share of the picture of the same time."""


def fold(calls: Calls, ranks: Sequence[int], length_ns: int) -> dict[int, tuple[int, ...]]:
    """Each rank that has a lane, with those that it stands for, itself included. `length_ns`: of the whole picture.

    Alike are ranks that call the same ops in the same order, each within `ALIKE` of the median's times; the one that
    is nearest to the median stands for them.
    """
    if len(ranks) <= MOST_LANES:
        return {rank: (rank,) for rank in ranks}
    order = np.lexsort((calls.start_ns, calls.rank))
    mine = {rank: order[calls.rank[order] == rank] for rank in ranks}
    same: dict[bytes, list[int]] = defaultdict(list)
    for rank, places in mine.items():
        unseen = calls.end_ns[places] == NONE  # What hangs is like what hangs.
        same[np.append(calls.op[places], unseen).tobytes()].append(rank)
    folded: dict[int, tuple[int, ...]] = {}
    for members in same.values():
        times = np.array([np.append(calls.start_ns[mine[rank]], calls.end_ns[mine[rank]]) for rank in members])
        far = np.abs(times - np.median(times, axis=0)).max(axis=1, initial=0)
        alike = [rank for rank, apart in zip(members, far, strict=True) if apart <= ALIKE * length_ns]
        folded |= {rank: (rank,) for rank in members if rank not in alike}
        if alike:
            folded[members[int(far.argmin())]] = tuple(alike)
    return {rank: folded[rank] for rank in sorted(folded)}
