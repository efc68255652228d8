"""Messages between the same two ranks, taken together: what one arrow of a picture stands for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable

import msgspec
import numpy as np

from dlearn.join.columns import spread
from dlearn.join.unrolling import PairSum, messages_of, sums_of, why_unknown
from dlearn.trace.message import How, Message, Operation
from dlearn.trace.tables.event_table import NONE
from dlearn.trace.tables.operations import Operations
from dlearn.trace.wording import Reason


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """`count` messages of one operation from `src` to `dst`. The times are those of the first and the last of them.

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
    """What is left of messages that are too many to look at one by one.

    `sent_bytes` are the payload bytes that each rank sends in each of equal stretches of time. `count` messages have
    their times, `never_came` have none. `arrows` would be needed with one for each pair of ranks in an operation.
    `derived` and `derived_arrows` are those of them that are derived. `unexplained` counts the operations whose
    messages are not known, by reason.
    """

    sent_bytes: dict[int, list[float]]
    count: int
    never_came: int
    arrows: int
    derived: int
    derived_arrows: int
    unexplained: dict[Reason, int]


def over_time(shown: Operations, ranks: Container[int], *, start_ns: int, end_ns: int, bins: int) -> Sums:
    """All messages between these ranks, by sender and time: those of an operation are spread evenly over its transfer.

    Of one whose time is known at one end only, all counts there; without any time it counts nowhere.
    """
    sent: dict[int, list[np.ndarray]] = defaultdict(list)
    count = never_came = arrows = derived = derived_arrows = 0
    unexplained: Counter[Reason] = Counter()
    leaves, _ = shown.leaves()
    for one, places in leaves.alike():
        sums = _timed_sums(one, leaves, places)
        reason = None if sums else why_unknown(one)
        if reason is not None:
            unexplained[reason] += len(places)
        for (src, dst, how, size, times), first_ns, last_ns in sums:
            if src not in ranks or dst not in ranks:
                continue
            if how == "missing":
                never_came += times * len(places)
            both, any_time = (first_ns != NONE) & (last_ns != NONE), (first_ns != NONE) | (last_ns != NONE)
            count += times * int(both.sum())
            arrows += int(both.sum())
            derived += times * int(both.sum()) * (how == "derived")
            derived_arrows += int(both.sum()) * (how == "derived")
            begins, ends = np.where(first_ns == NONE, last_ns, first_ns), np.where(last_ns == NONE, first_ns, last_ns)
            sent[src].append(np.stack([begins, ends, np.full(len(begins), size or 0)])[:, any_time])
    width_ns = (end_ns - start_ns) / bins
    sent_bytes: dict[int, list[float]] = {}
    for rank, parts in sent.items():
        begins, ends, sizes = np.concatenate(parts, axis=1)
        begin, end = ((at - start_ns) / width_ns for at in (begins, ends))
        if len(sizes):
            sent_bytes[rank] = spread(begin, np.maximum(begin, end), sizes.astype(float), bins=bins).tolist()
    return Sums(sent_bytes, count, never_came, arrows, derived, derived_arrows, unexplained)


def _timed_sums(one: Operation, leaves: Operations, places: np.ndarray) -> list[tuple[PairSum, np.ndarray, np.ndarray]]:
    """`sums_of` one of those that are alike; and of each, when the first message is sent and the last received."""
    if leaves.rows[places[0]] < 0:
        found = messages_of(one)
        return [
            (PairSum(m.src, m.dst, m.how, m.payload_bytes, 1), _time(m.sent_ns), _time(m.received_ns)) for m in found
        ]
    transfer_ns, end_ns, starts_ns, ends_ns = leaves.times(places)
    none = np.full(len(places), NONE)
    if one.sender is not None:
        sent_ns = starts_ns[:, 0] if one.ends[0].op == "send" else none
        received_ns = ends_ns[:, -1] if one.ends[-1].op == "recv" else none
    else:
        is_known = (end_ns != NONE) & (not one.failed)
        sent_ns = np.where(is_known, transfer_ns, NONE)
        received_ns = np.where(is_known, np.maximum(transfer_ns, end_ns), NONE)
    return [(pair, sent_ns, received_ns) for pair in sums_of(one)]


def _time(at_ns: int | None) -> np.ndarray:
    return np.array([NONE if at_ns is None else at_ns])


def flows(messages: Iterable[Message], *, by_step: bool) -> tuple[Flow, ...]:
    """All messages of one operation between the same two ranks together, or only the segments of one step."""
    groups: dict[Hashable, list[Message]] = defaultdict(list)
    for message in messages:
        step = message.step if by_step else 0
        groups[id(message.operation), message.src, message.dst, step].append(message)
    return tuple(_flow(group, step=group[0].step if by_step else 0) for group in groups.values())


def _flow(group: list[Message], *, step: int) -> Flow:
    first = group[0]
    sent = [message.sent_ns for message in group if message.sent_ns is not None]
    received = [message.received_ns for message in group if message.received_ns is not None]
    sizes = [message.payload_bytes for message in group]
    return Flow(
        src=first.src,
        dst=first.dst,
        operation=first.operation,
        payload_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        count=len(group),
        how=first.how,
        step=step,
        sent_ns=min(sent, default=None),
        received_ns=max(received, default=None),
    )
