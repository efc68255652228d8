"""Every step of a run on every rank at a glance: how long it took, who waited, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.analysis.ddp.step_times import RunSteps, step_times
from dlearn.analysis.findings import time_text
from dlearn.analysis.telling.words import network_sentences
from dlearn.draw import canvas
from dlearn.draw.canvas import draw_boxes, write
from dlearn.draw.palette import BYTE_SHADES, COUNTED, FAINT, INK, MISSING, WAITED_FOR
from dlearn.draw.text import TEXT_PT, plain
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

MOST_COLUMNS = 160
"""Of more steps some share a column, which shows the longest of them."""
_BARS_IN, _GAP_IN, _ROW_IN, _TALLEST_IN = 0.9, 0.22, 0.28, 6.4
_MOST_DOTS = 100
_WORTH_A_DOT = 0.1
"""Share of a step that others waited for a rank."""
_SHADES = LinearSegmentedColormap.from_list("waits", ("#f7fbff", *BYTE_SHADES[1:]))


class Column(NamedTuple):
    """The longest of the steps that share a column, by its place; the first of them, and how many they are."""

    place: int
    first: int
    steps: int


def steps(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a column for each step and a row for each rank, the stronger the longer the rank waited; above, how long
    each step took, on the rank that needed longest.

    A cell has its full shade where the rank waits as long as a step takes in the median; where nobody saw who waited,
    it is as dark as the step was long. Red is a step that a rank never finished: a cross, as it has no length.
    """
    found = step_times(trace)
    columns = columns_of(found)
    labels = [plain(found.labels[rank]) for rank in found.ranks]
    row = min(_ROW_IN, _TALLEST_IN / max(1, len(labels)))
    height = _BARS_IN + _GAP_IN + row * max(1, len(labels))
    ax = ax or canvas.new_axes(height_in=height, left_in=canvas.left_margin_in([*labels, "ms a step"]))
    if not columns:
        return canvas.say_empty(ax, f"{found.finding}.")
    canvas.describe(ax, "A column for each step, a bar as high as it took, and a cell for each rank.")
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(height, 0))
    draw_lengths(ax, found, columns)
    shown = draw_cells(ax, found, columns, row)
    label_axes(ax, found, columns, labels, row)
    told = [*notes(found, columns), *network_sentences(trace)]
    key, red = legend(found, shown), canvas.in_red(trace)
    ax = canvas.frame(ax, title=found.finding, legend=key, notes=told, marked=red)
    for place, patch in enumerate(ax.get_legend().get_patches()):  # type: ignore[union-attr]
        patch.set_gid(f"key of cells {place}")
    return ax


def columns_of(found: RunSteps) -> list[Column]:
    """A column for each step, or for as many as share one, so that there are no more than can be told apart."""
    count = len(found.titles)
    each = -(-count // MOST_COLUMNS) if count else 1
    groups = [range(first, min(first + each, count)) for first in range(0, count, each)]
    # A step that never ended is the longest.
    return [Column(max(group, key=lambda at: found.length_ns(at) or 1 << 62), group[0], len(group)) for group in groups]


def draw_lengths(ax: Axes, found: RunSteps, columns: Sequence[Column]) -> None:
    """Bars from a line upwards, the odd one darker and with its name; dotted, the median of all."""
    lengths = found.lengths_ns
    longest = max(lengths, default=1)
    scale = (_BARS_IN - 0.22) / longest
    bars, faces, endless = [], [], []
    for at, column in enumerate(columns):
        length = found.length_ns(column.place)
        if length is None:
            endless.append(at)
            continue
        box = (at - 0.42, at + 0.42, _BARS_IN - scale * length, _BARS_IN)
        bars.append(box)
        faces.append(INK if column.place == found.odd else COUNTED)
        if column.place == found.odd:
            canvas.write(ax, at, box[2] - 0.09, plain(found.titles[column.place]), ha="center", fontweight="bold")
    draw_boxes(ax, bars, facecolors=faces, edgecolors="none", gid="lengths")
    # A mark on the line, and no bar: it has no length.
    ax.plot(
        endless, [_BARS_IN - 0.06] * len(endless), "x", color=MISSING, markersize=6, markeredgewidth=2,
        zorder=3, gid="never finished",
    )  # fmt: skip
    if lengths:
        middle = _BARS_IN - scale * median(lengths)
        ax.plot(
            [-0.5, len(columns) - 0.5], [middle, middle], color=INK, linewidth=0.8, linestyle="dotted", gid="median"
        )


def draw_cells(ax: Axes, found: RunSteps, columns: Sequence[Column], row: float) -> set[str]:
    """Returns what there is to explain."""
    boxes, faces, shown, shades = [], [], set[str](), found.shades
    rows = {rank: _BARS_IN + _GAP_IN + place * row for place, rank in enumerate(found.ranks)}
    for at, column in enumerate(columns):
        for rank, cell in found.cells[column.place].items():
            boxes.append((at - 0.5, at + 0.5, rows[rank], rows[rank] + row * 0.94))
            faces.append(MISSING if cell.length_ns is None else _SHADES(shades[column.place][rank]))
            shown |= {"missing"} if cell.length_ns is None else set()
    canvas.draw_lanes(ax, [(_BARS_IN + _GAP_IN, _BARS_IN + _GAP_IN + row * len(found.ranks))])
    draw_boxes(ax, boxes, facecolors=faces, edgecolors="none", zorder=1, gid="cells")
    dots = _dots(found, columns, row)
    if dots:
        ax.plot(*zip(*dots, strict=True), "o", color=WAITED_FOR, markersize=3.5, zorder=3, gid="waited for")
        shown |= {"dots"}
    return shown


def _dots(found: RunSteps, columns: Sequence[Column], row: float) -> list[tuple[float, float]]:
    dots = []
    for at, column in enumerate(columns):
        if len(columns) > _MOST_DOTS and column.place != found.told:
            continue
        late, length = found.late[column.place], found.length_ns(column.place)
        waits = late is not None and (not length or late.waited_ns > _WORTH_A_DOT * length)
        for rank in late.ranks if late is not None and waits else ():
            if rank in found.ranks:
                dots.append((float(at), _BARS_IN + _GAP_IN + (found.ranks.index(rank) + 0.47) * row))
    return dots


def label_axes(ax: Axes, found: RunSteps, columns: Sequence[Column], labels: Sequence[str], row: float) -> None:
    """Names where they have room: of many ranks every eighth, and who came late to the step of the title."""
    every = 1 if row * 72 > TEXT_PT else 8
    named: Sequence[int] = range(0, len(labels), every)
    late = found.late[found.told] if found.told is not None else None
    if late is not None and late.ranks[0] in found.ranks:
        own = found.ranks.index(late.ranks[0])
        named = sorted({own} | {place for place in named if abs(place - own) * row * 72 > TEXT_PT or place == own})
    rows = [(_BARS_IN + _GAP_IN + (place + 0.5) * row, labels[place]) for place in named]
    longest = max(found.lengths_ns, default=0)
    ax.set_yticks([*(at for at, _ in rows)], [*(name for _, name in rows)], parse_math=False)
    write(ax, -0.02, _BARS_IN - 0.06, "0", ha="right", transform=ax.get_yaxis_transform(), color=FAINT)
    write(ax, -0.02, 0.22, time_text(longest), ha="right", transform=ax.get_yaxis_transform(), color=FAINT)
    places = range(0, len(columns), max(1, len(columns) // 10))
    ax.set_xticks(list(places), [str(columns[at].first) for at in places])
    canvas.quiet(ax, "step")
    ax.spines["bottom"].set_visible(False)


def legend(found: RunSteps, shown: set[str]) -> list[Artist]:
    handles: list[Artist] = [Line2D([], [], color=INK, linestyle="dotted", linewidth=0.8, label="median")]
    what = "waits" if found.waits_seen else "took"
    whole = ("a median step" if len(found.lengths_ns) > 1 else "the whole step") + ", or more"
    whole = whole if found.waits_seen else "the longest"
    for share in (0.25, 0.5, 1.0):
        label = time_text(round(share * found.full_ns))
        label = f"{what} {label}" if share == 0.25 else f"{label}: {whole}" if share == 1 else label
        handles.append(Patch(facecolor=_SHADES(share), label=label))
    if "dots" in shown:
        handles.append(
            Line2D([], [], color=WAITED_FOR, marker="o", linestyle="", markersize=4, label="the others wait for it")
        )
    if "missing" in shown:
        handles.append(Patch(facecolor=MISSING, label="never finished"))
    return handles


def notes(found: RunSteps, columns: Sequence[Column]) -> list[str]:
    told = [f"{found.longest_sentence}."] if found.longest_sentence else []
    most = max(column.steps for column in columns)
    if most > 1:
        told.append(f"{count_text(len(found.titles), 'step')}: {most} share a column, which shows the longest of them.")
    if len(columns) > _MOST_DOTS:
        told.append("For whom others waited in the other steps stands in analysis.step_times.")
    return told
