"""Arrows from rank to rank while they can be read, and the bytes over time where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import FancyArrowPatch

from dlearn.analysis.flows import Flow, by_pair, by_step
from dlearn.draw.palette import LINES, line_color
from dlearn.trace.message import Message

MOST_ARROWS = 250
_MOST_STEPS = 24
_NARROWEST_STEP_PT = 14


@dataclass(frozen=True)
class Arrows:
    """What can be drawn as arrows; `merged` where one stands for several steps, `not_drawn` counts messages."""

    flows: tuple[Flow, ...]
    merged: bool
    not_drawn: int


def readable(found: Sequence[Sequence[Message]], *, points_per_ns: float) -> Arrows:
    """An arrow for each step if all have room, else for each pair of ranks in an operation; none if that is too many.

    `found` holds the messages of each operation. One rule for the whole picture: an arrow means the same everywhere.
    """
    timed = [
        [message for message in messages if message.sent_ns is not None and message.received_ns is not None]
        for messages in found
    ]
    steps = [flow for messages in timed for flow in by_step(messages)]
    flows = steps if _have_room(steps, points_per_ns) else [flow for messages in timed for flow in by_pair(messages)]
    if len(flows) > MOST_ARROWS:
        return Arrows((), False, sum(len(messages) for messages in timed))
    return Arrows(tuple(flows), any(flow.count > 1 for flow in flows), 0)


def _have_room(steps: Sequence[Flow], points_per_ns: float) -> bool:
    """Whether steps can be told apart: few enough, none too narrow, and none that is over before it has begun."""
    spans = [(flow.received_ns or 0) - (flow.sent_ns or 0) for flow in steps]
    derived = any(flow.how == "derived" for flow in steps)
    return not derived or (len(steps) <= _MOST_STEPS and min(spans) * points_per_ns >= _NARROWEST_STEP_PT)


def draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], *, how: str, gid: str = "") -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, linewidth=1.0, linestyle=LINES[how],
            color=line_color(how), shrinkA=0, shrinkB=0, zorder=4, connectionstyle="arc3",
            joinstyle="miter", gid=gid,
        )
    )  # fmt: skip


def draw_density(ax: Axes, heights: Sequence[float], *, left: float, right: float, top: float, bottom: float) -> None:
    """The bytes that a rank sends over time as a grey area; `heights` from 0 to 1."""
    width = (right - left) / len(heights)
    outline: list[tuple[float, float]] = [(left, bottom)]
    for i, height in enumerate(heights):
        y = bottom - height * (bottom - top)
        outline += [(left + i * width, y), (left + (i + 1) * width, y)]
    outline.append((right, bottom))
    ax.add_collection(
        PolyCollection([outline], facecolor="#777777", edgecolor="#444444", linewidth=0.4, zorder=2, gid="density")
    )


def arrow_text(how: str) -> str:
    """What the legend says of an arrow."""
    return f"message, {how}"
