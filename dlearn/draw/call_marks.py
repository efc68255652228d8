"""The marks of calls in a timeline: bars, what they wait for, the critical path, and how they end."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.analysis.ddp.overlap import Leg, critical_path
from dlearn.analysis.ddp.step_clock import on_device
from dlearn.analysis.ddp.training_steps import COMPUTED, training_steps
from dlearn.draw.canvas import Box, Style, draw_boxes, draw_lines, points, points_per_ms, write
from dlearn.draw.palette import FAINT, INK, LANE, MISSING, TEXT_PT, WAITING_HATCH, Color, Look, ink_on, look, text_width
from dlearn.draw.timeline_model import Bar, TimelineModel, is_collective
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import count_text, first_few, time_text

ENDS_RED = {"stuck": "stuck: no end was seen", "failed": "failed: an error ended it"}
"""The red end of a bar, as the legend has it."""
_HATCHED_FROM_PT, _EDGED_FROM_PT = 6, 2.5
_MOST_BARS = 400  # More have no labels, and are not widened.
_MOST_LINES = 24  # Operations whose last rank is marked.
_LAST_RANK: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (2, 2))}
_CALL_BY_RPC = look("rpc_sync")


class TimelineMark:
    """One kind of mark: it draws itself, and knows its legend and its notes."""

    def __init__(self, model: TimelineModel) -> None:
        self.model = model

    def draw(self, ax: Axes) -> None:
        """Add the artists."""

    def legend(self) -> list[Artist]:
        return []

    def notes(self, ax: Axes) -> list[str]:
        """Return what is left out, or drawn in another way than a reader would think."""
        return []


class PlacedBar(NamedTuple):
    """A bar and its edges, times in ms, heights in inches; it transfers from `middle` on."""

    bar: Bar
    left: float
    middle: float
    right: float
    top: float
    bottom: float


class CallBars(TimelineMark):
    """The bars, with what each call was and how many bytes."""

    def draw(self, ax: Axes) -> None:
        model = self.model
        # Among many, a widened bar would hide its neighbours; their true widths blend into the right shade.
        narrowest = 1.0 / points_per_ms(ax) if len(model.bars) <= _MOST_BARS else 0.0
        placed: list[PlacedBar] = []
        for bar in model.bars:
            left = model.ms(bar.start_ns)
            right = max(model.ms(bar.end_ns), left + narrowest)
            middle = min(max(model.ms(bar.last_arrival_ns), left), right)
            placed.append(PlacedBar(bar, left, middle, right, *model.ends(bar)))
        _draw_bars(ax, placed)
        # How long the wait lasts that the title names, if there is room.
        longest = next((each for each in placed if each.bar is model.longest_wait), None)
        if longest is not None:
            bar, left, until, _, top, bottom = longest
            time, at = time_text(bar.waited_ns), ((left + until) / 2, (top + bottom) / 2)
            if text_width(time, bold=True) + 1 < (until - left) * points_per_ms(ax):
                style: dict[str, Any] = {"ha": "center", "zorder": 6, "fontweight": "bold"}
                write(ax, *at, time, on=LANE, gid="longest wait", **style)
            else:
                longest = None
        _label_bars(ax, placed, without=longest)

    def legend(self) -> list[Artist]:
        families: dict[str, dict[str, None]] = defaultdict(dict)
        for bar in self.model.bars:
            families[bar.look.color][bar.look.family] = None
        over = self.model.over
        labels = {color: first_few([*names], 3) + over(color) for color, names in families.items()}
        return [Style(label, color, ink_on(color)).key() for color, label in labels.items()]

    def notes(self, ax: Axes) -> list[str]:
        if not any(ranks[1:] for ranks in self.model.groups.values()):
            return []
        within = f"each call within {self.model.tolerance:.0%} of the picture's width of their median"
        return [f"Alike: ranks that call the same, {within}; the nearest to it is drawn."]


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
            at, color = self.model.ms(operation.last_arrival_ns), bars[0].look.line
            lanes = [self.model.lanes[bar.rank] for bar in bars]
            top, bottom = min(lane.bars_top for lane in lanes), max(lane.bottom for lane in lanes)
            ax.plot([at, at], [top, bottom], color=color, zorder=1.8, gid="last rank", **_LAST_RANK)
            last = next((sum(self.model.ends(bar)) / 2 for bar in bars if bar.rank == operation.last_rank), None)
            if last is not None:
                ax.plot([at], [last], marker=">", markersize=6, color=color, markeredgecolor="white", zorder=5)

    def legend(self) -> list[Artist]:
        handles: list[Artist] = []
        waits = " or ".join(dict.fromkeys(_awaited(bar) for bar in self.model.bars if bar.waited_ns > 0))
        if waits or any(bar.last_arrival_ns > bar.start_ns for bar in self.model.bars):
            label = f"waits for {waits}" if waits else "waits"
            handles.append(Style(label, "white", FAINT, WAITING_HATCH).key())
        if 0 < len(self.awaited) <= _MOST_LINES:
            label = "the last rank has come"
            handles.append(Line2D([], [], color=FAINT, marker=">", markersize=6, label=label, **_LAST_RANK))
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
        bars = {(bar.rank, bar.last_arrival_ns): bar for bar in self.model.bars}
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
            notes.append(f"No arrows for {count_text(sums.never_came, 'message')}: expected, and never came.")
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


def _draw_bars(ax: Axes, placed: Sequence[PlacedBar]) -> None:
    """Draw waiting hatched, then transfer; in red ends of calls that hang or failed, absent calls."""
    parts: dict[tuple[str, Look], list[Box]] = defaultdict(list)
    stuck: list[list[tuple[float, float]]] = []
    absent: list[Box] = []
    for bar, left, middle, right, top, bottom in placed:
        if bar.state == "absent":
            absent.append((left, right, top, bottom))
            continue
        if bar.state in ENDS_RED:
            stuck.append([(right, top), (right, bottom)])
        if middle > left:
            parts["waiting", bar.look].append((left, middle, top, bottom))
        if middle < right:
            parts["transfer", bar.look].append((middle, right, top, bottom))
    for (part, style), boxes in parts.items():
        _draw_part(ax, part, style, boxes)
    if stuck:
        draw_lines(ax, stuck, colors=MISSING, linewidths=4, zorder=5, gid="stuck", clip_on=False)
    if absent:
        dashed: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 1.2}
        draw_boxes(ax, absent, facecolor="white", edgecolor=MISSING, zorder=2, gid="absent", **dashed)


def _draw_part(ax: Axes, part: str, style: Look, boxes: Sequence[Box]) -> None:
    """Draw this part of bars, with edges and hatches where a box is wide enough for them."""
    transfer, gid = part == "transfer", f"{part} {style.family}"
    face: Color = style.color if transfer else style.pale
    edge: Color = "white" if transfer else style.line
    hatch = "" if transfer else WAITING_HATCH
    least = (_HATCHED_FROM_PT if hatch else _EDGED_FROM_PT) / points_per_ms(ax)
    wide = [box for box in boxes if box[1] - box[0] >= least]
    narrow = [box for box in boxes if box[1] - box[0] < least]
    zorder = 2.1 if transfer else 2
    if wide:
        draw_boxes(ax, wide, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.4, zorder=zorder, gid=gid)
    if narrow:
        draw_boxes(ax, narrow, facecolor=face, edgecolor="none", zorder=zorder, gid=f"{gid}, narrow")


def _label_bars(ax: Axes, placed: Sequence[PlacedBar], *, without: PlacedBar | None) -> None:
    """Write on a bar what fits: inside of it, else to the right where nothing follows, else nothing."""
    scale = points_per_ms(ax)
    row_pt = points(ax, 1.0, along="y") / max(1e-9, abs(ax.get_ylim()[1] - ax.get_ylim()[0]))
    said: set[Hashable] = set()
    absent = {id(each.bar.operation) for each in placed if each.bar.state == "absent"}
    follows = _next_in_row(placed, ax.get_xlim()[1])
    for each, following in sorted(zip(placed, follows, strict=True), key=lambda pair: pair[0].top):
        bar, _, _, right, top, bottom = each
        if (bottom - top) * row_pt < TEXT_PT * 1.1 or len(ax.texts) >= _MOST_BARS:
            continue
        # An operation of all ranks is said once, what a rank sends again and again once in its lane;
        # and who never came where it is missing.
        ended, alike = bar.state == "ended", (bar.rank, bar.labels)
        known = id(bar.operation) if is_collective(bar.operation) else alike
        if (ended and bar.operation.exchange is None and known in said) or each is without:
            continue
        labels = bar.labels[-1:] if bar.state == "stuck" and id(bar.operation) in absent else bar.labels
        start, end, face, ink = _wider_part(each)
        inside, beside = (end - start) * scale - 6, (following - right) * scale - 6
        y = (top + bottom) / 2
        for label in labels:
            width = text_width(label)
            # The legend names its colour, or its name was said in this lane.
            named = bar.look != _CALL_BY_RPC or (bar.rank, label) in said
            if width <= inside:
                write(ax, (start + end) / 2, y, label, on=face, ha="center", color=ink, zorder=6, clip_on=True)
            elif width <= beside and not (named and ended and bar.operation.exchange is not None):
                write(ax, right + 3 / scale, y, label, on=LANE, zorder=6, clip_on=True)
            else:
                continue
            said |= {id(bar.operation), alike, (bar.rank, label)}
            break


def _wider_part(each: PlacedBar) -> tuple[float, float, Color, str]:
    """Return start and end of the bar's wider part, its colour and the colour of text on it."""
    bar, left, middle, right, _, _ = each
    if bar.state == "absent":
        return left, right, "white", MISSING
    if middle - left > right - middle:
        return left, middle, bar.look.pale, INK
    return middle, right, bar.look.color, bar.look.ink


def _next_in_row(placed: Sequence[PlacedBar], edge: float) -> list[float]:
    """Return where the next bar of the same row begins, for each."""
    following: dict[float, float] = defaultdict(lambda: edge)
    nexts = [edge] * len(placed)
    for i in sorted(range(len(placed)), key=lambda i: -placed[i].left):
        nexts[i], following[placed[i].top] = following[placed[i].top], placed[i].left
    return nexts
