"""Every step of a run on every rank: how long it took, which rank waited, and for whom."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from dlearn.analysis.ddp.step_times import RunStep, RunSteps, step_times
from dlearn.analysis.telling.explanations import network_sentences
from dlearn.draw import canvas
from dlearn.draw.canvas import Box, Style, draw_boxes, legend_of, write
from dlearn.draw.palette import COUNTED, FAINT, INK, MISSING, TEXT_PT, WAITING_HATCH, plain
from dlearn.shown import count_text, time_text
from dlearn.trace import Trace

FEWEST = 4  # Of fewer steps a timeline has each call.
MOST_COLUMNS = 160  # Of more steps some share a column, which shows the longest of them.
_BARS_IN, _GAP_IN, _ROW_IN, _TALLEST_IN = 0.9, 0.22, 0.28, 6.4
_CELLS_IN = _BARS_IN + _GAP_IN
_MOST_DOTS = 100
_WORTH_A_DOT = 0.25  # Share of a step that others waited for a rank.
_SHADES = LinearSegmentedColormap.from_list("waits", ("#f7f7f7", COUNTED, INK))
_STYLES = {
    "median": Style("median", INK, line="dotted"),
    "waited for": Style("the others wait for it", INK, marker="o"),
    "never finished": Style("never finished", "white", FAINT, WAITING_HATCH),
    "guilty": Style("the others wait for it without end", MISSING),
}


class Column(NamedTuple):
    """The longest of the steps that share a column, and its number; the numbers of all of them."""

    step: RunStep
    place: int
    places: range


@canvas.for_cells
def steps(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a column for each step and a row for each rank, the stronger the longer the rank waited.

    Above, how long each step took, on the rank that needed longest. A cell has its full shade where
    the rank waits as long as a step takes in the median; where no wait was observed, it is as dark
    as the step was long. A step that was never finished has a cross, as it has no length: hatched where a rank waits,
    red where the others wait for it.
    """
    found = step_times(trace)
    columns = _columns(found)
    labels = [plain(found.labels[rank]) for rank in found.ranks]
    row = min(_ROW_IN, _TALLEST_IN / max(1, len(labels)))
    height = _CELLS_IN + row * max(1, len(labels))
    left_in = canvas.left_margin_in([*labels, "ms a step"])
    ax = ax or canvas.new_axes(height_in=height, left_in=left_in)
    if len(columns) < FEWEST:
        few = f"{found.finding}: draw.timeline has each call" if columns else found.finding
        return canvas.draw_message_instead(ax, f"{few}.")
    bars = "a bar as high as it took, and a cell for each rank"
    canvas.describe(ax, f"A column for each step, {bars}.")
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(height, 0))
    _draw_lengths(ax, found, columns)
    _draw_cells(ax, found, columns, row)
    _label_axes(ax, found, columns, row)
    notes = [*_notes(found, columns), *network_sentences(trace)]
    key, red = _legend(ax, found), canvas.in_red(trace)
    ax = canvas.frame(ax, title=found.finding, legend=key, notes=notes, marked=red)
    for place, patch in enumerate(ax.get_legend().get_patches()):  # type: ignore[union-attr]
        patch.set_gid(f"key of cells {place}")
    return ax


def _columns(found: RunSteps) -> list[Column]:
    """Return one for each step, or for as many as share it, so that columns are wide enough."""
    everything, columns = range(len(found.steps)), []
    each = -(-len(everything) // MOST_COLUMNS) or 1
    for first in everything[::each]:
        places = everything[first : first + each]
        longest = max(places, key=lambda place: found.steps[place].order_ns)
        columns.append(Column(found.steps[longest], longest, places))
    return columns


def _draw_lengths(ax: Axes, found: RunSteps, columns: Sequence[Column]) -> None:
    """Draw bars upwards from a line, the odd one darker and with its name; dotted, the median of all."""
    lengths, odd = found.lengths_ns, found.odd
    scale = (_BARS_IN - 0.22) / max(lengths, default=1)
    boxes, faces = [], []
    endless = [at for at, column in enumerate(columns) if column.step.length_ns is None]
    for at, (step, place, _) in enumerate(columns):
        if step.length_ns is None:
            continue
        top = _BARS_IN - scale * step.length_ns
        boxes.append((at - 0.42, at + 0.42, top, _BARS_IN))
        faces.append(INK if place == odd else COUNTED)
        if place == odd:
            write(ax, at, top - 0.09, plain(step.title), ha="center", fontweight="bold")
    draw_boxes(ax, boxes, facecolors=faces, edgecolors="none", gid="lengths")
    if endless:  # A mark on the line, and no bar: it has no length.
        (cross,) = ax.plot(endless, [_BARS_IN - 0.06] * len(endless), "x", color=MISSING, zorder=3)
        cross.set(markersize=6, markeredgewidth=2, gid="endless")
    if lengths:
        middle = _BARS_IN - scale * median(lengths)
        ax.plot(ax.get_xlim(), [middle, middle], ":", color=INK, linewidth=0.8, gid="median")


def _draw_cells(ax: Axes, found: RunSteps, columns: Sequence[Column], row: float) -> None:
    """Draw cells, with dots on the ranks that others waited for, of very many steps only in the reported one."""
    boxes, faces, dots, shades = [], list[Any](), [], found.shades
    waiting, guilty = list[Box](), list[Box]()
    tops = {rank: _CELLS_IN + place * row for place, rank in enumerate(found.ranks)}
    reported = found.reported
    for at, (step, place, _) in enumerate(columns):
        late = () if step.late is None else step.late.ranks
        for rank in {*step.cells} | ({*late} & {*tops} if step.length_ns is None else set()):
            box = (at - 0.5, at + 0.5, tops[rank], tops[rank] + row * 0.94)
            if step.length_ns is None and rank in late:
                guilty.append(box)
            elif step.cells[rank].length_ns is None:
                waiting.append(box)
            else:
                boxes.append(box)
                faces.append(_SHADES(shades[place][rank]))
        least = _WORTH_A_DOT * (step.length_ns or math.inf)
        dotted = len(columns) <= _MOST_DOTS or place == reported
        if dotted and step.late is not None and step.late.waited_ns > least:
            ranks = tops.keys() & step.late.ranks
            dots += [(at, tops[rank] + 0.47 * row) for rank in ranks]
    canvas.draw_lanes(ax, [(_CELLS_IN, _CELLS_IN + row * len(found.ranks))])
    draw_boxes(ax, boxes, facecolors=faces, edgecolors="none", zorder=1, gid="cells")
    for gid, some in {"never finished": waiting, "guilty": guilty}.items():
        if some:
            draw_boxes(ax, some, **_STYLES[gid].of_bar, zorder=1, gid=gid)
    if dots:
        (marks,) = ax.plot(*zip(*dots, strict=True), "o", color=INK, markersize=3.5)
        marks.set(zorder=3, gid="waited for")


def _label_axes(ax: Axes, found: RunSteps, columns: Sequence[Column], row: float) -> None:
    """Write names where they have room: of many ranks every eighth, and the late one of the title."""
    labels = [plain(found.labels[rank]) for rank in found.ranks]
    named = set(range(0, len(labels), 1 if row * 72 > TEXT_PT else 8))
    late = found.steps[found.reported].late if found.reported is not None else None
    if late is not None and late.ranks[0] in found.ranks:
        own = found.ranks.index(late.ranks[0])
        named = {own, *(place for place in named if abs(place - own) * row * 72 > TEXT_PT)}
    heights = {place: _CELLS_IN + (place + 0.5) * row for place in sorted(named)}
    ax.set_yticks([*heights.values()], [labels[place] for place in heights], parse_math=False)
    across = ax.get_yaxis_transform()
    for text, height in (("0", _BARS_IN - 0.06), (time_text(max(found.lengths_ns, default=0)), 0.22)):
        write(ax, -0.02, height, text, ha="right", transform=across, color=FAINT)
    places = range(0, len(columns), max(1, len(columns) // 10))
    ax.set_xticks([*places], [str(columns[at].places[0]) for at in places])
    canvas.quiet(ax, "step")
    ax.spines["bottom"].set_visible(False)


def _legend(ax: Axes, found: RunSteps) -> list[Artist]:
    """Explain three shades of the cells, and the marks."""
    whole = "a median step" if len(found.lengths_ns) > 1 else "the whole step"
    whole = f"{whole}, or more" if found.waits_seen else "the longest"
    quarter, half, full = (time_text(round(share * found.full_ns)) for share in (0.25, 0.5, 1.0))
    what = "waits" if found.waits_seen else "took"
    shades = {0.25: f"{what} {quarter}", 0.5: half, 1.0: f"{full}: {whole}"}
    cells = [Style(label, _SHADES(share)).key() for share, label in shades.items()]
    return cells + legend_of(ax, _STYLES)


def _notes(found: RunSteps, columns: Sequence[Column]) -> list[str]:
    notes = [f"{found.longest_sentence}."] if found.longest_sentence else []
    most = max(len(column.places) for column in columns)
    if most > 1:
        shared = f"{most} share a column, which shows the longest of them"
        notes.append(f"{count_text(len(found.steps), 'step')}: {shared}.")
    if len(columns) > _MOST_DOTS:
        notes.append("For whom others waited in the other steps stands in analysis.step_times.")
    return notes
