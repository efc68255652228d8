"""Lanes: the room of each rank's spans, gradients and bars, so that none of them hides another.

Of many ranks that call the same at almost the same times, one lane stands for all; a rank that differs has its own.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlearn.events.event_table import NONE
from dlearn.join.tables.operations import Calls

MOST_LANES = 24
"""Up to this many ranks have a lane each."""
TOLERANCE = 0.03
"""Share of the picture's width by which the calls of ranks with one lane may differ in time."""
_ROW_IN = 0.25
SPAN_IN = 0.2
STRIP_IN = 0.12
_GAP_IN = 0.3
_NARROW_GAP_IN = 0.14
_MOST_BAR_ROWS_IN = 1.5


@dataclass(frozen=True)
class Lane:
    """One rank's part of the picture, from `top` to `bottom`; all in inches, downwards."""

    top: float
    strip_top: float
    bars_top: float
    row: float
    rows: int
    bottom: float

    def bar(self, row: int) -> tuple[float, float]:
        """Return top and bottom of a bar in this row."""
        top = self.bars_top + row * self.row
        return top + 0.06 * self.row, top + 0.94 * self.row

    @property
    def middle(self) -> float:
        """Return the height of the rank's name."""
        return (self.bars_top + self.bottom) / 2 if self.rows else (self.top + self.bottom) / 2


def lane_groups(
    calls: Calls, ranks: Sequence[int], length_ns: int, own: Collection[int] = ()
) -> dict[int, tuple[int, ...]]:  # fmt: skip
    """Return the ranks that have lanes, each with those that it stands for, itself included.

    A group calls the same ops in the same order, each within `TOLERANCE` of `length_ns` of the median's times; the rank
    nearest to the median stands for it. Ranks in `own` are in no group.
    """
    if len(ranks) <= MOST_LANES:
        return {rank: (rank,) for rank in ranks}
    order = np.lexsort((calls.start_ns, calls.rank))
    mine = {rank: order[calls.rank[order] == rank] for rank in ranks}
    same: dict[bytes, list[int]] = defaultdict(list)
    for rank, places in mine.items():
        unseen = calls.end_ns[places] == NONE  # Calls that hang form a group of their own.
        same[np.append(calls.op[places], unseen).tobytes()].append(rank)
    folded: dict[int, tuple[int, ...]] = {}
    for members in same.values():
        times = np.array([np.append(calls.start_ns[mine[rank]], calls.end_ns[mine[rank]]) for rank in members])
        far = np.abs(times - np.median(times, axis=0)).max(axis=1, initial=0)
        apart = dict(zip(members, far.tolist(), strict=True))
        alike = [each for each in members if apart[each] <= TOLERANCE * length_ns and each not in own]
        folded |= {rank: (rank,) for rank in members if rank not in alike}
        if alike:
            folded[min(alike, key=apart.__getitem__)] = tuple(alike)
    return {rank: folded[rank] for rank in sorted(folded)}


def stack(ranks: Sequence[int], *, rows: dict[int, int], spans: dict[int, int], strips: set[int]) -> dict[int, Lane]:
    """Stack lanes from the top, each as high as its rows of bars and spans, and its strip, need."""
    lanes: dict[int, Lane] = {}
    gap = _GAP_IN if len(ranks) <= 8 else _NARROW_GAP_IN
    top = gap / 2
    for rank in ranks:
        count = rows.get(rank, 1)
        row = min(_ROW_IN, _MOST_BAR_ROWS_IN / max(1, count))
        strip = top + spans.get(rank, 0) * SPAN_IN
        bars = strip + (STRIP_IN if rank in strips else 0)
        lanes[rank] = Lane(top, strip, bars, row, count, bars + count * row)
        top = lanes[rank].bottom + gap
    return lanes


def depths(rows: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Count the rows of each rank, given the (rank, row) of its marks."""
    depth: dict[int, int] = defaultdict(int)
    for rank, row in rows:
        depth[rank] = max(depth[rank], row + 1)
    return depth


def height_in(lanes: dict[int, Lane]) -> float:
    """Return the height of all lanes, with equal margins above and below."""
    ends = list(lanes.values())
    return ends[-1].bottom + ends[0].top if ends else 1.0


def rows_for(intervals: Sequence[tuple[Hashable, int, int]], same: Sequence[Hashable]) -> list[int]:
    """Return the row of each interval (lane, start, end), so that none overlaps another in its row.

    Intervals of the `same` have one row in all lanes: the first that is free for all of them.
    """
    parts: dict[Hashable, list[int]] = defaultdict(list)
    for place, each in enumerate(same):
        parts[each].append(place)
    taken: dict[tuple[Hashable, int], list[tuple[int, int]]] = defaultdict(list)
    rows = [0] * len(intervals)
    for places in sorted(parts.values(), key=lambda places: min(intervals[place][1] for place in places)):
        mine, row = [intervals[place] for place in places], 0
        while not all(_is_free(taken[lane, row], *when) for lane, *when in mine):
            row += 1
        for place, (lane, start, end) in zip(places, mine, strict=True):
            rows[place] = row
            insort(taken[lane, row], (start, end))
    return rows


def _is_free(taken: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """Return whether this interval overlaps none of those, which are sorted and disjoint."""
    after = bisect_right(taken, (start, end))
    return all(until <= start or end <= at for at, until in taken[max(0, after - 1) : after + 1])
