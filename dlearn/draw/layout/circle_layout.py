"""Where the ranks of a traffic graph and of a stage stand, how arrows bend, and where their labels find room.

Ranks are on an ellipse, clockwise from the top; one that takes part in every arrow is in the middle. In a graph all
lengths are points and y grows upwards; on a stage they are pixels and y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dlearn.draw.canvas import Box
from dlearn.draw.text import TEXT_PT, text_width

Pair = tuple[int, int]
"""Sender and receiver."""
Point = tuple[float, float]

NODE_PT = 19.0
_PAD_PT = 9.0
_OUTSIDE_PT = 24.0
"""Room around the ellipse for labels."""
_LABEL_PT = 1.25 * TEXT_PT
_APART_PT = 3.0
_BESIDE_PT = 3.5
_BEND = 0.22
_LONGEST_PT = 250.0
"""Between two ranks that stand side by side."""
_FLATTEST = 1.75
_ALONG = (50, 42, 58, 34, 66, 27, 73, 20, 80)
"""Percent of an arrow, the best place for its label first."""

WIDTH = 760.0
_BOXES = ((4, 168.0, 104.0), (8, 124.0, 84.0), (16, 76.0, 62.0), (math.inf, 24.0, 18.0))
"""For up to so many ranks: width and height of a box, in pixels."""
_HEAD = 24.0
"""Above a box, for its name."""


class Spot(NamedTuple):
    """The middle of a box, half of its width, and its height."""

    middle: Point
    half: float
    height: float = NODE_PT

    def box(self, room: float = 0.0) -> Box:
        """Return its edges, with `room` around it."""
        (x, y), half, height = self
        return x - half - room, x + half + room, y - height / 2 - room, y + height / 2 + room


def on_circle(count: int) -> list[Point]:
    """Return points on a circle of radius 1, clockwise from the top: to the right, and up."""
    turns = [2 * math.pi * number / count for number in range(count)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]


def height_pt(ranks: Sequence[int], pairs: Sequence[Pair]) -> float:
    """Return the height at which so many ranks can be read."""
    around = len(ranks) - (hub_of(ranks, pairs) is not None)
    return 56.0 if len(ranks) < 2 else 110.0 if around <= 2 else min(150.0 + 30.0 * around, 430.0)


def hub_of(ranks: Sequence[int], pairs: Collection[Pair]) -> int | None:
    """Return the rank that sends or receives in every pair, if there are two or more others."""
    found = [rank for rank in ranks if all(rank in pair for pair in pairs)]
    return found[0] if len(ranks) > 2 and len({*pairs}) > 1 and len(found) == 1 else None


def place_ranks(names: Mapping[int, str], pairs: Sequence[Pair], size: Point) -> dict[int, Spot]:
    """Place each rank in axes of this width and height."""
    halves = {rank: text_width(name, size=TEXT_PT) / 2 + _PAD_PT for rank, name in names.items()}
    hub = hub_of(list(names), pairs)
    around = [rank for rank in names if rank != hub]
    center = size[0] / 2, size[1] / 2
    places = {} if hub is None else {hub: Spot(center, halves[hub])}
    if len(around) == 1:
        return {around[0]: Spot(center, halves[around[0]])}
    wide = size[0] / 2 - max(halves.values()) - _PAD_PT
    if len(around) == 2:
        wide = min(wide, _LONGEST_PT if hub is not None else _LONGEST_PT / 2)
        for rank, side in zip(around, (-1, 1), strict=True):
            places[rank] = Spot((center[0] + side * wide, center[1]), halves[rank])
        return places
    high = size[1] / 2 - NODE_PT / 2 - _OUTSIDE_PT
    wide = min(wide - 2 * _OUTSIDE_PT, _FLATTEST * high)
    circle = on_circle(len(around))
    lowest = min((up for _, up in circle), default=0.0)  # Three ranks leave the lowest quarter of their circle empty.
    for rank, (across, up) in zip(around, circle, strict=True):
        higher = (2 * up - 1 - lowest) / (1 - lowest)
        places[rank] = Spot((center[0] + wide * across, center[1] + high * higher), halves[rank])
    return places


def have_no_room(places: Collection[Spot]) -> bool:
    """Return whether a box overlaps another."""
    return any(_overlap(one.box(), other.box()) for one, other in combinations(places, 2))


def bend_of(pair: Pair, pairs: Collection[Pair]) -> float:
    """Return the `rad` of matplotlib's `arc3`: to the right of its direction, where another comes back."""
    return _BEND if pair[::-1] in pairs else 0.0


def place_labels(labels: Mapping[Pair, str], places: Mapping[int, Spot], size: Point) -> dict[Pair, Point] | None:
    """Return the middle of each arrow's label, clear of all others; None if they have no room."""
    curves = {}
    for src, dst in labels:
        rad = bend_of((src, dst), labels)
        curves[src, dst] = curve(places[src].middle, places[dst].middle, rad=rad)
    taken = [place.box() for place in places.values()]
    found: dict[Pair, Point] = {}
    # Short arrows have the least choice.
    for pair in sorted(labels, key=lambda pair: math.dist(places[pair[0]].middle, places[pair[1]].middle)):
        half = text_width(labels[pair], size=TEXT_PT) / 2
        others = [points for other, points in curves.items() if other != pair]
        center = size[0] / 2, size[1] / 2
        for x, y in _beside(curves[pair], 2 * half, center=center, bent=pair[::-1] in labels):
            box = Spot((x, y), half + _APART_PT, _LABEL_PT).box()
            inside = min(box) >= 0 and box[1] <= size[0] and box[3] <= size[1]
            if inside and not any(_overlap(box, each) for each in taken) and not meets(box, others):
                found[pair] = x, y
                taken.append(box)
                break
        else:
            return None
    return found


def curve(start: Point, end: Point, *, rad: float) -> np.ndarray:
    """Return 101 points along matplotlib's `arc3`, a Bézier curve with one control point; y grows upwards."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    control = (start[0] + end[0]) / 2 + rad * dy, (start[1] + end[1]) / 2 - rad * dx
    t = np.linspace(0, 1, 101)[:, np.newaxis]
    points: np.ndarray = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return points


def meets(box: Box, curves: Sequence[np.ndarray]) -> bool:
    """Return whether one of these curves goes through the box."""
    points = np.reshape(curves, (-1, 2))
    return bool(((points > box[::2]) & (points < box[1::2])).all(axis=1).any())


def _beside(points: np.ndarray, width: float, *, center: Point, bent: bool) -> Iterator[Point]:
    """Yield places for a label, the best first: outside of a bend, outside of the circle, in the arrow's middle."""
    for at in _ALONG:
        across = points[at + 1] - points[at - 1]
        # To the right hand of who goes along it.
        normal = np.array([across[1], -across[0]]) / (np.hypot(*across) or 1.0)
        outwards = 1 if bent or normal @ (points[at] - center) >= 0 else -1
        away = outwards * (np.abs(normal) @ (width / 2, _LABEL_PT / 2) + _BESIDE_PT) * normal
        for x, y in (points[at] + away, points[at] - away):
            yield float(x), float(y)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


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
    for rank, (right, up) in zip(around, on_circle(len(around)), strict=True):
        middles[rank] = center[0] + across * right, center[1] - down * up
    return Spots(middles, wide, high, max(y for _, y in middles.values()) + high / 2 + _HEAD, in_row=False)
