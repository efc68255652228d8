"""A trace in other tools' formats: every function takes a Trace and a place for the file, if there is to be one."""

import tempfile
from pathlib import Path

from dlearn.export.mermaid import mermaid
from dlearn.export.perfetto import perfetto
from dlearn.join.joining import operations
from dlearn.play import player, strip
from dlearn.play.page import page
from dlearn.play.writing import Place, write
from dlearn.trace import Trace

__all__ = ["gif", "html", "mermaid", "perfetto"]
__dir__ = __all__.copy


def html(trace: Trace, path: Place = None) -> str:
    """Return a page to step through the messages and to travel through all calls; write it to `path`, too.

    It needs nothing else. Raises SetupError where the file cannot be written.
    """
    shown = player(trace)
    travel = strip(trace).snippet if len(operations(trace).calls) else ""
    return page(shown.title, shown._repr_html_() + travel, path)


def gif(trace: Trace, path: Place = None) -> bytes:
    """Return a GIF's content: the player's stage, in at most 40 frames; write it to `path`, too.

    Raises DlearnError where nothing happens in the trace, SetupError where the file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "steps.gif")
        player(trace).to_gif(made)
        content = made.read_bytes()
    if path is not None:
        write({Path(path): [content]})
    return content
