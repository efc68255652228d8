"""The traffic graph: an arrow from each rank to each rank that it sends to, with the bytes written beside it.

Ranks are on an ellipse, clockwise from the top; one that takes part in every arrow is in the middle. What goes along a
tree is drawn as a tree. All lengths are points, and y grows upwards.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.bezier import BezierSegment
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionStyle, FancyArrowPatch, FancyBboxPatch, Patch

from dlearn import analysis
from dlearn.analysis.findings import hang_title, pair_sentences, traffic_finding
from dlearn.analysis.volume.traffic import Traffic
from dlearn.draw import canvas
from dlearn.draw.canvas import Box, Point, in_legend, points
from dlearn.draw.palette import INK, LANE, LINES, MISSING, TEXT_PT, Color, cut_names, line_color, look, text_width
from dlearn.draw.traffic_matrix import draw_matrix, traffic_notes
from dlearn.shown import count_text, size_text
from dlearn.trace import Trace

Pair = tuple[int, int]  # Sender and receiver.

MOST_RANKS, MOST_ARROWS = 24, 60  # More cannot be told apart in a circle: a matrix shows them.
_FEW_ARROWS = 16  # More of them are thinner, to be told apart.
_WIDEST_NAME_PT = 90.0
_THINNEST_PT, _THICKEST_PT, _EQUAL_PT = 0.6, 2.4, 1.2
_ALIKE = 1.05  # Bytes that differ by less look equal: a ring's pieces are rounded.
_NODE_PT, _PAD_PT = 19.0, 9.0
_OUTSIDE_PT = 24.0  # Room around the ellipse for labels.
_LABEL_PT = 1.25 * TEXT_PT
_APART_PT, _BESIDE_PT = 3.0, 3.5
_BEND = 0.22
_LAYER_PT = 66.0  # Between the layers of a tree.
_LONGEST_PT = 250.0  # Between two ranks that stand side by side.
_FLATTEST = 1.75
_ALONG = (50, 42, 58, 34, 66, 27, 73, 20, 80)  # Percent of an arrow: where its label may be.
Middles = dict[int, Point]  # Of the box of each lane.
STAGE_WIDTH, _HEAD = 760.0, 24.0  # Of the player's stage, and above a box for its name, in pixels.
_BOXES = ((4, 132.0, 92.0), (8, 108.0, 78.0), (16, 76.0, 62.0), (math.inf, 24.0, 18.0))
"""For up to so many ranks: width and height of a box, in pixels."""


class Spot(NamedTuple):
    """The middle of a box, half of its width, and its height."""

    middle: Point
    half: float
    height: float = _NODE_PT

    def box(self, room: float = 0.0) -> Box:
        """Return its edges, with `room` around it."""
        (x, y), half, height = self
        return x - half - room, x + half + room, y - height / 2 - room, y + height / 2 + room


@dataclass(frozen=True)
class Arrow:
    """What travels from one rank to another. `how` is how most of its bytes are known, `op` what sends most of them."""

    pair: Pair
    how: str
    op: str
    label: str
    width_pt: float

    @property
    def color(self) -> Color:
        return MISSING if self.how == "missing" else look(self.op).line


@canvas.for_cells
def traffic_graph(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw the ranks in a circle, clockwise from the top, and an arrow for each pair that sends, with its bytes.

    More than 24 ranks, or 60 arrows, or more than have room, are drawn as `traffic` draws them.
    """
    sent, hang = analysis.traffic(trace), hang_title(trace)
    arrows = arrows_of(sent)
    pairs = [arrow.pair for arrow in arrows]
    ranks = sorted({*sent.ranks, *chain.from_iterable(pairs)})
    height = height_pt(ranks, pairs)
    if not ranks:
        return canvas.draw_message_instead(ax, "This trace holds no process.")
    if len(ranks) > MOST_RANKS or len(arrows) > MOST_ARROWS:
        many = count_text(len(ranks), "rank") if len(ranks) > MOST_RANKS else count_text(len(arrows), "pair")
        return draw_matrix(trace, sent, ax, f"{many}: too many for arrows, so a matrix as of draw.traffic.")
    size = (canvas.points_wide(ax, left_in=0.15), height if ax is None else points(ax, 1.0, along="y"))
    names = dict(zip(ranks, cut_names([sent.labels[rank] for rank in ranks], _WIDEST_NAME_PT), strict=True))
    places = place_ranks(names, pairs, size)
    if any(_overlap(one.box(), other.box()) for one, other in combinations(places.values(), 2)):
        why = "No room for a circle of these ranks, so a matrix as of draw.traffic."
        return draw_matrix(trace, sent, ax, why)
    ax = ax or canvas.new_axes(height_in=height / 72, left_in=0.15)
    canvas.describe(ax, *pair_sentences(sent))
    # The axes' own unit is the point, so that curves, boxes and text have one measure.
    ax.set(xlim=(0, size[0]), ylim=(0, size[1]), xticks=[], yticks=[])
    ax.set_axis_off()
    boxes = draw_boxes(ax, places, names)
    for arrow in arrows:
        draw_flow(ax, arrow, places, boxes, bend_of(arrow.pair, pairs))
    labels = place_labels({arrow.pair: arrow.label for arrow in arrows}, places, size)
    if labels is None:
        write_sums(ax, sent, places)
    for pair, (x, y) in (labels or {}).items():
        arrow = arrows[pairs.index(pair)]
        ink = line_color(arrow.how)
        canvas.write(ax, x, y, arrow.label, on="white", pad=0.5, zorder=4, ha="center", color=ink)
    notes = [*([f"{traffic_finding(sent)}."] if hang else []), *_notes(sent, arrows, labelled=labels is not None)]
    title, key = hang or traffic_finding(sent), legend(arrows)
    red = {names[rank]: MISSING for rank in canvas.never_came(trace) if rank in names}
    marked = canvas.said(title, names.values()) | red
    return canvas.frame(ax, title=title, legend=key, notes=notes, below_in=0.08, marked=marked)


def arrows_of(sent: Traffic) -> list[Arrow]:
    """Return an arrow for each pair of ranks that sends; red where nothing came of what was expected."""
    pairs = [pair for pair in sorted({*sent.message_count, *sent.never_came}) if pair[0] != pair[1]]
    sizes = [sent.payload_bytes.get(pair, 0) for pair in pairs if pair in sent.message_count]
    most = max(sizes, default=0) or 1
    thickest = _THICKEST_PT if len(pairs) <= _FEW_ARROWS else _THICKEST_PT / 2
    arrows = []
    for pair in pairs:
        size = sent.payload_bytes.get(pair, 0)
        if pair not in sent.message_count:
            arrows.append(Arrow(pair, "missing", "", f"never came: {size_text(sent.never_came[pair])}", 1.0))
            continue
        label = size_text(size) if size else "no data"
        width = _THINNEST_PT + (thickest - _THINNEST_PT) * (size / most) ** 0.5
        equal = most < _ALIKE * min(sizes)
        arrows.append(Arrow(pair, sent.known[pair][0], sent.ops[pair], label, _EQUAL_PT if equal else width))
    return arrows


def draw_boxes(ax: Axes, places: Mapping[int, Spot], names: Mapping[int, str]) -> dict[int, Patch]:
    """Draw a box with its name for each rank, and return the boxes: arrows begin and end at their edges."""
    boxes: dict[int, Patch] = {}
    for rank, ((x, y), half, _) in places.items():
        style: dict[str, Any] = {"facecolor": LANE, "edgecolor": INK, "linewidth": 0.8, "zorder": 3}
        round_box, corner = "round,pad=0,rounding_size=6", (x - half, y - _NODE_PT / 2)
        boxes[rank] = FancyBboxPatch(corner, 2 * half, _NODE_PT, boxstyle=round_box, gid=f"rank {rank}", **style)
        ax.add_patch(boxes[rank])
        canvas.write(ax, x, y, names[rank], on=LANE, pad=0.5, zorder=4, ha="center")
    return boxes


def draw_flow(ax: Axes, arrow: Arrow, places: Mapping[int, Spot], boxes: Mapping[int, Patch], bend: float) -> None:
    """Draw an arrow from the edge of one box to that of the other; the head alone: it is never dashed."""
    src, dst = arrow.pair
    head_pt = 5.0 + 3.5 * arrow.width_pt
    line: dict[str, Any] = {"arrowstyle": "-", "linewidth": arrow.width_pt, "linestyle": LINES[arrow.how]}
    line |= {"shrinkB": 2 + 0.3 * head_pt, "gid": f"message {src} to {dst}"}
    head: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 0, "mutation_scale": head_pt, "shrinkB": 2, "gid": "head"}
    same: dict[str, Any] = {"patchA": boxes[src], "patchB": boxes[dst], "shrinkA": 2, "color": arrow.color, "zorder": 2}
    for part in (line, head):
        start, end, bent = places[src].middle, places[dst].middle, f"arc3,rad={bend}"
        ax.add_patch(FancyArrowPatch(start, end, connectionstyle=bent, **same, **part))


def write_sums(ax: Axes, sent: Traffic, places: Mapping[int, Spot]) -> None:
    """Write what each rank sends in all outside of it: the arrows are too many for their numbers."""
    middle = points(ax, 0.5, along="y")
    for rank, ((x, y), _, _) in places.items():
        away = _NODE_PT / 2 + 8
        at, text = y + (away if y > middle + 1 else -away), size_text(sent.bytes_from(rank=rank))
        canvas.write(ax, x, at, text, on="white", pad=0.5, zorder=4, ha="center")


def legend(arrows: Iterable[Arrow]) -> list[Artist]:
    """Say what each colour and line is: the op that sends most, and how that is known."""
    kinds = {(arrow.color, arrow.how): look(arrow.op).family for arrow in arrows}
    handles: list[Artist] = []
    for (color, how), family in kinds.items():
        line = Line2D([], [], color=color, linestyle=LINES[how], linewidth=_EQUAL_PT, label=f"{family}, {how}")
        handles.append(in_legend(how) if how == "missing" else line)
    return handles


def _notes(sent: Traffic, arrows: Sequence[Arrow], *, labelled: bool) -> list[str]:
    notes = []
    if not labelled:
        notes.append(f"{len(arrows):,} arrows are too many for a number each; draw.traffic has them all.")
        notes.append("Beside each rank stands what it sends in all.")
    if len({arrow.width_pt for arrow in arrows if arrow.how != "missing"}) > 1:
        notes.append("The width of an arrow grows with the square root of its bytes.")
    if any(len(sent.known.get(arrow.pair, ())) > 1 for arrow in arrows):
        notes.append("An arrow is drawn as most of its bytes are known.")
    own = [f"{sent.labels[src]} {size_text(size)}" for (src, dst), size in sent.payload_bytes.items() if src == dst]
    if own:
        notes.append(f"To themselves, and not drawn: {', '.join(own[:8])}{', ...' if own[8:] else ''}.")
    return notes + traffic_notes(sent)


def on_circle(count: int) -> list[Point]:
    """Return points on a circle of radius 1, clockwise from the top: to the right, and up."""
    turns = [2 * math.pi * number / count for number in range(count)]
    return [(math.sin(turn), math.cos(turn)) for turn in turns]


def height_pt(ranks: Sequence[int], pairs: Sequence[Pair]) -> float:
    around = len(ranks) - (hub_of(ranks, pairs) is not None)
    if layers := tree_layers(pairs):
        return 2 * _OUTSIDE_PT + _LAYER_PT * (len(layers) - 1)
    return 56.0 if len(ranks) < 2 else 110.0 if around <= 2 else min(150.0 + 30.0 * around, 430.0)


def tree_layers(pairs: Collection[Pair]) -> list[list[int]]:
    """Return the ranks of each layer, the root's first, if these pairs are the edges of a tree of some depth."""
    edges = nx.DiGraph(pairs)
    for down in (edges, edges.reverse()):
        if len(pairs) > 2 and nx.is_arborescence(down):
            (root,) = (rank for rank, above in down.in_degree if not above)
            layers = [*nx.bfs_layers(down, root)]
            return layers if len(layers) > 2 else []
    return []


def in_layers(layers: Sequence[Sequence[int]]) -> dict[int, Point]:
    """Return the place of each rank: across and up, from -1 to 1."""
    places: dict[int, Point] = {}
    for depth, layer in enumerate(layers):
        up = 1 - 2 * depth / (len(layers) - 1)
        places |= {rank: ((2 * at + 1) / len(layer) - 1, up) for at, rank in enumerate(layer)}
    return places


def hub_of(ranks: Sequence[int], pairs: Collection[Pair]) -> int | None:
    """Return the rank that sends or receives in every pair, if there are two or more others."""
    found = [rank for rank in ranks if all(rank in pair for pair in pairs)]
    return found[0] if len(ranks) > 2 and len({*pairs}) > 1 and len(found) == 1 else None


def place_ranks(names: Mapping[int, str], pairs: Sequence[Pair], size: Point) -> dict[int, Spot]:
    """Place each rank in axes of this width and height."""
    halves = {rank: text_width(name) / 2 + _PAD_PT for rank, name in names.items()}
    hub = hub_of(list(names), pairs)
    around = [rank for rank in names if rank != hub]
    center = size[0] / 2, size[1] / 2
    places = {} if hub is None else {hub: Spot(center, halves[hub])}
    wide, high = size[0] / 2 - max(halves.values()) - _PAD_PT, size[1] / 2 - _NODE_PT / 2 - _OUTSIDE_PT
    layers = tree_layers(pairs)
    if layers and len({*chain.from_iterable(layers)} & {*names}) == len(names):
        spots = in_layers(layers)
        around, offsets = [*spots], [*spots.values()]
        high = size[1] / 2 - _NODE_PT
        places.clear()
    elif len(around) == 1:
        offsets = [(0.0, 0.0)]
    elif len(around) == 2:
        wide = min(wide, _LONGEST_PT if hub is not None else _LONGEST_PT / 2)
        offsets = [(-1.0, 0.0), (1.0, 0.0)]
    else:
        wide = min(wide - 2 * _OUTSIDE_PT, _FLATTEST * high)
        circle = on_circle(len(around))
        lowest = min(up for _, up in circle)  # Three ranks leave the lowest quarter of their circle empty.
        offsets = [(across, (2 * up - 1 - lowest) / (1 - lowest)) for across, up in circle]
    for rank, (across, up) in zip(around, offsets, strict=True):
        places[rank] = Spot((center[0] + wide * across, center[1] + high * up), halves[rank])
    return places


def spots_of(lanes: Sequence[int], pairs: Collection[Pair]) -> tuple[Middles, float, float]:
    """Place the player's lanes by who sends to whom; return a box's width and height, too."""
    _, wide, high = next(box for box in _BOXES if len(lanes) <= box[0])
    hub = hub_of(lanes, pairs)
    around = [lane for lane in lanes if lane != hub]
    row = [around[0], hub, around[1]] if hub is not None and len(around) == 2 else [*lanes]
    places = {lane: place for place, lane in enumerate(row)}
    neighbours = bool(pairs) and all(abs(places[src] - places[dst]) == 1 for src, dst in pairs)
    if len(row) <= 2 or (neighbours and len(row) <= 8):
        gap = min(320.0, STAGE_WIDTH / max(1, len(row)))
        left, y = (STAGE_WIDTH - gap * len(row)) / 2, high / 2 + _HEAD
        middles = {lane: (left + gap * (place + 0.5), y) for lane, place in places.items()}
        return middles, max(24.0, min(wide, gap - 110)), high
    least = high + 60 if hub is None else 2 * high + 130
    around_pt = len(around) * (high + (8 if len(lanes) > 16 else 40))
    tall = max(0.32 * STAGE_WIDTH, around_pt / math.pi, least)
    across, down = min(STAGE_WIDTH / 2 - wide / 2 - 12, 1.5 * tall), tall / 2
    center = STAGE_WIDTH / 2, down + high / 2 + _HEAD
    middles = {} if hub is None else {hub: center}
    for lane, (right, up) in zip(around, on_circle(len(around)), strict=True):
        middles[lane] = center[0] + across * right, center[1] - down * up
    return middles, wide, high


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
        half = text_width(labels[pair]) / 2
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
    """Return 101 points along matplotlib's `arc3`; y grows upwards."""
    path = ConnectionStyle.Arc3(rad=rad).connect(start, end)
    points: np.ndarray = BezierSegment(path.vertices)(np.linspace(0, 1, 101))
    return points


def meets(box: Box, curves: Sequence[np.ndarray]) -> bool:
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
