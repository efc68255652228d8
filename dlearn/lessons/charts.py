"""The two plain charts of lessons: lines over a size, and bars side by side. The finding is the title."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.draw import canvas
from dlearn.draw.palette import GRID, INK, LINES, SERIES, TEXT_PT, TITLE_PT, plain, text_width, wrap

HEIGHT_IN = 2.9
_MARKERS = "os^DvP"


class Series(NamedTuple):
    """Points of one line. `spread` is a (low, high) around each y, drawn as a vertical line."""

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[tuple[float, float]] = ()
    derived: bool = False
    """Worked out, not measured: drawn dashed and without markers."""
    between: Literal["line", ""] = "line"
    """What joins two points: a line, or nothing."""
    like: str = ""
    """The label of the line whose colour it has."""


def lines(
    series: Mapping[str, Series],
    *,
    title: str,
    x: str,
    y: str,
    ticks: Sequence[tuple[float, str]] = (),
    log: str = "",
    notes: Sequence[str] = (),
    mark: tuple[float, str] | None = None,
) -> Axes:
    """Draw a line for each of `series`, with its label.

    `log` is "x", "y" or "xy"; `mark` is a position on the x axis and its name.
    """
    ax = canvas.new_axes(height_in=HEIGHT_IN, left_in=0.95, right_in=0.3)
    canvas.describe(ax, f"{y}, over {x}: {'; '.join(series)}.")
    handles: list[Artist] = []
    hues = [label for label, line in series.items() if not line.like]
    for place, (label, line) in enumerate(series.items()):
        color = SERIES[hues.index(line.like or label) % len(SERIES)]
        marker = "" if line.derived else _MARKERS[place % len(_MARKERS)]
        style = LINES["derived" if line.derived else "observed"] if line.between else ""
        ax.plot(
            line.x, line.y, marker=marker, color=color, linestyle=style, linewidth=1.6, markersize=5.5, gid=label,
        )  # fmt: skip
        if line.spread:
            low, high = zip(*line.spread, strict=True)
            ax.vlines(line.x, low, high, colors=color, linewidth=1.2, alpha=0.7)
        handles.append(Line2D([], [], color=color, marker=marker, linestyle=style, label=plain(label, most=90)))
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    if ticks:
        shown = _with_room(ax, ticks)
        ax.set_xticks([at for at, _ in shown], [name for _, name in shown])
        ax.set_xticks([], minor=True)
    if mark is not None:
        ax.axvline(mark[0], color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        before = _from_left(ax, mark[0]) + text_width(mark[1], size=TEXT_PT) + 8 > canvas.points(ax, 1.0, along="x")
        ax.annotate(
            mark[1], (mark[0], 1), (-4 if before else 4, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right" if before else "left", va="top", fontsize=TEXT_PT, color=INK,
            parse_math=False,
        )  # fmt: skip
    _label(ax, x, y)
    return canvas.frame(ax, title=title, legend=handles if len(handles) > 1 else (), notes=notes, below_in=0.5)


def _with_room(ax: Axes, ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks whose names do not touch, from left to right."""
    shown: list[tuple[float, str]] = []
    until = -math.inf
    for at, name in sorted(ticks):
        middle = _from_left(ax, at)
        half = text_width(name, size=TEXT_PT) / 2 + 3
        if middle - half > until:
            shown.append((at, name))
            until = middle + half
    return shown


def _from_left(ax: Axes, at: float) -> float:
    """Return the distance from the left edge in points, on a linear or logarithmic axis."""
    fraction = ax.transLimits.transform(ax.transScale.transform((at, ax.get_ylim()[1])))[0]
    return canvas.points(ax, float(fraction), along="x")


class Part(NamedTuple):
    """A part of stacked bars: its height on each bar."""

    label: str
    values: Sequence[float]


def bars(
    names: Sequence[str],
    parts: Sequence[Part],
    *,
    title: str,
    y: str,
    stacked: bool = False,
    text: Callable[[float], str] | None = None,
    notes: Sequence[str] = (),
) -> Axes:
    """Draw a bar for each name; several parts side by side, or stacked. `text` formats a value."""
    ax = canvas.new_axes(height_in=HEIGHT_IN, left_in=0.95, right_in=0.3)
    canvas.describe(ax, f"{y}, a bar for each of: {'; '.join(names)}.")
    width = 0.8 if stacked else 0.8 / len(parts)
    bottom = [0.0] * len(names)
    tops: list[tuple[float, float]] = []
    for place, part in enumerate(parts):
        at = [i if stacked else i - 0.4 + width * (place + 0.5) for i in range(len(names))]
        color = SERIES[place % len(SERIES)]
        ax.bar(at, part.values, width * 0.94, bottom=bottom if stacked else None, color=color, gid=part.label)
        if stacked:
            bottom = [low + value for low, value in zip(bottom, part.values, strict=True)]
        else:
            tops += zip(at, part.values, strict=True)
    tops += enumerate(bottom) if stacked else ()
    ax.set_xlim(-0.5, len(names) - 0.5)
    tallest = max(bottom) if stacked else max(value for part in parts for value in part.values)
    ax.set_ylim(0, 1.14 * tallest or 1.0)
    if text is not None:
        _values(ax, tops, width * 0.94, text)
    room = canvas.points(ax, 1 / len(names), along="x") - 6
    ax.set_xticks(range(len(names)), ["\n".join(wrap(name, room, size=TEXT_PT)) for name in names])
    _label(ax, "", y)
    rows = max(len(wrap(name, room, size=TEXT_PT)) for name in names)
    handles = [Patch(color=SERIES[i % len(SERIES)], label=part.label) for i, part in enumerate(parts)]
    below = 0.22 + rows * TEXT_PT * 1.3 / 72
    return canvas.frame(ax, title=title, legend=handles if len(parts) > 1 else (), notes=notes, below_in=below)


def _values(ax: Axes, tops: Sequence[tuple[float, float]], width: float, text: Callable[[float], str]) -> None:
    """Write its value above each bar, where it has room and meets no other bar or value.

    Boxes are in points from the lower left.
    """
    across = canvas.points(ax, 1.0, along="x") / (ax.get_xlim()[1] - ax.get_xlim()[0])
    up = canvas.points(ax, 1.0, along="y") / ax.get_ylim()[1]
    taken = [((x - width / 2) * across, 0.0, (x + width / 2) * across, height * up) for x, height in tops]
    for x, height in tops:
        shown, above = text(height), height * up + 2
        half = text_width(shown, size=TEXT_PT) / 2
        box = (x * across - half, above, x * across + half, above + TEXT_PT)
        if 2 * half <= across and all(
            box[0] >= x1 or box[2] <= x0 or box[1] >= y1 or box[3] <= y0 for x0, y0, x1, y1 in taken
        ):
            taken.append(box)
            ax.annotate(
                shown, (x, height), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=TEXT_PT,
                color=INK, parse_math=False,
            )  # fmt: skip


def _label(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=TEXT_PT, color=INK, labelpad=2, loc="left")
    ax.set_ylabel(y, fontsize=TEXT_PT, color=INK)
    if ax.get_yscale() == "linear":
        ax.ticklabel_format(axis="y", style="plain", useOffset=False)  # "1e7" would stand where the title is.
    ax.grid(axis="y", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    canvas.quiet(ax)


def retitle(ax: Axes, title: str) -> Axes:
    """Give a picture of `dlearn.draw` the finding that it shows here as its title."""
    lines = wrap(plain(title, most=400), canvas.width_in() * 72 - 16, size=TITLE_PT, bold=True)
    ax.set_title("\n".join(lines), loc="left", fontsize=TITLE_PT, fontweight="bold", color=INK, parse_math=False)
    return ax
