"""Bus bandwidth over the size of the data, a dot for each size, with its spread, and a line for each op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from dlearn.analysis.costs.bandwidth import Bandwidth, bandwidths, speed_text
from dlearn.analysis.findings import size_text
from dlearn.analysis.telling.words import network_sentences
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT
from dlearn.draw.palette import GRID, INK, look
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_HEIGHT_IN = 3.2
_MARKERS = "os^DvP"


def bandwidth(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw busbw in bytes per second over the size in bytes, both logarithmic, for each op and number of ranks."""
    told = bandwidths(trace)
    ax = ax or canvas.new_axes(height_in=_HEIGHT_IN, left_in=0.95, right_in=0.35)
    # Logarithmic axes have no place for what is 0.
    shown = [each for each in told.items if each.bus_bandwidth]
    if not shown:
        return canvas.say_empty(ax, "Nothing in this trace has a bandwidth.")
    canvas.describe(ax, *(f"{each}." for each in told.items))
    lines: dict[tuple[str, int], list[Bandwidth]] = {}
    for each in shown:
        lines.setdefault((each.op, each.ranks), []).append(each)
    handles = [draw_op(ax, found, _MARKERS[place % len(_MARKERS)]) for place, found in enumerate(lines.values())]
    label_axes(ax, shown)
    notes = ["A dot is the median of equal operations, its bar goes from the slowest to the fastest."]
    notes += network_sentences(trace)
    empty = len(told.items) - len(shown)
    notes += [f"Not here: {count_text(empty, 'kind')} of operations in which nothing travels."] if empty else []
    notes += [f"Not here: {count:,} × {why}." for why, count in list(told.left_out.items())[: canvas.MOST_PROBLEMS]]
    return canvas.frame(ax, title=title(shown), legend=handles, notes=notes, below_in=0.5)


def title(items: Sequence[Bandwidth]) -> str:
    """Say which op is the fastest, at which size, and how much slower its smallest size is."""
    best = max(items, key=lambda each: each.bus_bandwidth)
    alike = [each for each in items if (each.op, each.ranks) == (best.op, best.ranks)]
    least = min(alike, key=lambda each: each.size_bytes)
    told = f"{best.op} on {best.ranks} ranks reaches {speed_text(best.bus_bandwidth)} at {size_text(best.size_bytes)}"
    if least is best:
        return told
    return f"{told}, {speed_text(least.bus_bandwidth)} at {size_text(least.size_bytes)}"


def draw_op(ax: Axes, found: list[Bandwidth], marker: str) -> Line2D:
    """Draw one op on one number of ranks, in the colour that the op has everywhere; open, where that is hatched."""
    style = look(found[0].op)
    color, inside = style.line, "white" if style.hatch else style.line
    sizes = [each.size_bytes for each in found]
    speeds = [each.bus_bandwidth for each in found]
    slow = [each.bus_bandwidth * each.duration_ns / (each.slowest_ns or each.duration_ns) for each in found]
    fast = [each.bus_bandwidth * each.duration_ns / (each.fastest_ns or each.duration_ns) for each in found]
    name = f"{found[0].op} on {found[0].ranks} ranks"
    ax.vlines(sizes, slow, fast, color=color, linewidth=1.2, gid=f"spread {name}")
    dots: dict[str, Any] = {"marker": marker, "markersize": 5, "markerfacecolor": inside}
    return ax.plot(sizes, speeds, color=color, linewidth=0.8, label=name, gid=name, **dots)[0]


def label_axes(ax: Axes, items: Sequence[Bandwidth]) -> None:
    """Whole decades on both axes."""
    ax.set(xscale="log", yscale="log")
    sizes = [each.size_bytes for each in items]
    low, high = ax.dataLim.intervaly
    ax.set_xlim(_decade(min(sizes)), 10 * _decade(max(sizes)))
    # The last label stands clear of the title.
    ax.set_ylim(_decade(low), 14 * _decade(high))
    ax.xaxis.set_major_formatter(lambda size, _: size_text(round(size)))
    ax.yaxis.set_major_formatter(lambda speed, _: speed_text(speed))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
    ax.grid(color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_ylabel("bus bandwidth", fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax, "size, as nccl-tests count it", loc="left")


def _decade(number: float) -> float:
    """The power of ten below."""
    return float(10 ** math.floor(math.log10(number)))
