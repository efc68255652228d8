"""Every message of a trace, and which of them the kernel's counters confirm."""

from __future__ import annotations

import msgspec

from dlearn.analysis.joining import once, operations
from dlearn.analysis.ledger import confirmed
from dlearn.analysis.unrolling import message_count, messages_of
from dlearn.trace.message import Message, Messages, Operation
from dlearn.trace.trace import Trace

MOST_MESSAGES = 1_000_000
"""That `messages` holds at once: about 300 MB. `traffic` sums without making them, and has no limit."""


@once
def messages(trace: Trace) -> Messages:
    """Every message, in the order of sending, each with one sender and one receiver.

    Those of a collective are derived from the backend's algorithm, those of a glass-box collective observed. An
    operation that gives none is listed, with the reason.
    """
    found: list[Message] = []
    unexplained: list[tuple[Operation, str]] = []
    for operation in operations(trace):
        fits = len(found) + message_count(operation) <= MOST_MESSAGES
        too_many = f"the trace has more than {MOST_MESSAGES:,} messages; ask for a part of it"
        answer = messages_of(operation) if fits else too_many
        if isinstance(answer, str):
            unexplained.append((operation, answer))
            continue
        agreed = confirmed(operation, trace)
        if agreed:
            answer = [
                msgspec.structs.replace(each, confirmed=True) if (each.src, each.dst) in agreed else each
                for each in answer
            ]
        found += answer
    # A derived time is a share of the operation's; one without a time comes when its operation was called.
    found.sort(key=_in_order)
    return Messages(tuple(found), tuple(unexplained), dict(trace.labels))


def _in_order(message: Message) -> tuple[int, int]:
    return message.sent_ns if message.sent_ns is not None else message.operation.start_ns, message.step
