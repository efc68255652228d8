"""The player: a walk through a trace, step by step: a picture, what each rank holds, and a sentence for each step.

What is played is worked out by `analysis.walking`; `packing` turns it into data, `player.js` into a page. A page that
runs no scripts shows the still picture, and the first steps in words.
"""

from __future__ import annotations

import hashlib
import html
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from dlearn.analysis.walking import Walkthrough, walkthrough
from dlearn.draw.animation import animate
from dlearn.draw.palette import DARK, LIGHT, LINES
from dlearn.errors import DlearnError, SetupError
from dlearn.play.bridge import Bridge
from dlearn.play.packing import packed
from dlearn.play.still import MOST_ROWS, dashes, still
from dlearn.shown import count_text
from dlearn.trace.message import Message
from dlearn.trace.store import printable
from dlearn.trace.tables.message_table import Messages
from dlearn.trace.trace import Trace

_LANE_PX = 46


class Player:
    """Steps of a real run. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    def __init__(self, walk: Walkthrough) -> None:
        self.walk = walk
        self.title = printable(walk.title)
        self.sentences = tuple(printable(step.sentence) for step in walk.steps)
        self.notes = tuple(printable(note) for note in walk.notes)
        name, self.snippet = _snippet(walk, self.title, self.sentences, self.notes)
        """Self-contained HTML, to be put into a page."""
        self.bridge = Bridge(name, last=len(self.sentences))

    @property
    def step(self) -> int:
        """How many steps have been shown where the player stands, 0 at first. Set it: the shown player goes there.

        In JupyterLab with anywidget both follow each other. Elsewhere it is what was last set here.
        """
        return self.bridge.step

    @step.setter
    def step(self, step: int) -> None:
        self.bridge.step = step

    def on_step(self, callback: Callable[[int], object]) -> None:
        """Call `callback(step)` after each change of `step`, made here or on the page."""
        self.bridge.on_step(callback)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The player as a page that needs nothing else; written to `path` too, if there is one."""
        snippet = self.snippet.replace('<p class="title">', '<p class="title" role="heading" aria-level="1">', 1)
        page = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
            f"<title>{html.escape(self.title)}</title></head>\n<body><main>{snippet}</main></body></html>\n"
        )
        if path is not None:
            try:
                Path(path).write_text(page, encoding="utf-8")
            except OSError as error:
                raise SetupError(f"cannot write {path}: {error.strerror}. Choose another place for it.") from None
        return page

    def to_gif(self, path: str | os.PathLike[str], *, seconds: float = 1.2) -> None:
        """As an animation, a frame for each of the first 120 steps: for slides, and pages that play nothing."""
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
    with the contexts of distributed autograd, its graph, and the user's spans. At most 300 messages: it says so.
    `tags` are the program's own names of the tags of its sends: {1: "HELLO"}. DlearnError for messages that are none.
    """
    if messages is not None and not (isinstance(messages, Sequence | Messages) and all(map(_is_message, messages))):
        raise DlearnError(
            f"messages= takes the messages to play, and not {messages!r:.60}: such as dlearn.messages(trace)[:300]."
        )
    return Player(walkthrough(trace, messages=messages, title=title, tags=tags))


def _is_message(each: object) -> bool:
    return isinstance(each, Message)


# HTML -----------------------------------------------------------------------------------------------------------------


def _snippet(walk: Walkthrough, title: str, sentences: Sequence[str], notes: Sequence[str]) -> tuple[str, str]:
    """Its name, which two players share that are the same to the letter, and the HTML."""
    data = packed(walk)
    unique = hashlib.sha256(f"{title}{data}".encode()).hexdigest()[:8]
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences[:MOST_ROWS])
    more = len(sentences) - MOST_ROWS
    listed += f"<li>... and {more:,} more, for which this page must be allowed to run scripts</li>" if more > 0 else ""
    noted = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    # No shortcut of JupyterLab may take the arrow keys away, and no "$" in a name is the start of a formula.
    snippet = (
        f'<div class="dlearn-player mathjax_ignore tex2jax_ignore" data-player="{unique}"'
        f' data-lm-suppress-shortcuts="true"><style>{_style()}</style>'
        f'<p class="title">{html.escape(title)}</p><div class="bar"></div>'
        f'<div class="picture" style="min-width:{_LANE_PX * len(walk.labels)}px">{still(walk)}</div>'
        '<div class="holds" role="group" aria-label="What each rank holds"></div><div class="totals"></div>'
        f"<details open><summary>All steps in words</summary><ol>{listed}</ol></details>"
        f'{noted}<script type="application/dlearn">{data}</script><script>{_script()}</script></div>'
    )
    return unique, snippet


def _script() -> str:
    """Two files as one function: nothing in it is seen by the page around it."""
    return f"(() => {{\n{_read('pictures.js')}\n{_read('player.js')}\n}})();"


def _read(name: str) -> str:
    """A file beside this one, without its indentation and comments: a page may hold it many times."""
    lines = (line.strip() for line in (files("dlearn.play") / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _style() -> str:
    """The colours and dashes of the other pictures. JupyterLab says whether it is dark; elsewhere the browser does."""
    light, dark = (";".join(f"--{name}:{color}" for name, color in each.items()) for each in (LIGHT, DARK))
    dashed = [f".dlearn-player .{how}{{stroke-dasharray:{dashes(how)}}}" for how in LINES if dashes(how)]
    own = f".dlearn-player{{{light}}}\nbody[data-jp-theme-light=false] .dlearn-player{{{dark}}}"
    system = f"@media(prefers-color-scheme:dark){{body:not([data-jp-theme-light]) .dlearn-player{{{dark}}}}}"
    return "\n".join([own, system, _read("player.css"), *dashed])
