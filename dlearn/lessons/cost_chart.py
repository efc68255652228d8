"""The costs of the all-reduce algorithms: time over size, as the model has it, and as it was measured."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from dlearn.analysis.costs.bandwidth import speed_text
from dlearn.draw import canvas
from dlearn.draw.palette import FAINT, GRID, INK, LINES, SERIES, TEXT_PT, text_width
from dlearn.errors import DlearnError
from dlearn.lessons.trees_and_rings import (
    ALGORITHMS,
    Measurement,
    Model,
    cost,
    crossover,
    finding,
    fit_all_reduce,
    medians_of,
)
from dlearn.shown import size_text, time_text

_HEIGHT_IN = 4.6
_AROUND = 300.0
"""How far the axis reaches around the size whose bytes take as long as its latency, as a factor on either side."""
_HEADROOM = 6.0  # Above all times, for a panel's name.
_MARKER_PT = 5.5
_BEHIND = "#bdbdbd"


class Look(NamedTuple):
    """An algorithm's name, colour and marker in its own panel."""

    name: str
    color: str
    marker: str


_LOOKS = {
    "star": Look("star", SERIES[4], "s"),
    "tree": Look("tree", SERIES[1], "^"),
    "ring": Look("ring", SERIES[0], "o"),
    "halving_doubling": Look("halving-doubling", SERIES[3], "D"),
}


@dataclass(frozen=True)
class CostCurves:
    """What is drawn: the model, the measured medians, the model that fits these (if there is one), and the sizes."""

    model: Model
    ranks: int
    seen: dict[str, list[Measurement]]
    fitted: Model | None
    left: float
    right: float

    def line(self, name: str, model: Model) -> tuple[list[float], list[float]]:
        sizes = [self.left * (self.right / self.left) ** (i / 100) for i in range(101)]
        return sizes, [model.time_s(cost(name, self.ranks, size)) for size in sizes]


def costs(
    model: Model,
    ranks: int = 4,
    *,
    measured: Mapping[str, Iterable[Measurement]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how long an all-reduce takes over its size, a panel for each algorithm; both axes are logarithmic.

    `measured` gives (bytes, seconds) by the algorithm's name, as `measurements(trace, op="all_reduce")` does.
    """
    seen = {name: list(found) for name, found in (measured or {}).items()}
    unknown = [name for name in seen if name not in ALGORITHMS]
    if unknown:
        raise DlearnError(f"there is no algorithm {unknown[0]!r} here; there are: {', '.join(ALGORITHMS)}.")
    curves = _curves(model, ranks, seen)
    ax = ax or canvas.new_axes(height_in=_HEIGHT_IN, left_in=0.9)
    canvas.describe(ax, "How long an all-reduce takes over its size, a panel for each algorithm; logarithmic axes.")
    panels = panels_of(ax, [name for name in _LOOKS if not any(seen.values()) or seen.get(name)])
    for name, panel in panels.items():
        draw_panel(panel, name, curves)
    label_axes(ax, list(panels.values()), curves)
    return canvas.frame(ax, title=title_of(curves), legend=legend(curves), notes=notes(curves), below_in=0.5)


def _curves(model: Model, ranks: int, seen: dict[str, list[Measurement]]) -> CostCurves:
    """Choose the range: all measured sizes, else around the size whose bytes take its latency."""
    # Where bytes begin to count: a message of this size has half the bandwidth (Hockney's n_1/2).
    middle = model.latency_s * model.bandwidth or 1e5
    low, high = middle / _AROUND, middle * _AROUND
    positive = [size for found in seen.values() for size, _ in found if size > 0]
    if positive:
        low, high = min(positive) / 2, max(positive) * 2
    crossing = crossover(model, ranks)
    if crossing is not None:
        low, high = min(low, crossing / 3), max(high, crossing * 3)
    fitted = None
    with suppress(DlearnError):  # Too few sizes, or no slower with more bytes.
        fitted = fit_all_reduce(seen, ranks)
    return CostCurves(model, ranks, seen, fitted, low, high)


def title_of(curves: CostCurves) -> str:
    """Return who was fastest and how far the model is off; without measurements, the theory."""
    medians = {name: medians_of(found) for name, found in curves.seen.items() if found}
    if not medians:
        return finding(curves.model, curves.ranks)
    sizes = sorted(set.intersection(*(set(times) for times in medians.values())))
    if len(medians) == 1 or not sizes:
        return f"{curves.ranks} ranks, measured: {off_text(curves)}"
    fastest = [min(medians, key=lambda name: medians[name][size]) for size in sizes]
    first, last = (_LOOKS[fastest[place]].name for place in (0, -1))
    if len(set(fastest)) == 1:
        return f"{curves.ranks} ranks, measured: {first} is the fastest at every size"
    small, large = (size_text(round(sizes[place])) for place in (0, -1))
    return f"{curves.ranks} ranks, measured: {first} is the fastest at {small}, {last} at {large}"


def off_text(curves: CostCurves) -> str:
    """Return "the model is up to 22 times off"."""
    off = [
        time / curves.model.time_s(cost(name, curves.ranks, size))
        for name, found in curves.seen.items()
        for size, time in medians_of(found).items()
    ]
    return f"the model is up to {max(max(off), 1 / min(off)):.2g} times off"


def panels_of(ax: Axes, names: Sequence[str]) -> dict[str, Axes]:
    """Make panels in two columns; `ax` only contains them."""
    ax.set_axis_off()
    columns, rows = min(2, len(names)), math.ceil(len(names) / 2)
    wide, high = 1 / columns, 1 / rows
    return {
        name: ax.inset_axes((place % 2 * wide, 1 - (place // 2 + 1) * high, wide * 0.95, high * 0.92))
        for place, name in enumerate(names)
    }


def draw_panel(panel: Axes, name: str, curves: CostCurves) -> None:
    """Draw one algorithm in colour, the others in grey; its medians, a bar over the middle half."""
    look, spent = _LOOKS[name], cost(name, curves.ranks, 1)
    panel.set_xscale("log")
    panel.set_yscale("log")
    for other in _LOOKS:
        others = medians_of(curves.seen.get(other, []))
        panel.plot(*curves.line(other, curves.model), color=GRID, linewidth=1.2, zorder=1, gid=f"behind {other}")
        panel.plot(
            list(others), list(others.values()), _LOOKS[other].marker, color=_BEHIND, markersize=3.5, zorder=1.5,
            gid=f"dots behind {other}",
        )  # fmt: skip
    panel.plot(
        *curves.line(name, curves.model), color=look.color, linewidth=1.8, linestyle=LINES["derived"], zorder=2,
        gid=f"line {name}",
    )  # fmt: skip
    if curves.fitted is not None:
        panel.plot(
            *curves.line(name, curves.fitted), color=FAINT, linewidth=1.2, linestyle=LINES["inferred"], zorder=2,
            gid=f"fitted {name}",
        )  # fmt: skip
    times: defaultdict[float, list[float]] = defaultdict(list)
    for size, time in curves.seen.get(name, []):
        times[size].append(time)
    for size, each in times.items():
        low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else (each[0],) * 3
        panel.plot([size, size], [low, high], color=look.color, linewidth=1.8, zorder=3, gid=f"spread {name}")
    medians = medians_of(curves.seen.get(name, []))
    panel.plot(
        list(medians), list(medians.values()), look.marker, color=look.color, markeredgecolor=INK, markeredgewidth=0.7,
        markersize=_MARKER_PT, zorder=4, gid=f"measured {name}",
    )  # fmt: skip
    crossing = crossover(curves.model, curves.ranks)
    if crossing is not None and name in ("ring", "tree"):
        time = curves.model.time_s(cost("ring", curves.ranks, crossing))
        panel.plot(
            [crossing], [time], "o", color="white", markeredgecolor=INK, markersize=_MARKER_PT + 2, zorder=2.5,
            gid="crossing",
        )  # fmt: skip
    panel.annotate(
        f"{look.name}: {spent.steps} steps, {spent.bytes:.3g} S", (0, 1), (6, -4), xycoords="axes fraction",
        textcoords="offset points", va="top", fontsize=TEXT_PT, fontweight="bold", color=INK, gid=f"label {name}",
    )  # fmt: skip


def label_axes(ax: Axes, panels: Sequence[Axes], curves: CostCurves) -> None:
    """Give all panels the same decades; name them only at the left and below."""
    bottom = min(panel.get_ylim()[0] for panel in panels)
    top = max(panel.get_ylim()[1] for panel in panels) * _HEADROOM
    sizes = _decades(curves.left, curves.right, EngFormatter("B"))
    times = _decades(bottom, top, EngFormatter("s"))
    columns = min(2, len(panels))
    across = canvas.points(ax, 0.95 / columns, along="x") / math.log10(curves.right / curves.left)
    up = canvas.points(ax, 0.92 / math.ceil(len(panels) / 2), along="y") / math.log10(top / bottom)
    widest = max((text_width(name, size=TEXT_PT) for name in sizes.values()), default=0.0) + 8
    shown, heights = list(sizes)[:: math.ceil(widest / across)], list(times)[:: math.ceil(1.5 * TEXT_PT / up)]
    for place, panel in enumerate(panels):
        panel.set_xlim(curves.left, curves.right)
        panel.set_ylim(bottom, top)
        below, leftmost = place >= len(panels) - columns, place % 2 == 0
        panel.set_xticks(shown, [sizes[size] if below else "" for size in shown], fontsize=TEXT_PT, color=INK)
        panel.set_yticks(heights, [times[t] if leftmost else "" for t in heights], fontsize=TEXT_PT, color=INK)
        panel.minorticks_off()
        panel.hlines(heights, curves.left, curves.right, colors=GRID, linewidth=0.6, zorder=0)
        canvas.quiet(panel)
    panels[-1].set_xlabel("bytes that each rank has (S)", fontsize=TEXT_PT, color=INK, labelpad=2)
    panels[0].set_ylabel("time of one all-reduce", fontsize=TEXT_PT, color=INK)


def _decades(low: float, high: float, text: EngFormatter) -> dict[float, str]:
    """Return the powers of ten between these and their names, "10 kB" or "100 µs"."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return {10.0**power: text(10.0**power) for power in powers}


def legend(curves: CostCurves) -> list[Line2D]:
    handles = [Line2D([], [], color=INK, linewidth=1.8, linestyle=LINES["derived"], label="the model")]
    if any(curves.seen.values()):
        dot = Line2D([], [], color=FAINT, linestyle="", marker="o", markeredgecolor=INK)
        dot.set_label("measured: median, and the middle half")
        handles.append(dot)
    if curves.fitted is not None:
        fitted = "the model, its constants from these dots"
        handles.append(Line2D([], [], color=FAINT, linestyle=LINES["inferred"], label=fitted))
    return [*handles, Line2D([], [], color=GRID, linewidth=1.8, label="the other algorithms")]


def notes(curves: CostCurves) -> list[str]:
    model = curves.model
    latency, speed = time_text(round(model.latency_s * 1e9)), speed_text(model.bandwidth)
    said = [f"The model: steps × {latency} + bytes / {speed}, for the longest chain of messages; adding is left out."]
    if model.fitted:
        said.append(f"Both constants are {model.fitted}.")
    if any(curves.seen.values()):
        said.append(f"Against these dots {off_text(curves)}.")
    crossing = crossover(model, curves.ranks)
    if crossing is not None:
        said.append(f"White circle: in the model, ring and tree take the same time for {size_text(round(crossing))}.")
    return said
