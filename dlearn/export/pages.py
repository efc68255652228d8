"""The player and the strip as a page of their own, and the stage as an animation."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dlearn.analysis.walking import walkthrough
from dlearn.draw.animation import animate
from dlearn.join.joining import operations
from dlearn.play import player, strip
from dlearn.play.page import page
from dlearn.trace import Trace


def html(trace: Trace) -> str:
    """Return a page to step through the messages and to travel through all calls, that needs nothing else."""
    shown = player(trace)
    travel = strip(trace).snippet if len(operations(trace).calls) else ""
    return page(shown.title, shown.snippet + travel)


def gif(trace: Trace) -> bytes:
    """Return a GIF's content: the player's stage, in at most 40 frames.

    Raises DlearnError where nothing happens in the trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps.gif")
        animate(walkthrough(trace), path)
        return path.read_bytes()
