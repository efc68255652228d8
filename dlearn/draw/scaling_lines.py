"""How messages grow with the batch: the line that was worked out, through the points that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlearn.analysis.costs.scaling import Scaling, ScalingLine
from dlearn.analysis.costs.scaling import scaling as scaling_of
from dlearn.analysis.findings import size_text
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, cut, plain, points, text_width
from dlearn.draw.palette import GRID, INK, LINES, SERIES
from dlearn.trace.trace import Trace

_HEIGHT_IN = 3.2
_LINE_PT = 1.35 * TEXT_PT
_MARKER_PT = 6.5
_MOST_LINES = 6
_LOOKS = tuple(zip(SERIES, "os^DvP", strict=True))


@dataclass(frozen=True)
class Family:
    """Messages that grow alike lie on one line; `more` says how many there are besides the first."""

    line: ScalingLine
    members: tuple[ScalingLine, ...]
    color: str
    marker: str
    width: float


def scaling(runs: Mapping[int, Trace] | Scaling, *, ax: Axes | None = None) -> Axes:
    """Draw payload bytes over the size, for each message that depends on it: the line, and what was measured."""
    told = runs if isinstance(runs, Scaling) else scaling_of(runs)
    fit = ax is None
    # The last size stands below the edge.
    beyond = text_width(f"{max(told.sizes, default=0):,}", size=TEXT_PT) / 2 / 72
    ax = ax or canvas.new_axes(height_in=_HEIGHT_IN, left_in=0.85, right_in=max(0.15, beyond + 0.05))
    families = families_of(told)
    if not families:
        return canvas.say_empty(ax, f"{told.finding}.", fit=fit)
    canvas.describe(ax, "The payload of a message over the size, a line for all messages that grow alike.")
    right = max(told.sizes)
    for family in families:
        draw_family(ax, family, right)
    label_axes(ax, told, right)
    handles = label_families(ax, told, families, right)
    canvas.frame(ax, title=told.finding, legend=handles, notes=notes(told, families), below_in=0.5, fit=fit)
    return ax


def families_of(told: Scaling) -> list[Family]:
    """The steepest first: it is drawn below the others, and wider."""
    alike: dict[tuple[int, ...], list[ScalingLine]] = {}
    for line in told.growing:
        # Apart by less than a dot is one line: the constants are a few hundred bytes.
        alike.setdefault(line.tensor_bytes, []).append(line)
    found = sorted(alike.values(), key=lambda lines: -lines[0].slope)[:_MOST_LINES]
    return [
        Family(lines[0], tuple(lines), *_LOOKS[place], width=3.4 - 0.4 * place) for place, lines in enumerate(found)
    ]


def draw_family(ax: Axes, family: Family, right: float) -> None:
    """A derived line is dashed, as in every picture; the points are what the runs sent."""
    line = family.line
    ends = [0.0, float(right)]
    ax.plot(
        ends, [line.at(each) for each in ends], color=family.color, linewidth=family.width, linestyle=LINES["derived"],
        zorder=2, gid=f"line {line.place} {line.what}",
    )  # fmt: skip
    for member in family.members:
        ax.plot(
            member.sizes, member.payload_bytes, family.marker, color=family.color, markeredgecolor=INK,
            markeredgewidth=0.7, markersize=_MARKER_PT, zorder=3, clip_on=False,
            gid=f"measured {member.place} {member.what}",
        )  # fmt: skip


def label_axes(ax: Axes, told: Scaling, right: float) -> None:
    """A tick at each size that was run, where there is room for it."""
    top = max(max(line.payload_bytes) for line in told.growing)
    ax.set_xlim(0, right)
    ax.set_ylim(0, top * 1.08)
    wide, shown = points(ax, 1.0, along="x") / right, [0]
    for size in told.sizes:
        if size and (size - shown[-1]) * wide > text_width(f"{size:,}", size=TEXT_PT) + 6:
            shown.append(size)
    ax.set_xticks(shown, [f"{size:,}" for size in shown], fontsize=TEXT_PT, color=INK)
    ticks = [tick for tick in ax.get_yticks() if 0 <= tick <= top * 1.08]
    ax.set_yticks(ticks, [size_text(round(tick)) for tick in ticks], fontsize=TEXT_PT, color=INK)
    ax.hlines(ticks, 0, right, colors=GRID, linewidth=0.6, zorder=0)
    ax.set_xlabel(
        "examples in a batch (B)" if told.name == "B" else told.name,
        fontsize=TEXT_PT,
        color=INK,
        labelpad=2,
        loc="left",
    )
    ax.set_ylabel("payload of a message", fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax)


def label_families(ax: Axes, told: Scaling, families: Sequence[Family], right: float) -> list[Line2D]:
    """What each line is, in the legend."""
    width = points(ax, 1.0, along="x") - 40
    return [
        Line2D(
            [],
            [],
            color=family.color,
            linewidth=family.width,
            linestyle=LINES["derived"],
            marker=family.marker,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            markersize=_MARKER_PT,
            label=cut(plain(_label(told, family), most=200), width, size=TEXT_PT),
        )
        for family in families
    ]


def _label(told: Scaling, family: Family) -> str:
    """ "8,192 B for each: result of forward, gradient"."""
    line = family.line
    slope = f"{line.slope:,.0f} B × {line.name}" if line.exact else "not linear"
    whats = list(dict.fromkeys(member.what for member in family.members))
    return f"{slope}: {told.between(line) + ': ' if len(family.members) == 1 else ''}{'; '.join(whats)}"


def notes(told: Scaling, families: Sequence[Family]) -> list[str]:
    shown = ["Dashed: constant + slope × " + told.name + ". Points: what the runs sent."]
    left = len({line.tensor_bytes for line in told.growing}) - len(families)
    if left:
        shown.append(f"{left} more, of a smaller slope, are not drawn.")
    rest = len(told.lines) - len(told.growing)
    if rest:
        shown.append(f"Not drawn: {rest} messages that do not depend on {told.name}.")
    return shown
