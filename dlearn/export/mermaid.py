"""Mermaid's sequence diagrams: text that GitHub, GitLab and many editors show as a picture.

Solid arrows were observed, dashed ones are derived or inferred, as their label says, and a cross ends what never came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlearn.analysis.findings import sequence_finding
from dlearn.analysis.telling.repeats import repeats
from dlearn.analysis.telling.words import carried_text, payload_text
from dlearn.join.joining import everybody, operations
from dlearn.join.unrolling import messages_of, why_unknown
from dlearn.trace.message import Message
from dlearn.trace.store import printable
from dlearn.trace.trace import Trace

MOST_EDGES, MOST_CHARACTERS = 500, 50_000
"""Of one diagram: Mermaid's own limits (maxEdges, maxTextSize)."""
_LONGEST_LOOP = 200
"""Lines that are repeated."""
_LONGEST_TEXT = 120
_MOST_NAMES = 64
"""Of more ranks only the numbers, so that a diagram has room for messages, too."""
_UNSAFE = re.compile(r"[^\w .,:/()\[\]…=*'-]|(?<=^wrap):|(?<=^nowrap):")
"""What may mean something to Mermaid or to HTML. ("wrap:" before a text is an order of Mermaid's.)"""
_ARROWS = {"observed": "->>", "derived": "-->>", "inferred": "-->>", "missing": "-x"}


@dataclass(frozen=True)
class Loop:
    """Lines that follow one another `times` times in a row."""

    lines: tuple[str, ...]
    times: int = 1

    @property
    def text(self) -> str:
        if self.times == 1:
            return "".join(f"    {line}\n" for line in self.lines)
        inside = "".join(f"        {line}\n" for line in self.lines)
        return f"    loop {self.times} times\n{inside}    end\n"


def mermaid(trace: Trace) -> list[str]:
    """Diagrams, one or more: at Mermaid's limits begins a new part. Every message is in them, in the order of calls."""
    finding = escaped(sequence_finding(trace), most=200)
    ranks = sorted(everybody(trace))
    names = [f" as {escaped(trace.label(rank), most=40)}" if len(ranks) <= _MOST_NAMES else "" for rank in ranks]
    cast = "".join(f"    participant r{rank}{name}\n" for rank, name in zip(ranks, names, strict=True))
    room = MOST_CHARACTERS - len(finding) - len(cast) - 100
    bodies = [*_parts([part for loop in _loops([*_lines(trace)]) for part in _small_enough(loop, room)], room)]
    bodies = bodies or [f"    Note over r{ranks[0]}: no message\n"]
    parts = [f" (part {number:,} of {len(bodies):,})" * (len(bodies) > 1) for number in range(1, len(bodies) + 1)]
    heads = [f"sequenceDiagram\n    title {finding}{part}\n{cast}" for part in parts]
    return [head + body for head, body in zip(heads, bodies, strict=True)]


# Lines ----------------------------------------------------------------------------------------------------------------


def _lines(trace: Trace) -> Iterator[str]:
    """An operation's messages stand together; those of an RPC, between which much may happen, when they are sent."""
    placed: list[tuple[int, str]] = []
    for operation in operations(trace):
        found = messages_of(operation)
        reason = None if found else why_unknown(operation)
        if reason is not None:
            ranks = sorted({*operation.ranks, *operation.missing})
            over = f"r{ranks[0]},r{ranks[-1]}" if len(ranks) > 1 else f"r{ranks[0]}"
            text = escaped(f"{operation.op}, its messages are not known: {reason}", most=_LONGEST_TEXT)
            placed.append((operation.start_ns, f"Note over {over}: {text}"))
        for message in found:
            at_ns = message.sent_ns if operation.exchange is not None else None
            placed.append((operation.start_ns if at_ns is None else at_ns, _line(message)))
    return (line for _, line in sorted(placed, key=lambda each: each[0]))


def _line(message: Message) -> str:
    how = {"observed": "", "missing": " (never came)"}.get(message.how, f" ({message.how})")
    text = escaped(f"{payload_text(message)}, {message.op}{carried_text(message)}", most=_LONGEST_TEXT) + how
    return f"r{message.src}{_ARROWS[message.how]}r{message.dst}: {text}"


def escaped(text: str, *, most: int) -> str:
    """As it is to be read, in `most` characters: what is unsafe becomes its #number;."""
    shown = printable(text)
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return _UNSAFE.sub(lambda match: f"#{ord(match[0])};", shown)


# Loops and parts ------------------------------------------------------------------------------------------------------


def _loops(lines: Sequence[str]) -> list[Loop]:
    """The same lines again become a loop, the one that covers most."""
    found = repeats(lines, longest=_LONGEST_LOOP)
    return [Loop(tuple(lines[at : at + length]), times) for at, length, times in found]


def _small_enough(loop: Loop, room: int) -> Iterator[Loop]:
    """A diagram must hold it whole: one that does not fit is written out."""
    if len(loop.text) <= room:
        yield loop
    else:
        yield from (Loop((line,)) for _ in range(loop.times) for line in loop.lines)


def _parts(loops: Sequence[Loop], room: int) -> Iterator[str]:
    """As many lines as a diagram can hold, of `room` characters, again and again."""
    kept: list[str] = []
    edges = characters = 0
    for loop in loops:
        text = loop.text
        if kept and (edges + len(loop.lines) > MOST_EDGES or characters + len(text) > room):
            yield "".join(kept)
            kept, edges, characters = [], 0, 0
        kept.append(text)
        edges, characters = edges + len(loop.lines), characters + len(text)
    if kept:
        yield "".join(kept)
