"""What ranks hold while they train: an area for each part of it over time, beside what the textbook says."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn.analysis.volume.rank_memory import PARTS, RankMemory, rank_memory, textbook, total_bytes
from dlearn.draw import canvas
from dlearn.draw.canvas import points, write
from dlearn.draw.palette import FAINT, INK, TEXT_PT, cut, look, plain, text_width
from dlearn.events.memory_held import MemoryHeld
from dlearn.shown import count_text, first_few, size_text
from dlearn.trace import Trace

_LANE_IN, _GAP_IN = 1.1, 0.3
_NAME_IN = 0.1  # From a lane to its name, which stands above: beside it there would be less room.
_MOST_LANES = 6
_BAR = 0.05  # Width of the bar of the textbook, as a share of the time shown.
_OPS = {
    "parameters": "all_reduce", "buckets": "all_to_all", "state": "reduce_scatter",
    "gradients": "broadcast", "gathered": "all_gather", "activations": "send",
}  # fmt: skip
_COLORS = {part: look(op).color for part, op in _OPS.items()}


@canvas.for_cells
def memory(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw what each rank holds over time, in ms: parameters, gradients, buckets, optimizer state, activations.

    A lane for each rank, all on one scale; ranks that hold the same share one. The bar at its right is the textbook's.
    Recorded with `sources=["memory"]`.
    """
    found = rank_memory(trace)
    alike = _alike(found)
    lanes = dict(list(alike.items())[:_MOST_LANES])
    labels = [_label(found, ranks) for ranks in lanes.values()]
    height = max(1, len(lanes)) * (_LANE_IN + _GAP_IN)
    ax = ax or canvas.new_axes(height_in=height, left_in=0.3, right_in=0.3)
    if not lanes:
        return canvas.draw_message_instead(ax, f"{found.finding}.")
    canvas.describe(ax, "A lane for each rank: areas on each other, as high as the bytes that it holds of each part.")
    shown = [each for ranks in lanes.values() for each in found.held[ranks[0]]]
    first_ns = min(each.start_ns for each in shown)
    last = max(1e-6, (max(each.start_ns for each in shown) - first_ns) / 1e6) * 1.04
    most = max(max(total_bytes(each), sum(textbook(each).values())) for each in shown)
    tops = [_GAP_IN + place * (_LANE_IN + _GAP_IN) for place in range(len(lanes))]
    ax.set(xlim=(0, last * (1 + 3 * _BAR)), ylim=(height, 0))
    room = points(ax, 1 / (1 + 3 * _BAR), along="x") - text_width("textbook")
    names = [cut(label, room) for label in labels]
    ax.set_yticks([top - _NAME_IN for top in tops], names, parse_math=False, fontsize=TEXT_PT, color=INK, ha="left")
    canvas.draw_lanes(ax, [(top, top + _LANE_IN) for top in tops])
    for top, ranks in zip(tops, lanes.values(), strict=True):
        held = found.held[ranks[0]]
        bottom, scale = top + _LANE_IN, _LANE_IN / most
        draw_held(ax, held, first_ns, last, bottom, scale)
        draw_textbook(ax, textbook(found.peak(ranks[0])), last, bottom, scale)
        write(ax, last * (1 + _BAR), top - _NAME_IN, "textbook", ha="center")
        draw_models(ax, held[-1].model, last, bottom, scale, most)
    ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= last])
    canvas.quiet(ax, "ms from the first change shown")
    ax.tick_params(axis="y", pad=0)
    legend = [Patch(facecolor=_COLORS[part], label=name) for part, name in PARTS.items() if _any_of(shown, part)]
    return canvas.frame(ax, title=found.finding, legend=legend, notes=_notes(shown, len(alike) - len(lanes)))


def _alike(found: RankMemory) -> dict[tuple[int, ...], list[int]]:
    """Group ranks by the most that they hold of each part, those that hold most first."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in found.held:
        groups[tuple(found.most(rank, part) for part in PARTS)].append(rank)
    return dict(sorted(groups.items(), key=lambda each: -sum(each[0])))


def _label(found: RankMemory, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return plain(found.labels[ranks[0]])
    return plain(f"ranks {first_few([found.labels.short(rank) for rank in ranks], 4)}")


def _any_of(shown: Sequence[MemoryHeld], part: str) -> bool:
    return any(getattr(each, part) for each in shown)


def draw_held(ax: Axes, held: Sequence[MemoryHeld], first_ns: int, last: float, bottom: float, scale: float) -> None:
    """Draw areas: what is held at a moment is held until the next."""
    at = [(each.start_ns - first_ns) / 1e6 for each in held] + [last]
    lower = np.zeros(len(at))
    for part, color in _COLORS.items():
        sizes = [getattr(each, part) for each in held]
        upper = lower + np.array([*sizes, sizes[-1]])
        edges = bottom - lower * scale, bottom - upper * scale
        if any(sizes):
            ax.fill_between(at, *edges, step="post", facecolor=color, linewidth=0, zorder=2, gid=part)
        lower = upper


def draw_textbook(ax: Axes, expected: Mapping[str, float], last: float, bottom: float, scale: float) -> None:
    """Draw what stays for as long as the job trains, in the same colours."""
    below = 0.0
    for part in PARTS:
        size = expected.get(part, 0.0)
        style: dict[str, Any] = {"facecolor": _COLORS[part], "edgecolor": INK, "linestyle": "dotted", "linewidth": 0.8}
        start = bottom - below * scale
        ax.bar(last * (1 + _BAR), -size * scale, last * _BAR, start, gid=f"textbook {part}", **style)
        below += size


def draw_models(ax: Axes, model: int, last: float, bottom: float, scale: float, most: float) -> None:
    """Draw lines at multiples of the model's size: the unit in which the textbook counts."""
    step = max(1, round(most / max(1, model) / 4))
    for times in range(step, int(most // max(1, model)) + 1, step):
        y = bottom - times * model * scale
        ax.plot([0, last], [y, y], color=FAINT, linewidth=0.6, linestyle="dotted", zorder=3)
        write(ax, last * (1 + 2 * _BAR), y, f"{times} P", ha="left", color=FAINT)


def _notes(shown: Sequence[MemoryHeld], left_out: int) -> list[str]:
    sizes = sorted({each.model for each in shown})
    notes = [f"P is a model's parameters: {first_few([size_text(size) for size in sizes], 3)}."]
    if _any_of(shown, "buckets"):
        notes.append("DDP's buckets are derived, a place for each gradient; all else is counted.")
    if _any_of(shown, "activations"):
        notes.append("Activations are what autograd keeps for the backward pass; the textbook says nothing of them.")
    if left_out:
        notes.append(f"{count_text(left_out, 'more lane')} not drawn, of ranks that hold less.")
    return notes
