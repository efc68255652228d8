"""The demo's page: two real jobs to step through, and what they sent, in one file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from dlearn import play
from dlearn.analysis import Explanation
from dlearn.join.tables.message_table import Message
from dlearn.trace import Trace

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
section { margin-top: 3rem; }
img { max-width: 100%; }
table { border-collapse: collapse; }
td, th { padding: 0.1rem 0.6rem; }
code { overflow-wrap: anywhere; }
"""


def page(
    trace: Trace, step: Trace, explanation: Explanation, served: Trace, mine: Sequence[Message], surprise: str
) -> str:
    """Make it of the training and one `step` of it, and of the parameter server and the messages of one trainer."""
    played = play.player(step)
    served_played = play.player(served, messages=mine, title=surprise)
    parts = (
        ("A step of DistributedDataParallel, message by message", played.snippet),
        ("All of the training; the stage above goes to what you choose of its step", play.strip(trace).snippet),
        ("In words", explanation._repr_html_()),
        (surprise, served_played.snippet),
        ("Go on", _GO_ON),
    )
    body = "".join(f"<section><h2>{html.escape(title)}</h2>{content}</section>" for title, content in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>dlearn: what a real job sends</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>What a real job sends</h1><p>{_FIRST}</p>{body}</main></body></html>\n"
    )


_FIRST = (
    "Recorded just now on this machine: three ranks that train a small ConvNet on handwritten digits, and the same"
    " net on a parameter server. Nothing here was drawn by hand. Press the arrow keys in a picture to go on."
)
_GO_ON = (
    "<p>In a notebook: <code>from dlearn import Trace, draw, explain; trace = Trace.load('trace')</code>, then"
    " <code>explain(trace)</code> or <code>draw.timeline(trace.within('step 3'))</code>. Of a script of your own,"
    " without changing it: <code>dlearn run train.py</code>.</p>"
)
