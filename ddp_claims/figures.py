"""The figures that are no drawing of a trace: measurements as dots; and the verdict below each."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes

from ddp_claims.samples import Samples
from dlearn.draw import canvas
from dlearn.draw.palette import FAINT, INK, LANE, SERIES, TEXT_PT, text_width, wrap
from dlearn.lessons.charts import HEIGHT_IN


def dots(
    columns: Mapping[str, Sequence[float]], *, title: str, y: str, between: Sequence[str], notes: Sequence[str]
) -> Axes:
    """Draw all values of each column, median and 95 % interval; neighbours are pairs.

    What was measured in one turn is joined by a line; `between` is written above each pair of columns.
    """
    ax = canvas.new_axes(height_in=HEIGHT_IN, left_in=0.8)
    canvas.describe(ax, f"{y}, a dot for each measurement of: {'; '.join(columns)}.")
    values = list(columns.values())
    for place, (first, second) in enumerate(zip(values[::2], values[1::2], strict=True)):
        left, right = 2 * place, 2 * place + 1
        ax.plot([left + 0.1, right - 0.1], [first, second], color=FAINT, linewidth=0.5, alpha=0.6, gid="pairs")
        for x, side, taken in ((left, -1, first), (right, 1, second)):
            color = SERIES[0] if side < 0 else SERIES[1]
            ax.plot([x - 0.1 * side] * len(taken), taken, "o", color=color, markersize=3.5, alpha=0.7, gid="dots")
            middle, interval = median(taken), Samples(tuple(taken)).interval
            ax.plot([x + 0.05 * side] * 2, interval, color=INK, linewidth=2.2, solid_capstyle="butt", gid="interval")
            ax.plot([x + 0.05 * side], [middle], "D", color=INK, markersize=5.5, gid="median")
            align = "right" if side < 0 else "left"
            canvas.write(ax, x + 0.11 * side, middle, f"{middle:.3g}", ha=align, fontweight="bold")
    top = 1.18 * max(max(taken) for taken in values)
    for place, text in enumerate(between):
        canvas.write(ax, 2 * place + 0.5, 0.96 * top, text, ha="center", va="top", fontweight="bold")
    ax.set_xlim(-0.6, len(values) - 0.4)
    ax.set_ylim(0, top)
    ax.set_xticks(range(len(values)), list(columns), fontsize=TEXT_PT, color=INK)
    ax.set_ylabel(y, fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax)
    told = ["A dot for each measurement, joined with its partner; diamond: the median; thick line: its 95% interval."]
    lines = 1 + max(name.count("\n") for name in columns)
    return canvas.frame(ax, title=title, notes=[*told, *notes], below_in=0.22 + 0.16 * lines)


def stamp(ax: Axes, verdict: str, mark: str, paper: str) -> None:
    """Write the paper's claim below the figure, and the verdict in a box."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    tag = f"{mark} {verdict}"
    wide = figure.get_figwidth() * 72
    told = wrap(paper, wide - text_width(tag, size=TEXT_PT, bold=True) - 48, size=TEXT_PT)
    height, more = figure.get_figheight(), (len(told) * TEXT_PT * 1.45 + 12) / 72
    figure.set_figheight(height + more)
    for each in figure.axes:
        box = each.get_position()
        each.set_position(
            (box.x0, (box.y0 * height + more) / (height + more), box.width, box.height * height / (height + more))
        )
    for line, text in enumerate(told):
        y = (more * 72 - 8 - (line + 0.5) * TEXT_PT * 1.45) / 72 / (height + more)
        figure.text(8 / wide, y, text, fontsize=TEXT_PT, color=INK, va="center", parse_math=False)
    figure.text(
        1 - 14 / wide, more / 2 / (height + more), tag, ha="right", va="center", fontsize=TEXT_PT, fontweight="bold",
        color=INK, bbox={"facecolor": LANE, "edgecolor": INK, "boxstyle": "round,pad=0.35", "linewidth": 0.8},
    )  # fmt: skip
