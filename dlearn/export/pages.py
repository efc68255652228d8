"""The player and the strip as a page of their own, and the stage as an animation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from dlearn.analysis.walking import walkthrough
from dlearn.draw.animation import animate
from dlearn.join.joining import operations
from dlearn.play import player, strip
from dlearn.play.page import page
from dlearn.trace.trace import Trace


def html(trace: Trace) -> str:
    """A page to step through the messages and to travel through all calls, that needs nothing else."""
    shown = player(trace)
    travel = strip(trace).snippet if len(operations(trace).calls) else ""
    return page(shown.title, shown.snippet + travel)


def gif(trace: Trace, *, tell: Callable[[int, int], object] | None = None) -> bytes:
    """A GIF's content: the player's stage, in at most 40 frames. `tell` hears how many are done, and of how many.

    Raises DlearnError where nothing happens in the trace.
    """
    return _animation(trace, ".gif", tell)


def webp(trace: Trace, *, tell: Callable[[int, int], object] | None = None) -> bytes:
    """The same as `gif`, as a WebP's content: all colours, in fewer bytes."""
    return _animation(trace, ".webp", tell)


def _animation(trace: Trace, ending: str, tell: Callable[[int, int], object] | None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"steps{ending}"
        animate(walkthrough(trace), path, tell=tell)
        return path.read_bytes()
