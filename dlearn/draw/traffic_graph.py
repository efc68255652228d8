"""The traffic graph: an arrow from each rank to each rank that it sends to, with the bytes written beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from dlearn import analysis
from dlearn.analysis.findings import hang_finding, pair_sentences, traffic_finding
from dlearn.analysis.volume.traffic import Traffic
from dlearn.draw import canvas
from dlearn.draw.arrows import in_legend
from dlearn.draw.canvas import points
from dlearn.draw.layout import circle_layout as circle
from dlearn.draw.layout.circle_layout import NODE_PT, Pair, Spot
from dlearn.draw.palette import INK, LANE, LINES, MISSING, Color, line_color, look
from dlearn.draw.text import cut_names
from dlearn.draw.traffic_matrix import draw_matrix
from dlearn.draw.traffic_matrix import notes as traffic_notes
from dlearn.shown import count_text, size_text
from dlearn.trace import Trace

MOST_RANKS, MOST_ARROWS = 24, 60
"""More of them cannot be told apart in a circle: a matrix shows them."""
_FEW_ARROWS = 16
"""More of them are thinner, to be told apart."""
_WIDEST_NAME_PT = 90.0
_THINNEST_PT, _THICKEST_PT, _EQUAL_PT = 0.6, 2.4, 1.2
_ALIKE = 1.05
"""Bytes that differ by less look equal: a ring's pieces are rounded."""


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


def traffic_graph(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw the ranks in a circle, clockwise from the top, and an arrow for each pair that sends, with its bytes.

    More than 24 ranks, or 60 arrows, or more than have room, are drawn as `traffic` draws them.
    """
    sent, hang = analysis.traffic(trace), hang_finding(trace)
    arrows = arrows_of(sent)
    pairs = [arrow.pair for arrow in arrows]
    ranks = sorted({*sent.ranks, *chain.from_iterable(pairs)})
    height = circle.height_pt(ranks, pairs)
    if not ranks:
        ax = ax or canvas.new_axes(height_in=height / 72, left_in=0.15)
        return canvas.draw_message_instead(ax, "This trace holds no process.")
    if len(ranks) > MOST_RANKS or len(arrows) > MOST_ARROWS:
        many = count_text(len(ranks), "rank") if len(ranks) > MOST_RANKS else count_text(len(arrows), "pair")
        return draw_matrix(trace, sent, ax, f"{many}: too many for arrows, so a matrix as of draw.traffic.")
    size = (canvas.points_wide(ax, left_in=0.15), height if ax is None else points(ax, 1.0, along="y"))
    names = dict(zip(ranks, cut_names([sent.labels[rank] for rank in ranks], _WIDEST_NAME_PT), strict=True))
    places = circle.place_ranks(names, pairs, size)
    if circle.have_no_room(places.values()):
        why = "No room for a circle of these ranks, so a matrix as of draw.traffic."
        return draw_matrix(trace, sent, ax, why)
    ax = ax or canvas.new_axes(height_in=height / 72, left_in=0.15)
    canvas.describe(ax, *pair_sentences(sent))
    # The axes' own unit is the point, so that curves, boxes and text have one measure.
    ax.set(xlim=(0, size[0]), ylim=(0, size[1]), xticks=[], yticks=[])
    ax.set_axis_off()
    boxes = draw_boxes(ax, places, names)
    for arrow in arrows:
        draw_flow(ax, arrow, places, boxes, circle.bend_of(arrow.pair, pairs))
    labels = circle.place_labels({arrow.pair: arrow.label for arrow in arrows}, places, size)
    if labels is None:
        write_sums(ax, sent, places)
    for pair, (x, y) in (labels or {}).items():
        arrow = arrows[pairs.index(pair)]
        ink = line_color(arrow.how)
        canvas.write(ax, x, y, arrow.label, on="white", pad=0.5, zorder=4, ha="center", color=ink)
    told = [*([f"{traffic_finding(sent)}."] if hang else []), *notes(sent, arrows, labelled=labels is not None)]
    marked = {names[rank]: MISSING for rank in canvas.never_came(trace) if rank in names}
    title, key = hang or traffic_finding(sent), legend(arrows)
    return canvas.frame(ax, title=title, legend=key, notes=told, below_in=0.08, marked=marked)


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
        round_box, corner = "round,pad=0,rounding_size=6", (x - half, y - NODE_PT / 2)
        boxes[rank] = FancyBboxPatch(corner, 2 * half, NODE_PT, boxstyle=round_box, gid=f"rank {rank}", **style)
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
        away = NODE_PT / 2 + 8
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


def notes(sent: Traffic, arrows: Sequence[Arrow], *, labelled: bool) -> list[str]:
    told = []
    if not labelled:
        told.append(f"{len(arrows):,} arrows are too many for a number each; draw.traffic has them all.")
        told.append("Beside each rank stands what it sends in all.")
    if len({arrow.width_pt for arrow in arrows if arrow.how != "missing"}) > 1:
        told.append("The width of an arrow grows with the square root of its bytes.")
    if any(len(sent.known.get(arrow.pair, ())) > 1 for arrow in arrows):
        told.append("An arrow is drawn as most of its bytes are known.")
    own = [f"{sent.labels[src]} {size_text(size)}" for (src, dst), size in sent.payload_bytes.items() if src == dst]
    if own:
        told.append(f"To themselves, and not drawn: {', '.join(own[:8])}{', ...' if own[8:] else ''}.")
    return told + traffic_notes(sent)
