"""The message player: a sequence diagram to step through, with a sentence for each message.

Everything is drawn here, once: the whole picture as SVG and the sentences as a list. `player.js` only shows a part of
both. So a page that runs no scripts shows all of it, still.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dlearn.analysis import messages as all_messages
from dlearn.analysis.findings import sequence_finding, size_text
from dlearn.analysis.words import count_text, message_sentence
from dlearn.draw.palette import FAINT, INK, LINES, MISSING, look
from dlearn.play.bridge import Bridge
from dlearn.trace.message import Message, Messages
from dlearn.trace.store import printable
from dlearn.trace.trace import Trace

MOST_MESSAGES = 300
_MOST_QUIET_RANKS = 64
"""Lanes of ranks that send and get nothing, unless they would be more."""
_ROW_PX = 24
_LANE_PX = 46


@dataclass(repr=False, eq=False)
class Player:
    """Messages to step through. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    title: str
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    snippet: str
    """Self-contained HTML, to be put into a page."""
    bridge: Bridge

    @property
    def step(self) -> int:
        """How many messages have been sent where the player stands, 0 at first. Set it: the shown player goes there.

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
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return self.snippet

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """What a notebook asks for when it is about to show this."""
        self.bridge.open()
        return {"text/html": self._repr_html_(), "text/plain": str(self)}

    def __str__(self) -> str:
        told = [f"{number:>4}. {sentence}" for number, sentence in enumerate(self.sentences, 1)]
        return "\n".join([self.title, *told, *self.notes])

    __repr__ = __str__


def player(trace: Trace, *, messages: Sequence[Message] | None = None, title: str | None = None) -> Player:
    """Step through who sends what to whom: all messages of the trace, or only these, in the order given."""
    found = all_messages(trace)
    chosen = tuple(found if messages is None else messages)
    shown = chosen[:MOST_MESSAGES]
    if title is None:
        title = sequence_finding(trace) if messages is None else count_text(len(chosen), "message")
    title = printable(title)
    sentences = tuple(printable(message_sentence(message, trace)) for message in shown)
    notes = tuple(_notes(chosen, shown, found if messages is None else None))
    lanes = _lanes(trace, shown)
    names = {rank: printable(trace.label(rank)) for rank in lanes}
    name, snippet = _snippet(title, sentences, notes, shown, names)
    return Player(title, sentences, notes, snippet, Bridge(name, last=len(sentences)))


def is_control(message: Message) -> bool:
    """Whether it carries none of the program's data: what the system tells itself, or a mere "I am here"."""
    return message.control or (message.how != "observed" and not message.payload_bytes)


def _notes(chosen: Sequence[Message], shown: Sequence[Message], found: Messages | None) -> list[str]:
    """What the lines mean, and what is not shown: nothing is dropped without a word."""
    meaning = {"observed": "solid", "derived": "dashed", "inferred": "dotted", "missing": "red"}
    used = {message.how for message in shown}
    notes = ["Lines: " + ", ".join(f"{line} {how}" for how, line in meaning.items() if how in used) + "."] * bool(used)
    if len(shown) < len(chosen):
        left = len(chosen) - len(shown)
        notes.append(
            f"The first {len(shown):,} of {len(chosen):,} messages; {left:,} later ones are left out:"
            " choose a part with trace.within(...), or with messages=."
        )
    if found is not None and found.unexplained:
        notes += [printable(line[:1].upper() + line[1:]) for line in map(str.strip, str(found).splitlines())]
    return notes


def _lanes(trace: Trace, shown: Sequence[Message]) -> dict[int, int]:
    """Rank -> its place from the left."""
    ends = {rank for message in shown for rank in (message.src, message.dst)}
    quiet = trace.ranks if len(ends) + len(trace.ranks) <= _MOST_QUIET_RANKS else ()
    return {rank: place for place, rank in enumerate(sorted({*ends, *quiet}))}


# HTML -----------------------------------------------------------------------------------------------------------------


def _snippet(
    title: str, sentences: Sequence[str], notes: Sequence[str], shown: Sequence[Message], names: dict[int, str]
) -> tuple[str, str]:
    """The name by which the page and Python know this player, and its HTML."""
    data = _data(shown, names)
    unique = hashlib.sha256("".join([title, data, *sentences]).encode()).hexdigest()[:8]
    heads = "".join(f'<span title="{html.escape(name)}">{html.escape(name)}</span>' for name in names.values())
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    noted = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
    script = _read("player.js")
    # No shortcut of JupyterLab may take the arrow keys away, and no "$" in a name is the start of a formula.
    return unique, (
        f'<div class="dlearn-player mathjax_ignore tex2jax_ignore" data-player="{unique}"'
        ' data-lm-suppress-shortcuts="true">'
        f"<style>{_style()}</style>"
        f'<p class="title">{html.escape(title)}</p><div class="bar"></div>'
        f'<div class="picture" style="min-width:{_LANE_PX * len(names)}px"><div class="names">{heads}</div>'
        f"{_svg(shown, names, unique)}</div>"
        f'<div class="totals"></div><details open><summary>All messages in words</summary><ol>{listed}</ol></details>'
        f'{noted}<script type="application/json">{data}</script><script>{script}</script></div>'
    )


def _data(shown: Sequence[Message], names: dict[int, str]) -> str:
    """A column for each fact. Nothing in it can end the script that it stands in, whatever the ranks are called."""
    pairs = list(dict.fromkeys((message.src, message.dst) for message in shown))
    colors = list(dict.fromkeys(look(message.op).color for message in shown))
    columns: dict[str, Any] = {
        "pairs": [f"{names[src]} → {names[dst]}" for src, dst in pairs],
        "colors": colors,
        "pair": [pairs.index((message.src, message.dst)) for message in shown],
        "color": [colors.index(look(message.op).color) for message in shown],
        "bytes": [message.payload_bytes for message in shown],
        "came": [int(message.how != "missing") for message in shown],
        "control": [int(is_control(message)) for message in shown],
    }
    text = json.dumps(columns, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _svg(shown: Sequence[Message], names: dict[int, str], unique: str) -> str:
    """Places are shares of the width, so that text keeps its size however narrow the page is."""
    at = {rank: f"{100 * (place + 0.5) / len(names):.4g}%" for place, rank in enumerate(names)}
    between = {(src, dst): f"{(float(at[src][:-1]) + float(at[dst][:-1])) / 2:.4g}%" for src in at for dst in at}
    heads = "".join(
        f'<marker id="{unique}{kind}" class="{kind}" viewBox="-8 -4 8 8" refX="-.5" markerWidth="9" markerHeight="9"'
        ' markerUnits="userSpaceOnUse" orient="auto"><path d="M-8-4 0 0-8 4z"/></marker>'
        for kind in ("came", "missing")
    )
    rows: list[str] = []
    for number, message in enumerate(shown):
        if number == 0 or message.how != shown[number - 1].how:
            rows.append(f'{"</g>" * bool(rows)}<g class="{message.how}">')
        src, dst = at[message.src], at[message.dst]
        head = f' marker-end="url(#{unique}missing)"' if message.how == "missing" else ""
        arrow = f'<line x1="{src}" x2="{dst}"{head}/>'
        if message.src == message.dst:
            arrow = f'<svg x="{src}"><path d="M0-10h18v10H1"{head}/></svg>'
        label = "never came: " * (message.how == "missing") + size_text(message.payload_bytes)
        beside = ' dx="-22" dy="3"' if message.src == message.dst else ""
        text = f'<text x="{between[message.src, message.dst]}"{beside}>{label}</text>'
        rows.append(f'<svg y="{_ROW_PX * number + 18}">{text}{arrow}</svg>')
    lines = "".join(f'<line x1="{x}" x2="{x}" y2="100%"/>' for x in at.values())
    return (
        f'<svg class="rows" width="100%" height="{_ROW_PX * len(shown) + 8}" role="img"'
        f' aria-label="Sequence diagram; its messages are listed in words below"><defs>{heads}</defs>'
        f'<rect class="mark" width="100%" height="{_ROW_PX}" y="-{_ROW_PX}"/><g class="lanes">{lines}</g>'
        f'<g class="messages" marker-end="url(#{unique}came)">{"".join(rows)}{"</g>" * bool(rows)}</g></svg>'
    )


def _read(name: str) -> str:
    """A file beside this one, without its indentation and comments: a page may hold it many times."""
    lines = (line.strip() for line in (files("dlearn.play") / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _style() -> str:
    """The colours and dashes of the other pictures. JupyterLab says whether it is dark; elsewhere the browser does."""
    light = f"--ink:{INK};--paper:#fff;--faint:{FAINT};--missing:{MISSING};--mark:#dbe9ff"
    dark = "--ink:#e6e6e6;--paper:#161616;--faint:#a0a0a0;--missing:#ff7b7b;--mark:#27406b"
    dashes = [
        f".dlearn-player .{how}{{stroke-dasharray:{' '.join(str(1.5 * length) for length in line[1])}}}"
        for how, line in LINES.items()
        if not isinstance(line, str)
    ]
    own = f".dlearn-player{{{light}}}\nbody[data-jp-theme-light=false] .dlearn-player{{{dark}}}"
    system = f"@media(prefers-color-scheme:dark){{body:not([data-jp-theme-light]) .dlearn-player{{{dark}}}}}"
    return "\n".join([own, system, _read("player.css"), *dashes])
