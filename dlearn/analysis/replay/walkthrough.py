"""From a trace to its steps, in an order in which they can have happened."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from dlearn.analysis.ddp.training_steps import training_steps
from dlearn.analysis.findings import sequence_finding
from dlearn.analysis.replay.local_activity import contexts, gradients, local_activity, nodes
from dlearn.analysis.replay.steps import Step, WalkParts, Walkthrough, program_parts
from dlearn.analysis.replay.tensor_chunks import pieces
from dlearn.analysis.telling.explanations import message_sentence, problem_sentences
from dlearn.diagnosis.hang_detection import Hang, hangs
from dlearn.diagnosis.hang_report import missing_text, report
from dlearn.events.event import PointToPoint
from dlearn.events.event_table import Rows
from dlearn.join.message_evidence import messages as all_messages
from dlearn.join.operation_messages import sums_of
from dlearn.join.tables.message_table import Message, Messages
from dlearn.join.training_phases import steps_of
from dlearn.shown import RankNames, capital, capitalized, count_text, size_text
from dlearn.trace import Trace

MOST_MESSAGES = 300
MOST_OF_ONE = 20_000
"""Of one operation: in a ring 64 ranks send 16,128, which move in 252 rounds."""
MOST_OWN_STEPS = 300  # Of what ranks do by themselves.
_MOST_QUIET_RANKS = 64
"""Lanes of ranks that send and get nothing, unless they would be more."""
_MOST_PROBLEMS = 8
_LAST_NS = 2**62
_LINES = {"observed": "solid", "derived": "dashed", "inferred": "dotted", "missing": "red"}


def walkthrough(
    trace: Trace, *, messages: Sequence[Message] | None = None, title: str | None = None,
    tags: Mapping[int, str] | None = None,
) -> Walkthrough:  # fmt: skip
    """Return the steps of all messages of the trace, or only these, and of what ranks do between them.

    Of a trace with more than 300 messages one whole step, or, where a step has more, one whole collective. A collective
    that some rank never called is one step.
    `tags` are the program's own names of the tags of its sends.
    """
    found = all_messages(trace)
    if messages is None:
        part, asked, finding, later = _played(trace, found)
    else:
        part, asked, finding, later = trace, messages, "", 0
    # By the time of sending, which is never after what follows from it, and then by step.
    came = (message for message in asked if not _is_hung(message))
    chosen = sorted(came, key=lambda message: (_left_ns(message), message.step))
    of_one = len({id(message.operation) for message in chosen}) == 1
    shown = chosen[: MOST_OF_ONE if of_one else MOST_MESSAGES]
    walk = WalkParts()
    for add in (pieces, gradients, contexts, local_activity, nodes):
        add(part, shown, walk)
    never = [*_never_came(trace, asked)]
    steps = [*_message_steps(shown, tags or {}, walk, trace)]
    own = sorted(walk.steps, key=lambda step: step.at_ns)
    if len(asked) != len(all_messages(part)) or len(shown) != len(chosen):
        first_ns = min((step.at_ns for step in (*steps, *never)), default=_LAST_NS)
        last_ns = max((max(step.at_ns, step.until_ns or 0) for step in (*steps, *never)), default=0)
        own = [step for step in own if first_ns <= step.at_ns <= last_ns]
    steps = sorted([*steps, *own[:MOST_OWN_STEPS], *never], key=lambda step: (step in never, step.at_ns))
    ends: set[int] = set()
    for step in steps:
        sent = step.message
        ends.update((step.rank, *step.waiting, *step.absent) if sent is None else (sent.src, sent.dst))
    quiet = trace.ranks if len(ends) + len(trace.ranks) <= _MOST_QUIET_RANKS else ()
    notes = _notes(len(chosen) + later, shown, all_messages(part) if messages is None else None)
    if messages is None and len(asked) + later < len(found):
        others = count_text(len(found) - len(asked) - later, "message")
        notes.append(f"{others} of other steps are not played: choose with trace.within(...) or messages=.")
    notes += walk.notes
    if len(own) > MOST_OWN_STEPS:
        notes.append(f"Of {len(own):,} steps inside of ranks the first {MOST_OWN_STEPS:,} are shown.")
    return Walkthrough(
        title=title or finding or _chosen_title(asked), steps=tuple(_with_parts(steps)),
        panels=tuple(walk.panels), graphs=tuple(walk.graphs),
        notes=(*notes, *problem_sentences(trace, _MOST_PROBLEMS)),
        labels=RankNames((rank, trace.label(rank)) for rank in sorted({*ends, *quiet})),
    )  # fmt: skip


# Which messages of a long trace are played: one whole step, or what led to its hang -----------------------------------


def _played(trace: Trace, found: Messages) -> tuple[Trace, Sequence[Message], str, int]:
    """Choose all if few came, else the last step in which all came, or what led to a hang.

    Return also the trace of what ranks do meanwhile, a title, and how many messages are left out.
    """
    missing = found.missing
    if len(found) - missing.sum() <= MOST_MESSAGES:
        return trace, found, sequence_finding(trace), 0
    if hangs(trace):
        came, never = found.at(np.flatnonzero(~missing)), found.at(np.flatnonzero(missing))
        before = [message for message in came if message.operation is came[-1].operation]
        return trace, [*before[-MOST_OF_ONE:], *never], sequence_finding(trace), 0
    every = _steps_from_the_last(trace, found)
    steps = (each for each in every if 0 < len(each[2]) <= MOST_MESSAGES)
    for name, part, indices in chain(steps, _collectives_from_the_last(trace, found)):
        inside = all_messages(part).at(indices)
        if all(message.how != "missing" for message in inside):
            size = size_text(sum(message.payload_bytes or 0 for message in inside))
            of_all = f"{count_text(len(found), 'message')}, {size}"
            of_all = f"{len(inside):,} of " * (len(inside) < len(found)) + of_all
            return part, inside, f"{name}: {of_all}", 0
    row = found.operations.rows[found.columns.operation]
    hung = missing & found.operations.table.is_collective[row]
    others = np.flatnonzero(~hung)
    most = MOST_OF_ONE if len(np.unique(row[others])) == 1 else MOST_MESSAGES
    shown = [*found.at(others[:most]), *found.at(np.flatnonzero(hung))]
    return trace, shown, _chosen_title(found), len(found) - len(shown)


def _left_ns(message: Message) -> int:
    """Return when it left: without a time after the last call, and before the first rank was done."""
    if message.sent_ns is not None:
        return message.sent_ns
    ends = message.operation.ends
    over_ns = min((end.end_ns for end in ends if end.end_ns is not None), default=_LAST_NS)
    return min(max(end.start_ns for end in ends), over_ns)


_Part = tuple[str, Trace, Rows]
"""A name, a part of the trace, and indices into the part's messages."""


def _collectives_from_the_last(trace: Trace, found: Messages) -> Iterator[_Part]:
    asked = found.operations
    counts = np.bincount(found.columns.operation, minlength=len(asked))
    is_collective = asked.table.is_collective[asked.rows]
    for operation in reversed(np.flatnonzero(is_collective & (counts > 1) & (counts <= MOST_OF_ONE))):
        indices = np.flatnonzero(found.columns.operation == operation)
        first = found[int(indices[0])]
        if first.payload_bytes:
            what = f" ({first.operation.what})" if first.operation.what else ""
            yield f"{first.operation.op} #{first.operation.seq}{what}", trace, indices


def _chosen_title(chosen: Sequence[Message]) -> str:
    """Say how many of the messages asked for are played, and their bytes."""
    shown = chosen[:MOST_MESSAGES]
    sizes = [message.payload_bytes for message in shown if message.how != "missing"]
    size = size_text(sum(filter(None, sizes)))
    size += f" and {sizes.count(None):,} of unknown size" * (None in sizes)
    if len(shown) < len(chosen):
        return f"The first {len(shown):,} of {count_text(len(chosen), 'message')}, with {size}"
    return f"{count_text(len(shown), 'message')} with {size}"


def _steps_from_the_last(trace: Trace, found: Messages) -> Iterator[_Part]:
    """Yield spans that are called steps, then DDP's training steps, the last first."""
    names = [name for name in trace.spans if name.startswith("step")]
    for name in reversed(names):
        part = trace.within(name)
        yield f"{name} of {len(names):,}", part, np.arange(len(all_messages(part)))
    count = 1 + max((step.number for step in training_steps(trace)), default=-1)
    number = steps_of(found.operations, trace.whole)[found.columns.operation]
    for step in reversed(range(count)):
        yield f"Training step {step} of {count:,}", trace, np.flatnonzero(number == step)


def _is_hung(message: Message) -> bool:
    """Return whether it never came because a rank never called its collective."""
    operation = message.operation
    return message.how == "missing" and not operation.is_message and operation.exchange is None


def _never_came(trace: Trace, messages: Iterable[Message]) -> Iterator[Step]:
    """Yield a step for each cause of a hang, with what waits behind it."""
    hung = {id(message.operation): message.operation for message in messages if _is_hung(message)}
    stuck = hangs(trace)
    causes = []
    for cause in report(stuck, trace):
        if id(cause.hang.operation) in hung:
            sentence = capital(cause.sentence, cause.speaker, trace.labels)
            causes.append((cause.hang, sentence))
    for hang in stuck:
        hung.pop(id(hang.operation), None)
    for operation in hung.values():
        sentence = f"{operation.op}: {missing_text(operation, trace)}"
        causes.append((Hang(operation, operation.ranks), sentence))
    where = program_parts(trace.whole)
    for hang, sentence in causes:
        operation = hang.operation
        last = max(operation.ends, key=lambda end: end.start_ns)
        span, phase = where.of_event(last)
        never = [(pair.src, pair.dst) for pair in sums_of(operation)]
        yield Step(
            rank=operation.ends[0].rank, at_ns=last.start_ns, sentence=f"{sentence} (missing).",
            mark=f"{operation.op} #{operation.seq} never came", op=operation.op, span=span,
            phase=phase, waiting=hang.waiting, absent=operation.missing, never=tuple(never),
        )  # fmt: skip


def _message_steps(
    shown: Sequence[Message], tags: Mapping[int, str], walk: WalkParts, trace: Trace
) -> Iterator[Step]:  # fmt: skip
    where, marks = program_parts(trace.whole), _tag_marks(shown, tags)
    for index, message in enumerate(shown):
        mark, words = marks[index], walk.words.get(index)
        # Without the program's data, as in a barrier.
        control = message.control or (message.how != "observed" and message.payload_bytes == 0)
        sentence = message_sentence(message, trace)
        # A tag's number is in the sentence already, and only a name is new.
        if mark and mark != f"tag {message.operation.tag}":
            sentence = f"{mark}: {sentence}"
        span, phase = where.of_message(message)
        sentence = f"{sentence} {words}" if words else sentence
        yield Step(
            rank=message.src, at_ns=_left_ns(message), until_ns=message.received_ns,
            message=message, sentence=sentence, mark=mark, op=message.op, span=span, phase=phase,
            control=control, changes=tuple(walk.changes.get(index, ())),
        )  # fmt: skip


def _tag_marks(shown: Sequence[Message], names: Mapping[int, str]) -> list[str]:
    """Return the tag of each send, or its name, where the program has several tags."""
    ends = [message.operation.ends[0] for message in shown]
    tags = [end.tag if isinstance(end, PointToPoint) else None for end in ends]
    if len({*tags} - {None}) < 2 and not any(tag in names for tag in tags):
        return [""] * len(tags)
    return ["" if tag is None else names.get(tag, f"tag {tag}") for tag in tags]


def _with_parts(steps: Sequence[Step]) -> list[Step]:
    """Give each local activity the span and phase of the message that its rank sends next."""
    placed: list[Step] = []
    following: dict[int, Step] = {}
    for step in reversed(steps):
        if step.message is not None:
            following[step.rank] = step
        elif step.rank in following:
            sends = following[step.rank]
            step = msgspec.structs.replace(step, span=step.span or sends.span, phase=step.phase or sends.phase)
        placed.append(step)
    return placed[::-1]


def _notes(count: int, shown: Sequence[Message], found: Messages | None) -> list[str]:
    used = {message.how for message in shown}
    lines = [f"{line} = {how}" for how, line in _LINES.items() if how in used]
    notes = [f"Lines: {', '.join(lines)}."] if lines else []
    if "derived" in used:
        notes.append("The times of derived messages share out the operation's, and are no measurement.")
    if len(shown) < count:
        later = f"{count - len(shown):,} later ones are left out"
        choose = "choose a part with trace.within(...), or with messages=."
        notes.append(f"The first {len(shown):,} of {count:,} messages; {later}: {choose}")
    if found is not None and found.reasons:
        notes += map(capitalized, found.sentences())
    return notes
