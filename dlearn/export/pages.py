"""The player as a page of its own, and as an animation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from dlearn.analysis.walking import walkthrough
from dlearn.draw.animation import animate
from dlearn.play import player
from dlearn.trace.trace import Trace


def html(trace: Trace) -> str:
    """A page to step through the messages, that needs nothing else: no server, no network."""
    return player(trace).to_html()


def gif(trace: Trace, *, tell: Callable[[int, int], object] | None = None) -> bytes:
    """A GIF's content: a frame for each of the first 120 steps. `tell` hears how many frames are done, and of how
    many. Raises DlearnError where nothing happens in the trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.gif"
        animate(walkthrough(trace), path, tell=tell)
        return path.read_bytes()
