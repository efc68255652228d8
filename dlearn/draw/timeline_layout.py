"""The layout of a timeline: lanes of ranks, rows in them, and the arrows that have room."""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dlearn.analysis.volume.flows import Flow, Sums, flows
from dlearn.events.event_table import NONE
from dlearn.join.operation_messages import messages_of
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Calls

MOST_LANES = 24  # Up to this many ranks have a lane each.
TOLERANCES = 0.03, 0.1  # Shares of the width by which calls in one lane may differ: the least that fits.
_ROW_IN = 0.25
SPAN_IN = 0.2
STRIP_IN = 0.12
_GAP_IN = 0.3
_NARROW_GAP_IN = 0.14
_MOST_BAR_ROWS_IN = 1.5
MOST_ARROWS = 250
_MOST_STEPS, _NARROWEST_STEP_PT = 24, 14
_APART_PT = 9


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
    calls: Calls, ranks: Sequence[int], own: Collection[int] = (), *, within_ns: float
) -> dict[int, tuple[int, ...]]:  # fmt: skip
    """Return the ranks that have lanes, each with those that it stands for, itself included.

    A group calls the same ops in the same order, each `within_ns` of the median's times; the rank nearest
    to the median stands for it. Ranks in `own` are in no group.
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
        alike = [each for each in members if apart[each] <= within_ns and each not in own]
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
    """Return the first free row of each interval (lane, start, end), one for all of the `same`."""
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


def arrows_of(
    shown: Iterable[Operation], ranks: Sequence[int], sums: Sums, *, points_per_ns: float, derived: bool
) -> tuple[list[Flow], int]:
    """Return arrows between these ranks, and count the messages that have no room for one.

    An arrow stands for a step if all steps have room, else for all messages of an operation between two ranks: it means
    the same in the whole picture. `derived` messages have arrows if asked for.
    """
    everything = sums.count.total() - (0 if derived else sums.count["derived"])
    if sums.arrows.total() - (0 if derived else sums.arrows["derived"]) > MOST_ARROWS:
        return [], everything

    def is_shown(message: Message) -> bool:
        asked_for = derived or message.how != "derived"
        timed = message.sent_ns is not None and message.received_ns is not None
        return timed and message.src in ranks and message.dst in ranks and asked_for and not message.control

    sent = [message for operation in shown for message in messages_of(operation) if is_shown(message)]
    drawn = [*flows(sent, by_step=True)]
    if not _steps_have_room(drawn, points_per_ns):
        drawn = [*flows(sent, by_step=False)]
    if len(drawn) > MOST_ARROWS:
        return [], everything
    observed = [flow for flow in drawn if flow.how != "derived"]
    kept = [flow for flow in drawn if flow.how == "derived"]
    kept += _apart(observed, ranks, _APART_PT / points_per_ns)
    return kept, len(sent) - sum(flow.count for flow in kept)


def _apart(shown: Sequence[Flow], ranks: Sequence[int], nearest_ns: float) -> list[Flow]:
    """Return the arrows that are near no other where they leave, pass or reach a lane.

    All arrows of an operation are kept, or none: a request without its reply would mislead. Of two operations that
    touch, the longer one is kept; a call that is over at once has no room.
    """
    taken: dict[Hashable, list[float]] = defaultdict(list)
    kept: list[Flow] = []
    for arrows in sorted(_by_operation(shown), key=_lasted_ns, reverse=True):
        edges: list[tuple[Hashable, float]]
        edges = [(("head", flow.src, flow.dst), flow.received_ns or 0) for flow in arrows]
        if not _is_collective(arrows):
            edges = [edge for flow in arrows for edge in _lane_edges(flow, ranks)]
        own: dict[Hashable, list[float]] = defaultdict(list)
        for edge, at_ns in edges:
            own[edge].append(at_ns)
        long = arrows[0].operation.exchange is None or _lasted_ns(arrows) >= nearest_ns
        if long and all(_are_apart([*taken[edge], *own[edge]], nearest_ns) for edge in own):
            kept += arrows
            for edge, times_ns in own.items():
                taken[edge] += times_ns
    return kept


def _by_operation(shown: Sequence[Flow]) -> list[list[Flow]]:
    together: dict[int, list[Flow]] = defaultdict(list)
    for flow in shown:
        together[id(flow.operation)].append(flow)
    return list(together.values())


def _is_collective(arrows: Sequence[Flow]) -> bool:
    """Return whether the arrows cross by nature: then only those between the same ranks must be apart."""
    return len({(flow.src, flow.dst) for flow in arrows}) > 2


def _are_apart(times_ns: Iterable[float], nearest_ns: float) -> bool:
    return all(later - before >= nearest_ns for before, later in pairwise(sorted(times_ns)))


def _lasted_ns(arrows: Sequence[Flow]) -> int:
    """Return how long the bars last that these arrows join, or the arrows where an end was not seen."""
    operation = arrows[0].operation
    end_ns = operation.end_ns or max(flow.received_ns or 0 for flow in arrows)
    return end_ns - operation.start_ns


def _lane_edges(flow: Flow, ranks: Sequence[int]) -> Iterator[tuple[Hashable, float]]:
    """Yield the lanes that an arrow touches, on the side of which gap, and when, at constant speed."""
    src, dst = ranks.index(flow.src), ranks.index(flow.dst)
    sent, received = flow.sent_ns or 0, flow.received_ns or 0
    for gap in range(min(src, dst), max(src, dst)):
        for lane in (gap, gap + 1):
            yield (lane, gap), sent + (received - sent) * (lane - src) / (dst - src)


def _steps_have_room(steps: Sequence[Flow], points_per_ns: float) -> bool:
    """Return whether steps, if some are derived, are few and wide, and those of a collective apart."""
    if any(flow.how == "derived" for flow in steps):
        shortest_ns = min((flow.received_ns or 0) - (flow.sent_ns or 0) for flow in steps)
        if len(steps) > _MOST_STEPS or shortest_ns * points_per_ns < _NARROWEST_STEP_PT:
            return False
    heads: dict[Hashable, list[float]] = defaultdict(list)
    for arrows in _by_operation([flow for flow in steps if flow.how != "derived"]):
        for flow in arrows if _is_collective(arrows) else ():
            heads[id(flow.operation), flow.src, flow.dst].append(flow.received_ns or 0)
    return all(_are_apart(times_ns, _APART_PT / points_per_ns) for times_ns in heads.values())
