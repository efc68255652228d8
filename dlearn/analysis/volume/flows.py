"""Messages between the same two ranks, taken together: what one arrow of a picture stands for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable

import msgspec
import numpy as np

from dlearn.join.columns import spread
from dlearn.join.unrolling import PairSum, messages_of, sums_of, why_unknown
from dlearn.trace.message import How, Message, Operation
from dlearn.trace.source import ServiceCall
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


def by_step(messages: Iterable[Message]) -> tuple[Flow, ...]:
    """The segments of one step between the same two ranks together."""
    return _together(messages, lambda message: message.step)


def by_pair(messages: Iterable[Message]) -> tuple[Flow, ...]:
    """All steps of one operation between the same two ranks together."""
    return _together(messages, lambda message: 0)


class Sums(msgspec.Struct, frozen=True):
    """What is left of messages that are too many to look at one by one.

    `sent_bytes` are the payload bytes that each rank sends in each of equal stretches of time. `count` messages have
    their times, `never_came` have none. `arrows` would be needed with one for each pair of ranks in an operation.
    `unexplained` counts the operations whose messages are not known, by reason.
    """

    sent_bytes: dict[int, list[float]]
    count: int
    never_came: int
    arrows: int
    unexplained: dict[Reason, int]


def over_time(shown: Iterable[Operation], ranks: Container[int], *, start_ns: int, end_ns: int, bins: int) -> Sums:
    """All messages between these ranks, by sender and time: those of an operation are spread evenly over its transfer.

    Of one whose time is known at one end only, all counts there; without any time it counts nowhere.
    """
    sent: dict[int, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
    count = never_came = arrows = 0
    unexplained: Counter[Reason] = Counter()
    for operation in shown:
        for part in operation.steps or (operation,):
            sums = _timed_sums(part)
            reason = None if sums else why_unknown(part)
            if reason is not None:
                unexplained[reason] += 1
            for (src, dst, how, size, times), first_ns, last_ns in sums:
                if src not in ranks or dst not in ranks:
                    continue
                if how == "missing":
                    never_came += times
                if first_ns is not None and last_ns is not None:
                    count += times
                    arrows += 1
                elif first_ns is None and last_ns is None:
                    continue
                begins, ends, sizes = sent[src]
                begins.append(first_ns if first_ns is not None else last_ns or 0)
                ends.append(last_ns if last_ns is not None else first_ns or 0)
                sizes.append(size or 0)
    width_ns = (end_ns - start_ns) / bins
    sent_bytes: dict[int, list[float]] = {}
    for rank, (begins, ends, sizes) in sent.items():
        begin, end = ((np.array(at) - start_ns) / width_ns for at in (begins, ends))
        sent_bytes[rank] = spread(begin, np.maximum(begin, end), np.array(sizes, dtype=float), bins=bins).tolist()
    return Sums(sent_bytes, count, never_came, arrows, unexplained)


def _timed_sums(operation: Operation) -> list[tuple[PairSum, int | None, int | None]]:
    """`sums_of`, with when the first message is sent and the last received; of a collective, its transfer."""
    if operation.exchange is not None or isinstance(operation.ends[0], ServiceCall):
        found = messages_of(operation)
        return [(PairSum(m.src, m.dst, m.how, m.payload_bytes, 1), m.sent_ns, m.received_ns) for m in found]
    first, last = operation.ends[0], operation.ends[-1]
    sent_ns, received_ns = None, None
    if operation.sender is not None:
        sent_ns = first.start_ns if first.op == "send" else None
        received_ns = last.end_ns if last.op == "recv" else None
    elif operation.end_ns is not None and not operation.failed:
        sent_ns, received_ns = operation.transfer_ns, max(operation.transfer_ns, operation.end_ns)
    return [(pair, sent_ns, received_ns) for pair in sums_of(operation)]


def _together(messages: Iterable[Message], part: Callable[[Message], int]) -> tuple[Flow, ...]:
    groups: dict[Hashable, list[Message]] = defaultdict(list)
    for message in messages:
        groups[id(message.operation), message.src, message.dst, part(message)].append(message)
    return tuple(_flow(group, step=part(group[0])) for group in groups.values())


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
