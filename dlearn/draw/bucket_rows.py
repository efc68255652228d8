"""DDP's buckets: when each gradient is ready, when its bucket goes, how long it waits, and when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.analysis.ddp.bucket_times import BucketTime, BucketTimes, begins_of, bucket_times
from dlearn.analysis.findings import size_text
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, corners, cut, plain, points, points_per_ms, text_width, write
from dlearn.draw.palette import FAINT, INK, MISSING, WAITING_HATCH, look
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_NAMES_IN, _BAR_IN, _GAP_IN, _HEAD_IN = 0.19, 0.21, 0.1, 0.3
_MOST_ROWS = 24
"""Rows of one backward pass; of more ranks or buckets the first are drawn."""
_EDGE_PT = 8
_BOLDER = 1.12
"""How much wider bold text is."""
_STYLE = look("all_reduce")


def buckets(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw the gradients and buckets of the first backward pass, and of the first with rebuilt buckets below it.

    A row for each bucket on each rank; time in ms from the start of the pass.
    """
    found = bucket_times(trace)
    rows, left_out = _rows(found)
    fit = ax is None
    height = rows[-1].bottom + _GAP_IN if rows else 1.0
    labels = [row.label for row in rows]
    ax = ax or canvas.new_axes(height_in=height, left_in=canvas.left_margin_in(labels))
    if not rows:
        return canvas.say_empty(ax, "This trace holds no backward pass through a DDP model.", fit=fit)
    canvas.describe(
        ax,
        "A row for each bucket on each rank: ticks where gradients become ready, and a bar while the bucket travels.",
    )
    label_axes(ax, rows, height)
    draw_gradients(ax, rows)
    draw_transfers(ax, rows)
    name_gradients(ax, rows)
    title_passes(ax, rows)
    canvas.frame(ax, title=found.finding, legend=legend(rows), notes=notes(found, rows, left_out), fit=fit)
    return ax


@dataclass(frozen=True)
class BucketRow:
    """One bucket on one rank, from `top` to `bottom` in inches: names, then ticks and bar. Times in ms."""

    of: BucketTime
    label: str
    heading: str
    """Above the first row of each pass."""
    top: float
    begin_ns: int

    @property
    def bar(self) -> tuple[float, float]:
        return self.top + _NAMES_IN, self.top + _NAMES_IN + _BAR_IN

    @property
    def bottom(self) -> float:
        return self.bar[1] + 0.03

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
        shown = [each for each in found.examples if each.backward == number]
        left_out += len(shown[_MOST_ROWS:])
        top += _HEAD_IN
        before = -1
        for place, each in enumerate(shown[:_MOST_ROWS]):
            top += _GAP_IN if before not in (-1, each.rank) else 0.0
            before = each.rank
            model = f"model {each.model}, " if any(other.model for other in shown) else ""
            label = plain(f"{found.labels[each.rank]}: {model}bucket {each.index}")
            rows.append(BucketRow(each, label, _heading(shown) if not place else "", top, begins[number]))
            top = rows[-1].bottom
    return rows, left_out


def _heading(shown: Sequence[BucketTime]) -> str:
    """ "step 1: 3 buckets, rebuilt: 101 kB, 10.4 kB, 432 B"."""
    mine = [each for each in shown if each.rank == shown[0].rank]
    built = "as first built" if mine[0].built == "first" else "rebuilt"
    sizes = ", ".join(size_text(each.bytes) for each in mine[:8]) + (", ..." if len(mine) > 8 else "")
    return f"{mine[0].title}: {count_text(len(mine), 'bucket')}, {built}: {sizes}"


def label_axes(ax: Axes, rows: Sequence[BucketRow], height: float) -> None:
    last = max(row.last_ms for row in rows) or 1.0
    # What is stuck lasts longer than anything that was seen.
    ax.set_xlim(-0.005 * last, (1.2 if any(row.of.missing for row in rows) else 1.02) * last)
    ax.set_ylim(height, 0)
    canvas.draw_lanes(ax, [(row.top, row.bottom) for row in rows])
    ax.set_yticks(
        [sum(row.bar) / 2 for row in rows], [row.label for row in rows], parse_math=False, fontsize=TEXT_PT, color=INK
    )
    ax.set_xlabel("ms from the start of the backward pass", fontsize=TEXT_PT, color=INK, labelpad=2)
    canvas.quiet(ax)


def draw_gradients(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """A tick when a gradient is ready; a line from the first one to the launch, for which they wait."""
    ticks: list[list[tuple[float, float]]] = []
    lines: list[list[tuple[float, float]]] = []
    for row in rows:
        top, bottom = row.bar
        times = [row.ms(at) for _, at in row.of.ready]
        ticks += [[(time, top), (time, bottom)] for time in times]
        if times:
            until = row.ms(row.of.launched_ns) if row.of.launched_ns is not None else times[-1]
            lines.append([(times[0], (top + bottom) / 2), (max(until, times[0]), (top + bottom) / 2)])
    ax.add_collection(LineCollection(lines, colors=FAINT, linewidths=0.8, zorder=1, gid="collecting"), autolim=False)
    ax.add_collection(LineCollection(ticks, colors=INK, linewidths=1.1, zorder=3, gid="gradients"), autolim=False)


def draw_transfers(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """From its launch a bucket waits (hatched) for the last rank's, then it travels, or is stuck (red) for ever."""
    waiting: list[list[tuple[float, float]]] = []
    moving: list[list[tuple[float, float]]] = []
    stuck: list[list[tuple[float, float]]] = []
    least = 1.0 / points_per_ms(ax)
    for row in rows:
        of, (top, bottom) = row.of, row.bar
        if of.launched_ns is None:
            continue
        launched = row.ms(of.launched_ns)
        transfer = row.ms(of.transfer_ns) if of.transfer_ns is not None else launched
        if of.missing:
            edge = ax.get_xlim()[1]
            waiting.append(corners(launched, edge, top, bottom))
            stuck.append([(edge, top), (edge, bottom)])
            continue
        if transfer > launched:
            waiting.append(corners(launched, transfer, top, bottom))
        done = row.ms(of.done_ns) if of.done_ns is not None else transfer
        # What lasts less than a point would not be seen; where the end was not observed, the launch is all there is.
        moving.append(corners(transfer, max(done, transfer + least), top, bottom))
    ax.add_collection(
        PolyCollection(
            waiting, facecolor=_STYLE.pale, edgecolor=_STYLE.color, hatch=WAITING_HATCH, linewidth=0.4, zorder=2,
            gid="waiting",
        ),
        autolim=False,
    )  # fmt: skip
    ax.add_collection(
        PolyCollection(moving, facecolor=_STYLE.color, edgecolor="none", zorder=2.1, gid="transfer"), autolim=False
    )
    ax.add_collection(
        LineCollection(stuck, colors=MISSING, linewidths=4, zorder=5, gid="stuck", clip_on=False), autolim=False
    )


def name_gradients(ax: Axes, rows: Sequence[BucketRow]) -> None:
    """Each name begins at its tick; those that would stand on each other follow one another, from the first tick on."""
    scale, left = points_per_ms(ax), ax.get_xlim()[0]
    width = points(ax, 1.0, along="x")
    for row in rows:
        y = row.top + _NAMES_IN * 0.55
        missing = row.of.never_ready
        if missing:
            # Where a gradient is missing, that is what there is to say.
            told = plain(f"never ready: {', '.join(missing)}", most=200)
            write(ax, left + 4 / scale, y, cut(told, width - _EDGE_PT, size=TEXT_PT), zorder=6, clip_on=True)
            continue
        groups: list[tuple[float, str]] = []
        for name, at in row.of.ready:
            x = (row.ms(at) - left) * scale
            if groups and groups[-1][0] + text_width(groups[-1][1], size=TEXT_PT) + 8 > x:
                groups[-1] = groups[-1][0], f"{groups[-1][1]}, {plain(name)}"
            else:
                groups.append((x, plain(name)))
        free = 0.0
        for place, (x, text) in enumerate(groups):
            last = place == len(groups) - 1
            room = width - _EDGE_PT if last else groups[place + 1][0] - 8
            # At the right edge there is room to the left of the tick only.
            x = max(free, min(x, room - text_width(text, size=TEXT_PT))) if last else x
            shown = cut(text, room - x, size=TEXT_PT)
            write(ax, left + x / scale, y, shown, zorder=6, clip_on=True)
            free = x + text_width(shown, size=TEXT_PT) + 8


def title_passes(ax: Axes, rows: Sequence[BucketRow]) -> None:
    width = points(ax, 1.0, along="x")
    for row in rows:
        if row.heading:
            shown = cut(plain(row.heading, most=200), width / _BOLDER, size=TEXT_PT)
            across = ax.get_yaxis_transform()
            write(ax, 0, row.top - 0.05, shown, transform=across, va="bottom", fontweight="bold")


def legend(rows: Sequence[BucketRow]) -> list[Artist]:
    handles: list[Artist] = [
        Line2D([], [], color=INK, marker="|", linestyle="", markersize=7, label="a gradient is ready"),
    ]
    if any(row.of.waited_ns or row.of.missing for row in rows):
        label = "launched, waits for the last rank"
        handles.append(
            Patch(facecolor=_STYLE.pale, edgecolor=_STYLE.color, hatch=WAITING_HATCH, linewidth=0.4, label=label)
        )
    if any(row.of.transfer_ns is not None for row in rows):
        handles.append(Patch(facecolor=_STYLE.color, label="all-reduce of the bucket"))
    if any(row.of.missing for row in rows):
        handles.append(Line2D([], [], color=MISSING, linewidth=4, label="stuck: a rank never sent this bucket"))
    return handles


def notes(found: BucketTimes, rows: Sequence[BucketRow], left_out: int) -> list[str]:
    told = [found.note] if found.note else []
    if any(row.of.launched_ns is not None for row in rows):
        told.append("Which all-reduce carries which bucket is inferred from order, size and readiness.")
    if any(row.of.launched_ns is None for row in rows):
        told.append("A row without a bar: the bucket was not sent in this pass, or nobody knows by which call.")
    if any(row.of.transfer_ns is not None and row.of.done_ns is None for row in rows):
        told.append("Ends that were not seen are not drawn: the bar then shows the launch only.")
    if any(row.of.missing for row in rows):
        told.append("Stuck buckets wait longer than drawn: the axis ends with the last event of the pass.")
    if found.not_told:
        told.append(f"Of {found.not_told:,} all-reduces nobody knows what bucket they carry.")
    if left_out:
        told.append(f"{left_out:,} more rows, of other ranks or buckets, are not drawn.")
    return told
