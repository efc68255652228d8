"""The player as a web page of its own."""

from __future__ import annotations

from dlearn.play import player
from dlearn.trace.trace import Trace


def html(trace: Trace) -> str:
    """A page to step through the messages, that needs nothing else: no server, no network."""
    return player(trace).to_html()
