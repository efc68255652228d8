"""Arrows from rank to rank, where they can be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from dlearn.analysis.volume.flows import Flow, Sums, flows
from dlearn.draw.palette import LINES, Color, line_color
from dlearn.join.operation_messages import messages_of
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation

MOST_ARROWS = 250
_MOST_STEPS = 24
_NARROWEST_STEP_PT = 14
_APART_PT = 9


def arrows_of(
    shown: Iterable[Operation], ranks: Sequence[int], sums: Sums, *, points_per_ns: float, derived: bool
) -> tuple[list[Flow], int]:
    """Return arrows between these ranks, and count the messages that have no room for one.

    An arrow stands for a step if all steps have room, else for all messages of an operation between two ranks: it means
    the same in the whole picture. `derived` messages have arrows if asked for.
    """
    everything = sums.count if derived else sums.count - sums.derived
    if sums.arrows - (0 if derived else sums.derived_arrows) > MOST_ARROWS:
        return [], everything

    def is_shown(message: Message) -> bool:
        asked_for = derived or message.how != "derived"
        timed = message.sent_ns is not None and message.received_ns is not None
        return timed and message.src in ranks and message.dst in ranks and asked_for and not message.control

    found = [message for operation in shown for message in messages_of(operation) if is_shown(message)]
    nearest_ns = _APART_PT / points_per_ns
    drawn = flows(found, by_step=True)
    if not (_have_room(drawn, points_per_ns) and _are_told_apart(drawn, nearest_ns)):
        drawn = flows(found, by_step=False)
    if len(drawn) > MOST_ARROWS:
        return [], everything
    observed = [flow for flow in drawn if flow.how != "derived"]
    kept = [flow for flow in drawn if flow.how == "derived"] + _apart(observed, ranks, nearest_ns)
    return kept, len(found) - sum(flow.count for flow in kept)


def _apart(shown: Sequence[Flow], ranks: Sequence[int], nearest_ns: float) -> list[Flow]:
    """Return the arrows that are near no other where they leave, pass or reach a lane.

    All arrows of an operation are kept, or none: a request without its reply would mislead. Of two operations that
    touch, the longer one is kept; a call that is over at once has no room.
    """
    taken: dict[Hashable, list[float]] = defaultdict(list)
    kept: list[Flow] = []
    for each in sorted(_by_operation(shown), key=_lasted_ns, reverse=True):
        edges = list(map(_head, each))
        if not _is_collective(each):
            edges = [edge for flow in each for edge in _edges(flow, ranks)]
        long = each[0].operation.exchange is None or _lasted_ns(each) >= nearest_ns
        free = all(abs(at - other) >= nearest_ns for edge, at in edges for other in taken[edge])
        if long and free and _are_apart(edges, nearest_ns):
            kept += each
            for edge, at in edges:
                taken[edge].append(at)
    return kept


def _are_told_apart(steps: Sequence[Flow], nearest_ns: float) -> bool:
    """Return whether the observed steps of each collective have room."""
    collectives = filter(_is_collective, _by_operation([flow for flow in steps if flow.how != "derived"]))
    return all(_are_apart(list(map(_head, each)), nearest_ns) for each in collectives)


def _by_operation(shown: Sequence[Flow]) -> list[list[Flow]]:
    together: dict[int, list[Flow]] = defaultdict(list)
    for flow in shown:
        together[id(flow.operation)].append(flow)
    return list(together.values())


def _is_collective(together: Sequence[Flow]) -> bool:
    """Return whether the arrows cross by nature: then only those between the same ranks must be apart."""
    return len({(flow.src, flow.dst) for flow in together}) > 2


def _are_apart(edges: Sequence[tuple[Hashable, float]], nearest_ns: float) -> bool:
    at = defaultdict(list)
    for edge, when in edges:
        at[edge].append(when)
    return all(later - before >= nearest_ns for each in at.values() for before, later in pairwise(sorted(each)))


def _head(flow: Flow) -> tuple[Hashable, float]:
    return ("head", flow.src, flow.dst), flow.received_ns or 0


def _lasted_ns(together: Sequence[Flow]) -> int:
    """Return how long the bars last that these arrows join, or the arrows where an end was not seen."""
    operation = together[0].operation
    end_ns = operation.end_ns or max(flow.received_ns or 0 for flow in together)
    return end_ns - operation.start_ns


def _edges(flow: Flow, ranks: Sequence[int]) -> Iterator[tuple[Hashable, float]]:
    """Yield the lanes that an arrow touches, on the side of which gap, and when, at constant speed."""
    src, dst = ranks.index(flow.src), ranks.index(flow.dst)
    sent, received = flow.sent_ns or 0, flow.received_ns or 0
    for gap in range(min(src, dst), max(src, dst)):
        for lane in (gap, gap + 1):
            yield (lane, gap), sent + (received - sent) * (lane - src) / (dst - src)


def _have_room(steps: Sequence[Flow], points_per_ns: float) -> bool:
    """Return whether steps, if some are derived, are few and wide enough."""
    spans = [(flow.received_ns or 0) - (flow.sent_ns or 0) for flow in steps]
    derived = any(flow.how == "derived" for flow in steps)
    return not derived or (len(steps) <= _MOST_STEPS and min(spans) * points_per_ns >= _NARROWEST_STEP_PT)


def draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, how: str,
    color: Color | None = None, **more: Any,
) -> None:  # fmt: skip
    """Draw an arrow from point to point; `more` as a FancyArrowPatch takes it."""
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.0, "zorder": 4}
    style |= {"linestyle": LINES[how], "color": color or line_color(how), "shrinkA": 0, "shrinkB": 0}
    style |= {"connectionstyle": "arc3", "joinstyle": "miter"}
    ax.add_patch(FancyArrowPatch(start, end, **style | more))


def in_legend(how: str) -> Line2D:
    """Return the legend's line for messages that are known in this way."""
    return Line2D([], [], color=line_color(how), linestyle=LINES[how], linewidth=1, label=f"message, {how}")
