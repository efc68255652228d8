"""Where the ranks of a traffic graph stand, how its arrows bend, and where their labels find room. All in points.

Ranks are on an ellipse, clockwise from the top; one that takes part in every arrow is in the middle. y grows upwards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from dlearn.draw.text import TEXT_PT, text_width

Pair = tuple[int, int]
"""Sender and receiver."""
Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

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


class Spot(NamedTuple):
    """Of a rank: the middle of its box, and half of the box's width."""

    middle: Point
    half: float

    @property
    def box(self) -> Box:
        (x, y), half = self
        return x - half, y - NODE_PT / 2, x + half, y + NODE_PT / 2


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
        return places | {
            rank: Spot((center[0] + side * wide, center[1]), halves[rank])
            for rank, side in zip(around, (-1, 1), strict=True)
        }
    high = size[1] / 2 - NODE_PT / 2 - _OUTSIDE_PT
    wide = min(wide - 2 * _OUTSIDE_PT, _FLATTEST * high)
    angles = [math.pi / 2 - 2 * math.pi * i / len(around) for i in range(len(around))]
    lowest = min(map(math.sin, angles))  # three ranks would leave the lowest quarter of their circle empty
    for rank, angle in zip(around, angles, strict=True):
        up = (2 * math.sin(angle) - 1 - lowest) / (1 - lowest)
        places[rank] = Spot((center[0] + wide * math.cos(angle), center[1] + high * up), halves[rank])
    return places


def have_no_room(places: Collection[Spot]) -> bool:
    """Return whether a box overlaps another."""
    return any(_overlap(one.box, other.box) for one, other in combinations(places, 2))


def bend_of(pair: Pair, pairs: Collection[Pair]) -> float:
    """Return the `rad` of matplotlib's `arc3`: to the right of its direction, where another comes back."""
    return _BEND if pair[::-1] in pairs else 0.0


def place_labels(labels: Mapping[Pair, str], places: Mapping[int, Spot], size: Point) -> dict[Pair, Point] | None:
    """Return the middle of each arrow's label, clear of all others; None if they have no room."""
    curves = {
        (src, dst): curve(places[src].middle, places[dst].middle, rad=bend_of((src, dst), labels))
        for src, dst in labels
    }
    taken = [place.box for place in places.values()]
    found: dict[Pair, Point] = {}
    # Short arrows have the least choice.
    for pair in sorted(labels, key=lambda pair: math.dist(places[pair[0]].middle, places[pair[1]].middle)):
        half = text_width(labels[pair], size=TEXT_PT) / 2
        others = [points for other, points in curves.items() if other != pair]
        for x, y in _beside(curves[pair], 2 * half, center=(size[0] / 2, size[1] / 2), bent=pair[::-1] in labels):
            box = (x - half - _APART_PT, y - _LABEL_PT / 2, x + half + _APART_PT, y + _LABEL_PT / 2)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= size[0] and box[3] <= size[1]
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
    return bool(((points > box[:2]) & (points < box[2:])).all(axis=1).any())


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
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
