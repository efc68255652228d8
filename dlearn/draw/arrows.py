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
_MOST_STEPS = 80
_NARROWEST_STEP_PT = 14


@dataclass(frozen=True)
class Arrows:
    """What can be drawn as arrows; `merged` where one stands for several steps, `not_drawn` counts messages."""

    flows: tuple[Flow, ...]
    merged: bool
    not_drawn: int


def readable(found: Sequence[Sequence[Message]], *, points_per_ns: float) -> Arrows:
    """An arrow for each step if there is room, else for each pair of ranks in an operation; none if that is too many.

    `found` holds the messages of each operation.
    """
    timed = [
        [message for message in messages if message.sent_ns is not None and message.received_ns is not None]
        for messages in found
    ]
    steps = [flow for messages in timed for flow in _steps_or_pairs(messages, points_per_ns)]
    flows = steps if len(steps) <= _MOST_STEPS else [flow for messages in timed for flow in by_pair(messages)]
    if len(flows) > MOST_ARROWS:
        return Arrows((), False, sum(len(messages) for messages in timed))
    return Arrows(tuple(flows), any(flow.count > 1 for flow in flows), 0)


def _steps_or_pairs(messages: Sequence[Message], points_per_ns: float) -> tuple[Flow, ...]:
    """Steps that could not be told apart are taken together, and those that would come after a rank was done."""
    steps = by_step(messages)
    ends = {end.rank: end.end_ns for message in messages[:1] for end in message.operation.ends}
    for flow in steps:
        sent, received = flow.sent_ns or 0, flow.received_ns or 0
        too_late = received - (ends.get(flow.dst) or received) > received - sent
        if too_late or (received - sent) * points_per_ns < _NARROWEST_STEP_PT:
            return by_pair(messages)
    return steps


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
    return "message, seen" if how == "observed" else f"message, {how}"
