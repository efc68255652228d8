"""What all pictures share: new axes, text that no name can break, and the frame of title, legend and notes."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from itertools import compress
from typing import Any, Literal, NamedTuple, ParamSpec

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.transforms import ScaledTranslation

from dlearn.diagnosis.hang_detection import hangs
from dlearn.diagnosis.roots import roots
from dlearn.draw import palette
from dlearn.draw.palette import FAINT, INK, TEXT_PT, TITLE_PT, Color, cut_names, plain, text_width, wrap
from dlearn.draw.save import Drawing, figure_of, finding_of
from dlearn.trace import Trace

WIDTH_IN = 9.0
_SMALL_IN = 400 / 96
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # Left, right, top, bottom.
_Given = ParamSpec("_Given")
_width_in = ContextVar("inches that a new figure is wide", default=WIDTH_IN)
width_in = _width_in.get
MOST_PROBLEMS = 2  # Problems in the notes below a picture; the others are counted.
_POINTS = 72
_NARROWEST_NAME_PT = 90.0
_LINE = 1.45  # Inches of text lines: font size times this.


@contextmanager
def small() -> Iterator[None]:
    """Lay out what is drawn in this block for a column of 400 px, with text as large as in any drawing."""
    before = _width_in.set(_SMALL_IN)
    try:
        yield
    finally:
        _width_in.reset(before)


def for_cells(picture: Callable[_Given, Axes]) -> Callable[_Given, Axes]:
    """Let a notebook show a new drawing of this function for a column, too, where its cell is narrow."""

    @wraps(picture)
    def drawn(*given: _Given.args, **options: _Given.kwargs) -> Axes:
        ax = picture(*given, **options)
        figure = figure_of(ax)
        if isinstance(figure, Drawing) and options.get("ax") is None and width_in() == WIDTH_IN:
            figure.narrow = partial(small()(picture), *given, **options)
            figure.titled = finding_of(figure)
        return ax

    return drawn


class _Axes(Axes):
    def __repr__(self) -> str:
        return f"<Axes: {' '.join(self.get_title(loc='left').split())}>"  # and not its description


def new_axes(*, height_in: float, left_in: float, right_in: float = 0.15) -> Axes:
    """Make axes of this height, on a figure of their own that a notebook shows once, at the end of the cell."""
    whole = width_in()
    figure = plt.figure(FigureClass=Drawing, figsize=(whole, height_in), dpi=120, facecolor="white")
    box = (left_in / whole, 0.0, (whole - left_in - right_in) / whole, 1.0)
    return figure.add_axes(box, axes_class=_Axes, facecolor="white")


def points_wide(ax: Axes | None, *, left_in: float, right_in: float = 0.15) -> float:
    """Return how wide these axes are, or those that `new_axes` would make."""
    return (width_in() - left_in - right_in) * _POINTS if ax is None else points(ax, 1.0, along="x")


def frame(
    ax: Axes, *, title: str, legend: Sequence[Artist] = (), notes: Sequence[str] = (),
    above_in: float = 0.0, below_in: float = 0.42, marked: Mapping[str, Color] | None = None,
) -> Axes:  # fmt: skip
    """Put the finding above, legend and notes below; `above_in` and `below_in` are what the axes' own labels take.

    Legend and notes become part of the description. A figure of `new_axes` grows by them, any other
    keeps its size. Names that are `marked` become bold, in these colours, and those in the title.
    """
    names = [*ax.get_xticklabels(), *ax.get_yticklabels()]
    marked = said(title, (name.get_text() for name in names)) | dict(marked or {})
    for text in [*names, *ax.texts]:
        if text.get_text() in marked:
            text.set(color=marked[text.get_text()], fontweight="bold")
    figure = figure_of(ax)
    grows = figure if isinstance(figure, Drawing) and not figure.framed else None
    left, width = 0.0, points(ax, 1.0, along="x")
    if grows:  # From the left edge of the figure.
        box = ax.get_position()
        figure_pt = width / box.width
        left, width = -(figure_pt * box.x0 - 8), figure_pt - 16
    lines = wrap(plain(title, most=400), width, size=TITLE_PT, bold=True)
    style: dict[str, Any] = {"fontsize": TITLE_PT, "fontweight": "bold", "color": INK, "parse_math": False}
    ax.set_title("\n".join(lines), loc="left", x=left / points(ax, 1.0, along="x"), **style)
    below = below_in + (_legend(ax, legend, left, width, below_in) if legend else 0)
    for line in [part for note in notes for part in wrap(plain(note, most=400), width)]:
        style = {"fontsize": TEXT_PT, "color": INK, "parse_math": False, "annotation_clip": False, "gid": "note"}
        style |= {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
        ax.annotate(line, (0, 0), (left, -below * _POINTS), **style)
        below += TEXT_PT * _LINE / _POINTS
    key = [f"Legend: {'; '.join(str(handle.get_label()) for handle in legend)}."] if legend else []
    describe(ax, str(ax.get_label()), *key, *notes)
    if grows:
        grows.framed = True
        # By what stands above and below the axes, which keep their own size.
        height, box = grows.get_figheight(), ax.get_position()
        whole = height + above_in + len(lines) * TITLE_PT * _LINE / _POINTS + 0.15 + below + 0.08
        grows.set_figheight(whole)
        ax.set_position((box.x0, (below + 0.08) / whole, box.width, height / whole))
    return ax


def said(title: str, names: Iterable[str]) -> dict[str, Color]:
    """Return those of the names that the title says, unless all; numbers of a scale are none."""
    own = [name for name in names if name[:1].isalpha()]
    in_title = (re.search(rf"\b{re.escape(name)}\b", title, re.IGNORECASE) for name in own)
    found = [*compress(own, in_title)]
    return dict.fromkeys(found, INK) if len(found) < len(own) else {}


def never_came(trace: Trace) -> list[int]:
    """Return the ranks that never come; where it is known, only those that hold up the others."""
    held_up = [root.rank for root in roots(trace)]
    return held_up or [rank for hang in hangs(trace) for rank in hang.operation.missing]


def in_red(trace: Trace) -> dict[str, Color]:
    """Return the names of these ranks, as `frame` marks them."""
    return {plain(trace.label(rank)): palette.MISSING for rank in never_came(trace)}


def draw_message_instead(ax: Axes | None, sentence: str) -> Axes:
    """Write a sentence instead of a picture that would be empty; a figure of its own is as low."""
    ax = ax or new_axes(height_in=1.0, left_in=0.15)
    ax.set_axis_off()
    if isinstance(figure := figure_of(ax), Drawing):
        figure.set_figheight(0.1)
    describe(ax, sentence)
    return frame(ax, title=sentence, below_in=0)


def describe(ax: Axes, *sentences: str) -> None:
    """Say in words what the picture shows: `save` writes them into the file, for readers who do not see it."""
    ax.set_label(" ".join(plain(sentence, most=4000) for sentence in sentences if sentence))


def _legend(ax: Axes, handles: Sequence[Artist], left: float, width: float, below_in: float) -> float:
    """Add the legend, and return its height in inches."""
    widest = max(text_width(str(handle.get_label())) for handle in handles) + 3.8 * TEXT_PT
    columns = max(1, min(len(handles), int(width / widest)))
    down = ScaledTranslation(left / _POINTS, -below_in, figure_of(ax).dpi_scale_trans)
    legend = ax.legend(
        handles=list(handles), loc="upper left", ncols=columns, fontsize=TEXT_PT, frameon=False, borderpad=0,
        borderaxespad=0, handlelength=2.2, columnspacing=1.6, labelcolor=INK,
        bbox_to_anchor=(0, 0), bbox_transform=ax.transAxes + down,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    rows = -(-len(handles) // columns)
    return rows * TEXT_PT * 1.65 / _POINTS + 0.06


def write(ax: Axes, x: float, y: float, text: str, *, on: Color | None = None, pad: float = 1.0, **more: Any) -> None:
    """Write a line of text, without formulas, `on` a box of this colour; `more` as for ax.text."""
    usual: dict[str, Any] = {"va": "center_baseline", "fontsize": TEXT_PT, "color": INK, "parse_math": False}
    if on is not None:
        usual["bbox"] = {"facecolor": on, "edgecolor": "none", "pad": pad}
    ax.text(x, y, text, **usual | more)


def names_on_top(ax: Axes, places: Sequence[float], names: Sequence[str], width: float) -> float:
    """Name columns of `width` points, upright where one has no room; return the inches it takes."""
    upright = width < _NARROWEST_NAME_PT and any(text_width(name) > width - 4 for name in names)
    shown = cut_names(names, _NARROWEST_NAME_PT if upright else width - 4)
    ax.xaxis.tick_top()
    ax.set_xticks(places, shown, parse_math=False, rotation=90 if upright else 0)
    names_only(ax)
    tallest = max(text_width(name) for name in shown) if upright else TEXT_PT * 1.4
    return tallest / _POINTS + 0.08


def points(ax: Axes, fraction: float, *, along: str) -> float:
    """Return the length in points of this fraction of the axes."""
    figure, box = figure_of(ax), ax.get_position()
    inches = box.width * figure.get_figwidth() if along == "x" else box.height * figure.get_figheight()
    return float(inches * fraction * _POINTS)


def points_per_ms(ax: Axes) -> float:
    left, right = ax.get_xlim()
    return points(ax, 1.0, along="x") / (right - left)


def left_margin_in(labels: Iterable[str]) -> float:
    """Return the inches that the longest of these labels needs at the left of the axes."""
    return max((text_width(label) for label in labels), default=0.0) / _POINTS + 0.25


def draw_boxes(ax: Axes, boxes: Iterable[Box], **style: Any) -> None:
    """Draw one collection of boxes (left, right, top, bottom); `style` as a PolyCollection takes it."""
    corners = [[(left, top), (right, top), (right, bottom), (left, bottom)] for left, right, top, bottom in boxes]
    ax.add_collection(PolyCollection(corners, **style), autolim=False)


def draw_lines(ax: Axes, lines: Iterable[Sequence[Point]], **style: Any) -> None:
    """Draw one collection of lines through points; `style` as a LineCollection takes it."""
    ax.add_collection(LineCollection(list(lines), **style), autolim=False)


def draw_arrow(ax: Axes, start: Point, end: Point, *, how: str, **more: Any) -> None:
    """Draw an arrow from point to point; `more` as a FancyArrowPatch takes it."""
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.0, "zorder": 4}
    style |= {"linestyle": palette.LINES[how], "color": palette.line_color(how)}
    style |= {"connectionstyle": "arc3", "joinstyle": "miter", "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, **style | more))


def in_legend(how: str) -> Line2D:
    """Return the legend's line for messages that are known in this way."""
    color, line = palette.line_color(how), palette.LINES[how]
    return Line2D([], [], color=color, linestyle=line, linewidth=1, label=f"message, {how}")


def draw_lanes(ax: Axes, bands: Iterable[tuple[float, float]]) -> None:
    """Draw a pale band over the whole width from each top to each bottom."""
    boxes = [(0.0, 1.0, top, bottom) for top, bottom in bands]
    draw_boxes(ax, boxes, facecolor=palette.LANE, zorder=0, transform=ax.get_yaxis_transform(), gid="lanes")


def names_only(ax: Axes) -> None:
    """Leave the names at the axes, without lines or ticks: there is no scale."""
    ax.tick_params(length=0, labelsize=TEXT_PT, labelcolor=INK)
    for spine in ax.spines.values():
        spine.set_visible(False)


def name_rows(ax: Axes, heights: Iterable[float], names: Iterable[str]) -> None:
    ax.set_yticks(list(heights), list(names), parse_math=False, fontsize=TEXT_PT, color=INK)


def quiet(ax: Axes, scale: str = "", *, loc: Literal["left", "center"] = "center") -> None:
    """Leave only the axis that carries a scale, and say below which one that is."""
    if scale:
        ax.set_xlabel(scale, fontsize=TEXT_PT, color=INK, labelpad=2, loc=loc)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(FAINT)
    ax.tick_params(labelsize=TEXT_PT, colors=INK)
    ax.tick_params(axis="y", length=0)


class Style(NamedTuple):
    """How a bar looks, or a mark or a line, and what the legend calls it."""

    label: str
    color: Any
    edge: Any = "none"
    hatch: str = ""
    line: Any = None
    marker: str = ""

    @property
    def of_bar(self) -> dict[str, Any]:
        colors = {"facecolor": self.color, "edgecolor": self.edge}
        return {**colors, "hatch": self.hatch, "linewidth": 0.5}

    def key(self) -> Artist:
        """Return what the legend shows of it."""
        if self.line is None and not self.marker:
            return Patch(label=self.label, **self.of_bar)
        size = 7 if self.marker == "|" else 4
        line = Line2D([], [], color=self.color, marker=self.marker, markersize=size)
        line.set(linestyle=self.line or "none", label=self.label)
        return line


def legend_of(ax: Axes, styles: Mapping[Any, Style], named: Container[Any] = ()) -> list[Artist]:
    """Explain what is drawn, by its gid; but not what is `named` in the picture."""
    drawn = {artist.get_gid() for artist in (*ax.patches, *ax.collections, *ax.lines)}
    return [style.key() for gid, style in styles.items() if gid in drawn and gid not in named]
