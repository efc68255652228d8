"""Messages between the same two ranks, taken together: what one arrow of a picture stands for."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import repeat
from operator import attrgetter

import msgspec
import numpy as np

from dlearn.events.event_table import NONE, Rows
from dlearn.join.columns import grouped
from dlearn.join.ends import How
from dlearn.join.operation_messages import sums_of, times_of_calls, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.join.wording import Reason


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """`count` messages of an operation, with the first and last time; `step` 0: of all steps."""

    src: int
    dst: int
    operation: Operation
    payload_bytes: int | None
    count: int
    how: How
    step: int
    sent_ns: int | None
    received_ns: int | None


class Sums(msgspec.Struct, frozen=True):
    """Sums by how messages are known: the `count` of those with times, and an arrow a pair."""

    count: Counter[How]
    arrows: Counter[How]
    never_came: int
    unexplained: dict[Reason, int]


def count_messages(shown: Operations, ranks: Container[int]) -> Sums:
    count, arrows, never_came = Counter[How](), Counter[How](), 0
    unexplained: Counter[Reason] = Counter()
    leaves, _ = shown.leaves()
    times_of_call = times_of_calls(leaves)
    for one, indices in leaves.groups():
        sums = sums_of(one)
        reason = None if sums else why_unknown(one)
        if reason is not None:
            unexplained[reason] += len(indices)
        timed = _with_both_times(one, leaves, indices, times_of_call)
        for (src, dst, how, _, times), both in zip(sums, timed, strict=False):
            if src not in ranks or dst not in ranks:
                continue
            if how == "missing":
                never_came += times * len(indices)
            count[how] += times * both
            arrows[how] += both
    return Sums(count, arrows, never_came, unexplained)


def _with_both_times(one: Operation, leaves: Operations, indices: Rows, times_of_call: np.ndarray) -> Iterable[int]:
    """Count, for each of `sums_of(one)`, the operations of its class that have both times of it."""
    if one.is_call:  # Of the request, then of the reply.
        return [int(count) for count in (times_of_call[indices] != NONE).all(axis=2).sum(axis=0)]
    _, end_ns, starts_ns, ends_ns = leaves.times(indices)
    known = (end_ns != NONE) & (not one.failed)
    if one.sender is not None:
        both = one.ends[0].op == "send" and one.ends[-1].op == "recv"
        known = (starts_ns[:, 0] != NONE) & (ends_ns[:, -1] != NONE) & both
    return repeat(int(known.sum()))


def flows(messages: Iterable[Message], *, by_step: bool) -> Iterator[Flow]:
    """Join all messages of one operation between the same two ranks, or only those of one step."""
    way = attrgetter("src", "dst", "step") if by_step else attrgetter("src", "dst")
    for group in grouped(messages, lambda each: (id(each.operation), way(each))).values():
        first, sizes = group[0], [message.payload_bytes for message in group]
        sent = [message.sent_ns for message in group if message.sent_ns is not None]
        received = [message.received_ns for message in group if message.received_ns is not None]
        yield Flow(
            src=first.src, dst=first.dst, operation=first.operation,
            payload_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            count=len(group), how=first.how, step=first.step if by_step else 0,
            sent_ns=min(sent, default=None), received_ns=max(received, default=None),
        )  # fmt: skip
