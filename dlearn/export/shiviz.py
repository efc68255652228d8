"""ShiViz (https://bestchai.bitbucket.io/shiviz/): a log with a vector clock for each event.

A vector clock counts, for each host, the events of it that can have had an effect here: a host's own count goes up by
one with each event, and who receives takes over what the sender knew (Mattern, 1988). So one event is before another
if, and only if, its clock is.
"""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import attrgetter

import msgspec

from dlearn.analysis.hang_words import missing_text
from dlearn.analysis.joining import operations
from dlearn.analysis.unrolling import answers
from dlearn.analysis.words import payload_text, shorten
from dlearn.trace.message import Message, Operation
from dlearn.trace.store import printable
from dlearn.trace.trace import Trace

_DERIVED = " (derived: in the order of the algorithm's steps)"
_BEFORE = " (by the clocks it came before it was sent)"


class LogEvent(msgspec.Struct, frozen=True, gc=False):
    """`message` numbers the message that is sent or, `received`, comes in; None where nothing does."""

    rank: int
    at_ns: int
    step: int
    text: str
    message: int | None = None
    received: bool = False

    @property
    def order(self) -> tuple[int, int, bool]:
        """At the same moment a step's sends come before its receives, and these before the next step."""
        return self.at_ns, self.step, self.received


def shiviz(trace: Trace) -> str:
    """The log, for ShiViz's own expression: a host with its clock on one line, what happened on the next.

    An event for each send and each receive, in the order of time, and for each call without a known message.
    """
    events = sorted(_events(trace), key=attrgetter("order"))
    hosts = host_names({rank: trace.label(rank) for rank in sorted({event.rank for event in events})})
    clocks: dict[int, dict[int, int]] = defaultdict(dict)
    under_way: dict[int, dict[int, int]] = {}
    log = io.StringIO()
    for event in events:
        clock = clocks[event.rank]
        if event.received and event.message is not None:
            for rank, count in under_way.pop(event.message).items():
                clock[rank] = max(clock.get(rank, 0), count)
        clock[event.rank] = clock.get(event.rank, 0) + 1
        if event.message is not None and not event.received:
            under_way[event.message] = dict(clock)
        shown = json.dumps({hosts[rank]: count for rank, count in sorted(clock.items())})
        log.write(f"{hosts[event.rank]} {shown}\n{printable(event.text)}\n")
    return log.getvalue()


def host_names(labels: Mapping[int, str]) -> dict[int, str]:
    """A name without blanks for each rank, like its label, and no two the same."""
    names: dict[int, str] = {}
    for rank, label in labels.items():
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", label)[:40]
        while name in names.values():
            name += f"_{rank}"
        names[rank] = name
    return names


def _events(trace: Trace) -> Iterator[LogEvent]:
    number = 0
    for operation, answer in answers(operations(trace)):
        if isinstance(answer, str) or all(message.how == "missing" for message in answer):
            yield from _calls(operation, answer, trace)
            continue
        yield from (_never_came(message, trace) for message in answer if message.how == "missing")
        answer = [message for message in answer if message.how != "missing"]
        reached: dict[int, int] = {}
        for _, step in groupby(sorted(answer, key=attrgetter("step")), key=attrgetter("step")):
            came: list[LogEvent] = []
            for message in step:
                sent, received = _pair(message, number, reached, trace)
                yield sent
                came.append(received)
                number += 1
            yield from came
            reached |= {each.rank: max(each.at_ns, reached.get(each.rank, each.at_ns)) for each in came}


def _calls(operation: Operation, answer: list[Message] | str, trace: Trace) -> Iterator[LogEvent]:
    """Of each rank that called it."""
    if isinstance(answer, str):
        why = f": its messages are not known: {answer}"
    elif not answer:
        why = ": nothing travels"
    else:
        why = f": {missing_text(operation, trace)}" if operation.missing else ": it failed"
        why += " (missing)"
    for end in operation.ends:
        yield LogEvent(end.rank, end.start_ns, 0, f"{end.op} #{operation.seq}{why}")


def _never_came(message: Message, trace: Trace) -> LogEvent:
    """Of a step that one rank began alone."""
    what = f"{payload_text(message)} for {message.op}; it never came (missing)"
    if message.sent_ns is not None:
        return LogEvent(message.src, message.sent_ns, message.step, f"sends {trace.label(message.dst)} {what}")
    waits = f"waits for {trace.label(message.src)}'s {what}"
    return LogEvent(message.dst, message.operation.start_ns, message.step, waits)


def _pair(message: Message, number: int, reached: Mapping[int, int], trace: Trace) -> tuple[LogEvent, LogEvent]:
    """Its sending and its coming. `reached`: when the last of the operation's earlier steps came to each rank.

    What is derived has times that share out a transfer: there a step follows those before it, whatever its time is.
    """
    sent_ns = message.sent_ns if message.sent_ns is not None else message.operation.start_ns
    received_ns = message.received_ns if message.received_ns is not None else sent_ns
    note = "" if message.how == "observed" else f" ({message.how})"
    if message.how == "derived":
        note, sent_ns = _DERIVED, max(sent_ns, reached.get(message.src, sent_ns))
    elif received_ns < sent_ns:
        note += _BEFORE
    received_ns = max(received_ns, sent_ns)
    about = f": {shorten(message.what, message.operation.bucket)}" if message.what else ""
    what = f"{payload_text(message)} for {message.op}{about}{note}"
    src, dst = trace.label(message.src), trace.label(message.dst)
    return (
        LogEvent(message.src, sent_ns, message.step, f"sends {dst} {what}", number),
        LogEvent(message.dst, received_ns, message.step, f"gets from {src} {what}", number, received=True),
    )
