"""A walk through the trace as an animated GIF, for slides and pages that play nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from dlearn.analysis.walking import walkthrough
from dlearn.draw.animation import animate
from dlearn.trace.trace import Trace


def gif(trace: Trace, *, tell: Callable[[int, int], object] | None = None) -> bytes:
    """The file's content: a frame for each of the first 120 steps. `tell` hears how many frames are done, and of how
    many. Raises DlearnError where nothing happens in the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.gif"
        animate(walkthrough(trace), path, tell=tell)
        return path.read_bytes()
