"""The marks of calls in a timeline: bars, what they wait for, the critical path, and how they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.analysis.ddp.overlap import Leg, critical_path
from dlearn.analysis.ddp.step_clock import on_device
from dlearn.analysis.ddp.training_steps import COMPUTED, training_steps
from dlearn.analysis.findings import time_text
from dlearn.draw.canvas import Box, draw_boxes, draw_lines, points, points_per_ms, write
from dlearn.draw.layout.lanes import TOLERANCE
from dlearn.draw.palette import FAINT, GRID, INK, LANE, MISSING, WAITING_HATCH, Color, Look, look
from dlearn.draw.text import TEXT_PT, text_width
from dlearn.draw.timeline_model import BINS, THIN, Bar, TimelineModel, is_collective
from dlearn.join.columns import disjoint, spread
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Calls
from dlearn.shown import count_text

ENDS_RED = {"stuck": "stuck: no end was seen", "failed": "failed: an error ended it"}
"""The red end of a bar, as the legend has it."""
_HATCHED_FROM_PT, _EDGED_FROM_PT = 6, 2.5
_MOST_BARS = 400
"""More have no labels, and are not widened."""
_MOST_LINES = 24
"""Operations whose last rank is marked."""
_LAST_RANK: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 2))}


def legend_key(label: str, face: str, edge: str, hatch: str = "") -> Patch:
    """Return a box for the legend."""
    return Patch(facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, label=label)


class TimelineMark:
    """One kind of mark: it draws itself, and knows its legend and its notes."""

    def __init__(self, model: TimelineModel) -> None:
        self.model = model

    def draw(self, ax: Axes) -> None:
        """Add the artists."""

    def legend(self) -> list[Artist]:
        """Return the legend's entries for what was drawn."""
        return []

    def notes(self, ax: Axes) -> list[str]:
        """Return what is left out, or drawn in another way than a reader would think."""
        return []


class CallBars(TimelineMark):
    """The bars, with what each call was and how many bytes."""

    def draw(self, ax: Axes) -> None:
        # Among many, a widened bar would hide its neighbours; their true widths blend into the right shade.
        narrowest = 1.0 / points_per_ms(ax) if len(self.model.bars) <= _MOST_BARS else 0.0
        placed: list[tuple[Bar, Box]] = []
        for bar in self.model.bars:
            left = self.model.ms(bar.start_ns)
            right = max(self.model.ms(bar.end_ns), left + narrowest)
            placed.append((bar, (left, right, *self.model.ends(bar))))
        transfer_at = [self.model.ms(bar.transfer_ns) for bar in self.model.bars]
        _draw_bars(ax, placed, transfer_at=transfer_at)
        _label_bars(ax, placed, transfer_at=transfer_at)
        if self.utilization is not None:
            for rank, lane in self.model.lanes.items():
                self._draw_utilization(ax, self.utilization, rank, lane.bar(0))
        if self.model.longest_wait is not None:
            self._write_wait(ax, self.model.longest_wait)

    def _write_wait(self, ax: Axes, bar: Bar) -> None:
        """Write how long the wait lasts that the title names, if there is room."""
        left, right, time = self.model.ms(bar.start_ns), self.model.ms(bar.transfer_ns), time_text(bar.waited_ns)
        if text_width(time, size=TEXT_PT) + 12 < (right - left) * points_per_ms(ax):
            at = (left + right) / 2, sum(self.model.ends(bar)) / 2
            write(ax, *at, time, on=LANE, ha="center", zorder=6, gid="longest wait")

    @cached_property
    def utilization(self) -> Utilization | None:
        """Return the share of time that ranks spend in calls, where these are too many for bars."""
        model = self.model
        return utilization_of(model.calls, start_ns=model.start_ns, end_ns=model.end_ns) if model.crowded else None

    def _draw_utilization(self, ax: Axes, utilization: Utilization, rank: int, box: tuple[float, float]) -> None:
        """Stack what is transferred, in its colour, and what waits, paler; a full strip is all of the time."""
        mine = {kind: shares for (owner, kind), shares in utilization.transfer.items() if owner == rank}
        everything: list[tuple[Color, np.ndarray, str]] = []
        everything += [(kind.color, shares, f"time in {kind.family}") for kind, shares in mine.items()]
        everything += [(kind.pale, utilization.waiting[rank, kind], f"time waiting in {kind.family}") for kind in mine]
        # Calls of several kinds at the same time share the strip.
        whole = np.maximum(1, sum(shares for _, shares, _ in everything))
        lower, (top, bottom) = np.zeros_like(whole), box
        for color, shares, gid in everything:
            upper = lower + shares / whole
            at = np.linspace(0, self.model.ms(self.model.end_ns), len(upper) + 1).repeat(2)[1:-1]
            above, below = (np.column_stack([at, bottom - edge.repeat(2) * (bottom - top)]) for edge in (upper, lower))
            outline = np.concatenate([above, below[::-1]])
            strip = PolyCollection([outline], facecolor=color, edgecolor="none", zorder=2, gid=gid)
            ax.add_collection(strip, autolim=False)
            lower = upper

    def legend(self) -> list[Artist]:
        looks = [bar.look for bar in self.model.bars]
        looks += [each for _, each in self.utilization.transfer] if self.utilization else []
        families = {each.family: each for each in reversed(looks)}
        more = ", a colour for each" * (len({each.color for each in looks}) > len(families))
        return [legend_key(each.family + more, each.color, each.ink, each.hatch) for each in families.values()]

    def notes(self, ax: Axes) -> list[str]:
        notes = []
        if self.utilization:
            notes.append(
                f"{self.utilization.calls:,} calls are too many for bars: the height of a strip is the share of"
                " the time that the rank is inside of calls, fainter while all of them wait for the last rank."
            )
        if any(ranks[1:] for ranks in self.model.groups.values()):
            within = f"each call within {TOLERANCE:.0%} of the picture's width of their median"
            notes.append(f"Alike: ranks that call the same, {within}; the nearest to it is drawn.")
        return notes


class Waits(TimelineMark):
    """A line where the last rank has come to an operation, from which on all can send, and a mark on that rank."""

    @cached_property
    def awaited(self) -> dict[Operation, list[Bar]]:
        """Return the operations that all ranks called and some rank waited in, with their bars."""
        found: dict[Operation, list[Bar]] = defaultdict(list)
        for bar in self.model.bars:
            if is_collective(bar.operation) and not bar.operation.missing:
                found[bar.operation].append(bar)
        return {each: bars for each, bars in found.items() if any(bar.waited_ns > 0 for bar in bars)}

    def draw(self, ax: Axes) -> None:
        for operation, bars in self.awaited.items() if len(self.awaited) <= _MOST_LINES else ():
            at, color = self.model.ms(operation.transfer_ns), bars[0].look.line
            lanes = [self.model.lanes[bar.rank] for bar in bars]
            top, bottom = min(lane.bars_top for lane in lanes), max(lane.bottom for lane in lanes)
            ax.plot([at, at], [top, bottom], color=color, zorder=1.8, gid="last rank", **_LAST_RANK)
            last = next((sum(self.model.ends(bar)) / 2 for bar in bars if bar.rank == operation.last_rank), None)
            if last is not None:
                ax.plot([at], [last], marker=">", markersize=6, color=color, markeredgecolor="white", zorder=5)

    def legend(self) -> list[Artist]:
        handles: list[Artist] = []
        waits = " or ".join(dict.fromkeys(_awaited(bar) for bar in self.model.bars if bar.waited_ns > 0))
        if waits:
            handles.append(Line2D([], [], color=FAINT, linewidth=3, label=f"thin: waits for {waits}"))
        if 0 < len(self.awaited) <= _MOST_LINES:
            label = "the last rank has come"
            handles.append(Line2D([], [], color=FAINT, marker=">", markersize=6, label=label, **_LAST_RANK))
        if any(bar.transfer_ns > bar.start_ns and bar.state in ENDS_RED for bar in self.model.bars):
            handles.append(legend_key("hatched: waits", GRID, FAINT, WAITING_HATCH))
        return handles

    def notes(self, ax: Axes) -> list[str]:
        note = f"More than {_MOST_LINES} operations: no lines where the last rank has come."
        return [note] if len(self.awaited) > _MOST_LINES else []


class CriticalPath(TimelineMark):
    """An outline around the bars and, where a rank computes, the strips that the end of the step waited for."""

    @cached_property
    def path(self) -> Sequence[Leg]:
        """Return the critical path, where one step is shown and all of its ranks have lanes."""
        trace = self.model.trace
        steps = training_steps(trace)
        if len({step.number for step in steps}) != 1 or on_device(trace) is not trace:
            return ()  # A GPU's times are not those of this picture.
        path = critical_path(steps)
        return path if {leg.rank for leg in path} <= {*self.model.groups} else ()

    def draw(self, ax: Axes) -> None:
        boxes: list[Box] = []
        bars = {(bar.rank, bar.transfer_ns): bar for bar in self.model.bars}
        for (rank, computes), legs in groupby(self.path, key=lambda leg: (leg.rank, leg.what in COMPUTED)):
            mine, lane = list(legs), self.model.lanes[rank]
            left, right = max(mine[0].start_ns, self.model.start_ns), min(mine[-1].end_ns, self.model.end_ns)
            bar = bars.get((rank, mine[0].start_ns))
            if left < right and computes:
                boxes.append((self.model.ms(left), self.model.ms(right), lane.strip_top, lane.bars_top))
            elif left < right and bar is not None:  # A selection may leave it out.
                boxes.append((self.model.ms(left), self.model.ms(right), *self.model.ends(bar)))
        draw_boxes(ax, boxes, facecolor="none", edgecolor=INK, linewidth=2, zorder=3, gid="critical path")

    def legend(self) -> list[Artist]:
        path = Patch(facecolor="none", edgecolor=INK, linewidth=2, label="critical path of the step")
        return [path] if self.path else []


class Outcomes(TimelineMark):
    """What did not end, never came or is not known. Its marks are parts of the bars."""

    def legend(self) -> list[Artist]:
        states = {bar.state for bar in self.model.bars}
        red = [text for state, text in ENDS_RED.items() if state in states]
        return [Line2D([], [], color=MISSING, linewidth=4, label="; ".join(red))] if red else []

    def notes(self, ax: Axes) -> list[str]:
        bars, sums, notes = self.model.bars, self.model.sums, []
        states = [bar.state for bar in bars]
        if "stuck" in states:
            notes.append("Stuck calls last longer than drawn: the axis ends with the last event that was seen.")
        if sums.never_came:
            notes.append(f"{sums.never_came:,} messages were expected and never came: no arrows.")
        reasons = list(sums.unexplained.items())
        notes += [f"No arrows for {count_text(count, 'operation')}: {reason}." for reason, count in reasons[:2]]
        others = sum(count for _, count in reasons[2:])
        if others:
            notes.append(f"No arrows for {count_text(others, 'operation')} of other kinds.")
        narrow = sum(bar.end_ns - bar.start_ns < 1e6 / points_per_ms(ax) and bar.state == "ended" for bar in bars)
        if narrow > len(bars) // 10:
            notes.append(f"{narrow:,} of {len(bars):,} bars are narrower than a line: choose a shorter part.")
        unseen = states.count("not observed")
        if unseen:
            were = "end was" if unseen == 1 else "ends were"
            notes.append(f"{unseen:,} {were} not seen: the bar shows the start only.")
        return notes


def _awaited(bar: Bar) -> str:
    if bar.operation.exchange is not None:
        return "an answer"
    return "the last rank" if is_collective(bar.operation) else "the other rank"


def _draw_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """Draw waiting thin and pale, transfer thick. `transfer_at[i]` is where, in ms, the i-th bar's transfer begins."""
    parts: dict[tuple[str, Look], list[Box]] = defaultdict(list)
    for (bar, (left, right, top, bottom)), transfer in zip(placed, transfer_at, strict=True):
        if bar.state == "absent":
            continue
        middle = min(max(transfer, left), right)
        if middle > left and bar.state in ENDS_RED:
            parts["stuck", bar.look].append((left, middle, top, bottom))
        elif middle > left:
            thinner = THIN * (bottom - top)
            parts["waiting", bar.look].append((left, middle, top + thinner, bottom - thinner))
        if middle < right:
            parts["transfer", bar.look].append((middle, right, top, bottom))
    for (part, style), boxes in parts.items():
        gid = f"{part} {style.family}".replace("stuck", "waiting")
        if part == "transfer":
            edge = style.ink if style.hatch else "white"
            _draw_boxes(ax, boxes, style.color, edge, style.hatch, zorder=2.1, gid=gid)
        else:
            hatch, narrow = (WAITING_HATCH, None) if part == "stuck" else ("", style.line)
            _draw_boxes(ax, boxes, style.pale, style.line, hatch, zorder=2, gid=gid, narrow=narrow)
    _draw_faults(ax, placed)


def _draw_boxes(
    ax: Axes, boxes: Sequence[Box], face: Color, edge: Color, hatch: str, *, zorder: float, gid: str,
    narrow: Color | None = None,
) -> None:  # fmt: skip
    """Draw edges and hatches where a box is wide enough for them; `narrow` is the colour of the others."""
    least = (_HATCHED_FROM_PT if hatch else _EDGED_FROM_PT) / points_per_ms(ax)
    wide = [box for box in boxes if box[1] - box[0] >= least]
    others = [box for box in boxes if box[1] - box[0] < least]
    if wide:
        draw_boxes(ax, wide, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, zorder=zorder, gid=gid)
    if others:
        draw_boxes(ax, others, facecolor=narrow or face, edgecolor="none", zorder=zorder, gid=f"{gid}, narrow")


def _draw_faults(ax: Axes, placed: Sequence[tuple[Bar, Box]]) -> None:
    """Draw a red end where a rank is stuck or got an error, a dashed box for a call that never came."""
    stuck = [[(right, top), (right, bottom)] for bar, (_, right, top, bottom) in placed if bar.state in ENDS_RED]
    if stuck:
        draw_lines(ax, stuck, colors=MISSING, linewidths=4, zorder=5, gid="stuck", clip_on=False)
    absent = [box for bar, box in placed if bar.state == "absent"]
    if absent:
        dashed: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 1.2}
        draw_boxes(ax, absent, facecolor="white", edgecolor=MISSING, zorder=2, gid="absent", **dashed)


def _label_bars(ax: Axes, placed: Sequence[tuple[Bar, Box]], *, transfer_at: Sequence[float]) -> None:
    """Write on a bar what fits: inside of it, else to the right where nothing follows, else nothing."""
    scale = points_per_ms(ax)
    row_pt = points(ax, 1.0, along="y") / max(1e-9, abs(ax.get_ylim()[1] - ax.get_ylim()[0]))
    follows = _next_in_row([box for _, box in placed], ax.get_xlim()[1])
    said: set[Hashable] = set()
    shared = look("rpc_sync")
    absent = {id(bar.operation) for bar, _ in placed if bar.state == "absent"}
    from_the_top = sorted(zip(placed, transfer_at, follows, strict=True), key=lambda each: each[0][1][2])
    for (bar, box), transfer, following in from_the_top:
        left, right, top, bottom = box
        if (bottom - top) * row_pt < TEXT_PT * 1.1 or len(ax.texts) >= _MOST_BARS:
            continue
        # What all ranks do in an operation is said once, and who never came to it where it is missing.
        once = bar.state == "ended" and is_collective(bar.operation)
        if (once and id(bar.operation) in said) or (bar.state == "ended" and transfer >= right > left):
            continue
        labels = bar.labels[-1:] if bar.state == "stuck" and id(bar.operation) in absent else bar.labels
        start, end, face, ink = _wider_part(bar, left, right, min(max(transfer, left), right))
        inside, beside = (end - start) * scale - 6, (following - right) * scale - 6
        y = (top + bottom) / 2
        for label in labels:
            width = text_width(label, size=TEXT_PT)
            # The legend names its colour, or its name was said in this lane.
            told = bar.look != shared or (bar.rank, label) in said
            if width <= inside:
                write(ax, (start + end) / 2, y, label, on=face, ha="center", color=ink, zorder=6, clip_on=True)
            elif width <= beside and not (told and bar.state == "ended" and bar.operation.exchange is not None):
                write(ax, right + 3 / scale, y, label, on=LANE, zorder=6, clip_on=True)
            else:
                continue
            said |= {id(bar.operation), (bar.rank, label)}
            break


def _wider_part(bar: Bar, left: float, right: float, middle: float) -> tuple[float, float, Color, str]:
    """Return start and end of the bar's wider part, its colour and the colour of text on it."""
    style = bar.look
    if bar.state == "absent":
        return left, right, "white", MISSING
    if middle - left > right - middle and bar.state in ENDS_RED:
        return left, middle, style.pale, INK
    return middle, right, style.color, style.ink


def _next_in_row(boxes: Sequence[Box], edge: float) -> list[float]:
    """Return where the next bar of the same row begins, for each."""
    following: dict[float, float] = defaultdict(lambda: edge)
    nexts = [edge] * len(boxes)
    for i in sorted(range(len(boxes)), key=lambda i: -boxes[i][0]):
        left, _, top, _ = boxes[i]
        nexts[i], following[top] = following[top], left
    return nexts


@dataclass(frozen=True)
class Utilization:
    """For each rank and look, a share from 0 to 1 for each bin; calls at the same time count once."""

    calls: int
    transfer: dict[tuple[int, Look], np.ndarray]
    waiting: dict[tuple[int, Look], np.ndarray]  # While all of the rank's calls of that look wait.


def utilization_of(calls: Calls, *, start_ns: int, end_ns: int) -> Utilization:
    """Sum the calls whose end was observed, from `start_ns` to `end_ns`, for each bin."""
    width_ns = (end_ns - start_ns) / BINS
    until_ns = np.where(calls.ended, calls.end_ns, calls.start_ns)
    start, end = (calls.start_ns - start_ns) / width_ns, (until_ns - start_ns) / width_ns
    middle = (calls.transfer_ns - start_ns) / width_ns
    # A call that was done before the last rank came has not waited.
    middle = np.where(end <= middle, start, middle)
    transfer: dict[tuple[int, Look], np.ndarray] = {}
    waiting: dict[tuple[int, Look], np.ndarray] = {}
    looks = list(dict.fromkeys(map(look, calls.ops)))
    number = np.array([looks.index(look(name)) for name in calls.ops])
    kind = calls.rank * len(looks) + number[calls.op]
    for each in np.unique(kind[calls.ended]):
        mine = np.flatnonzero((kind == each) & calls.ended)
        key = (int(each) // len(looks), looks[int(each) % len(looks)])
        inside = _covered(start[mine], end[mine])
        transfer[key] = _covered(middle[mine], end[mine])
        waiting[key] = np.maximum(inside - transfer[key], 0)
    return Utilization(len(calls), transfer, waiting)


def _covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    begun, over = disjoint(start, end)
    return spread(begun, over, over - begun, bins=BINS)
