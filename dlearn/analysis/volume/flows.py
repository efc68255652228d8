"""Messages between the same two ranks, taken together: what one arrow of a picture stands for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable

import msgspec
import numpy as np

from dlearn.events.event_table import NONE, Column, Rows
from dlearn.join.ends import How
from dlearn.join.operation_messages import PairSum, sums_of, times_of_calls, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.join.wording import Reason


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A number of messages of one operation from `src` to `dst`, with the times of the first and the last.

    `step` is 0 where all steps are taken together.
    """

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
    """Sums of messages that are too many to look at one by one.

    `count` messages have their times, `never_came` have none. `arrows` would be needed with one for each pair of ranks
    in an operation. `derived` and `derived_arrows` are those of them that are derived. `unexplained` counts the
    operations whose messages are not known, by reason.
    """

    count: int
    never_came: int
    arrows: int
    derived: int
    derived_arrows: int
    unexplained: dict[Reason, int]


def count_messages(shown: Operations, ranks: Container[int]) -> Sums:
    """Count all messages between these ranks."""
    count = never_came = arrows = derived = derived_arrows = 0
    unexplained: Counter[Reason] = Counter()
    leaves, _ = shown.leaves()
    times_of_call = times_of_calls(leaves)
    for one, indices in leaves.groups():
        sums = _timed_sums(one, leaves, indices, times_of_call)
        reason = None if sums else why_unknown(one)
        if reason is not None:
            unexplained[reason] += len(indices)
        for (src, dst, how, _, times), first_ns, last_ns in sums:
            if src not in ranks or dst not in ranks:
                continue
            if how == "missing":
                never_came += times * len(indices)
            both = int(((first_ns != NONE) & (last_ns != NONE)).sum())
            count += times * both
            arrows += both
            derived += times * both * (how == "derived")
            derived_arrows += both * (how == "derived")
    return Sums(count, never_came, arrows, derived, derived_arrows, unexplained)


def _timed_sums(
    one: Operation, leaves: Operations, indices: Rows, times_of_call: np.ndarray
) -> list[tuple[PairSum, Column, Column]]:
    """Return `sums_of` one operation of a class, with the times of sending and receiving in all of the class."""
    if one.is_call:  # The request is first, the reply second.
        sums = enumerate(sums_of(one))
        return [(pair, times_of_call[indices, step, 0], times_of_call[indices, step, 1]) for step, pair in sums]
    last_arrival_ns, end_ns, starts_ns, ends_ns = leaves.times(indices)
    none = np.full(len(indices), NONE)
    if one.sender is not None:
        sent_ns = starts_ns[:, 0] if one.ends[0].op == "send" else none
        received_ns = ends_ns[:, -1] if one.ends[-1].op == "recv" else none
    else:
        is_known = (end_ns != NONE) & (not one.failed)
        sent_ns = np.where(is_known, last_arrival_ns, NONE)
        received_ns = np.where(is_known, np.maximum(last_arrival_ns, end_ns), NONE)
    return [(pair, sent_ns, received_ns) for pair in sums_of(one)]


def flows(messages: Iterable[Message], *, by_step: bool) -> tuple[Flow, ...]:
    """Join all messages of one operation between the same two ranks, or only those of one step."""
    groups: dict[Hashable, list[Message]] = defaultdict(list)
    for message in messages:
        step = message.step if by_step else 0
        groups[id(message.operation), message.src, message.dst, step].append(message)
    joined = []
    for group in groups.values():
        first, sizes = group[0], [message.payload_bytes for message in group]
        sent = [message.sent_ns for message in group if message.sent_ns is not None]
        received = [message.received_ns for message in group if message.received_ns is not None]
        flow = Flow(
            src=first.src,
            dst=first.dst,
            operation=first.operation,
            payload_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            count=len(group),
            how=first.how,
            step=first.step if by_step else 0,
            sent_ns=min(sent, default=None),
            received_ns=max(received, default=None),
        )
        joined.append(flow)
    return tuple(joined)
