"""A trace in other tools' formats: every function takes a Trace and returns what stands in the file, as text but for
a GIF. The caller chooses the file."""

import tempfile
from pathlib import Path

from dlearn.export.mermaid import mermaid
from dlearn.export.perfetto import perfetto
from dlearn.join.joining import operations
from dlearn.play import player, strip
from dlearn.play.page import page
from dlearn.trace import Trace

__all__ = ["gif", "html", "mermaid", "perfetto"]
__dir__ = __all__.copy


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
        player(trace).to_gif(path)
        return path.read_bytes()
