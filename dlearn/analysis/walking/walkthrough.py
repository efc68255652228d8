"""From a trace to its steps, in the order in which they can be told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec

from dlearn.analysis.findings import sequence_finding, size_text
from dlearn.analysis.telling.words import message_sentence, problem_sentences
from dlearn.analysis.walking.contexts import contexts
from dlearn.analysis.walking.nodes import nodes
from dlearn.analysis.walking.own_work import works
from dlearn.analysis.walking.parts import WalkParts
from dlearn.analysis.walking.pieces import pieces
from dlearn.analysis.walking.ready_gradients import gradients
from dlearn.analysis.walking.steps import Step, WalkSource, Walkthrough
from dlearn.join.confirming import messages as all_messages
from dlearn.shown import RankNames, count_text
from dlearn.trace.event import PointToPoint
from dlearn.trace.message import Message
from dlearn.trace.tables.message_table import Messages
from dlearn.trace.trace import Trace

MOST_MESSAGES = 300
MOST_OWN_STEPS = 300
"""Of what ranks do by themselves."""
_MOST_QUIET_RANKS = 64
"""Lanes of ranks that send and get nothing, unless they would be more."""
_MOST_PROBLEMS = 8
_SOURCES = (pieces, gradients, contexts, works, nodes)


def walkthrough(
    trace: Trace,
    *,
    messages: Sequence[Message] | None = None,
    title: str | None = None,
    tags: Mapping[int, str] | None = None,
) -> Walkthrough:
    """Step by step through all messages of the trace, or only these, and through what ranks do between them.

    `tags` are the program's own names of the tags of its sends.
    """
    found = all_messages(trace)
    chosen = _in_order(found if messages is None else messages)
    if title is None:
        title = sequence_finding(trace) if messages is None else _chosen_title([message for _, message in chosen])
    ordered = chosen[:MOST_MESSAGES]
    shown = [message for _, message in ordered]
    told = [source(trace, shown) for source in _SOURCES]
    own = _own_steps(trace, told, ordered, all_of_it=len(shown) == len(found))
    where = WalkParts(trace)
    marks = _tag_marks(shown, tags or {})
    steps = [
        _of_message(place, at_ns, message, marks[place], told, where, trace)
        for place, (at_ns, message) in enumerate(ordered)
    ]
    steps = sorted([*steps, *own[:MOST_OWN_STEPS]], key=lambda step: step.at_ns)
    ends = {rank for step in steps for rank in _ranks(step)}
    quiet = trace.ranks if len(ends) + len(trace.ranks) <= _MOST_QUIET_RANKS else ()
    return Walkthrough(
        title=title,
        steps=tuple(_with_parts(steps)),
        boards=tuple(board for each in told for board in each.boards),
        graphs=tuple(graph for each in told for graph in each.graphs),
        notes=(
            *_notes(len(chosen), shown, found if messages is None else None),
            *(note for each in told for note in each.notes),
            *_left_out(len(own)),
            *problem_sentences(trace, _MOST_PROBLEMS),
        ),
        labels=RankNames((rank, trace.label(rank)) for rank in sorted({*ends, *quiet})),
    )


def is_control(message: Message) -> bool:
    """Whether it carries none of the program's data: what the system tells itself, or a mere "I am here"."""
    return message.control or (message.how != "observed" and message.payload_bytes == 0)


def _in_order(messages: Sequence[Message] | Messages) -> list[tuple[int, Message]]:
    """By the time of sending. A derived message's time is a share of the whole, so its operation's steps decide."""
    times: dict[int, list[tuple[int, Message]]] = defaultdict(list)
    for message in messages:
        at_ns = message.sent_ns if message.sent_ns is not None else message.operation.start_ns
        times[id(message.operation)].append((at_ns, message))
    timed: list[tuple[int, Message]] = []
    for of_one in times.values():
        if of_one[0][1].how == "derived":
            latest = 0
            for at_ns, message in sorted(of_one, key=lambda each: (each[1].step, each[0])):
                latest = max(latest, at_ns)
                timed.append((latest, message))
        else:
            timed += of_one
    return sorted(timed, key=lambda each: each[0])


def _own_steps(
    trace: Trace, told: Sequence[WalkSource], messages: Sequence[tuple[int, Message]], *, all_of_it: bool
) -> list[Step]:
    """What ranks did by themselves; beside a part of the messages only what lies between the first and the last."""
    steps = sorted((step for each in told for step in each.steps), key=lambda step: step.at_ns)
    if all_of_it:
        return steps
    if not messages:
        return []
    last_ns = max(message.received_ns or at_ns for at_ns, message in messages)
    return [step for step in steps if messages[0][0] <= step.at_ns <= last_ns]


def _of_message(
    place: int, at_ns: int, message: Message, mark: str, told: Sequence[WalkSource], where: WalkParts, trace: Trace
) -> Step:
    words = [each.words[place] for each in told if each.words.get(place)]
    sentence = message_sentence(message, trace)
    if mark and mark != f"tag {message.operation.tag}":  # The number is in the sentence, and only a name is new.
        sentence = f"{mark}: {sentence}"
    span, phase = where.of_message(message)
    return Step(
        rank=message.src,
        sentence=" ".join([sentence, *words]),
        at_ns=at_ns,
        until_ns=message.received_ns,
        message=message,
        mark=mark,
        op=message.op,
        span=span,
        phase=phase,
        control=is_control(message),
        changes=tuple(chain.from_iterable(each.changes.get(place, ()) for each in told)),
    )


def _tag_marks(shown: Sequence[Message], names: Mapping[int, str]) -> list[str]:
    """The tag of each send, where the program tells its messages apart by tags; its name, where it has one."""
    ends = [message.operation.ends[0] for message in shown]
    tags = [end.tag if isinstance(end, PointToPoint) else None for end in ends]
    if len({*tags} - {None}) < 2 and not any(tag in names for tag in tags):
        return [""] * len(tags)
    return ["" if tag is None else names.get(tag, f"tag {tag}") for tag in tags]


def _with_parts(steps: Sequence[Step]) -> list[Step]:
    """What a rank does by itself, and nobody has put into a phase, leads to what it sends next."""
    told: list[Step] = []
    following: dict[int, Step] = {}
    for step in reversed(steps):
        if step.message is not None:
            following[step.rank] = step
        elif step.rank in following:
            sends = following[step.rank]
            step = msgspec.structs.replace(step, span=step.span or sends.span, phase=step.phase or sends.phase)
        told.append(step)
    return told[::-1]


def _chosen_title(chosen: Sequence[Message]) -> str:
    came = sum(message.payload_bytes or 0 for message in chosen if message.how != "missing")
    return f"{count_text(len(chosen), 'message')} with {size_text(came)}"


def _ranks(step: Step) -> tuple[int, ...]:
    return (step.rank,) if step.message is None else (step.message.src, step.message.dst)


def _notes(count: int, shown: Sequence[Message], found: Messages | None) -> list[str]:
    """What the lines mean, and what is not shown: nothing is dropped without a word."""
    meaning = {"observed": "solid", "derived": "dashed", "inferred": "dotted", "missing": "red"}
    used = {message.how for message in shown}
    lines = [f"{line} = {how}" for how, line in meaning.items() if how in used]
    notes = [f"Lines: {', '.join(lines)}."] if lines else []
    if "derived" in used:
        notes.append("The times of derived messages share out the operation's, and are no measurement.")
    if len(shown) < count:
        notes.append(
            f"The first {len(shown):,} of {count:,} messages; {count - len(shown):,} later ones are left out:"
            " choose a part with trace.within(...), or with messages=."
        )
    if found is not None and found.reasons:
        notes += [line[:1].upper() + line[1:] for line in found.sentences()]
    return notes


def _left_out(own: int) -> list[str]:
    if own <= MOST_OWN_STEPS:
        return []
    return [f"Of {own:,} steps inside of ranks the first {MOST_OWN_STEPS:,} are shown."]
