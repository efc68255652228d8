"""Whether the text of a picture can be read: no two texts on each other, none cut off, none over somebody else's axes.

What is checked is what the renderer is told to draw, line by line: the ink's own box, turned as the text is.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

MOST_PX = 1.0
"""What edges may share: the rim of a letter, where it is painted half."""


@dataclass(frozen=True)
class Line:
    """One drawn line of text: the `corners` of its ink in pixels from the lower left, and to what it is clipped."""

    text: str
    owner: Text
    corners: np.ndarray
    clip: BboxBase | None


class _Listener(RendererAgg):
    """Notes each line of text, and paints none: what is looked at is where it would stand."""

    def __init__(self, figure: Figure) -> None:
        width, height = figure.bbox.size
        super().__init__(width, height, figure.dpi)
        self.lines: list[Line] = []
        self.owner = Text()

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        width, height, descent = self.get_text_width_height_descent(s, prop, ismath)
        box = np.array([(0, -descent), (width, -descent), (width, height - descent), (0, height - descent)])
        cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
        corners = box @ np.array([[cos, sin], [-sin, cos]]) + (x, self.height - y)
        if s.strip():
            self.lines.append(Line(s.strip(), self.owner, corners, gc.get_clip_rectangle()))


def drawn_lines(figure: Figure) -> list[Line]:
    """All text of the figure that is drawn."""
    listener = _Listener(figure)
    draw = Text.draw

    def noted(text: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(renderer, _Listener):
            renderer.owner = text
        draw(text, renderer, *args, **kwargs)

    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()  # It settles.
    with patch.object(Text, "draw", noted):
        figure.draw(listener)
    return listener.lines


def faults(figure: Figure) -> list[str]:
    """A sentence for each text that cannot be read, or that somebody else's axes cannot be read for."""
    return faults_of(drawn_lines(figure), figure)


def faults_of(lines: list[Line], figure: Figure) -> list[str]:
    told = [
        f"{one.text!r} and {other.text!r} overlap by {depth:.0f} px"
        for one, other in _close(lines)
        if one.owner is not other.owner and (depth := _overlap(one.corners, other.corners)) > MOST_PX
    ]
    for line in lines:
        if line.clip is not None and (cut := _beyond(line.corners, line.clip)) > MOST_PX:
            told.append(f"{line.text!r} is cut off at the edge of its axes: {cut:.0f} px")
        if (out := _beyond(line.corners, figure.bbox)) > MOST_PX:
            told.append(f"{line.text!r} leaves the figure by {out:.0f} px")
        told += [f"{line.text!r} stands over other axes" for axes in _others(figure, line) if _covers(axes, line)]
    return told


def _close(lines: list[Line]) -> Iterator[tuple[Line, Line]]:
    """The pairs whose upright boxes meet: few, so that the exact look at them costs nothing."""
    low = np.array([line.corners.min(axis=0) for line in lines]).reshape(-1, 2)
    high = np.array([line.corners.max(axis=0) for line in lines]).reshape(-1, 2)
    meet = ((low[:, None] < high) & (low < high[:, None])).all(axis=2)
    for i, j in np.argwhere(np.triu(meet, k=1)):
        yield lines[i], lines[j]


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    """How far two rectangles reach into each other, in pixels: the least over the directions of their sides."""
    depth = np.inf
    for corners in (one, other):
        for side in (corners[1] - corners[0], corners[3] - corners[0]):
            along = side / (np.hypot(*side) or 1.0)
            a, b = one @ along, other @ along
            depth = min(depth, min(a.max(), b.max()) - max(a.min(), b.min()))
    return float(depth)


def _beyond(corners: np.ndarray, box: BboxBase) -> float:
    """How far it leaves the box, in pixels."""
    (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
    return float(max(box.x0 - left, right - box.x1, box.y0 - low, high - box.y1))


def _others(figure: Figure, line: Line) -> list[Axes]:
    """Axes that are not the text's own, nor hold these as a panel, nor lie on them as twins do."""
    own = line.owner.axes
    if own is None:
        return []
    every = [*figure.axes, *(panel for axes in figure.axes for panel in axes.child_axes)]
    strange = [axes for axes in every if own not in axes.child_axes and axes not in own.child_axes]
    return [axes for axes in strange if not np.allclose(axes.bbox.extents, own.bbox.extents)]


def _covers(axes: Axes, line: Line) -> bool:
    box = axes.bbox
    corners = np.array([(box.x0, box.y0), (box.x1, box.y0), (box.x1, box.y1), (box.x0, box.y1)])
    return _overlap(corners, line.corners) > MOST_PX


def watch(report: Callable[[list[Line], list[str]], None]) -> Callable[[], None]:
    """Check every figure that is shown by a notebook or saved, before it is; returns what ends this."""
    printed = FigureCanvasBase.print_figure

    def checked(canvas: FigureCanvasBase, *args: Any, **kwargs: Any) -> Any:
        lines = drawn_lines(canvas.figure)
        report(lines, faults_of(lines, canvas.figure))
        return printed(canvas, *args, **kwargs)

    change = patch.object(FigureCanvasBase, "print_figure", checked)
    change.start()
    return change.stop


def watch_kernel(path: str) -> None:
    """In a notebook's kernel, from its start on: a line of JSON for each picture, with the cell that shows it."""
    from IPython import get_ipython

    def note(lines: list[Line], found: list[str]) -> None:
        cells = get_ipython().user_ns["In"]
        line = {"cell": len(cells) - 1, "source": cells[-1], "texts": len(lines), "faults": found}
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")

    png = get_ipython().display_formatter.formatters["image/png"]
    png.for_type_by_name("dlearn.draw.save", "Drawing", lambda drawing: None)  # The same again: its SVG is looked at.
    watch(note)
