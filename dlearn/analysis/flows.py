"""Messages between the same two ranks, taken together: what one arrow of a picture stands for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec
import numpy as np

from dlearn.trace.message import How, Message, Operation


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """`count` messages of one operation from `src` to `dst`. The times are those of the first and the last of them.

    `step` is 0 where all steps are taken together.
    """

    src: int
    dst: int
    operation: Operation
    what: str
    payload_bytes: int
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


def sent_over_time(messages: Sequence[Message], *, start_ns: int, end_ns: int, bins: int) -> dict[int, list[float]]:
    """Payload bytes that each rank sends in each of `bins` equal stretches of time; a message's are spread evenly.

    A message with only one known time counts there, one without any counts nowhere.
    """
    edges = np.linspace(0, end_ns - start_ns, bins + 1)
    rows: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for message in messages:
        sent, received = message.sent_ns, message.received_ns
        known = [time - start_ns for time in (sent, received) if time is not None]
        if known:
            rows[message.src].append((min(known), max(known), message.payload_bytes))
    return {rank: np.diff(_sent_by(edges, np.array(sends))).tolist() for rank, sends in rows.items()}


def _sent_by(times: np.ndarray, sends: np.ndarray) -> np.ndarray:
    """Bytes that have been sent by each of these times."""
    start, end, size = sends[:, 0], sends[:, 1], sends[:, 2]
    lasting = np.maximum(end - start, 1)
    return np.array([(np.clip((time - start) / lasting, 0, 1) * size).sum() for time in times])


def _together(messages: Iterable[Message], part: Callable[[Message], int]) -> tuple[Flow, ...]:
    groups: dict[Hashable, list[Message]] = defaultdict(list)
    for message in messages:
        groups[id(message.operation), message.src, message.dst, part(message)].append(message)
    return tuple(_flow(group, step=part(group[0])) for group in groups.values())


def _flow(group: list[Message], *, step: int) -> Flow:
    first = group[0]
    sent = [message.sent_ns for message in group if message.sent_ns is not None]
    received = [message.received_ns for message in group if message.received_ns is not None]
    return Flow(
        src=first.src,
        dst=first.dst,
        operation=first.operation,
        what=first.what,
        payload_bytes=sum(message.payload_bytes for message in group),
        count=len(group),
        how=first.how,
        step=step,
        sent_ns=min(sent, default=None),
        received_ns=max(received, default=None),
    )
