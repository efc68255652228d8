"""A slide deck: the story of a trace as one web page that needs nothing else, neither a server nor the network.

Every slide is there without scripts, too, one below the other; slides.js shows them one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from dlearn import draw
from dlearn.analysis.confirming import messages
from dlearn.analysis.findings import capital, finding, sequence_finding, time_text, traffic_finding
from dlearn.analysis.iteration import iteration, iterations
from dlearn.analysis.joining import operations, payload_bytes
from dlearn.analysis.reconcile import reconcile
from dlearn.analysis.traffic import traffic
from dlearn.analysis.unrolling import sums_of
from dlearn.analysis.words import explain, message_sentence, overview, problem_sentences
from dlearn.draw.embed import inline_svg
from dlearn.export.steps import Part, one_step
from dlearn.shown import count_text
from dlearn.trace.message import Operation
from dlearn.trace.store import printable
from dlearn.trace.trace import Process, Trace

_MOST_ROWS = 16
"""Of a table or a list on a slide."""
_MOST_WORDS = 40
"""Lines that tell a picture in words."""
_LONGEST = 240
_MEANINGS = {
    "observed": "solid: hooks saw the call at both ends",
    "derived": "dashed: follows from the backend's algorithm; its times share out a transfer, they are no measurement",
    "inferred": "dotted: a message of the runtime's own, whose kind follows from rules",
    "missing": "red: expected, never came",
}


class Slide(NamedTuple):
    """`body` is HTML: every name in it is escaped."""

    title: str
    body: str


def slides(trace: Trace) -> str:
    """The deck: finding, cast, one step in words, its sequence, the traffic, its timeline, what to trust.

    Of a long trace words, sequence and timeline tell one step, and say which.
    """
    part = one_step(trace)
    deck = [
        title(trace),
        cast(trace),
        words(trace, part),
        sequence(part),
        traffic_slide(trace),
        timeline(part),
        trust(trace),
    ]
    pages = "".join(_section(slide, number, len(deck)) for number, slide in enumerate(deck, 1))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{text(finding(trace))}</title><style>{_read('slides.css')}</style></head>\n<body><main>{pages}</main>"
        '<nav aria-label="Slides" hidden><button type="button" data-go="-1" aria-label="Previous slide">←</button>'
        '<span class="number"></span><progress aria-label="Progress" value="1" '
        f'max="{len(deck)}"></progress><button type="button" data-go="1" aria-label="Next slide">→</button></nav>'
        f'<p class="said" aria-live="polite"></p><script>{_read("slides.js")}</script></body></html>\n'
    )


def _section(slide: Slide, number: int, count: int) -> str:
    return (
        f'<section class="slide" id="slide-{number}" tabindex="-1" aria-label="Slide {number} of {count}">'
        f"<h1>{text(slide.title)}</h1>{slide.body}</section>\n"
    )


# Slides ---------------------------------------------------------------------------------------------------------------


def title(trace: Trace) -> Slide:
    shown = f'<p>{text(overview(trace))}</p><p class="quiet">A recorded job: {text(trace.path.absolute().name)}</p>'
    return Slide(finding(trace), shown)


def cast(trace: Trace) -> Slide:
    """Who the ranks are, where they run, to which groups they belong, and how much each sends."""
    sent = traffic(trace)
    rows = [
        [
            process.label,
            f"{process.header.host}, process {process.header.pid}",
            _groups(process),
            f"{sent.bytes_from(rank=process.rank):,}",
            f"{sent.bytes_to(rank=process.rank):,}",
        ]
        for process in trace.processes
    ]
    head = ["rank", "where", "process groups", "payload sent, B", "received, B"]
    note = "".join(f'<p class="quiet">{text(capital(each))}.</p>' for each in sent.not_known())
    return Slide(f"The cast: {count_text(len(trace.processes), 'rank')}", table([head, *rows], "ranks") + note)


def _groups(process: Process) -> str:
    groups = [f"{group.name} ({group.backend}, {count_text(group.size, 'rank')})" for group in process.groups.values()]
    groups += [f"RPC worker {process.worker.id}"] if process.worker is not None else []
    return ", ".join(groups[:3]) + (f" and {len(groups) - 3:,} more" if len(groups) > 3 else "") or "none"


def words(trace: Trace, part: Part) -> Slide:
    if iterations(trace):
        return Slide("One iteration in words", _which(part) + listed(iteration(trace).sentences(), "sentences"))
    told = [sentence for sentence in explain(part.trace).sentences[1:] if not sentence.startswith("Problem: ")]
    return Slide("In words", _which(part) + listed(told or ["Nothing was sent."], "sentences"))


def sequence(part: Part) -> Slide:
    found = messages(part.trace)
    told = [message_sentence(message, part.trace) for message in found.items[:_MOST_WORDS]]
    more = f"{len(found) - len(told):,} more messages" if len(found) > len(told) else ""
    picture = inline_svg(draw.sequence(part.trace), prefix="sequence-")
    return Slide("Message by message", _which(part) + figure(picture, sequence_finding(part.trace), _items(told, more)))


def traffic_slide(trace: Trace) -> Slide:
    sent = traffic(trace)
    picture = inline_svg(draw.traffic(trace), prefix="traffic-")
    whole = Part(trace, "the whole trace" if trace.selected_from is None else "the part that was chosen")
    shown = figure(picture, traffic_finding(sent), table(sent.rows(), "pairs"))
    return Slide("Who sends how much to whom", _which(whole) + shown)


def timeline(part: Part) -> Slide:
    calls = operations(part.trace)
    start_ns = min((call.start_ns for call in calls), default=0)
    told = [_call(call, start_ns, part.trace) for call in calls[:_MOST_WORDS]]
    more = f"{len(calls) - len(told):,} more calls" if len(calls) > len(told) else ""
    picture = inline_svg(draw.timeline(part.trace), prefix="timeline-")
    return Slide("When", _which(part) + figure(picture, finding(part.trace), _items(told, more)))


def _call(call: Operation, start_ns: int, trace: Trace) -> str:
    """ "all_reduce #3 of 4,000 B: begins after 1.20 ms, takes 310 µs; rank 2 called it last"."""
    takes = f"takes {time_text(call.end_ns - call.start_ns)}" if call.end_ns is not None else "its end was not observed"
    last = f"; {trace.label(call.last_rank)} called it last" if len(call.ends) > 2 else ""
    size = f" of {payload_bytes(call.ends[0]):,} B" if payload_bytes(call.ends[0]) else ""
    return f"{call.op} #{call.seq}{size}: begins after {time_text(call.start_ns - start_ns)}, {takes}{last}"


def trust(trace: Trace) -> Slide:
    """How each message is known, what is not explained, and what is wrong with the trace."""
    known: Counter[str] = Counter()
    unknown: Counter[tuple[str, str]] = Counter()
    for operation in operations(trace):
        sums = sums_of(operation)
        if isinstance(sums, str):
            unknown[operation.op, sums] += 1
        else:
            known.update({pair.how: 0 for pair in sums})
            for pair in sums:
                known[pair.how] += pair.message_count
    head = ["messages", "how they are known", "in the pictures"]
    rows = [[f"{known[how]:,}", how, meaning] for how, meaning in _MEANINGS.items()]
    told = [f"Not known, {count_text(count, op)}: {reason}." for (op, reason), count in unknown.most_common()]
    measured = reconcile(trace)
    told += [measured.sentence] if measured.whole.pairs else ["Bytes on the wire: not measured in this trace."]
    whole = ["No file of the trace says that it is damaged."]
    told += problem_sentences(trace) or whole
    return Slide("What to trust", table([head, *rows], "how messages are known") + listed(told, "notes"))


# HTML -----------------------------------------------------------------------------------------------------------------


def text(words: str) -> str:
    """Any text as text: it can neither end the element that it stands in nor begin one."""
    shown = printable(words)
    return escape(shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…")


def table(rows: Sequence[Sequence[str]], what: str) -> str:
    """The first row is the head; of too many the first ones, and how many more. Columns of numbers end on the right."""
    head, *body = rows
    sides = [
        ' class="figure"' if body and all(row[place].replace(",", "").isdigit() for row in body) else ""
        for place in range(len(head))
    ]
    cells = "".join(f'<th scope="col"{side}>{text(cell)}</th>' for cell, side in zip(head, sides, strict=True))
    shown = "".join(
        f'<tr><th scope="row"{sides[0]}>{text(row[0])}</th>'
        + "".join(f"<td{side}>{text(cell)}</td>" for cell, side in zip(row[1:], sides[1:], strict=True))
        + "</tr>"
        for row in body[:_MOST_ROWS]
    )
    more = f'<p class="quiet">{len(body) - _MOST_ROWS:,} more.</p>' if len(body) > _MOST_ROWS else ""
    return f"{_region(f'<table><thead><tr>{cells}</tr></thead><tbody>{shown}</tbody></table>', what)}{more}"


def listed(sentences: Sequence[str], what: str) -> str:
    shown = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences[:_MOST_ROWS])
    more = f"<li>{len(sentences) - _MOST_ROWS:,} more.</li>" if len(sentences) > _MOST_ROWS else ""
    return _region(f"<ul>{shown}{more}</ul>", what)


def figure(svg: str, told: str, in_words: str) -> str:
    """A picture with its finding as the name of it, and the same in words to unfold."""
    picture = f'<div class="picture" role="img" aria-label="{text(told)}">{svg}</div>'
    return _region(picture, "picture") + f"<details><summary>The same in words</summary>{in_words}</details>"


def _region(inside: str, what: str) -> str:
    """What may be larger than the slide can be scrolled, by keyboard too."""
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="{what}">{inside}</div>'


def _items(sentences: Sequence[str], more: str) -> str:
    return "<ol>" + "".join(f"<li>{text(each)}</li>" for each in sentences) + f"</ol><p>{more}</p>"


def _which(part: Part) -> str:
    return f'<p class="quiet">Shown: {text(part.which)}.</p>'


def _read(name: str) -> str:
    return (files("dlearn.export") / name).read_text(encoding="utf-8")
