"""Arrows from rank to rank, where they can be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from dlearn.analysis.volume.flows import Flow, flows
from dlearn.draw.palette import LINES, Color, line_color
from dlearn.join.tables.message_table import Message

MOST_ARROWS = 250
_MOST_STEPS = 24
_NARROWEST_STEP_PT = 14
_APART_PT = 9


@dataclass(frozen=True)
class Arrows:
    """What can be drawn; `merged`: one stands for several steps. `crowded`: messages without room."""

    flows: tuple[Flow, ...]
    merged: bool
    crowded: int = 0


def readable(found: Sequence[Sequence[Message]], ranks: Sequence[int], *, points_per_ns: float) -> Arrows | None:
    """An arrow for each step if all have room, else for each pair of ranks in an operation; None if that is too many.

    `found` holds the messages of each operation, between these `ranks`, from the top. One rule for the whole picture:
    an arrow means the same everywhere.
    """
    timed = [
        [message for message in messages if message.sent_ns is not None and message.received_ns is not None]
        for messages in found
    ]
    steps = [flow for messages in timed for flow in flows(messages, by_step=True)]
    pairs = [flow for messages in timed for flow in flows(messages, by_step=False)]
    nearest_ns = _APART_PT / points_per_ns
    shown = steps if _have_room(steps, points_per_ns) and _told_apart(steps, nearest_ns) else pairs
    if len(shown) > MOST_ARROWS:
        return None
    observed = [flow for flow in shown if flow.how != "derived"]
    apart = [flow for flow in shown if flow.how == "derived"] + _apart(observed, ranks, nearest_ns)
    left_out = sum(flow.count for flow in shown) - sum(flow.count for flow in apart)
    return Arrows(tuple(apart), any(flow.count > 1 for flow in apart), left_out)


def _apart(shown: Sequence[Flow], ranks: Sequence[int], nearest_ns: float) -> list[Flow]:
    """Those that are nowhere too near to another where they leave, pass or reach a lane.

    All arrows of an operation are kept, or none: a request without its reply, or a ring that is broken somewhere, would
    mislead. Of two operations that touch, the one that lasts longer; a call that is over at once has no room.
    """
    taken: dict[Hashable, list[float]] = defaultdict(list)
    kept: list[Flow] = []
    for each in sorted(_by_operation(shown), key=_lasted_ns, reverse=True):
        edges = [edge for flow in each for edge in (_heads(flow) if _is_collective(each) else _edges(flow, ranks))]
        long = each[0].operation.exchange is None or _lasted_ns(each) >= nearest_ns
        if (
            long
            and _are_apart(edges, nearest_ns)
            and all(abs(at - other) >= nearest_ns for edge, at in edges for other in taken[edge])
        ):
            kept += each
            for edge, at in edges:
                taken[edge].append(at)
    return kept


def _told_apart(steps: Sequence[Flow], nearest_ns: float) -> bool:
    """Whether the observed steps of each collective are."""
    collectives = filter(_is_collective, _by_operation([flow for flow in steps if flow.how != "derived"]))
    return all(_are_apart([head for flow in each for head in _heads(flow)], nearest_ns) for each in collectives)


def _by_operation(shown: Sequence[Flow]) -> list[list[Flow]]:
    together: dict[int, list[Flow]] = defaultdict(list)
    for flow in shown:
        together[id(flow.operation)].append(flow)
    return list(together.values())


def _is_collective(together: Sequence[Flow]) -> bool:
    """Its arrows cross each other by nature: only those from the same rank to the same must be apart."""
    return len({(flow.src, flow.dst) for flow in together}) > 2


def _are_apart(edges: Sequence[tuple[Hashable, float]], nearest_ns: float) -> bool:
    at = defaultdict(list)
    for edge, when in edges:
        at[edge].append(when)
    return all(later - before >= nearest_ns for each in at.values() for before, later in pairwise(sorted(each)))


def _heads(flow: Flow) -> list[tuple[Hashable, float]]:
    return [(("head", flow.src, flow.dst), flow.received_ns or 0)]


def _lasted_ns(together: Sequence[Flow]) -> int:
    """Of the bars that these arrows join, or of the arrows where an end was not seen."""
    operation = together[0].operation
    end_ns = operation.end_ns or max(flow.received_ns or 0 for flow in together)
    return end_ns - operation.start_ns


def _edges(flow: Flow, ranks: Sequence[int]) -> Iterator[tuple[Hashable, float]]:
    """The lanes that an arrow touches, on the side of which gap, and when, as if it crossed all gaps equally fast."""
    src, dst = ranks.index(flow.src), ranks.index(flow.dst)
    sent, received = flow.sent_ns or 0, flow.received_ns or 0
    for gap in range(min(src, dst), max(src, dst)):
        for lane in (gap, gap + 1):
            yield (lane, gap), sent + (received - sent) * (lane - src) / (dst - src)


def _have_room(steps: Sequence[Flow], points_per_ns: float) -> bool:
    """Whether steps can be told apart: few enough, none too narrow, and none that is over before it has begun."""
    spans = [(flow.received_ns or 0) - (flow.sent_ns or 0) for flow in steps]
    derived = any(flow.how == "derived" for flow in steps)
    return not derived or (len(steps) <= _MOST_STEPS and min(spans) * points_per_ns >= _NARROWEST_STEP_PT)


def draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, how: str, gid: str = "",
    color: Color | None = None, width: float = 1.0, zorder: float = 4,
) -> None:  # fmt: skip
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, linewidth=width, linestyle=LINES[how],
            color=color or line_color(how), shrinkA=0, shrinkB=0, zorder=zorder, connectionstyle="arc3",
            joinstyle="miter", gid=gid,
        )
    )  # fmt: skip


def in_legend(how: str) -> Line2D:
    """What the legend says of an arrow."""
    return Line2D([], [], color=line_color(how), linestyle=LINES[how], linewidth=1, label=f"message, {how}")
