"""The traffic graph: an arrow from each rank to each rank that it sends to, with the bytes written beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from dlearn import analysis
from dlearn.analysis.findings import pair_sentences, size_text, traffic_finding
from dlearn.analysis.volume.traffic import Traffic
from dlearn.draw import canvas
from dlearn.draw.arrows import in_legend
from dlearn.draw.canvas import TEXT_PT, cut, plain, points
from dlearn.draw.circle_layout import NODE_PT, Pair, Point, Spot, bend_of, height_pt, place_labels, place_ranks
from dlearn.draw.palette import INK, LANE, LINES, line_color
from dlearn.draw.traffic_matrix import notes as traffic_notes
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

MOST_RANKS = 24
MOST_ARROWS = 60
_FEW_ARROWS = 16
"""More of them are thinner, to be told apart."""
_WIDEST_NAME_PT = 90.0
_THINNEST_PT, _THICKEST_PT = 0.8, 3.0


@dataclass(frozen=True)
class Arrow:
    """What travels from one rank to another. `how` is how most of its bytes are known."""

    pair: Pair
    how: str
    label: str
    width_pt: float


def traffic_graph(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw the ranks in a circle, clockwise from the top, and an arrow for each pair that sends, with its bytes."""
    sent = analysis.traffic(trace)
    ranks = ranks_shown(sent)
    names = {rank: cut(plain(sent.labels[rank]), _WIDEST_NAME_PT, size=TEXT_PT) for rank in ranks}
    arrows = arrows_of(sent, ranks)
    pairs = [arrow.pair for arrow in arrows]
    fit = ax is None
    ax = ax or canvas.new_axes(height_in=height_pt(ranks, pairs) / 72, left_in=0.15)
    if not ranks:
        return canvas.say_empty(ax, "This trace holds no process.", fit=fit)
    canvas.describe(ax, *pair_sentences(sent))
    size = (points(ax, 1.0, along="x"), points(ax, 1.0, along="y"))
    places = place_ranks(names, pairs, size)
    labels = place_labels({each.pair: each.label for each in arrows}, places, size) if few(arrows) else None
    set_scale(ax, size)
    boxes = draw_ranks(ax, places, names)
    for arrow in arrows if few(arrows) else []:
        draw_arrow(ax, arrow, places, boxes, bend_of(arrow.pair, pairs))
    if labels is None:
        write_sums(ax, sent, places)
    else:
        write_labels(ax, arrows, labels)
    told = notes(sent, arrows, ranks, labelled=labels is not None)
    canvas.frame(ax, title=traffic_finding(sent), legend=legend(arrows), notes=told, below_in=0.08, fit=fit)
    return ax


def ranks_shown(sent: Traffic) -> tuple[int, ...]:
    """In ring order; of too many those that send and receive most."""
    ranks = sorted(sent.labels)
    if len(ranks) <= MOST_RANKS:
        return tuple(ranks)
    busiest = sorted(ranks, key=lambda rank: -sent.bytes_from(rank=rank) - sent.bytes_to(rank=rank))
    return tuple(sorted(busiest[:MOST_RANKS]))


def arrows_of(sent: Traffic, ranks: Sequence[int]) -> list[Arrow]:
    """One for each pair of different ranks that sends; red where nothing came of what was expected."""
    most = max(sent.payload_bytes.values(), default=0) or 1
    pairs = [
        (src, dst)
        for src, dst in sorted({*sent.message_count, *sent.never_came})
        if src != dst and src in ranks and dst in ranks
    ]
    thickest = _THICKEST_PT if len(pairs) <= _FEW_ARROWS else _THICKEST_PT / 2
    arrows = []
    for pair in pairs:
        size = sent.payload_bytes.get(pair, 0)
        if pair not in sent.message_count:
            arrows.append(Arrow(pair, "missing", f"never came: {size_text(sent.never_came[pair])}", 1.0))
            continue
        label = size_text(size) if size else f"{count_text(sent.message_count[pair], 'message')} without data"
        width = _THINNEST_PT + (thickest - _THINNEST_PT) * (size / most) ** 0.5
        arrows.append(Arrow(pair, sent.known[pair][0], label, width))
    return arrows


def few(arrows: Sequence[Arrow]) -> bool:
    """Whether they can be told apart at all."""
    return len(arrows) <= MOST_ARROWS


def set_scale(ax: Axes, size: tuple[float, float]) -> None:
    """The axes' own unit is the point, so that curves, boxes and text have one measure."""
    ax.set_xlim(0, size[0])
    ax.set_ylim(0, size[1])
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_axis_off()


def draw_ranks(ax: Axes, places: Mapping[int, Spot], names: Mapping[int, str]) -> dict[int, FancyBboxPatch]:
    """Returns their boxes, where the arrows begin and end."""
    boxes = {}
    for rank, ((x, y), half) in places.items():
        boxes[rank] = FancyBboxPatch(
            (x - half, y - NODE_PT / 2), 2 * half, NODE_PT, boxstyle="round,pad=0,rounding_size=6", facecolor=LANE,
            edgecolor=INK, linewidth=0.8, zorder=3, gid=f"rank {rank}",
        )  # fmt: skip
        ax.add_patch(boxes[rank])
        _write(ax, (x, y), names[rank], behind=LANE)
    return boxes


def draw_arrow(ax: Axes, arrow: Arrow, places: Mapping[int, Spot], boxes: Mapping[int, Patch], bend: float) -> None:
    """From the edge of one box to that of the other. The head is drawn alone: it is never dashed."""
    src, dst = arrow.pair
    head_pt = 6.0 + 3.5 * arrow.width_pt
    line: dict[str, Any] = {
        "arrowstyle": "-", "linewidth": arrow.width_pt, "linestyle": LINES[arrow.how], "shrinkB": 2 + 0.3 * head_pt,
        "gid": f"message {src} to {dst}",
    }  # fmt: skip
    head: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 0, "mutation_scale": head_pt, "shrinkB": 2, "gid": "head"}
    for part in (line, head):
        ax.add_patch(
            FancyArrowPatch(
                places[src].middle, places[dst].middle, patchA=boxes[src], patchB=boxes[dst], shrinkA=2,
                color=line_color(arrow.how), zorder=2, connectionstyle=f"arc3,rad={bend}", **part,
            )
        )  # fmt: skip


def write_labels(ax: Axes, arrows: Sequence[Arrow], labels: Mapping[Pair, Point]) -> None:
    for arrow in arrows:
        _write(ax, labels[arrow.pair], arrow.label, line_color(arrow.how))


def write_sums(ax: Axes, sent: Traffic, places: Mapping[int, Spot]) -> None:
    """Where the arrows are too many for their numbers: outside of each rank what it sends in all."""
    for rank, place in places.items():
        x, y = place.middle
        away = NODE_PT / 2 + 8
        _write(
            ax, (x, y + (away if y > points(ax, 0.5, along="y") + 1 else -away)), size_text(sent.bytes_from(rank=rank))
        )


def _write(ax: Axes, at: Point, text: str, ink: str = INK, *, behind: str = "white") -> None:
    box = {"facecolor": behind, "edgecolor": "none", "pad": 0.5}
    canvas.write(ax, *at, text, ha="center", color=ink, zorder=4, bbox=box)


def legend(arrows: Sequence[Arrow]) -> list[Artist]:
    hows = dict.fromkeys(arrow.how for arrow in arrows) if few(arrows) else {}
    return [in_legend(how) for how in hows]


def notes(sent: Traffic, arrows: Sequence[Arrow], ranks: Sequence[int], *, labelled: bool) -> list[str]:
    told = []
    if not labelled:
        what = "arrows are too many for a number each" if few(arrows) else "arrows are too many to be seen"
        told.append(f"{len(arrows):,} {what}: beside each rank stands what it sends in all; draw.traffic has them all.")
    if few(arrows) and len({arrow.width_pt for arrow in arrows if arrow.how != "missing"}) > 1:
        told.append("The width of an arrow grows with the square root of its bytes.")
    if any(len(sent.known.get(arrow.pair, ())) > 1 for arrow in arrows):
        told.append("An arrow is drawn as most of its bytes are known.")
    left_out = len(sent.labels) - len(ranks)
    if left_out:
        inside = sum(size for pair, size in sent.payload_bytes.items() if {*pair} <= {*ranks})
        told.append(
            f"Drawn are the {len(ranks)} of {len(sent.labels):,} ranks that send and receive most, and what goes"
            f" between them: {size_text(inside)} of {size_text(sent.total_bytes)}."
        )
    own = [f"{sent.labels[src]} {size_text(size)}" for (src, dst), size in sent.payload_bytes.items() if src == dst]
    if own:
        told.append(f"To themselves, and not drawn: {', '.join(own[:8])}{', ...' if own[8:] else ''}.")
    return told + traffic_notes(sent)
