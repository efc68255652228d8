"""Arrows from rank to rank while they can be read, and the bytes over time where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from dlearn.analysis.volume.flows import Flow, flows
from dlearn.draw.palette import LINES, line_color
from dlearn.trace.message import Message

Color = str | tuple[float, ...]

MOST_ARROWS = 250
_MOST_STEPS = 24
_NARROWEST_STEP_PT = 14
_HEADS_APART_PT = 5


@dataclass(frozen=True)
class Arrows:
    """What can be drawn as arrows; `merged` where one stands for several steps. `crowded` counts the messages that have
    no arrow because another between the same ranks is too near."""

    flows: tuple[Flow, ...]
    merged: bool
    crowded: int = 0


def readable(found: Sequence[Sequence[Message]], *, points_per_ns: float) -> Arrows | None:
    """An arrow for each step if all have room, else for each pair of ranks in an operation; None if that is too many.

    `found` holds the messages of each operation. One rule for the whole picture: an arrow means the same everywhere.
    """
    timed = [
        [message for message in messages if message.sent_ns is not None and message.received_ns is not None]
        for messages in found
    ]
    steps = [flow for messages in timed for flow in flows(messages, by_step=True)]
    pairs = [flow for messages in timed for flow in flows(messages, by_step=False)]
    shown = steps if _have_room(steps, points_per_ns) else pairs
    if len(shown) > MOST_ARROWS:
        return None
    observed = [flow for flow in shown if flow.how != "derived"]
    apart = [flow for flow in shown if flow.how == "derived"] + _apart(observed, _HEADS_APART_PT / points_per_ns)
    left_out = sum(flow.count for flow in shown) - sum(flow.count for flow in apart)
    return Arrows(tuple(apart), any(flow.count > 1 for flow in apart), left_out)


def _apart(shown: Sequence[Flow], nearest_ns: float) -> list[Flow]:
    """Those whose heads can be told from the one before, from the same rank to the same; the first is kept."""
    last: dict[tuple[int, int], int] = {}
    kept = []
    for flow in sorted(shown, key=lambda flow: flow.received_ns or 0):
        before, at = last.get((flow.src, flow.dst)), flow.received_ns or 0
        if before is None or at - before >= nearest_ns:
            last[flow.src, flow.dst] = at
            kept.append(flow)
    return kept


def _have_room(steps: Sequence[Flow], points_per_ns: float) -> bool:
    """Whether steps can be told apart: few enough, none too narrow, and none that is over before it has begun."""
    spans = [(flow.received_ns or 0) - (flow.sent_ns or 0) for flow in steps]
    derived = any(flow.how == "derived" for flow in steps)
    return not derived or (len(steps) <= _MOST_STEPS and min(spans) * points_per_ns >= _NARROWEST_STEP_PT)


def draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, how: str, gid: str = "",
    color: Color | None = None, width: float = 1.0,
) -> None:  # fmt: skip
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, linewidth=width, linestyle=LINES[how],
            color=color or line_color(how), shrinkA=0, shrinkB=0, zorder=4, connectionstyle="arc3",
            joinstyle="miter", gid=gid,
        )
    )  # fmt: skip


def draw_steps(
    ax: Axes, lower: np.ndarray, upper: np.ndarray, *, right: float, box: tuple[float, float], color: Color, gid: str
) -> None:
    """Steps over time as an area from `lower` to `upper`, both from 0, the bottom of the box, to 1, its top."""
    top, bottom = box
    at = np.linspace(0, right, len(upper) + 1).repeat(2)[1:-1]
    above, below = (np.column_stack([at, bottom - edge.repeat(2) * (bottom - top)]) for edge in (upper, lower))
    outline = np.concatenate([above, below[::-1]])
    ax.add_collection(PolyCollection([outline], facecolor=color, edgecolor="none", zorder=2, gid=gid), autolim=False)


def in_legend(how: str) -> Line2D:
    """What the legend says of an arrow."""
    return Line2D([], [], color=line_color(how), linestyle=LINES[how], linewidth=1, label=f"message, {how}")
