"""A picture as a file's bytes with its title: for a page that shows it itself. No figure stays open."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

_DPI = 110


@dataclass(frozen=True)
class Still:
    """A picture as PNG, and its finding in words, for those who do not see it."""

    title: str
    png: bytes


def still(draw: Callable[[], Axes]) -> Still:
    """The picture that `draw` makes on a figure of its own."""
    before = plt.get_fignums()
    try:
        ax = draw()
        figure = ax.get_figure(root=True)
        assert figure is not None
        file = io.BytesIO()
        # Every drawing fits its figure: looking once more for what sticks out would cost a third of the time.
        figure.savefig(file, format="png", dpi=_DPI)
        return Still(" ".join(ax.get_title(loc="left").split()), file.getvalue())
    finally:
        for number in set(plt.get_fignums()).difference(before):
            plt.close(number)
