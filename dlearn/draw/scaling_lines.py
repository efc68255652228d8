"""How messages grow with the batch: the line that was worked out, through the points that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlearn.analysis.costs.scaling import Scaling, ScalingLine
from dlearn.analysis.costs.scaling import scaling as scaling_of
from dlearn.draw import canvas
from dlearn.draw.canvas import points
from dlearn.draw.palette import FAINT, GRID, INK, LINES, SERIES, TEXT_PT, text_width
from dlearn.shown import count_text, size_text
from dlearn.trace import Trace

_HEIGHT_IN = 3.2
_MOST_LINES = 6


@dataclass(frozen=True)
class Family:
    """Messages of one slope; or `flat`, all that do not depend on the size, together."""

    lines: tuple[ScalingLine, ...]
    color: str
    flat: bool = False

    def at(self, size: float) -> float:
        return sum(line.at(size) for line in self.lines) if self.flat else self.lines[0].at(size)

    @property
    def formula(self) -> str:
        """Return "3,072 B × B + 376 B"."""
        first, constants = self.lines[0], [line.constant for line in self.lines]
        if self.flat:
            return f"{sum(constants):,.0f} B at every B"
        low, high = f"{min(constants):,.0f}", f"{max(constants):,.0f}"
        constant = f"{low} B" if low == high else f"{low} to {high} B"
        return f"{first.slope:,.0f} B × B + {constant}" if first.exact else "not linear"

    @property
    def label(self) -> str:
        """Return "3,072 B × B + 376 B: float32[...]", the formula and which messages these are."""
        others = count_text(len(self.lines), "other message")
        what = others if self.flat else "; ".join(dict.fromkeys(line.what for line in self.lines))
        return f"{self.formula}: {what}"


@canvas.for_cells
def scaling(runs: Mapping[int, Trace] | Scaling, *, ax: Axes | None = None) -> Axes:
    """Draw payload bytes over the size: a line for all messages of one slope, and one for those that do not depend."""
    costs = runs if isinstance(runs, Scaling) else scaling_of(runs)
    ax = ax or canvas.new_axes(height_in=_HEIGHT_IN, left_in=0.85)
    families = families_of(costs)
    if not costs.growing:
        return canvas.draw_message_instead(ax, f"{costs.finding}.")
    canvas.describe(ax, "The payload of a message over the size.", *(family.label for family in families))
    top = 1.08 * max(line.at(max(costs.sizes)) for line in costs.growing)
    drawn = [family for family in families if not family.flat or family.at(max(costs.sizes)) <= top]
    for family in drawn:
        draw_family(ax, family, costs)
    label_axes(ax, costs, top)
    left = len(costs.lines) - sum(len(family.lines) for family in families)
    notes = ["Dashed: slope × size + constant. Points: what the runs sent."]
    notes += [f"{family.label}." for family in drawn]
    notes += [f"Above this picture: {family.label}." for family in families if family not in drawn]
    notes += [f"Not drawn: {count_text(left, 'message')} of a smaller slope, or packed by C++."] if left else []
    dashed: dict[str, Any] = {"linewidth": 1.6, "linestyle": LINES["derived"]}
    keys = [Line2D([], [], color=each.color, label=each.formula, **dashed) for each in drawn]
    return canvas.frame(ax, title=costs.finding, legend=keys, notes=notes, below_in=0.5)


def families_of(costs: Scaling) -> list[Family]:
    """Group lines by slope, the steepest first; last those that do not grow."""
    alike: dict[tuple[float, bool], list[ScalingLine]] = {}
    for line in costs.growing:
        alike.setdefault((line.slope, line.exact), []).append(line)
    steepest = sorted(alike.values(), key=lambda lines: -lines[0].slope)[:_MOST_LINES]
    found = [Family(tuple(lines), color) for lines, color in zip(steepest, SERIES, strict=False)]
    flat = tuple(line for line in costs.lines if line.known and not line.varies)
    return [*found, Family(flat, FAINT, flat=True)] if flat else found


def draw_family(ax: Axes, family: Family, costs: Scaling) -> None:
    """Draw the derived line dashed, as in every picture, and what the runs sent as points."""
    what = "constant" if family.flat else family.lines[0].what
    ends = [0.0, float(max(costs.sizes))]
    style: dict[str, Any] = {"color": family.color, "linewidth": 1.6, "linestyle": LINES["derived"]}
    ax.plot(ends, [family.at(each) for each in ends], gid=f"line {what}", **style)
    measured = [line.payload_bytes for line in family.lines]
    if family.flat:
        measured = [tuple(sum(column) for column in zip(*measured, strict=True))]
    for payloads in measured:
        style = {"color": family.color, "markeredgecolor": INK, "markeredgewidth": 0.7, "markersize": 5.5}
        ax.plot(costs.sizes, payloads, "o", zorder=3, clip_on=False, gid=f"measured {what}", **style)


def label_axes(ax: Axes, costs: Scaling, top: float) -> None:
    """Draw a tick at each size that was run, where there is room for it."""
    right = max(costs.sizes)
    wide, shown = points(ax, 1.0, along="x") / right, [0]
    for size in costs.sizes:
        if size and (size - shown[-1]) * wide > text_width(f"{size:,}") + 6:
            shown.append(size)
    ax.set(xlim=(0, right), ylim=(0, top))
    ax.set_xticks(shown, [f"{size:,}" for size in shown])
    ticks = [tick for tick in ax.get_yticks() if 0 <= tick <= top]
    ax.set_yticks(ticks, [size_text(round(tick)) for tick in ticks])
    ax.hlines(ticks, 0, right, colors=GRID, linewidth=0.6, zorder=0)
    ax.set_ylabel("payload of a message", fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax, "examples in a batch (B)", loc="left")
