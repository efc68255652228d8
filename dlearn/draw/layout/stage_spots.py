"""Where ranks stand on a stage, as they send to each other: around a hub, in a row, or in a circle."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dlearn.draw.layout.circle_layout import Pair, Point, hub_of

WIDTH = 760.0
_BOXES = ((4, 168.0, 104.0), (8, 124.0, 84.0), (16, 76.0, 62.0), (math.inf, 24.0, 18.0))
"""For up to so many ranks: width and height of a box, in pixels."""
_HEAD = 24.0
"""Above a box, for its name."""


class Spots(NamedTuple):
    """The middle of each rank's box, the size of all boxes, and the height of all, in pixels."""

    middles: dict[int, Point]
    wide: float
    high: float
    height: float
    in_row: bool

    def wire(self, pair: Pair, pairs: Collection[Pair]) -> tuple[Point, Point]:
        """From the rim of the sender's box to the receiver's; beside the middle where packets go both ways."""
        (x, y), (to_x, to_y) = self.middles[pair[0]], self.middles[pair[1]]
        far = math.dist((x, y), (to_x, to_y)) or 1.0
        across, down = (to_x - x) / far, (to_y - y) / far
        rim = min(self.wide / 2 / max(1e-6, abs(across)), self.high / 2 / max(1e-6, abs(down))) + 5
        beside = 6.0 if pair[::-1] in pairs else 0.0
        x, y = x - down * beside, y + across * beside
        rim = min(rim, far / 2)
        return (x + across * rim, y + down * rim), (x + across * (far - rim), y + down * (far - rim))


def spots_of(ranks: Sequence[int], pairs: Collection[Pair]) -> Spots:
    """Place ranks on a stage of WIDTH pixels, by who sends to whom in these pairs."""
    _, wide, high = next(box for box in _BOXES if len(ranks) <= box[0])
    hub = hub_of(ranks, pairs)
    around = [rank for rank in ranks if rank != hub]
    row = [around[0], hub, around[1]] if hub is not None and len(around) == 2 else [*ranks]
    places = {rank: place for place, rank in enumerate(row)}
    neighbours = bool(pairs) and all(abs(places[src] - places[dst]) == 1 for src, dst in pairs)
    if len(row) <= 2 or (neighbours and len(row) <= 8):
        gap = min(320.0, WIDTH / max(1, len(row)))
        left = (WIDTH - gap * len(row)) / 2
        middles = {rank: (left + gap * (place + 0.5), high / 2 + _HEAD) for rank, place in places.items()}
        return Spots(middles, max(24.0, min(wide, gap - 90)), high, high + 2 * _HEAD, in_row=True)
    apart = 8 if len(ranks) > 16 else 40
    tall = max(0.32 * WIDTH, len(around) * (high + apart) / math.pi, high + 60 if hub is None else 2 * high + 130)
    across, down = min(WIDTH / 2 - wide / 2 - 12, 1.5 * tall), tall / 2
    center = WIDTH / 2, down + high / 2 + _HEAD
    middles = {} if hub is None else {hub: center}
    for place, rank in enumerate(around):
        angle = 2 * math.pi * place / len(around) - math.pi / 2
        middles[rank] = center[0] + across * math.cos(angle), center[1] + down * math.sin(angle)
    return Spots(middles, wide, high, max(y for _, y in middles.values()) + high / 2 + _HEAD, in_row=False)
