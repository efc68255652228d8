"""The player: a walk through a trace, with a picture and a sentence for each step.

`analysis.replay` makes the steps, `packing` turns them into data, and `player.js` shows them.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, SupportsIndex

from dlearn.analysis.replay.steps import Walkthrough
from dlearn.analysis.replay.walkthrough import walkthrough
from dlearn.draw import film, sequence
from dlearn.draw.animation import animate
from dlearn.errors import DlearnError, SetupError
from dlearn.events.printable import printable
from dlearn.join.joining import operations
from dlearn.join.message_evidence import messages as all_messages
from dlearn.join.tables.message_table import Message, Messages
from dlearn.notices import notice
from dlearn.play.packing import player_facts
from dlearn.play.page import Page, frame, name_for, pack, page, render, still, widget
from dlearn.play.writing import Place
from dlearn.shown import count_text, in_a_notebook
from dlearn.trace import Trace

_MOST_SENTENCES = 24  # Where no scripts run.
_PICTURE = '<div class="picture">'


class Player(Page):
    """Steps of a real run. A notebook shows it, also without a kernel; `to_html` gives a page of its own.

    `step` is the same here and on the page. Without a kernel and anywidget it is only remembered.
    """

    def __init__(self, walk: Walkthrough, trace: Trace) -> None:
        self.walk, self._trace = walk, trace
        self.title = printable(walk.title)
        self.sentences = tuple(printable(step.sentence) for step in walk.steps)
        self.notes = tuple(printable(note) for note in walk.notes)
        markup = {name: render(f"{name}.html") for name in ("controls", "totals")}  # For scripts.
        data = pack(player_facts(walk) | markup, {})
        self._name = name_for(self.title, data)
        facts = {"sentences": self.sentences, "most": _MOST_SENTENCES, "notes": self.notes}
        self.snippet = frame("player", self._name, self.title, data, **facts)
        hung = (number for number, step in enumerate(walk.steps, 1) if step.absent)
        self._step = next(hung, 0)
        self._callbacks: list[Callable[[int], object]] = []
        self._widget: Any = None
        self._unlinked = ""  # Why the page that was shown does not follow.

    @property
    def step(self) -> int:
        """Return how many steps have been shown. Set it: in JupyterLab with anywidget the page goes there."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        last = len(self.sentences)
        if not isinstance(step, SupportsIndex) or not 0 <= step.__index__() <= last:
            what = f"choose one from 0 (before the first message) to {last}"
            raise DlearnError(f"this player has no step {step!r}: {what}")
        self._warn_if_unlinked()
        self._move(step.__index__())
        if self._widget is not None:
            self._widget.state = self._step

    def on_step(self, callback: Callable[[int], object]) -> None:
        """Call `callback(step)` after each change of `step`, made here or on the page."""
        self._warn_if_unlinked()
        self._callbacks.append(callback)

    def _move(self, step: int) -> None:
        if step != self._step:
            self._step = step
            for callback in self._callbacks:
                callback(step)

    def _warn_if_unlinked(self) -> None:
        if self._unlinked:
            warnings.warn(self._unlinked, stacklevel=3)
            self._unlinked = ""

    def to_html(self, path: Place = None) -> str:
        return page(self.title, self._repr_html_(), path)

    def to_gif(
        self, path: str | os.PathLike[str], *, seconds: float = 0.5, dark: bool = False
    ) -> None:  # fmt: skip
        """Write an animation of 12 frames a second, at most 256; `dark` is for dark pages."""
        animate(self.walk, path, seconds=seconds, dark=dark)

    def _repr_html_(self) -> str:
        """Return the page with a picture, for a notebook that runs no scripts: a film or a sequence."""
        picture = still(film if len(operations(self._trace)) == 1 else sequence, self._trace)
        return self.snippet.replace(_PICTURE, f"{_PICTURE}{picture}", 1)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        if self._widget is None and in_a_notebook():
            try:
                self._widget = player_widget(self._name)
                self._widget.state = self._step
                self._widget.observe(lambda change: self._move(change.new), "state")
            except SetupError as error:  # no anywidget: the page plays all the same
                self._unlinked = str(error)
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def __str__(self) -> str:
        words = [f"{number:>4}. {sentence}" for number, sentence in enumerate(self.sentences, 1)]
        return "\n".join([self.title, *words, *self.notes])

    def __repr__(self) -> str:
        return f"{self.title}: {count_text(len(self.sentences), 'step')}"


@cache
def player_widget(name: str) -> Any:
    """Return the widget of all players of this name: those of a cell that was run again move together."""
    return widget(name, 0, needed_by="a page that follows Python, and is followed,")


def player(
    trace: Trace, *, messages: Sequence[Message] | None = None, title: str | None = None,
    tags: Mapping[int, str] | None = None,
) -> Player:  # fmt: skip
    """Step through who sends what to whom, and what ranks do and hold in between: all of the trace, or these messages.

    It plays whatever the trace has: sends, collectives with the pieces of their data, the buckets of DDP, calls by RPC
    with the contexts of distributed autograd, its graph, and the user's spans. Of more than 300 messages it plays one
    whole step, the last, or one whole collective (up to 20,000 messages of one operation); of a hang what was before
    it. The title says so.
    `tags` are the program's own names of the tags of its sends: {1: "HELLO"}. DlearnError for messages that are none.
    """
    given = [] if messages is None else messages
    are_messages = isinstance(given, Sequence | Messages)
    if not are_messages or not all(isinstance(each, Message) for each in given):
        what = f"and not {messages!r:.60}: such as dlearn.messages(trace)[:300]"
        raise DlearnError(f"messages= takes the messages to play, {what}.")
    if (count := len(all_messages(trace))) > 10_000:
        notice(f"making a player of a trace with {count:,} messages, which takes some seconds")
    return Player(walkthrough(trace, messages=messages, title=title, tags=tags), trace)
