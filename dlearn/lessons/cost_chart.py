"""The costs of the all-reduce algorithms: time over size, as the model has it, and as it was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from dlearn.analysis.costs.bandwidth import speed_text
from dlearn.analysis.findings import size_text, time_text
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, points, text_width
from dlearn.draw.palette import FAINT, GRID, INK, SERIES
from dlearn.errors import DlearnError
from dlearn.lessons.trees_and_rings import ALGORITHMS, Measurement, Model, cost, crossover, finding, medians_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT_IN = 4.4
_AROUND = 300.0
"""How far the axis reaches around the size whose bytes take as long as its latency, as a factor on either side."""
_HEADROOM = 3.0
_LINE_PT = 1.35 * TEXT_PT
_MARKER_PT = 6.0
_ASIDE = 0.013
"""From the dots of one algorithm to those of the next, as a part of the lines' width."""


@dataclass(frozen=True)
class Look:
    """Lines lie on each other where algorithms cost the same: the later ones are narrower, so that all are seen."""

    name: str
    color: str
    width: float
    marker: str


_LOOKS = {
    "star": Look("star", "#949494", 7.0, "s"),
    "tree": Look("tree", SERIES[1], 4.6, "^"),
    "ring": Look("ring", SERIES[0], 2.6, "o"),
    "halving_doubling": Look("halving-doubling", INK, 1.0, "D"),
}


def costs(
    model: Model,
    ranks: int = 4,
    *,
    measured: Mapping[str, Iterable[Measurement]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how long an all-reduce takes over its size, a line for each algorithm; both axes are logarithmic.

    `measured` gives (bytes, seconds) by the algorithm's name, as `measurements(trace, op="all_reduce")` does.
    """
    seen = {name: list(found) for name, found in (measured or {}).items()}
    unknown = [name for name in seen if name not in ALGORITHMS]
    if unknown:
        raise DlearnError(f"there is no algorithm {unknown[0]!r} here; there are: {', '.join(ALGORITHMS)}.")
    fit = ax is None
    ax = ax or canvas.new_axes(height_in=_HEIGHT_IN, left_in=0.75)
    canvas.describe(
        ax, "How long an all-reduce takes over its size, a line for each algorithm; both axes are logarithmic."
    )
    left, right = _sizes(model, ranks, [size for found in seen.values() for size, _ in found])
    draw_lines(ax, model, ranks, left, right)
    draw_measured(ax, seen, left, right)
    label_lines(ax, model, ranks, left, right)
    label_axes(ax, left, right)
    mark_crossing(ax, model, ranks, left)
    canvas.frame(ax, title=finding(model, ranks), notes=notes(model, seen), below_in=0.5, fit=fit)
    return ax


def _sizes(model: Model, ranks: int, measured: Sequence[float]) -> tuple[float, float]:
    """From where to where: all that was measured, else around the size whose bytes take as long as its latency."""
    # Where bytes begin to count: a message of this size has half the bandwidth (Hockney's n_1/2).
    middle = model.latency_s * model.bandwidth or 1e5
    low, high = middle / _AROUND, middle * _AROUND
    positive = [size for size in measured if size > 0]
    if positive:
        low, high = min(positive) / 2, max(positive) * 2
    crossing = crossover(model, ranks)
    return (low, high) if crossing is None else (min(low, crossing / 3), max(high, crossing * 3))


def draw_lines(ax: Axes, model: Model, ranks: int, left: float, right: float) -> None:
    sizes = [left * (right / left) ** (i / 100) for i in range(101)]
    ax.set_xscale("log")
    ax.set_yscale("log")
    for place, (name, look) in enumerate(_LOOKS.items()):
        times = [model.time_s(cost(name, ranks, size)) for size in sizes]
        ax.plot(sizes, times, color=look.color, linewidth=look.width, zorder=2 + place / 10, gid=f"line {name}")


def draw_measured(ax: Axes, seen: Mapping[str, Sequence[Measurement]], left: float, right: float) -> None:
    """A dot at each median and a bar over the middle half of the times; those of one size stand side by side."""
    for place, (name, found) in enumerate(seen.items()):
        look = _LOOKS[name]
        aside = (right / left) ** (_ASIDE * (place - (len(seen) - 1) / 2))
        times: defaultdict[float, list[float]] = defaultdict(list)
        for size, time in found:
            times[size].append(time)
        for size, each in times.items():
            low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else (each[0],) * 3
            ax.plot([size * aside] * 2, [low, high], color=look.color, linewidth=1.8, zorder=3, gid=f"spread {name}")
        medians = medians_of(found)
        ax.plot(
            [size * aside for size in medians], list(medians.values()), look.marker, color=look.color,
            markeredgecolor="white" if look.color == INK else INK, markeredgewidth=0.7, markersize=_MARKER_PT, zorder=4,
            gid=f"measured {name}",
        )  # fmt: skip


def label_axes(ax: Axes, left: float, right: float) -> None:
    """Decades with their units. The axis of sizes ends with the lines: their names stand to the right of it."""
    bottom, top = ax.get_ylim()
    sizes = _decades(left, right, ("B", "kB", "MB", "GB"), shift=0)
    times = _decades(bottom, top, ("ns", "µs", "ms", "s"), shift=9)
    widest = max((text_width(name, size=TEXT_PT) for name in sizes.values()), default=0.0) + 8
    each = points(ax, 1.0, along="x") / math.log10(ax.get_xlim()[1] / left)
    shown = list(sizes)[:: math.ceil(widest / each)]
    ax.set_xticks(shown, [sizes[size] for size in shown], fontsize=TEXT_PT, color=INK)
    ax.set_yticks(list(times), list(times.values()), fontsize=TEXT_PT, color=INK)
    ax.minorticks_off()
    ax.hlines(list(times), left, right, colors=GRID, linewidth=0.6, zorder=0)
    ax.spines["bottom"].set_bounds(left, right)
    ax.set_xlabel("bytes that each rank has (S)", fontsize=TEXT_PT, color=INK, labelpad=2, loc="left")
    ax.set_ylabel("time of one all-reduce", fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax)


def _decades(low: float, high: float, units: Sequence[str], *, shift: int) -> dict[float, str]:
    """The powers of ten between, with their names; `shift` is the power of ten of the first unit in the axis' own."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return {10.0**power: _decade_text(power + shift, units) for power in powers}


def _decade_text(decade: int, units: Sequence[str]) -> str:
    """ "10 kB", "100 µs"."""
    unit = min(max(decade // 3, 0), len(units) - 1)
    return f"{10.0 ** (decade - 3 * unit):,g} {units[unit]}"


def label_lines(ax: Axes, model: Model, ranks: int, left: float, right: float) -> None:
    """The name at the end of each line, with its steps and bytes where there is room; the axes grow to hold them."""
    at_one = {name: cost(name, ranks, 1) for name in _LOOKS}
    labels = {name: f"{_LOOKS[name].name}: {spent.steps} steps, {spent.bytes:.3g} S" for name, spent in at_one.items()}
    wide = points(ax, 1.0, along="x")
    if _widest(labels) > 0.4 * wide:
        labels = {name: look.name for name, look in _LOOKS.items()}
    lines_end = 1 - (_widest(labels) + 18) / wide
    ax.set_xlim(left, left * (right / left) ** (1 / lines_end))
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top * _HEADROOM)
    scale = points(ax, 1.0, along="y") / math.log(top * _HEADROOM / bottom)
    ends = {name: math.log(model.time_s(cost(name, ranks, right)) / bottom) * scale for name in _LOOKS}
    height = -math.inf
    for name in sorted(ends, key=lambda name: (ends[name], _LOOKS[name].width)):
        height = max(ends[name], height + _LINE_PT)
        ax.annotate(
            labels[name], (right, bottom), (10, height), textcoords="offset points", va="center_baseline",
            fontsize=TEXT_PT, color=INK, annotation_clip=False, gid=f"label {name}",
        )  # fmt: skip


def _widest(labels: Mapping[str, str]) -> float:
    return max(text_width(label, size=TEXT_PT) for label in labels.values())


def mark_crossing(ax: Axes, model: Model, ranks: int, left: float) -> None:
    """A line up from where ring and tree cost the same, with the size in words at its top, where no other line is."""
    size = crossover(model, ranks)
    if size is None:
        return
    time, top = model.time_s(cost("ring", ranks, size)), ax.get_ylim()[1]
    ax.plot([size, size], [time, top], color=FAINT, linewidth=0.8, zorder=1, gid="crossing")
    ax.plot([size], [time], "o", color="white", markeredgecolor=INK, markersize=_MARKER_PT, zorder=5, gid="crossing")
    lines = ["ring and tree", f"cross at {size_text(round(size))}"]
    room = points(ax, 1.0, along="x") * math.log(size / left) / math.log(ax.get_xlim()[1] / left)
    before = room > max(text_width(line, size=TEXT_PT) for line in lines) + 8
    ax.annotate(
        "\n".join(lines), (size, top), (-5 if before else 5, -2), textcoords="offset points",
        ha="right" if before else "left", va="top", fontsize=TEXT_PT, color=INK, annotation_clip=False, gid="crossing",
    )  # fmt: skip


def notes(model: Model, seen: Mapping[str, Sequence[Measurement]]) -> list[str]:
    latency, speed = time_text(round(model.latency_s * 1e9)), speed_text(model.bandwidth)
    told = [f"Lines: steps × {latency} + bytes / {speed}, for the longest chain of messages; adding up is left out."]
    if model.fitted:
        told.append(f"Both constants are {model.fitted}.")
    if any(seen.values()):
        told.append("Dots: medians of what was measured; bars: the middle half.")
    return told
