"""Every message of a trace, and which of them the kernel's counters confirm."""

from __future__ import annotations

import msgspec

from dlearn.join.joining import once, operations
from dlearn.join.ledger import confirmed
from dlearn.join.unrolling import message_count, messages_of, why_unknown
from dlearn.trace.message import Message, Messages, Operation
from dlearn.trace.trace import Trace
from dlearn.trace.wording import Reason, ReasonKind

MOST_MESSAGES = 1_000_000
"""That `messages` holds at once: about 300 MB. `traffic` sums without making them, and has no limit."""


@once
def messages(trace: Trace) -> Messages:
    """Every message, in the order of sending, each with one sender and one receiver.

    Those of a collective are derived from the backend's algorithm, those of a glass-box collective observed. An
    operation that gives none is listed, with the reason.
    """
    found: list[Message] = []
    unexplained: list[tuple[Operation, Reason]] = []
    for operation in operations(trace):
        fits = len(found) + message_count(operation) <= MOST_MESSAGES
        mine = messages_of(operation) if fits else []
        if not mine:
            reason = why_unknown(operation) if fits else Reason.of(ReasonKind.TOO_MANY, MOST_MESSAGES)
            unexplained += [(operation, reason)] if reason is not None else []
            continue
        agreed = confirmed(operation, trace)
        found += [
            msgspec.structs.replace(each, confirmed=True) if (each.src, each.dst) in agreed else each for each in mine
        ]
    # A derived time is a share of the operation's; one without a time comes when its operation was called.
    found.sort(key=_in_order)
    return Messages(tuple(found), tuple(unexplained), trace.labels)


def _in_order(message: Message) -> tuple[int, int]:
    return message.sent_ns if message.sent_ns is not None else message.operation.start_ns, message.step
