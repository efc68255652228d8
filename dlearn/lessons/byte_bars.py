"""Bytes as bars: what was predicted beside what was measured, for ways of doing the same."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn.analysis.findings import size_text
from dlearn.draw import canvas
from dlearn.draw.palette import COUNTED, INK, LINES, look
from dlearn.draw.save import closed_after, png_of
from dlearn.draw.text import TEXT_PT, plain, text_width

_ROW_IN = 0.3
_LOOKS = (look("all_reduce"), look("send"), look("reduce_scatter"), look("broadcast"))


@dataclass(frozen=True)
class Bars:
    """`names[i]` is predicted to send `predicted[i]` bytes, and sent `measured[i]`."""

    title: str
    names: tuple[str, ...]
    predicted: tuple[int, ...]
    measured: tuple[int, ...]
    note: str = ""


def byte_bars(bars: Bars, *, ax: Axes | None = None) -> Axes:
    """Draw two bars for each name, with their bytes at the end."""
    rows = 3 * len(bars.names)
    ax = ax or canvas.new_axes(height_in=rows * _ROW_IN, left_in=0.15)
    sizes = zip(bars.names, bars.predicted, bars.measured, strict=True)
    words = (f"{name}: predicted {_number(one)}, counted {_number(other)}." for name, one, other in sizes)
    canvas.describe(ax, *words)
    widest = max(text_width(_number(size), size=TEXT_PT) for size in (*bars.predicted, *bars.measured)) + 12
    most = max(*bars.predicted, *bars.measured, 1)
    ax.set_xlim(0, most / (1 - widest / canvas.points(ax, 1.0, along="x")))
    ax.set_ylim(rows, 0)
    for place, name in enumerate(bars.names):
        top = 3 * place
        ax.annotate(
            plain(name), (0, top + 0.92), (0, 0), textcoords="offset points", va="bottom", fontsize=TEXT_PT,
            fontweight="bold", color=INK, parse_math=False, annotation_clip=False,
        )  # fmt: skip
        _bar(ax, place, top + 1, bars.predicted[place], f"predicted {name}", derived=True)
        _bar(ax, place, top + 2, bars.measured[place], f"measured {name}", derived=False)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_axis_off()
    handles = [
        Patch(facecolor="white", edgecolor=INK, linestyle=LINES["derived"], label="predicted"),
        Patch(facecolor=COUNTED, edgecolor=INK, label="counted by the kernel, framing too"),
    ]
    notes = [bars.note] if bars.note else []
    return canvas.frame(ax, title=bars.title, legend=handles, notes=notes, below_in=0.08)


def png(bars: Bars) -> bytes:
    """Draw the bars as PNG bytes, for a widget that shows them itself."""
    with closed_after():
        return png_of(byte_bars(bars))


def _bar(ax: Axes, place: int, top: float, size: int, gid: str, *, derived: bool) -> None:
    shown = _LOOKS[place % len(_LOOKS)]
    ax.barh(
        top + 0.45, size, height=0.8, color=shown.pale if derived else shown.color, edgecolor=INK, linewidth=1.0,
        linestyle=LINES["derived"] if derived else "solid", gid=gid,
    )  # fmt: skip
    ax.annotate(
        _number(size), (size, top + 0.45), (5, 0), textcoords="offset points", va="center_baseline",
        fontsize=TEXT_PT, color=INK, annotation_clip=False,
    )  # fmt: skip


def _number(size: int) -> str:
    """Format as "287,696 B" below a hundred million, else with three digits."""
    return f"{size:,} B" if size < 10**8 else size_text(size)
