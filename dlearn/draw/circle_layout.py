"""Where the ranks of a traffic graph stand, how its arrows bend, and where their labels find room. All in points.

The ranks stand on an ellipse, clockwise from the top in ring order; one that has a part in every arrow, as a server
has, stands in the middle. y grows upwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from dlearn.draw.canvas import TEXT_PT, text_width

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
_APART_PT = 4.0
_BESIDE_PT = 3.5
_BEND = 0.22
_LONGEST_PT = 250.0
"""Between two ranks that stand side by side."""
_FLATTEST = 1.75
_ALONG = (0.5, 0.42, 0.58, 0.34, 0.66, 0.27, 0.73, 0.2, 0.8)
_CROSSED_AT_MOST = 0.2
"""Share of the labels that may touch another arrow: where more do, nobody can say which number is whose."""


class Spot(NamedTuple):
    """Of a rank: the middle of its box, and half of the box's width."""

    middle: Point
    half: float

    @property
    def box(self) -> Box:
        (x, y), half = self
        return x - half, y - NODE_PT / 2, x + half, y + NODE_PT / 2


def height_pt(ranks: Sequence[int], pairs: Sequence[Pair]) -> float:
    """What so many ranks need to be read."""
    around = len(ranks) - (hub_of(ranks, pairs) is not None)
    return 56.0 if len(ranks) < 2 else 110.0 if around <= 2 else min(150.0 + 30.0 * around, 430.0)


def hub_of(ranks: Sequence[int], pairs: Sequence[Pair]) -> int | None:
    """The rank that sends or receives in every pair, if there are two or more others."""
    found = [rank for rank in ranks if all(rank in pair for pair in pairs)]
    return found[0] if len(ranks) > 2 and len({*pairs}) > 1 and len(found) == 1 else None


def place_ranks(names: Mapping[int, str], pairs: Sequence[Pair], size: Point) -> dict[int, Spot]:
    """The place of each rank in axes of this width and height."""
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


def bend_of(pair: Pair, pairs: Sequence[Pair]) -> float:
    """The `rad` of matplotlib's `arc3`: to the right hand of who goes along it, where another comes back."""
    return _BEND if pair[::-1] in pairs else 0.0


def place_labels(labels: Mapping[Pair, str], places: Mapping[int, Spot], size: Point) -> dict[Pair, Point] | None:
    """The middle of each arrow's label, beside it and clear of the others; None if they have no room."""
    pairs = list(labels)
    curves = {(a, b): _curve(places[a].middle, places[b].middle, bend_of((a, b), pairs)) for a, b in pairs}
    taken = [place.box for place in places.values()]
    found: dict[Pair, Point] = {}
    crossed = 0
    # Short arrows have the least choice.
    for pair in sorted(pairs, key=lambda pair: math.dist(places[pair[0]].middle, places[pair[1]].middle)):
        half = text_width(labels[pair], size=TEXT_PT) / 2 + 1
        others = [curve for other, curve in curves.items() if other != pair]
        best: tuple[int, Point, Box] | None = None
        for x, y in _beside(curves[pair], 2 * half, bend_of(pair, pairs), (size[0] / 2, size[1] / 2)):
            box = (x - half, y - _LABEL_PT / 2, x + half, y + _LABEL_PT / 2)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= size[0] and box[3] <= size[1]
            if not inside or any(_overlap(box, other) for other in taken):
                continue
            crossings = _crossings(box, others)
            if best is None or crossings < best[0]:
                best = crossings, (x, y), box
            if not crossings:
                break
        if best is None:
            return None
        crossed += best[0] > 0
        if crossed > _CROSSED_AT_MOST * len(pairs):
            return None
        found[pair] = best[1]
        left, bottom, right, top = best[2]
        taken.append((left - _APART_PT, bottom, right + _APART_PT, top))
    return found


def _curve(start: Point, end: Point, bend: float) -> np.ndarray:
    """Points along matplotlib's `arc3`, a Bézier curve with one control point."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    control = (start[0] + end[0]) / 2 + bend * dy, (start[1] + end[1]) / 2 - bend * dx
    t = np.linspace(0, 1, 101)[:, np.newaxis]
    curve: np.ndarray = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end
    return curve


def _beside(curve: np.ndarray, width: float, bend: float, center: Point) -> list[Point]:
    """Where a label may stand, the best first: outside of a bend, outside of the circle, in the middle of the arrow."""
    found = []
    for along, side in product(_ALONG, (1, -1)):
        i = round(along * 100)
        (x, y), (before_x, before_y), (after_x, after_y) = (
            curve[i].tolist(),
            curve[i - 1].tolist(),
            curve[i + 1].tolist(),
        )
        length = math.hypot(after_x - before_x, after_y - before_y) or 1.0
        # To the right hand of who goes along it.
        nx, ny = (after_y - before_y) / length, -(after_x - before_x) / length
        outwards = 1 if bend or nx * (x - center[0]) + ny * (y - center[1]) >= 0 else -1
        away = side * outwards * (abs(nx) * width / 2 + abs(ny) * _LABEL_PT / 2 + _BESIDE_PT)
        found.append((x + nx * away, y + ny * away))
    return found


def _crossings(box: Box, curves: Sequence[np.ndarray]) -> int:
    """How many of these curves come so near that the label could be theirs."""
    if not curves:
        return 0
    x, y = np.stack(curves, axis=-1).swapaxes(0, 1)
    left, bottom, right, top = box
    near_x = (left - _APART_PT < x) & (x < right + _APART_PT)
    near_y = (bottom - _APART_PT < y) & (y < top + _APART_PT)
    return int((near_x & near_y).any(axis=0).sum())


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
