"""Where the time of a training step goes: a bar per rank, cut into its parts; of several runs below each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn.analysis.ddp.breakdown import Breakdown, Phase, StepTimes
from dlearn.analysis.ddp.breakdown import breakdown as parts_of
from dlearn.analysis.findings import hang_finding, time_text
from dlearn.draw import canvas
from dlearn.draw.bars import told_briefly
from dlearn.draw.canvas import points, points_per_ms, write
from dlearn.draw.palette import BACKWARD, FAINT, FORWARD, INK, OPTIMIZER, WAITING_HATCH, ink_on, look
from dlearn.draw.text import SMALLEST_PT, TEXT_PT, cut, plain, text_width, wrap
from dlearn.trace.trace import Trace

_HEAD_IN, _BAR_IN, _HIDDEN_IN, _SUMS_IN, _GAP_IN = 0.24, 0.28, 0.08, 0.16, 0.13
"""`_SUMS_IN` is of a line."""
_MOST_BARS = 8
_SENT = look("all_reduce")


class Style(NamedTuple):
    """How a part looks. What computes is grey, so that colour is what is sent."""

    label: str
    color: str | tuple[float, float, float]
    edge: str
    hatch: str = ""


_STYLES: dict[Phase, Style] = {
    "forward": Style("forward", FORWARD, FAINT),
    "backward": Style("backward", BACKWARD, FAINT),
    "waiting": Style("waits for the last rank", _SENT.pale, _SENT.color, WAITING_HATCH),
    "transfer": Style("transfer", _SENT.color, _SENT.color),
    "optimizer": Style("optimizer", OPTIMIZER, FAINT, "..."),
    "between": Style("other work, between the phases", "white", FAINT, "\\\\\\"),
    "hidden": Style("communication hidden behind the backward pass", _SENT.pale, _SENT.color),
}


class StepBar(NamedTuple):
    """One rank's step, drawn from `top`; `begin_ns` is when the first rank of its run began, `sums` what it was spent
    on, line by line."""

    label: str
    of: StepTimes
    sums: list[str]
    top: float
    begin_ns: int

    @property
    def bottom(self) -> float:
        return self.top + _BAR_IN + _HIDDEN_IN + _SUMS_IN * len(self.sums) + _GAP_IN

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e6


def breakdown(traces: Trace | Mapping[str, Trace], *, ax: Axes | None = None) -> Axes:
    """Draw the training step of median length: forward, backward, communication that is not hidden, optimizer.

    A bar per rank, in ms from when the first rank began; the thin strip below it is communication that is hidden.
    Several traces, by name, stand below each other on one scale.
    """
    runs = {"": traces} if isinstance(traces, Trace) else traces
    found = {name: parts_of(trace) for name, trace in runs.items()}
    left_in = canvas.left_margin_in(label_of(each, name, run) for name, run in found.items() for each in run.middle)
    blocks = blocks_of(found, canvas.points_wide(ax, left_in=left_in))
    shown = [bar for bars in blocks for bar in bars]
    height = shown[-1].bottom if shown else 1.0
    ax = ax or canvas.new_axes(height_in=height, left_in=left_in)
    if not shown:
        return canvas.say_empty(ax, "This trace holds no training step of a DDP model.")
    canvas.describe(ax, *(f"{bar.label}: {sums_text(bar.of)}." for bar in shown))
    ax.set(xlim=(0, 1.01 * max(bar.ms(part.end_ns) for bar in shown for part in bar.of.parts)), ylim=(height, 0))
    canvas.name_rows(ax, [bar.top + _BAR_IN / 2 for bar in shown], [bar.label for bar in shown])
    for bar in shown:
        draw_parts(ax, bar)
    for bars, run in zip(blocks, found.values(), strict=True):
        mark_last_rank(ax, bars, run)
    canvas.quiet(ax, "ms from when the first rank's step began")
    title, told = title_of(found), notes(found, [bar.of for bar in shown])
    hang = next(filter(None, map(hang_finding, runs.values())), "")
    told = [f"Steps that ended; after them: {hang}.", *told] if hang else told
    return canvas.frame(ax, title=title, legend=legend(ax, shown), notes=told)


def blocks_of(found: Mapping[str, Breakdown], wide_pt: float) -> list[list[StepBar]]:
    """The bars of each run from the top; of too many ranks those that wait least and those that wait longest."""
    blocks: list[list[StepBar]] = []
    top, most = 0.0, max(2, _MOST_BARS // max(1, len(found)))
    for name, run in found.items():
        steps = sorted(run.middle, key=lambda each: each.length_ns("waiting"))
        if len(steps) > most:
            steps = steps[: most // 2] + steps[-(most // 2) :]
        begin = min((part.start_ns for each in run.middle for part in each.parts), default=0)
        blocks.append([])
        top += _HEAD_IN
        for each in sorted(steps, key=lambda each: each.rank):
            sums = wrap(sums_text(each), wide_pt, size=SMALLEST_PT)
            blocks[-1].append(StepBar(label_of(each, name, run), each, sums, top, begin))
            top = blocks[-1][-1].bottom
    return blocks


def label_of(each: StepTimes, name: str, run: Breakdown) -> str:
    """ "rank 0", or "ConvNet: rank 0"."""
    label = run.labels[each.rank]
    return plain(f"{name}: {label}" if name else label)


def title_of(found: Mapping[str, Breakdown]) -> str:
    """Of one run how its median step was spent; of several, what of each one's is communication not hidden."""
    if len(found) == 1:
        return next(iter(found.values())).headline
    return "Communication that is not hidden: " + ", ".join(
        f"{name} " + ("not observed" if run.exposed is None else f"{run.exposed:.0%}") for name, run in found.items()
    )


def sums_text(each: StepTimes) -> str:
    """ "forward 1.2 ms, backward 8 ms, waits 2 ms"; a name stays with its number."""
    names: dict[Phase, str] = {"waiting": "waits", "between": "other"}
    lengths = {names.get(name, name): each.length_ns(name) for name in _STYLES}
    return ", ".join(f"{name}\u00a0{time_text(length)}" for name, length in lengths.items() if length)


def draw_parts(ax: Axes, bar: StepBar) -> None:
    """The parts where they happened, with their names where these fit, and their sums below."""
    for part in bar.of.parts:
        style, hidden = _STYLES[part.phase], part.phase == "hidden"
        left, width = bar.ms(part.start_ns), (part.end_ns - part.start_ns) / 1e6
        top, height = (bar.top + _BAR_IN, _HIDDEN_IN) if hidden else (bar.top, _BAR_IN)
        ax.barh(
            top + height / 2, width, left=left, height=height, color=style.color, edgecolor=style.edge,
            hatch=style.hatch, linewidth=0.5, gid=part.phase,
        )  # fmt: skip
        text = "waits" if part.phase == "waiting" else part.phase
        if not hidden and part.phase != "between" and text_width(text, size=TEXT_PT) + 6 <= width * points_per_ms(ax):
            middle, ink = (left + width / 2, top + height / 2), ink_on(style.color)
            write(ax, *middle, text, on=style.color, ha="center", color=ink, zorder=4, gid=part.phase)
    for line, sums in enumerate(bar.sums):
        under = bar.top + _BAR_IN + _HIDDEN_IN + _SUMS_IN * (line + 0.6)
        write(ax, 0, under, sums, fontsize=SMALLEST_PT, gid="sums", clip_on=True)


def mark_last_rank(ax: Axes, bars: Sequence[StepBar], run: Breakdown) -> None:
    """A line through all ranks where the longest wait ended: the last rank has come."""
    waits = [(part, part.awaited) for bar in bars for part in bar.of.parts if part.awaited is not None]
    if not waits:
        return
    longest, awaited = max(waits, key=lambda each: each[0].end_ns - each[0].start_ns)
    at = bars[0].ms(longest.end_ns)
    for bar in bars:
        ends = bar.top - 0.05, bar.top + _BAR_IN + _HIDDEN_IN
        ax.vlines(at, *ends, colors=INK, linewidth=1.4, zorder=3, gid="last rank")
    share = at / ax.get_xlim()[1]
    align = "left" if share < 0.5 else "right"
    name = plain(run.labels.together(awaited.last_ranks))
    has, wide = "has" if len(awaited.last_ranks) == 1 else "have", points(ax, max(share, 1 - share), along="x")
    where = told_briefly(awaited)
    told = f"the longest wait ends: {name} {has} come to {where}", f"{name} {has} come to {where}", f"{where}: {name}"
    text = next((each for each in told if text_width(each, size=TEXT_PT) <= wide), cut(told[-1], wide, size=TEXT_PT))
    write(ax, at, bars[0].top - 0.05, text, ha=align, va="bottom", gid="last rank")


def legend(ax: Axes, shown: Sequence[StepBar]) -> list[Artist]:
    """What stands in no bar by its name."""
    there = {part.phase for bar in shown for part in bar.of.parts} - {text.get_gid() for text in ax.texts}
    return [
        Patch(facecolor=style.color, edgecolor=style.edge, hatch=style.hatch, linewidth=0.5, label=style.label)
        for name, style in _STYLES.items()
        if name in there
    ]


def notes(found: Mapping[str, Breakdown], shown: Sequence[StepTimes]) -> list[str]:
    told = []
    if any(len({each.number for each in run.items}) > 1 for run in found.values()):
        told.append("The step of median length; shares are of all ranks' time together.")
    if len(found) == 1 and shown:
        told += [f"In all: {run.shares_text}." for run in found.values()]
    told += dict.fromkeys(run.note for run in found.values() if run.note)
    if any(not each.observed for each in shown):
        told.append("When the communication ended was not observed: forward and backward hold it, where they waited.")
    left_out = sum(len(run.middle) for run in found.values()) - len(shown)
    if left_out:
        told.append(f"{left_out:,} more ranks are not drawn: these wait least and longest.")
    return told
