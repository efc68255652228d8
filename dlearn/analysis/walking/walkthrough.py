"""From a trace to its steps, in the order in which they can be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import msgspec
import numpy as np

from dlearn.analysis.ddp.training_steps import TrainingStep, training_steps
from dlearn.analysis.findings import capital, sequence_finding, size_text
from dlearn.analysis.hanging.hang_words import missing_text, tell
from dlearn.analysis.hanging.stuck import Hang, hangs
from dlearn.analysis.telling.words import message_sentence, problem_sentences
from dlearn.analysis.walking.contexts import contexts, nodes
from dlearn.analysis.walking.own_work import gradients, works
from dlearn.analysis.walking.pieces import pieces
from dlearn.analysis.walking.steps import Step, WalkParts, WalkSource, Walkthrough
from dlearn.events.event import PointToPoint
from dlearn.events.event_table import NONE, Rows
from dlearn.join.message_evidence import messages as all_messages
from dlearn.join.operation_messages import sums_of
from dlearn.join.tables.message_table import Message, Messages
from dlearn.shown import RankNames, count_text
from dlearn.trace import Trace

MOST_MESSAGES = 300
MOST_OF_ONE = 20_000
"""Of one operation: in a ring 64 ranks send 16,128, which move in 252 rounds."""
MOST_OWN_STEPS = 300
"""Of what ranks do by themselves."""
_MOST_QUIET_RANKS = 64
"""Lanes of ranks that send and get nothing, unless they would be more."""
_MOST_PROBLEMS = 8
_LAST_NS = 2**62
_SOURCES = (pieces, gradients, contexts, works, nodes)


def walkthrough(
    trace: Trace,
    *,
    messages: Sequence[Message] | None = None,
    title: str | None = None,
    tags: Mapping[int, str] | None = None,
) -> Walkthrough:
    """Step by step through all messages of the trace, or only these, and through what ranks do between them.

    Of a trace with more than 300 messages one whole step, or, where a step has more, one whole collective. A collective
    that some rank never called is one step.
    `tags` are the program's own names of the tags of its sends.
    """
    found = all_messages(trace)
    if messages is None:
        part, asked, finding, later = _played(trace, found, MOST_MESSAGES)
    else:
        part, asked, finding, later = _Played(trace, messages, "")
    # By the time of sending, which is never after what follows from it, and then by step.
    chosen = [(_sent_ns(message), message) for message in asked if not _is_hung(message)]
    chosen.sort(key=lambda each: (each[0], each[1].step))
    of_one = len({id(message.operation) for _, message in chosen}) == 1
    ordered = chosen[: MOST_OF_ONE if of_one else MOST_MESSAGES]
    shown = [message for _, message in ordered]
    told = [source(part, shown) for source in _SOURCES]
    never = _never_came(trace, asked)
    whole = len(asked) == len(all_messages(part)) and len(shown) == len(chosen)
    own = _own_steps(told, ordered, never, all_of_it=whole)
    where = WalkParts(trace)
    marks = _tag_marks(shown, tags or {})
    steps = [
        _of_message(place, at_ns, message, marks[place], told, where, trace)
        for place, (at_ns, message) in enumerate(ordered)
    ]
    steps = sorted([*steps, *own[:MOST_OWN_STEPS], *never], key=lambda step: step.at_ns)
    ends = {rank for step in steps for rank in _ranks(step)}
    quiet = trace.ranks if len(ends) + len(trace.ranks) <= _MOST_QUIET_RANKS else ()
    notes = _notes(len(chosen) + later, shown, all_messages(part) if messages is None else None)
    if messages is None and len(asked) + later < len(found):
        others = count_text(len(found) - len(asked) - later, "message")
        notes.append(f"{others} of other steps are not played: choose with trace.within(...) or messages=.")
    notes += [note for each in told for note in each.notes]
    if len(own) > MOST_OWN_STEPS:
        notes.append(f"Of {len(own):,} steps inside of ranks the first {MOST_OWN_STEPS:,} are shown.")
    return Walkthrough(
        title=title or finding or _chosen_title(asked, MOST_MESSAGES),
        steps=tuple(_with_parts(steps)),
        boards=tuple(board for each in told for board in each.boards),
        graphs=tuple(graph for each in told for graph in each.graphs),
        notes=(*notes, *problem_sentences(trace, _MOST_PROBLEMS)),
        labels=RankNames((rank, trace.label(rank)) for rank in sorted({*ends, *quiet})),
    )


def is_control(message: Message) -> bool:
    """Whether it carries none of the program's data: what the system tells itself, or a mere "I am here"."""
    return message.control or (message.how != "observed" and message.payload_bytes == 0)


# Which messages of a long trace are played: one whole step, or what led to its hang -----------------------------------


class _Played(NamedTuple):
    """What is played of a trace, and its title. `trace` has what ranks do by themselves meanwhile; `later` messages
    that were asked for are too many."""

    trace: Trace
    messages: Sequence[Message]
    title: str
    later: int = 0


def _played(trace: Trace, found: Messages, most: int) -> _Played:
    """All, if what came is no more than `most`. Else the last step in which all came; of a hang what was before it."""
    missing = found.missing
    if len(found) - missing.sum() <= most:
        return _Played(trace, found, sequence_finding(trace))
    if hangs(trace):
        came, never = found.at(np.flatnonzero(~missing)), found.at(np.flatnonzero(missing))
        before = [message for message in came if message.operation is came[-1].operation]
        return _Played(trace, [*before[-MOST_OF_ONE:], *never], sequence_finding(trace))
    for name, part, places in _steps_from_the_last(trace, found):
        if 0 < len(places) <= most:
            inside = all_messages(part).at(places)
            if all(message.how != "missing" for message in inside):
                return _Played(part, inside, _part_title(name, inside, found))
    for places in _collectives_from_the_last(found):
        inside = found.at(places)
        if all(message.how != "missing" for message in inside):
            operation = inside[0].operation
            what = f" ({operation.what})" if operation.what else ""
            return _Played(trace, inside, _part_title(f"{operation.op} #{operation.seq}{what}", inside, found))
    first, hung = _first(found, most)
    title, later = _chosen_title(found, most), len(found) - len(first) - len(hung)
    return _Played(trace, [*found.at(first), *found.at(hung)], title, later)


def _first(found: Messages, most: int) -> tuple[Rows, Rows]:
    """The places of the first messages by `_sent_ns`, at most so many; and of all that hung with their collective."""
    table, sent, row = found.operations.table, found.columns, found.operations.rows[found.columns.operation]
    hung = found.missing & table.is_collective[row]
    end_ns = table.over_ends(np.minimum, np.where(table.events.end_ns == NONE, _LAST_NS, table.events.end_ns))
    left_ns = np.where(sent.sent_ns == NONE, np.minimum(table.transfer_ns, end_ns)[row], sent.sent_ns)
    came = np.flatnonzero(~hung)
    if len(np.unique(row[came])) == 1:
        most = MOST_OF_ONE
    return came[np.lexsort((sent.step[came], left_ns[came]))][:most], np.flatnonzero(hung)


def _part_title(name: str, inside: Sequence[Message], found: Messages) -> str:
    size = size_text(sum(message.payload_bytes or 0 for message in inside))
    return f"{name}: {len(inside):,} of {count_text(len(found), 'message')}, {size}"


def _collectives_from_the_last(found: Messages) -> Iterator[Rows]:
    """The places of the messages of each operation that has several, carries data and can be played whole."""
    asked = found.operations
    counts = np.bincount(found.columns.operation, minlength=len(asked))
    is_collective = asked.table.is_collective[asked.rows]
    for operation in reversed(np.flatnonzero(is_collective & (counts > 1) & (counts <= MOST_OF_ONE))):
        places = np.flatnonzero(found.columns.operation == operation)
        if found[int(places[0])].payload_bytes:
            yield places


def _chosen_title(chosen: Sequence[Message], most: int) -> str:
    """How many are played, of how many that were asked for, and their bytes: never those of others."""
    shown = chosen[:most]
    size = size_text(sum(message.payload_bytes or 0 for message in shown if message.how != "missing"))
    if len(shown) < len(chosen):
        return f"The first {len(shown):,} of {count_text(len(chosen), 'message')}, with {size}"
    return f"{count_text(len(shown), 'message')} with {size}"


def _steps_from_the_last(trace: Trace, found: Messages) -> Iterator[tuple[str, Trace, Rows]]:
    """The program's own spans that are called steps; else the training steps of DDP, as their stretches tell them.

    Each with a part of the trace, and the places of its messages there.
    """
    names = [name for name in trace.spans if name.startswith("step")]
    for name in reversed(names):
        part = trace.within(name)
        yield f"{name} of {len(names):,}", part, np.arange(len(all_messages(part)))
    steps = training_steps(trace)
    if not steps:
        return
    number = _numbers(found, steps)
    count = max(step.number for step in steps) + 1
    for step in reversed(range(count)):
        yield f"Training step {step} of {count:,}", trace, np.flatnonzero(number == step)


def _numbers(found: Messages, steps: Iterable[TrainingStep]) -> Rows:
    """Of each message the number of the training step in which its sender called it; -1 of one that is in none."""
    src, called_ns = found.columns.src, found.called_ns
    number = np.full(len(found), -1)
    for rank, own in groupby(sorted(steps, key=lambda step: (step.rank, step.number)), key=lambda step: step.rank):
        mine = np.flatnonzero(src == rank)
        each = list(own)
        place = np.searchsorted([step.start_ns for step in each], called_ns[mine], "right") - 1
        inside = (place >= 0) & (called_ns[mine] <= np.array([step.end_ns for step in each])[place])
        number[mine[inside]] = np.array([step.number for step in each])[place[inside]]
    return number


# A collective that some rank never called: one step, which names who waits and who never came -------------------------


def _is_hung(message: Message) -> bool:
    """Whether it never came because a rank never called its collective: then none of the messages came."""
    operation = message.operation
    return message.how == "missing" and not operation.is_message and operation.exchange is None


def _never_came(trace: Trace, messages: Iterable[Message]) -> list[Step]:
    """A step for each cause; what waits behind it is told with it."""
    hung = {id(message.operation): message.operation for message in messages if _is_hung(message)}
    stuck = hangs(trace)
    told = [(each.hang, capital(each.sentence, each.speaker, trace.labels)) for each in tell(stuck, trace)]
    known = {id(each.operation) for each in stuck}
    for place, operation in hung.items():
        if place not in known:
            told.append((Hang(operation, operation.ranks), f"{operation.op}: {missing_text(operation, trace)}"))
    where = WalkParts(trace)
    return [_hung_step(hang, sentence, where) for hang, sentence in told if id(hang.operation) in hung]


def _hung_step(hang: Hang, sentence: str, where: WalkParts) -> Step:
    operation = hang.operation
    last = max(operation.ends, key=lambda end: end.start_ns)
    span, phase = where.of_event(last)
    return Step(
        rank=operation.ends[0].rank,
        sentence=f"{sentence} (missing).",
        at_ns=last.start_ns,
        mark=f"{operation.op} #{operation.seq} never came",
        op=operation.op,
        span=span,
        phase=phase,
        waiting=hang.waiting,
        absent=operation.missing,
        never=tuple((each.src, each.dst) for each in sums_of(operation)),
    )


# Steps, in their order ------------------------------------------------------------------------------------------------


def _sent_ns(message: Message) -> int:
    """One without a time can have left when the last rank had called, but before the first one was done."""
    if message.sent_ns is not None:
        return message.sent_ns
    called_ns = max(end.start_ns for end in message.operation.ends)
    return min([called_ns, *(end.end_ns for end in message.operation.ends if end.end_ns is not None)])


def _own_steps(
    told: Sequence[WalkSource], messages: Sequence[tuple[int, Message]], never: Sequence[Step], *, all_of_it: bool
) -> list[Step]:
    """What ranks did by themselves; beside a part of the messages only what lies between the first and the last."""
    steps = sorted((step for each in told for step in each.steps), key=lambda step: step.at_ns)
    if all_of_it:
        return steps
    times = [at_ns for at_ns, _ in messages] + [step.at_ns for step in never]
    if not times:
        return []
    last_ns = max(chain(times, (message.received_ns or 0 for _, message in messages)))
    first_ns = min(times)
    return [step for step in steps if first_ns <= step.at_ns <= last_ns]


def _of_message(
    place: int, at_ns: int, message: Message, mark: str, told: Sequence[WalkSource], where: WalkParts, trace: Trace
) -> Step:
    words = [each.words[place] for each in told if each.words.get(place)]
    sentence = message_sentence(message, trace)
    if mark and mark != f"tag {message.operation.tag}":  # The number is in the sentence, and only a name is new.
        sentence = f"{mark}: {sentence}"
    span, phase = where.of_message(message)
    changes = tuple(chain.from_iterable(each.changes.get(place, ()) for each in told))
    return Step(
        rank=message.src, sentence=" ".join([sentence, *words]), at_ns=at_ns, until_ns=message.received_ns,
        message=message, mark=mark, op=message.op, span=span, phase=phase, control=is_control(message),
        changes=changes,
    )  # fmt: skip


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


def _ranks(step: Step) -> tuple[int, ...]:
    return (step.rank, *step.waiting, *step.absent) if step.message is None else (step.message.src, step.message.dst)


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
