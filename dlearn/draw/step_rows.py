"""DDP's steps over time: when gradients are ready and buckets travel, and the parts of a step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from msgspec.structs import replace

from dlearn.analysis.ddp.breakdown import Breakdown
from dlearn.analysis.ddp.breakdown import breakdown as parts_of
from dlearn.analysis.ddp.bucket_times import BucketTime, BucketTimes, begins_of, bucket_times
from dlearn.analysis.ddp.training_steps import Phase, TrainingStep
from dlearn.analysis.findings import hang_finding
from dlearn.analysis.telling.explanations import network_sentences
from dlearn.draw import canvas, palette
from dlearn.draw.canvas import Style, legend_of, points, points_per_ms, write
from dlearn.draw.palette import FAINT, INK, MISSING, WAITING_HATCH, cut, plain, text_width
from dlearn.draw.timeline_model import brief_name
from dlearn.shown import count_text, size_text, time_text
from dlearn.trace import Trace

_HEAD_IN, _NAMES_IN, _ROW_IN, _BAR_IN, _GAP_IN = 0.3, 0.21, 0.2, 0.17, 0.06
_MOST_ROWS = 24  # Rows of one backward pass; of more buckets the first are drawn.
_DASHED: palette.Line = (0, (3, 2))
_ALL_RANKS = 4
_OF_MANY = "of many ranks only the first and those that come last are"
_RUN_HEAD_IN, _STEP_BAR_IN, _HIDDEN_IN, _STEP_GAP_IN = 0.24, 0.28, 0.09, 0.13
_MOST_BARS = 8
_SENT = palette.look("all_reduce")
_STYLES: dict[Phase, Style] = {
    "forward": Style("forward", palette.FORWARD, FAINT),
    "backward": Style("backward", palette.BACKWARD, FAINT),
    "waiting": Style("waits for the last rank", _SENT.pale, _SENT.color, WAITING_HATCH),
    "transfer": Style("transfer", _SENT.color, _SENT.color),
    "optimizer": Style("optimizer", palette.OPTIMIZER, FAINT),
    "between": Style("other work, between the phases", "white", FAINT),
    "hidden": Style("communication hidden behind the backward pass", _SENT.pale, _SENT.color),
}
_BRIEF: dict[Phase, str] = {"waiting": "waits", "between": "other"}


@dataclass(frozen=True)
class TimeRow:
    """A row of bars, its middle in inches from the top; its time begins at `begin_ns`."""

    label: str
    middle: float
    begin_ns: int

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e6


def _label_axes(ax: Axes, rows: Sequence[TimeRow], begin: str) -> None:
    middles = [row.middle for row in rows]
    canvas.name_rows(ax, middles, [row.label for row in rows])
    canvas.quiet(ax, f"ms from {begin}")


@dataclass(frozen=True)
class BucketRow(TimeRow):
    """One bucket on one rank."""

    of: BucketTime

    @property
    def ends(self) -> tuple[float, float]:
        return self.middle - _BAR_IN / 2, self.middle + _BAR_IN / 2

    @property
    def last_ms(self) -> float:
        seen = [self.of.launched_ns, self.of.last_arrival_ns, self.of.done_ns]
        seen += [at for _, at in self.of.ready]
        return max((self.ms(at) for at in seen if at is not None), default=0.0)


@canvas.for_cells
def buckets(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw gradients and buckets of the first backward pass that sends, and of one after a rebuild.

    A row for each rank below each bucket; of many the first and the slowest. In ms from its start.
    """
    found = bucket_times(trace)
    told = {one.backward for one in found.items if one.launched_ns is not None or one.never_ready}
    kept = tuple(one for one in found.items if one.backward in told)  # None inside no_sync.
    found = replace(found, items=kept or found.items)
    rows, headings, left_out = _place(found)
    height = rows[-1].middle + _ROW_IN / 2 + _GAP_IN if rows else 1.0
    left_in = canvas.left_margin_in(row.label for row in rows)
    ax = ax or canvas.new_axes(height_in=height, left_in=left_in)
    if not rows:
        return canvas.draw_message_instead(ax, "This trace holds no backward pass through a DDP model.")
    ticks = "ticks where gradients become ready, a bar while the bucket travels"
    canvas.describe(ax, f"Below each bucket a row for each rank: {ticks}.")
    absent = {rank for row in rows for rank in row.of.missing}
    last = max(row.last_ms for row in rows) or 1.0
    # What is stuck lasts longer than anything that was seen.
    last_ms = (1.2 if absent else 1.02) * last
    ax.set(xlim=(-0.005 * last, last_ms), ylim=(height, 0))
    _label_axes(ax, rows, "the start of the backward pass")
    canvas.draw_lanes(ax, [(row.middle - _ROW_IN / 2, row.middle + _ROW_IN / 2) for row in rows])
    width, across = points(ax, 1.0, along="x"), ax.get_yaxis_transform()
    for at, text, weight in headings:
        shown = cut(plain(text, most=200), width - 12, bold=weight == "bold")
        write(ax, 0.003, at, shown, transform=across, fontweight=weight)
    for row in rows:
        _draw_gradients(ax, row)
        _draw_transfer(ax, row)
        if row.of.never_ready:
            _draw_never_ready(ax, row, waited_for=row.of.rank in absent)
    notes = [*_bucket_notes(found, rows, left_out), *network_sentences(trace)]
    key, red = legend_of(ax, _bucket_styles(rows[0].of)), canvas.in_red(trace)
    return canvas.frame(ax, title=found.finding, legend=key, notes=notes, marked=red)


def _bucket_styles(bucket: BucketTime) -> dict[str, Style]:
    look = palette.Look("", palette.SERIES[bucket.index % len(palette.SERIES)])
    waits, travels = "launched, waits for the last rank", "all-reduce; a colour for each bucket"
    return {
        "gradients": Style("a gradient is ready", INK, marker="|"),
        "gathering": Style("gradients wait for their bucket", FAINT, line="solid"),
        "waiting": Style(waits, look.pale, look.color, WAITING_HATCH),
        "transfer": Style(travels, look.color, look.color),
        "stuck": Style("stuck: a rank never sent this bucket", MISSING, line="solid"),
        "absent": Style("that rank", MISSING, line=_DASHED),
    }


def _place(found: BucketTimes) -> tuple[list[BucketRow], list[tuple[float, str, str]], int]:
    """Return rows; heights, texts and weights of headings; and count the rows that are left out."""
    rows: list[BucketRow] = []
    headings: list[tuple[float, str, str]] = []
    top, left_out = 0.0, 0
    for number, begin_ns in sorted(begins_of(found.examples).items()):
        all_ranks = [each for each in found.examples if each.backward == number]
        all_ranks += _never_begun(all_ranks)
        ranks = _ranks_shown(all_ranks)
        shown = [each for each in all_ranks if each.rank in ranks]
        shown.sort(key=lambda each: (each.model, each.index, each.rank))
        shown = shown[:_MOST_ROWS]
        left_out += len(all_ranks) - len(shown)
        top += _HEAD_IN
        headings.append((top + _GAP_IN - 0.12, _pass_text(all_ranks), "bold"))
        for _, of_bucket in groupby(shown, key=lambda each: (each.model, each.index)):
            same = list(of_bucket)
            top += _NAMES_IN + _GAP_IN
            model = f"model {same[0].model}, " if shown[-1].model else ""
            headings.append((top - _NAMES_IN / 2, model + _bucket_text(same[0]), "normal"))
            for each in same:
                label = plain(found.labels[each.rank])
                rows.append(BucketRow(label, top + _ROW_IN / 2, begin_ns, each))
                top += _ROW_IN
    return rows, headings, left_out


def _never_begun(shown: Sequence[BucketTime]) -> list[BucketTime]:
    """Make an empty row for each rank that others wait for in a pass that it never began."""
    here = {each.rank for each in shown}
    stuck = {(each.model, each.index): each for each in shown if each.missing}
    empty = {"missing": (), "launched_ns": None, "last_arrival_ns": None, "done_ns": None}
    return [
        replace(each, rank=rank, ready=(), never_ready=each.parameters, **empty)
        for each in stuck.values()
        for rank in {*each.missing} - here
    ]


def _ranks_shown(shown: Sequence[BucketTime]) -> set[int]:
    """Return all; of many the first, those that lack a bucket, and those that others wait for longest."""
    ranks = sorted({each.rank for each in shown})
    if len(ranks) <= _ALL_RANKS:
        return set(ranks)
    missing = [rank for each in shown for rank in each.missing]
    late = Counter(each.last_rank for each in shown if each.waited_ns)
    slowest = [rank for rank, _ in late.most_common(2) if rank is not None]
    return {*ranks[:1], *missing[:1], *slowest}


def _pass_text(shown: Sequence[BucketTime]) -> str:
    """Return "step 1: 3 buckets, rebuilt as gradients came"."""
    mine = [each for each in shown if each.rank == shown[0].rank]
    built = "as first built" if mine[0].built == "first" else "rebuilt as gradients came"
    return f"{mine[0].title}: {count_text(len(mine), 'bucket')}, {built}"


def _bucket_text(each: BucketTime) -> str:
    """Return "bucket 0, 101 kB: fc2.bias, fc2.weight"; names in the order of their ticks."""
    names = [name for name, _ in each.ready] or each.parameters
    return f"bucket {each.index}, {size_text(each.bytes)}: {', '.join(names)}"


def _draw_gradients(ax: Axes, row: BucketRow) -> None:
    """Draw a tick when a gradient is ready; a line from the first to the launch, for which they wait."""
    times = [row.ms(at) for _, at in row.of.ready]
    if times:
        ax.vlines(times, *row.ends, INK, linewidth=1.1, zorder=3, gid="gradients")
        until = max(times[0], row.ms(row.of.launched_ns or row.of.ready[-1][1]))
        ax.hlines(row.middle, times[0], until, FAINT, linewidth=0.8, zorder=1, gid="gathering")


def _draw_transfer(ax: Axes, row: BucketRow) -> None:
    """Draw how a bucket waits for the last rank's from its launch, then travels, or is stuck for ever."""
    of, styles, edge = row.of, _bucket_styles(row.of), ax.get_xlim()[1]
    if of.launched_ns is None:
        return
    launched, transfer = row.ms(of.launched_ns), row.ms(of.last_arrival_ns or of.launched_ns)
    # What lasts less than a point would not be seen; an end that was not observed is none.
    done = max(transfer + 1.0 / points_per_ms(ax), row.ms(of.done_ns or of.launched_ns))
    bars = [("waiting", launched, transfer), ("transfer", transfer, done)]
    if of.missing:
        bars = [("waiting", launched, edge)]
        ax.vlines(edge, *row.ends, MISSING, linewidth=4, zorder=5, gid="stuck", clip_on=False)
    for what, left, right in bars:
        if left < right:
            ax.barh(row.middle, right - left, _BAR_IN, left, **styles[what].of_bar, zorder=2, gid=what)


def _draw_never_ready(ax: Axes, row: BucketRow, *, waited_for: bool) -> None:
    """Write the names of the gradients that never came; draw a box where others wait for the bucket."""
    if waited_for and row.of.launched_ns is None:
        box = (row.last_ms, ax.get_xlim()[1], *row.ends)
        canvas.draw_boxes(ax, [box], facecolor="none", edgecolor=MISSING, linestyle=_DASHED, gid="absent")
    width, scale, begin = points(ax, 1.0, along="x"), points_per_ms(ax), ax.get_xlim()[0]
    text = plain(f"never ready: {', '.join(row.of.never_ready)}", most=200)
    room = max(0.0, width - text_width(text))
    x = min((row.last_ms - begin) * scale + 6, room)
    shown = cut(text, width - x)
    write(ax, begin + x / scale, row.middle, shown, zorder=6, clip_on=True, color=MISSING)


def _bucket_notes(found: BucketTimes, rows: Sequence[BucketRow], left_out: int) -> list[str]:
    of = [row.of for row in rows]
    sent = [each for each in of if each.launched_ns is not None]
    unsent = [each for each in of if each.launched_ns is None and not each.never_ready]
    unseen = [each for each in sent if each.last_arrival_ns is not None and each.done_ns is None]
    stuck = [each for each in of if each.missing]
    until = "the axis ends with the last event of the pass"
    unknown = "the bucket was not sent in this pass, or by a call that is not known"
    notes: dict[str, object] = {
        found.note: found.note,
        "Which all-reduce carries which bucket is inferred from order, size and readiness.": sent,
        f"A row without a bar: {unknown}.": unsent,
        "Ends that were not seen are not drawn: the bar then shows the launch only.": unseen,
        f"Stuck buckets wait longer than drawn: {until}.": stuck,
        f"Of {found.unknown_calls:,} all-reduces the bucket is not known.": found.unknown_calls,
        f"{left_out:,} more rows are not drawn: {_OF_MANY}.": left_out,
    }
    return [note for note, holds in notes.items() if holds]


@dataclass(frozen=True)
class StepBar(TimeRow):
    """One rank's step; its time begins when the first rank of its run began."""

    of: TrainingStep

    @property
    def bottom(self) -> float:
        """Return the bottom of its bar and the strip of what is hidden."""
        return self.middle + _STEP_BAR_IN / 2 + _HIDDEN_IN


@canvas.for_cells
def breakdown(traces: Trace | Mapping[str, Trace], *, ax: Axes | None = None) -> Axes:
    """Draw the step of median length: forward, backward, communication not hidden, optimizer.

    A bar per rank, in ms from when the first rank began; the thin strip below it is communication
    that is hidden. Several traces, by name, stand below each other on one scale.
    """
    runs = {"": traces} if isinstance(traces, Trace) else traces
    found = {name: parts_of(trace) for name, trace in runs.items()}
    labels = [_label(each, name, run) for name, run in found.items() for each in run.middle]
    left_in = canvas.left_margin_in(labels)
    blocks, height = _blocks(found)
    bars = [bar for block in blocks for bar in block]
    ax = ax or canvas.new_axes(height_in=height if bars else 1.0, left_in=left_in)
    if not bars:
        return canvas.draw_message_instead(ax, "This trace holds no training step of a DDP model.")
    canvas.describe(ax, *(f"{bar.label}: {_sums(bar.of)}." for bar in bars))
    last_ms = 1.01 * max(bar.ms(bar.of.end_ns) for bar in bars)
    ax.set(xlim=(0, last_ms), ylim=(height, 0))
    _label_axes(ax, bars, "when the first rank's step began")
    for bar in bars:
        _draw_parts(ax, bar)
    for block, run in zip(blocks, found.values(), strict=True):
        _mark_last_rank(ax, block, run)
    named = {text.get_gid() for text in ax.texts}
    title, notes = _step_title(found), _step_notes(found, [bar.of for bar in bars])
    hang = next(filter(None, map(hang_finding, runs.values())), "")
    if hang:
        title, notes = f"Before the hang: {title[0].lower()}{title[1:]}", [f"{hang}.", *notes]
    return canvas.frame(ax, title=title, legend=legend_of(ax, _STYLES, named), notes=notes)


def _blocks(found: Mapping[str, Breakdown]) -> tuple[list[list[StepBar]], float]:
    """Return the bars of each run, of many ranks those that wait least and longest; and their height."""
    blocks: list[list[StepBar]] = []
    top, most = 0.0, max(2, _MOST_BARS // max(1, len(found)))
    for name, run in found.items():
        steps = sorted(run.middle, key=lambda each: each.length_ns("waiting"))
        if len(steps) > most:
            steps = steps[: most // 2] + steps[-(most // 2) :]
        begin_ns = min((each.start_ns for each in run.middle), default=0)
        blocks.append([])
        top += _RUN_HEAD_IN
        for each in sorted(steps, key=lambda each: each.rank):
            label = _label(each, name, run)
            blocks[-1].append(StepBar(label, top + _STEP_BAR_IN / 2, begin_ns, each))
            top += _STEP_BAR_IN + _HIDDEN_IN + _STEP_GAP_IN
    return blocks, top


def _label(each: TrainingStep, name: str, run: Breakdown) -> str:
    label = run.labels[each.rank]
    return plain(f"{name}: {label}" if name else label)


def _step_title(found: Mapping[str, Breakdown]) -> str:
    """Say how the median step of one run was spent; of several, what of each is not hidden."""
    if len(found) == 1:
        return next(iter(found.values())).headline
    shares = {name: run.exposed for name, run in found.items()}
    percent = {name: "not observed" if it is None else f"{it:.0%}" for name, it in shares.items()}
    each = ", ".join(f"{name} {share}" for name, share in percent.items())
    return f"Communication that is not hidden: {each}"


def _sums(each: TrainingStep) -> str:
    """Return "forward 1.2 ms, backward 8 ms, waits 2 ms"; a name stays with its number."""
    lengths = {_BRIEF.get(phase, phase): each.length_ns(phase) for phase in _STYLES}
    return ", ".join(f"{name}\u00a0{time_text(ns)}" for name, ns in lengths.items() if ns)


def _draw_parts(ax: Axes, bar: StepBar) -> None:
    """Draw the parts where they happened, with names and times where these fit."""
    for part in bar.of.parts:
        style, name = _STYLES[part.phase], _BRIEF.get(part.phase, part.phase)
        left = bar.ms(part.start_ns)
        width, middle, height = bar.ms(part.end_ns) - left, bar.middle, _STEP_BAR_IN
        if part.phase == "hidden":
            middle, height = bar.bottom - _HIDDEN_IN / 2, _HIDDEN_IN
        ax.barh(middle, width, height, left, **style.of_bar, zorder=2, gid=part.phase)
        room = width * points_per_ms(ax) - 6
        texts = f"{name} {time_text(part.end_ns - part.start_ns)}", name
        text = next((each for each in texts if text_width(each) <= room), "")
        if text and part.phase not in ("between", "hidden"):
            ink = palette.ink_on(style.color)
            at = left + width / 2, middle
            write(ax, *at, text, on=style.color, ha="center", color=ink, zorder=4, gid=part.phase)


def _mark_last_rank(ax: Axes, bars: Sequence[StepBar], run: Breakdown) -> None:
    """Draw a line through all ranks where the longest wait ended: the last rank has come."""
    parts = [part for bar in bars for part in bar.of.parts if part.awaited is not None]
    longest = max(parts, key=lambda part: part.end_ns - part.start_ns, default=None)
    if longest is None or longest.awaited is None:
        return
    at, where = bars[0].ms(longest.end_ns), brief_name(longest.awaited)
    tops = [bar.middle - _STEP_BAR_IN / 2 - 0.05 for bar in bars]
    bottoms = [bar.bottom for bar in bars]
    ax.vlines([at] * len(bars), tops, bottoms, INK, linewidth=1.4, zorder=3, gid="last rank")
    share = at / ax.get_xlim()[1]
    ranks = longest.awaited.last_ranks
    name, has = plain(run.labels.together(ranks)), "has" if len(ranks) == 1 else "have"
    wide = points(ax, max(share, 1 - share), along="x")
    text = f"the longest wait ends: {name} {has} come to {where}"
    if text_width(text) > wide:
        text = cut(f"{name} {has} come", wide)
    align = "left" if share < 0.5 else "right"
    write(ax, at, tops[0], text, ha=align, va="bottom", gid="last rank")


def _step_notes(found: Mapping[str, Breakdown], shown: Sequence[TrainingStep]) -> list[str]:
    notes = []
    if any(len({each.number for each in run.items}) > 1 for run in found.values()):
        notes.append("The step of median length; shares are of all ranks' time together.")
    if len(found) == 1:
        notes += [f"In all: {run.shares_text}." for run in found.values()]
    notes += dict.fromkeys(run.note for run in found.values() if run.note)
    if any(not each.observed for each in shown):
        unseen = "forward and backward hold it, where they waited"
        notes.append(f"When the communication ended was not observed: {unseen}.")
    left_out = sum(len(run.middle) for run in found.values()) - len(shown)
    if left_out:
        notes.append(f"{left_out:,} more ranks are not drawn: these wait least and longest.")
    return notes
