"""Mermaid's sequence diagrams: text that GitHub, GitLab and many editors show as a picture.

Solid arrows were observed, dashed ones derived or inferred; a cross ends what never came.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import numpy as np

from dlearn.analysis.findings import sequence_finding
from dlearn.analysis.telling.explanations import NAMES_SHOWN, payload_text
from dlearn.analysis.telling.repeats import repeats
from dlearn.events.event_table import NONE
from dlearn.events.printable import printable
from dlearn.join.ends import payload_bytes
from dlearn.join.joining import all_ranks, operations
from dlearn.join.operation_messages import messages_of, times_of_calls, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.play.writing import Place, write
from dlearn.shown import size_text
from dlearn.trace import Trace

MARKDOWN = (".md", ".markdown")
MOST_EDGES, MOST_CHARACTERS = 500, 50_000  # Mermaid's own limits (maxEdges, maxTextSize).
_LONGEST_LOOP = 200  # Lines, calls or phases that are repeated.
_LONGEST_TEXT = 120
_MOST_NAMES = 64  # Of more ranks only the numbers, so that a diagram has room for messages, too.
_UNSAFE = re.compile(r"[^\w .,:/()\[\]…=*'-]|(?<=^wrap):|(?<=^nowrap):")
"""What may mean something to Mermaid or to HTML. ("wrap:" before a text is an order of Mermaid's.)"""
_ARROWS = {"observed": "->>", "derived": "-->>", "inferred": "-->>", "missing": "-x"}
_EDGE = re.compile(r"^ *r\d+-", re.MULTILINE)
_BAND = "rect rgba(128, 128, 128, 0.12)"  # Seen on a light page and on a dark one.


class Piece(NamedTuple):
    """Text that one diagram holds whole, in the band of its phase."""

    phase: str
    text: str

    @property
    def edges(self) -> int:
        return len(_EDGE.findall(self.text))

    @property
    def characters(self) -> int:
        """Return an upper bound, with the band and its name around the text, in a loop."""
        return len(self.text) + 16 * self.text.count("\n") + 200 * bool(self.phase)

    def fits(self, room: int) -> bool:
        return self.edges <= MOST_EDGES and self.characters <= room


def mermaid(trace: Trace, path: Place = None) -> list[str]:
    """Return one or more diagrams with every message, in the order of calls; write them to `path`, too.

    A new diagram begins at Mermaid's limits. A .md holds all of them; else several have a file each: x-1.mmd, ...
    Raises SetupError where a file cannot be written.
    """
    diagrams = _diagrams(trace)
    if path is not None:
        write(files_of(diagrams, Path(path)))
    return diagrams


def files_of(diagrams: Sequence[str], path: Path) -> dict[Path, Sequence[str]]:
    """Return what stands in which file."""
    if path.suffix.lower() in MARKDOWN:
        return {path: [f"```mermaid\n{diagram}```\n\n" for diagram in diagrams]}
    if len(diagrams) == 1:
        return {path: diagrams}
    numbered = enumerate(diagrams, 1)
    return {path.with_stem(f"{path.stem}-{number}"): [text] for number, text in numbered}


def _diagrams(trace: Trace) -> list[str]:
    finding = escaped(sequence_finding(trace), most=200)
    ranks = sorted(all_ranks(trace))
    names = [f" as {escaped(trace.label(rank), most=40)}" if len(ranks) <= _MOST_NAMES else "" for rank in ranks]
    cast = "".join(f"    participant r{rank}{name}\n" for rank, name in zip(ranks, names, strict=True))
    room = MOST_CHARACTERS - len(finding) - len(cast) - 100
    over = f"Note over {_over(ranks)}: "
    bodies = [*_parts(_looped(_calls(trace), room, over), room, over)] or [f"    Note over r{ranks[0]}: no message\n"]
    parts = [f" (part {number:,} of {len(bodies):,})" * (len(bodies) > 1) for number in range(1, len(bodies) + 1)]
    # Mermaid cuts a title that is wider than the picture, but makes room for a note.
    heads = [f"sequenceDiagram\n{cast}    {over}{finding}{part}\n" for part in parts]
    return [head + body for head, body in zip(heads, bodies, strict=True)]


def _over(ranks: Sequence[int]) -> str:
    return f"r{ranks[0]},r{ranks[-1]}" if len(ranks) > 1 else f"r{ranks[0]}"


# Calls ----------------------------------------------------------------------------------------------------------------


def _calls(trace: Trace) -> list[Piece]:
    """Return the calls in order of time: an operation's messages together, those of an RPC when they are sent."""
    shown = operations(trace)
    sent_ns = times_of_calls(shown)[:, :, 0]
    sent_ns = np.where(sent_ns == NONE, shown.start_ns[:, None], sent_ns)
    found: list[tuple[int, int, Piece]] = []  # With its time in ns, and its place among the operations.
    for one, places in shown.groups():
        phase = one.ends[0].phase.removeprefix("none")
        sent = messages_of(one) if one.exchange is not None else []
        texts = [(sent_ns[places, each.step], _line(each)) for each in sent]
        for at_ns, text in texts or [(shown.start_ns[places], _call(one))]:
            found += zip(at_ns.tolist(), places.tolist(), repeat(Piece(phase, text)), strict=False)
    return [piece for *_, piece in sorted(found) if piece.text]


def _call(operation: Operation) -> str:
    """Return the lines of an operation. A collective's arrows have their bytes; the note over them says the rest."""
    found = messages_of(operation)
    reason = None if found else why_unknown(operation)
    if (operation.is_message and found) or not (found or reason):
        return "".join(map(_line, found))
    size = payload_bytes(operation.ends[0])
    name = f"{operation.op} {size_text(size)}" if size else operation.op
    what = f"its messages are not known: {reason}" if reason else operation.describe(most=NAMES_SHOWN)
    text = escaped(f"{name}: {what}" if what else name, most=_LONGEST_TEXT)
    how = f" ({found[0].how})" if found and found[0].how in ("derived", "inferred") else ""
    in_order = sorted(found, key=lambda message: (message.step, message.src, message.dst))
    bytes_of = _about([message.payload_bytes or 0 for message in found])
    lines = [Piece("", f"{_arrow(each)}: {bytes_of or payload_text(each)}{_never(each)}\n") for each in in_order]
    arrows = "".join(piece.text for piece in _looped(lines))
    return f"Note over {_over(sorted({*operation.ranks, *operation.missing}))}: {text}{how}\n{arrows}"


def _about(sizes: Sequence[int]) -> str:
    """Return one text for chunks of which the last is a little smaller; "" for sizes that differ more."""
    least, most = min(sizes, default=0), max(sizes, default=0)
    return f"about {size_text(most)}" if 0.95 * most <= least < most else ""


def _line(message: Message) -> str:
    what = message.describe(most=NAMES_SHOWN) or message.op
    how = " (inferred)" if message.how == "inferred" else _never(message)
    return f"{_arrow(message)}: {escaped(f'{payload_text(message)}, {what}', most=_LONGEST_TEXT)}{how}\n"


def _arrow(message: Message) -> str:
    return f"r{message.src}{_ARROWS[message.how]}r{message.dst}"


def _never(message: Message) -> str:
    return " (never came)" if message.how == "missing" else ""


def escaped(text: str, *, most: int) -> str:
    """Return the text as Mermaid shows it, cut to `most` characters: an unsafe character becomes its #number;."""
    shown = printable(text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return _UNSAFE.sub(lambda match: f"#{ord(match[0])};", shown)


# Loops, bands and parts -----------------------------------------------------------------------------------------------


def _looped(pieces: Sequence[Piece], room: int = MOST_CHARACTERS, over: str = "") -> Iterator[Piece]:
    """Return the pieces with a loop for what is repeated: the loop that covers most and fits into a diagram."""

    def loop(at: int, length: int, times: int) -> Piece:
        some = pieces[at : at + length]
        phases = {piece.phase for piece in some}
        if len(phases) > 1:
            return Piece("", _block(f"loop {times} times", _banded(some, over)))
        return Piece(phases.pop(), _block(f"loop {times} times", "".join(piece.text for piece in some)))

    def fits(at: int, length: int) -> bool:
        return loop(at, length, 1).fits(room)

    for at, length, times in repeats(pieces, longest=_LONGEST_LOOP, fits=fits):
        if times > 1:
            yield loop(at, length, times)
        else:
            yield from pieces[at : at + length]


def _block(head: str, text: str) -> str:
    return f"{head}\n{indent(text, '    ')}end\n"


def _banded(pieces: Iterable[Piece], over: str) -> str:
    """Return the text with a band around the pieces of each phase, which says its name."""
    bands = []
    for phase, some in groupby(pieces, key=lambda piece: piece.phase):
        text = "".join(piece.text for piece in some)
        bands.append(_block(_BAND, f"{over}{escaped(phase, most=40)}\n{text}") if phase else text)
    return "".join(bands)


def _parts(pieces: Iterable[Piece], room: int, over: str) -> Iterator[str]:
    """Return the bodies of diagrams, each with as many pieces as fit into `room` characters."""
    kept: list[Piece] = []
    edges = characters = 0
    for piece in pieces:
        if kept and (edges + piece.edges > MOST_EDGES or characters + piece.characters > room):
            yield indent(_banded(kept, over), "    ")
            kept, edges, characters = [], 0, 0
        kept.append(piece)
        edges, characters = edges + piece.edges, characters + piece.characters
    if kept:
        yield indent(_banded(kept, over), "    ")
