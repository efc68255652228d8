"""DDP's buckets: when each gradient is ready, when its bucket is launched, how long it waits, and when it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from msgspec.structs import replace

from dlearn.analysis.ddp.bucket_times import BucketTime, BucketTimes, begins_of, bucket_times
from dlearn.analysis.findings import size_text
from dlearn.analysis.telling.words import network_sentences
from dlearn.draw import canvas
from dlearn.draw.canvas import points, points_per_ms, write
from dlearn.draw.palette import FAINT, INK, MISSING, SERIES, WAITING_HATCH, Look
from dlearn.draw.text import TEXT_PT, cut, plain, text_width
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_HEAD_IN, _NAMES_IN, _ROW_IN, _BAR_IN, _GAP_IN = 0.3, 0.21, 0.2, 0.17, 0.06
_MOST_ROWS = 24
"""Rows of one backward pass; of more buckets the first are drawn."""
_DASHED = (0, (3, 2))
_ALL_RANKS = 4
"""Of more ranks the first and those that come last are drawn."""


def buckets(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw the gradients and buckets of the first backward pass, and of the first with rebuilt buckets below it.

    A row for each rank below each bucket; of many ranks the first and the slowest. Time in ms from the pass's start.
    """
    found = bucket_times(trace)
    rows, left_out = _rows(found)
    height = rows[-1].top + _ROW_IN + _GAP_IN if rows else 1.0
    ax = ax or canvas.new_axes(height_in=height, left_in=canvas.left_margin_in(row.label for row in rows))
    if not rows:
        return canvas.say_empty(ax, "This trace holds no backward pass through a DDP model.")
    canvas.describe(
        ax, "Below each bucket a row for each rank: ticks where gradients become ready, a bar while the bucket travels."
    )
    label_axes(ax, rows, height)
    draw_gradients(ax, rows)
    draw_transfers(ax, rows)
    write_headings(ax, rows)
    told, red = [*notes(found, rows, left_out), *network_sentences(trace)], canvas.in_red(trace)
    return canvas.frame(ax, title=found.finding, legend=legend(rows), notes=told, marked=red)


@dataclass(frozen=True)
class BucketRow:
    """One bucket on one rank, `top` inches from the top; above it the headings of its pass and bucket, if it has any.

    Times in ms.
    """

    of: BucketTime
    label: str
    top: float
    begin_ns: int
    look: Look
    of_pass: str = ""
    of_bucket: str = ""

    @property
    def middle(self) -> float:
        return self.top + _ROW_IN / 2

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e6

    @property
    def last_ms(self) -> float:
        times = [at for _, at in self.of.ready] + [self.of.launched_ns, self.of.transfer_ns, self.of.done_ns]
        return max((self.ms(at) for at in times if at is not None), default=0.0)


def _rows(found: BucketTimes) -> tuple[list[BucketRow], int]:
    """From the top, and how many are left out."""
    rows: list[BucketRow] = []
    begins = begins_of(found.examples)
    top, left_out = 0.0, 0
    for number in sorted(begins):
        all_ranks = [each for each in found.examples if each.backward == number]
        all_ranks += _never_begun(all_ranks)
        ranks = ranks_shown(all_ranks)
        shown = [each for each in all_ranks if each.rank in ranks]
        shown.sort(key=lambda each: (each.model, each.index, each.rank))
        shown = shown[:_MOST_ROWS]
        left_out += len(all_ranks) - len(shown)
        top += _HEAD_IN
        for place, each in enumerate(shown):
            bucket, before = (each.model, each.index), shown[place - 1]
            new = not place or bucket != (before.model, before.index)
            top += _NAMES_IN + _GAP_IN if new else 0.0
            style = Look("", SERIES[each.index % len(SERIES)])
            of_pass = _pass_text(all_ranks) if not place else ""
            of_bucket = _bucket_text(each, several_models=shown[-1].model > 0) if new else ""
            label = plain(found.labels[each.rank])
            rows.append(BucketRow(each, label, top, begins[number], style, of_pass, of_bucket))
            top += _ROW_IN
    return rows, left_out


def _never_begun(shown: Sequence[BucketTime]) -> list[BucketTime]:
    """Make an empty row for each rank that others wait for in a pass that it never began."""
    here = {each.rank for each in shown}
    rows = {(each.model, each.index): each for each in shown if each.missing}
    empty = {"missing": (), "launched_ns": None, "transfer_ns": None, "done_ns": None}
    return [
        replace(each, rank=rank, ready=(), never_ready=each.parameters, **empty)
        for each in rows.values()
        for rank in {*each.missing} - here
    ]


def ranks_shown(shown: Sequence[BucketTime]) -> set[int]:
    """All; of many the first, those that wait for a bucket or lack one for ever, and those that others wait for."""
    ranks = sorted({each.rank for each in shown})
    if len(ranks) <= _ALL_RANKS:
        return set(ranks)
    missing = [rank for each in shown for rank in each.missing]
    late = Counter(each.last_rank for each in shown if each.last_rank is not None and each.waited_ns)
    return {*ranks[:1], *missing[:1], *(rank for rank, _ in late.most_common(2))}


def _pass_text(shown: Sequence[BucketTime]) -> str:
    """ "step 1: 3 buckets, rebuilt"."""
    mine = [each for each in shown if each.rank == shown[0].rank]
    built = "as first built" if mine[0].built == "first" else "rebuilt in the order in which gradients came"
    return f"{mine[0].title}: {count_text(len(mine), 'bucket')}, {built}"


def _bucket_text(each: BucketTime, *, several_models: bool) -> str:
    """ "bucket 0, 101 kB: fc2.bias, fc2.weight"; names in the order of their ticks, on the first rank."""
    model = f"model {each.model}, " if several_models else ""
    names = [name for name, _ in each.ready] or each.parameters
    return f"{model}bucket {each.index}, {size_text(each.bytes)}: {', '.join(names)}"


def label_axes(ax: Axes, rows: Sequence[BucketRow], height: float) -> None:
    last = max(row.last_ms for row in rows) or 1.0
    # What is stuck lasts longer than anything that was seen.
    ax.set(xlim=(-0.005 * last, (1.2 if any(row.of.missing for row in rows) else 1.02) * last), ylim=(height, 0))
    canvas.draw_lanes(ax, [(row.top, row.top + _ROW_IN) for row in rows])
    canvas.name_rows(ax, [row.middle for row in rows], [row.label for row in rows])
    canvas.quiet(ax, "ms from the start of the backward pass")


def draw_gradients(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """A tick when a gradient is ready; a line from the first one to the launch, for which they wait."""
    for row in rows:
        times = [row.ms(at) for _, at in row.of.ready]
        ends = row.middle - _BAR_IN / 2, row.middle + _BAR_IN / 2
        ax.vlines(times, *ends, colors=INK, linewidth=1.1, zorder=3, gid="gradients")
        if times:
            until = row.ms(row.of.launched_ns) if row.of.launched_ns is not None else times[-1]
            ax.hlines(row.middle, times[0], max(until, times[0]), colors=FAINT, linewidth=0.8, zorder=1)


def draw_transfers(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """From its launch a bucket waits (hatched) for the last rank's, then it travels, or is stuck (red) for ever."""
    edge, least = ax.get_xlim()[1], 1.0 / points_per_ms(ax)
    for row in rows:
        of = row.of
        if of.launched_ns is None:
            if of.never_ready and any(of.rank in other.of.missing for other in rows):
                box = (row.last_ms, edge, row.middle - _BAR_IN / 2, row.middle + _BAR_IN / 2)
                style = {"facecolor": "none", "edgecolor": MISSING, "linestyle": _DASHED}
                canvas.draw_boxes(ax, [box], gid="absent", **style)
            continue
        launched = row.ms(of.launched_ns)
        transfer = row.ms(of.transfer_ns) if of.transfer_ns is not None else launched
        until = edge if of.missing else transfer
        if until > launched:
            _bar(ax, row, launched, until, "waiting")
        if of.missing:
            ends = row.middle - _BAR_IN / 2, row.middle + _BAR_IN / 2
            ax.vlines(edge, *ends, colors=MISSING, linewidth=4, zorder=5, gid="stuck", clip_on=False)
            continue
        done = row.ms(of.done_ns) if of.done_ns is not None else transfer
        # What lasts less than a point would not be seen; where the end was not observed, the launch is all there is.
        _bar(ax, row, transfer, max(done, transfer + least), "transfer")


def _bar(ax: Axes, row: BucketRow, left: float, right: float, what: str) -> None:
    waits = what == "waiting"
    ax.barh(
        row.middle, right - left, left=left, height=_BAR_IN, color=row.look.pale if waits else row.look.color,
        edgecolor=row.look.color, linewidth=0.4, hatch=WAITING_HATCH if waits else "", zorder=2, gid=what,
    )  # fmt: skip


def write_headings(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """Of each pass, of each bucket with the names of its gradients, and what of these never came on a rank."""
    width, scale = points(ax, 1.0, along="x"), points_per_ms(ax)
    across = ax.get_yaxis_transform()
    for row in rows:
        if row.of_pass:
            shown = cut(plain(row.of_pass, most=200), width, size=TEXT_PT, bold=True)
            write(ax, 0, row.top - _NAMES_IN - 0.04, shown, transform=across, va="bottom", fontweight="bold")
        if row.of_bucket:
            shown = cut(plain(row.of_bucket, most=200), width - 12, size=TEXT_PT)
            write(ax, 0.003, row.top - _NAMES_IN / 2, shown, transform=across)
        if row.of.never_ready:
            told = plain(f"never ready: {', '.join(row.of.never_ready)}", most=200)
            after = (row.last_ms - ax.get_xlim()[0]) * scale + 6
            x = min(after, max(0.0, width - text_width(told, size=TEXT_PT)))
            shown = cut(told, width - x, size=TEXT_PT)
            at = ax.get_xlim()[0] + x / scale
            write(ax, at, row.middle, shown, zorder=6, clip_on=True, color=MISSING)


def legend(rows: Sequence[BucketRow]) -> list[Artist]:
    ready = Line2D([], [], color=INK, marker="|", linestyle="", markersize=7, label="a gradient is ready")
    handles: list[Artist] = [ready]
    if any(len(row.of.ready) > 1 for row in rows):
        handles.append(Line2D([], [], color=FAINT, linewidth=0.8, label="gradients wait for their bucket"))
    first = rows[0].look
    if any(row.of.waited_ns or row.of.missing for row in rows):
        label = "launched, waits for the last rank"
        handles.append(
            Patch(facecolor=first.pale, edgecolor=first.color, hatch=WAITING_HATCH, linewidth=0.4, label=label)
        )
    if any(row.of.transfer_ns is not None for row in rows):
        handles.append(Patch(facecolor=first.color, label="all-reduce; a colour for each bucket"))
    if any(row.of.missing for row in rows):
        handles.append(Line2D([], [], color=MISSING, linewidth=4, label="stuck: a rank never sent this bucket"))
        handles.append(Line2D([], [], color=MISSING, linestyle=_DASHED, label="that rank"))
    return handles


def notes(found: BucketTimes, rows: Sequence[BucketRow], left_out: int) -> list[str]:
    told = [found.note] if found.note else []
    if any(row.of.launched_ns is not None for row in rows):
        told.append("Which all-reduce carries which bucket is inferred from order, size and readiness.")
    if any(row.of.launched_ns is None and not row.of.never_ready for row in rows):
        told.append("A row without a bar: the bucket was not sent in this pass, or nobody knows by which call.")
    if any(row.of.transfer_ns is not None and row.of.done_ns is None for row in rows):
        told.append("Ends that were not seen are not drawn: the bar then shows the launch only.")
    if any(row.of.missing for row in rows):
        told.append("Stuck buckets wait longer than drawn: the axis ends with the last event of the pass.")
    if found.not_told:
        told.append(f"Of {found.not_told:,} all-reduces nobody knows what bucket they carry.")
    if left_out:
        told.append(f"{left_out:,} more rows are not drawn: of many ranks only the first and those that come last are.")
    return told
