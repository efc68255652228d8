"""What pictures of training steps share: rows over time, bars, a legend of what is drawn."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dlearn.draw import canvas


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


def legend(ax: Axes, styles: Mapping[Any, Style], named: Container[Any] = ()) -> list[Artist]:
    """Explain what is drawn, by its gid; but not what is `named` in the picture."""
    drawn = {artist.get_gid() for artist in (*ax.patches, *ax.collections, *ax.lines)}
    return [style.key() for gid, style in styles.items() if gid in drawn and gid not in named]


@dataclass(frozen=True)
class TimeRow:
    """A row of bars, its middle in inches from the top; its time begins at `begin_ns`."""

    label: str
    middle: float
    begin_ns: int

    def ms(self, at_ns: int) -> float:
        return (at_ns - self.begin_ns) / 1e6


def lay_out(ax: Axes, rows: Sequence[TimeRow], height: float, *, last_ms: float, of: str) -> None:
    """Name the rows at their left; below them write ms from the moment `of`."""
    ax.set(xlim=(0, last_ms), ylim=(height, 0))
    canvas.name_rows(ax, [row.middle for row in rows], [row.label for row in rows])
    canvas.quiet(ax, f"ms from {of}")
