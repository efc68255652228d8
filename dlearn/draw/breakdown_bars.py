"""Where the time of a step goes: a bar per rank, cut into its parts, of one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from dlearn.analysis.ddp.breakdown import Breakdown
from dlearn.analysis.ddp.breakdown import breakdown as parts_of
from dlearn.analysis.ddp.training_steps import Phase, TrainingStep
from dlearn.analysis.findings import hang_finding
from dlearn.draw import canvas, palette
from dlearn.draw.canvas import points, points_per_ms, write
from dlearn.draw.palette import BACKWARD, FAINT, FORWARD, INK, OPTIMIZER, WAITING_HATCH
from dlearn.draw.step_bars import Style, TimeRow, lay_out, legend
from dlearn.draw.text import SMALLEST_PT, TEXT_PT, cut, plain, text_width, wrap
from dlearn.draw.timeline_model import brief_name
from dlearn.shown import time_text
from dlearn.trace import Trace

_HEAD_IN, _BAR_IN, _HIDDEN_IN, _LINE_IN, _GAP_IN = 0.24, 0.28, 0.08, 0.16, 0.13
_MOST_BARS = 8
_SENT = palette.look("all_reduce")
# What computes is grey, so that colour is what is sent.
_STYLES: dict[Phase, Style] = {
    "forward": Style("forward", FORWARD, FAINT),
    "backward": Style("backward", BACKWARD, FAINT),
    "waiting": Style("waits for the last rank", _SENT.pale, _SENT.color, WAITING_HATCH),
    "transfer": Style("transfer", _SENT.color, _SENT.color),
    "optimizer": Style("optimizer", OPTIMIZER, FAINT, "..."),
    "between": Style("other work, between the phases", "white", FAINT, "\\\\\\"),
    "hidden": Style("communication hidden behind the backward pass", _SENT.pale, _SENT.color),
}
_BRIEF: dict[Phase, str] = {"waiting": "waits", "between": "other"}


@dataclass(frozen=True)
class StepBar(TimeRow):
    """One rank's step; `begin_ns` is when the first rank of its run began, `sums` are lines."""

    of: TrainingStep
    sums: list[str]

    @property
    def bottom(self) -> float:
        """Return the bottom of its bar and the strip of what is hidden."""
        return self.middle + _BAR_IN / 2 + _HIDDEN_IN


def breakdown(traces: Trace | Mapping[str, Trace], *, ax: Axes | None = None) -> Axes:
    """Draw the step of median length: forward, backward, communication not hidden, optimizer.

    A bar per rank, in ms from when the first rank began; the thin strip below it is communication
    that is hidden. Several traces, by name, stand below each other on one scale.
    """
    runs = {"": traces} if isinstance(traces, Trace) else traces
    found = {name: parts_of(trace) for name, trace in runs.items()}
    labels = [_label(each, name, run) for name, run in found.items() for each in run.middle]
    left_in = canvas.left_margin_in(labels)
    blocks, height = _blocks(found, canvas.points_wide(ax, left_in=left_in))
    bars = [bar for block in blocks for bar in block]
    ax = ax or canvas.new_axes(height_in=height if bars else 1.0, left_in=left_in)
    if not bars:
        return canvas.draw_message_instead(ax, "This trace holds no training step of a DDP model.")
    canvas.describe(ax, *(f"{bar.label}: {_sums(bar.of)}." for bar in bars))
    last_ms = 1.01 * max(bar.ms(bar.of.end_ns) for bar in bars)
    lay_out(ax, bars, height, last_ms=last_ms, of="when the first rank's step began")
    for bar in bars:
        _draw_parts(ax, bar)
    for block, run in zip(blocks, found.values(), strict=True):
        _mark_last_rank(ax, block, run)
    named = {text.get_gid() for text in ax.texts}
    hangs = filter(None, map(hang_finding, runs.values()))
    told = [f"Steps that ended; after them: {hang}." for hang in hangs][:1]
    told += _notes(found, [bar.of for bar in bars])
    return canvas.frame(ax, title=_title(found), legend=legend(ax, _STYLES, named), notes=told)


def _blocks(found: Mapping[str, Breakdown], wide_pt: float) -> tuple[list[list[StepBar]], float]:
    """Return the bars of each run, of many ranks those that wait least and longest; and their height."""
    blocks: list[list[StepBar]] = []
    top, most = 0.0, max(2, _MOST_BARS // max(1, len(found)))
    for name, run in found.items():
        steps = sorted(run.middle, key=lambda each: each.length_ns("waiting"))
        if len(steps) > most:
            steps = steps[: most // 2] + steps[-(most // 2) :]
        begin_ns = min((each.start_ns for each in run.middle), default=0)
        blocks.append([])
        top += _HEAD_IN
        for each in sorted(steps, key=lambda each: each.rank):
            sums = wrap(_sums(each), wide_pt, size=SMALLEST_PT)
            label = _label(each, name, run)
            blocks[-1].append(StepBar(label, top + _BAR_IN / 2, begin_ns, each, sums))
            top += _BAR_IN + _HIDDEN_IN + _LINE_IN * len(sums) + _GAP_IN
    return blocks, top


def _label(each: TrainingStep, name: str, run: Breakdown) -> str:
    label = run.labels[each.rank]
    return plain(f"{name}: {label}" if name else label)


def _title(found: Mapping[str, Breakdown]) -> str:
    """Say how the median step of one run was spent; of several, what of each is not hidden."""
    if len(found) == 1:
        return next(iter(found.values())).headline
    shares = {name: run.exposed for name, run in found.items()}
    told = {name: "not observed" if it is None else f"{it:.0%}" for name, it in shares.items()}
    each = ", ".join(f"{name} {share}" for name, share in told.items())
    return f"Communication that is not hidden: {each}"


def _sums(each: TrainingStep) -> str:
    """Return "forward 1.2 ms, backward 8 ms, waits 2 ms"; a name stays with its number."""
    lengths = {_BRIEF.get(phase, phase): each.length_ns(phase) for phase in _STYLES}
    return ", ".join(f"{name}\u00a0{time_text(ns)}" for name, ns in lengths.items() if ns)


def _draw_parts(ax: Axes, bar: StepBar) -> None:
    """Draw the parts where they happened, with their names where these fit, and their sums below."""
    for part in bar.of.parts:
        style, text = _STYLES[part.phase], _BRIEF.get(part.phase, part.phase)
        left = bar.ms(part.start_ns)
        width, middle, height = bar.ms(part.end_ns) - left, bar.middle, _BAR_IN
        if part.phase == "hidden":
            middle, height = bar.bottom - _HIDDEN_IN / 2, _HIDDEN_IN
        ax.barh(middle, width, height, left, **style.of_bar, zorder=2, gid=part.phase)
        fits = text_width(text, size=TEXT_PT) + 6 <= width * points_per_ms(ax)
        if fits and part.phase not in ("between", "hidden"):
            ink = palette.ink_on(style.color)
            at = left + width / 2, middle
            write(ax, *at, text, on=style.color, ha="center", color=ink, zorder=4, gid=part.phase)
    for line, sums in enumerate(bar.sums):
        under = bar.bottom + _LINE_IN * (line + 0.6)
        write(ax, 0, under, sums, fontsize=SMALLEST_PT, gid="sums", clip_on=True)


def _mark_last_rank(ax: Axes, bars: Sequence[StepBar], run: Breakdown) -> None:
    """Draw a line through all ranks where the longest wait ended: the last rank has come."""
    parts = [part for bar in bars for part in bar.of.parts if part.awaited is not None]
    longest = max(parts, key=lambda part: part.end_ns - part.start_ns, default=None)
    if longest is None or longest.awaited is None:
        return
    at, where = bars[0].ms(longest.end_ns), brief_name(longest.awaited)
    tops = [bar.middle - _BAR_IN / 2 - 0.05 for bar in bars]
    bottoms = [bar.bottom for bar in bars]
    ax.vlines([at] * len(bars), tops, bottoms, INK, linewidth=1.4, zorder=3, gid="last rank")
    share = at / ax.get_xlim()[1]
    ranks = longest.awaited.last_ranks
    name, has = plain(run.labels.together(ranks)), "has" if len(ranks) == 1 else "have"
    wide = points(ax, max(share, 1 - share), along="x")
    text = f"the longest wait ends: {name} {has} come to {where}"
    if text_width(text, size=TEXT_PT) > wide:
        text = cut(f"{name} {has} come to {where}", wide, size=TEXT_PT)
    align = "left" if share < 0.5 else "right"
    write(ax, at, tops[0], text, ha=align, va="bottom", gid="last rank")


def _notes(found: Mapping[str, Breakdown], shown: Sequence[TrainingStep]) -> list[str]:
    told = []
    if any(len({each.number for each in run.items}) > 1 for run in found.values()):
        told.append("The step of median length; shares are of all ranks' time together.")
    if len(found) == 1:
        told += [f"In all: {run.shares_text}." for run in found.values()]
    told += dict.fromkeys(run.note for run in found.values() if run.note)
    if any(not each.observed for each in shown):
        unseen = "forward and backward hold it, where they waited"
        told.append(f"When the communication ended was not observed: {unseen}.")
    left_out = sum(len(run.middle) for run in found.values()) - len(shown)
    if left_out:
        told.append(f"{left_out:,} more ranks are not drawn: these wait least and longest.")
    return told
