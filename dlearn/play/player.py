"""The player: a walk through a trace, step by step: a picture, what each rank holds, and a sentence for each step.

What is played is worked out by `analysis.walking`; `packing` turns it into data, `player.js` into a page. A page that
runs no scripts shows the still picture, and the first steps in words.
"""

from __future__ import annotations

import hashlib
import html
import os
from collections.abc import Callable, Mapping, Sequence

from dlearn.analysis.walking import Walkthrough, walkthrough
from dlearn.draw.animation import animate
from dlearn.draw.palette import LINES
from dlearn.errors import DlearnError
from dlearn.events.printable import printable
from dlearn.join.tables.message_table import Message, Messages
from dlearn.play.bridge import Bridge
from dlearn.play.packing import MOST_NAMES, packed
from dlearn.play.page import Page, script, style
from dlearn.play.still import MOST_ROWS, dashes, still
from dlearn.shown import count_text
from dlearn.trace import Trace

_LANE_PX, _NUMBER_PX = 46, 12
"""The least width of a lane, and of one that has only a number above it."""
_SCRIPTS = ("elements.js", "pictures.js", "stage.js", "player.js")


class Player(Page):
    """Steps of a real run. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    def __init__(self, walk: Walkthrough) -> None:
        self.walk = walk
        self.title = printable(walk.title)
        self.sentences = tuple(printable(step.sentence) for step in walk.steps)
        self.notes = tuple(printable(note) for note in walk.notes)
        name, self.snippet = _snippet(walk, self.title, self.sentences, self.notes)
        hung = (place for place, step in enumerate(walk.steps, 1) if step.absent)
        self.bridge = Bridge(name, last=len(self.sentences), step=next(hung, 0))

    @property
    def step(self) -> int:
        """How many steps have been shown. Set it: the player goes there, in JupyterLab with anywidget."""
        return self.bridge.step

    @step.setter
    def step(self, step: int) -> None:
        self.bridge.step = step

    def on_step(self, callback: Callable[[int], object]) -> None:
        """Call `callback(step)` after each change of `step`, made here or on the page."""
        self.bridge.on_step(callback)

    def to_gif(self, path: str | os.PathLike[str], *, seconds: float = 1.2) -> None:
        """Write an animation of the stage, in at most 40 frames."""
        animate(self.walk, path, seconds=seconds)

    def _repr_html_(self) -> str:
        return self.snippet

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """What a notebook asks for when it is about to show this."""
        self.bridge.open()
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def __str__(self) -> str:
        told = [f"{number:>4}. {sentence}" for number, sentence in enumerate(self.sentences, 1)]
        return "\n".join([self.title, *told, *self.notes])

    def __repr__(self) -> str:
        return f"{self.title}: {count_text(len(self.sentences), 'step')}"


def player(
    trace: Trace,
    *,
    messages: Sequence[Message] | None = None,
    title: str | None = None,
    tags: Mapping[int, str] | None = None,
) -> Player:
    """Step through who sends what to whom, and what ranks do and hold in between: all of the trace, or these messages.

    It plays whatever the trace has: sends, collectives with the pieces of their data, the buckets of DDP, calls by RPC
    with the contexts of distributed autograd, its graph, and the user's spans. Of more than 300 messages it plays one
    whole step, the last, or one whole collective (up to 20,000 messages of one operation); of a hang what was before
    it. The title says so.
    `tags` are the program's own names of the tags of its sends: {1: "HELLO"}. DlearnError for messages that are none.
    """
    if messages is not None and not (isinstance(messages, Sequence | Messages) and all(map(_is_message, messages))):
        raise DlearnError(
            f"messages= takes the messages to play, and not {messages!r:.60}: such as dlearn.messages(trace)[:300]."
        )
    return Player(walkthrough(trace, messages=messages, title=title, tags=tags))


def _is_message(each: object) -> bool:
    return isinstance(each, Message)


def _snippet(walk: Walkthrough, title: str, sentences: Sequence[str], notes: Sequence[str]) -> tuple[str, str]:
    """Its name, which two players share that are the same to the letter, and the HTML."""
    data = packed(walk)
    numbered = len(walk.labels) > MOST_NAMES and all(walk.labels.short(rank).isdigit() for rank in walk.labels)
    least = _NUMBER_PX if numbered else _LANE_PX
    unique = hashlib.sha256(f"{title}{data}".encode()).hexdigest()[:8]
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences[:MOST_ROWS])
    more = len(sentences) - MOST_ROWS
    listed += f"<li>... and {more:,} more, for which this page must be allowed to run scripts</li>" if more > 0 else ""
    noted = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    dashed = "".join(f".dlearn-player .{how}{{stroke-dasharray:{dashes(how)}}}" for how in LINES if dashes(how))
    # No shortcut of JupyterLab may take the arrow keys away, and no "$" in a name is the start of a formula.
    snippet = (
        f'<div class="dlearn-player mathjax_ignore tex2jax_ignore" data-player="{unique}"'
        f' data-lm-suppress-shortcuts="true"><style>{style()}{dashed}</style>'
        f'<p class="title">{html.escape(title)}</p><div class="bar"></div>'
        f'<div class="picture" style="min-width:{least * len(walk.labels)}px">{still(walk)}</div>'
        '<div class="holds" role="group" aria-label="What each rank holds"></div><div class="totals"></div>'
        f"<details open><summary>All steps in words</summary><ol>{listed}</ol></details>"
        f'{noted}<script type="application/dlearn">{data}</script>{script(*_SCRIPTS)}</div>'
    )
    return unique, snippet
