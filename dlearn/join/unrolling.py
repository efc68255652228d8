"""One operation -> its messages: who sent what to whom.

A send and its recv are a message that was observed, and so are the steps of a glass-box collective. Those of any other
collective are derived from the backend's algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

import msgspec

from dlearn.join import gloo
from dlearn.join.gloo_schedules import Send
from dlearn.join.rpc_messages import messages_of_exchange, why_nothing_sent
from dlearn.join.services import messages_of_call
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import How, Message, Operation
from dlearn.trace.mpi_facts import CANCELLED
from dlearn.trace.source import ServiceCall, in_use
from dlearn.trace.wording import Reason, ReasonKind


class PairSum(NamedTuple):
    """What one rank sends another in one operation: payload in bytes (None: not known), and in how many messages."""

    src: int
    dst: int
    how: How
    payload_bytes: int | None
    message_count: int


def messages_of(operation: Operation) -> list[Message]:
    """The messages of one operation: its steps', else those of the backend's algorithm.

    None where `why_unknown` has a reason.
    """
    if operation.exchange is not None:
        return messages_of_exchange(operation)
    if operation.refused:
        return []
    if isinstance(call := operation.ends[0], ServiceCall):
        return messages_of_call(operation, call)
    if operation.steps:
        sent = [message for step in operation.steps for message in _sent(step)]
        return [msgspec.structs.replace(each, op=operation.op, operation=operation) for each in sent]
    return _sent(operation) if operation.is_message else list(_derived(operation, _schedule(operation).sends))


def why_unknown(operation: Operation) -> Reason | None:
    """Why the messages of an operation are not known; None where they are, or where it has none."""
    if operation.exchange is not None:
        return why_nothing_sent(operation.exchange)
    if operation.refused:
        return None
    if isinstance(operation.ends[0], ServiceCall):
        return Reason(ReasonKind.HOST_UNKNOWN) if operation.receiver is None else None
    sends = operation.steps or ((operation,) if operation.is_message else ())
    if not sends:
        return _schedule(operation).unknown
    return None if any(map(_is_paired, sends)) else _why_alone(sends[0])


def message_count(operation: Operation) -> int:
    """How many messages `messages_of` would make, if none of them is unknown."""
    if operation.exchange is not None:
        return 2
    if operation.refused:
        return 0
    if isinstance(call := operation.ends[0], ServiceCall):
        return len(messages_of_call(operation, call))
    if operation.steps or operation.is_message:
        return len(operation.steps) or 1
    return len(_schedule(operation).sends)


def sums_of(operation: Operation) -> list[PairSum]:
    """`messages_of` summed for each pair of ranks, at the price of one message each."""
    if operation.steps or operation.exchange is not None or isinstance(operation.ends[0], ServiceCall):
        return [PairSum(each.src, each.dst, each.how, each.payload_bytes, 1) for each in messages_of(operation)]
    if operation.refused:
        return []
    if operation.sender is not None and operation.receiver is not None:
        return [PairSum(operation.sender, operation.receiver, how_sent(operation), operation.payload_bytes, 1)]
    if operation.is_message:
        return []
    schedule, members, how = _schedule(operation), operation.group.members, _how(operation)
    return [
        PairSum(members[src], members[dst], how, schedule.bytes_by_pair[src, dst], count)
        for (src, dst), count in schedule.count_by_pair.items()
    ]


def how_sent(operation: Operation) -> How:
    """Of a send with its recv."""
    return "missing" if operation.missing or operation.failed else "observed"


def _how(operation: Operation) -> How:
    return "missing" if operation.missing else "derived"


def _is_paired(send: Operation) -> bool:
    return send.sender is not None and send.receiver is not None


def _sent(operation: Operation) -> list[Message]:
    """A send with its recv as a message; nothing of one whose other end is not known."""
    if operation.sender is None or operation.receiver is None:
        return []
    first, last = operation.ends[0], operation.ends[-1]
    known = operation.payload_bytes
    offset, whole, step = 0, 0, 0
    if isinstance(first, PointToPoint) and first.op == "send":
        offset, whole, step = first.offset_bytes, first.whole_bytes, first.step
    message = Message(
        src=operation.sender,
        dst=operation.receiver,
        op="send",
        payload_bytes=known,
        how=how_sent(operation),
        operation=operation,
        sent_ns=first.start_ns if first.op == "send" else None,
        received_ns=last.end_ns if last.op == "recv" else None,
        offset_bytes=offset,
        whole_bytes=whole or known,
        step=step,
    )
    return [message]


def _why_alone(operation: Operation) -> Reason:
    end = operation.ends[0]
    if not operation.group.members:
        return Reason(ReasonKind.GROUP_LOST)
    if end.error == CANCELLED:
        return Reason.of(ReasonKind.TAKEN_BACK, end.op)
    if isinstance(end, PointToPoint) and end.peer is None:
        return Reason.of(ReasonKind.PEER_NOT_SEEN, end.op)
    return Reason(ReasonKind.PEER_OUTSIDE)


def _schedule(operation: Operation) -> gloo.Schedule:
    members, backend = operation.group.members, operation.group.backend
    source = in_use.get(backend) if backend != "gloo" else None
    if operation.misfit is not None:
        return gloo.Schedule(unknown=operation.misfit)
    if not members:
        return gloo.unknown(ReasonKind.GROUP_LOST)
    if backend == "mpi4py":
        return gloo.unknown(ReasonKind.MPI_CHOOSES)
    if backend != "gloo" and (source is None or not source.schedule):
        return gloo.unknown(ReasonKind.NO_SCHEDULE, backend, operation.op)
    if operation.pending and not operation.missing:
        return gloo.unknown(ReasonKind.NOT_OVER)
    if operation.failed and not operation.missing:
        return gloo.unknown(ReasonKind.FAILED)
    calls = [end for end in operation.ends if isinstance(end, Collective)]
    calls.sort(key=lambda call: members.index(call.rank))
    if source is None:
        return gloo.schedule_of(calls, len(members))
    steps = source.schedule if isinstance(source.schedule, str) else source.schedule(calls, len(members))
    if isinstance(steps, str):
        return gloo.unknown(ReasonKind.SOURCE_SAYS, steps)
    return gloo.Schedule(tuple(starmap(Send, steps)))


def _derived(operation: Operation, sends: Sequence[gloo.Send]) -> Iterator[Message]:
    """Each step takes an equal share of the transfer, which begins when the last rank has called."""
    members, how = operation.group.members, _how(operation)
    steps = max((send.step for send in sends), default=0) + 1
    start, end = operation.transfer_ns, operation.end_ns if how == "derived" else None
    # Clocks of several hosts are not aligned: a transfer may seem to end before it begins.
    bounds = [None if end is None else start + max(0, end - start) * step // steps for step in range(steps + 1)]
    whole = max((send.offset + send.length for send in sends), default=0)
    ended = {call.rank: call.end_ns for call in operation.ends if call.end_ns is not None}
    for send in sends:
        src, dst, sent, received = members[send.src], members[send.dst], bounds[send.step], bounds[send.step + 1]
        if sent is not None and received is not None:
            # A rank has sent and received its last before its own call ended.
            received = min(received, ended.get(dst, received))
            sent = min(sent, ended.get(src, sent), received)
        yield Message(
            src=src,
            dst=dst,
            op=operation.op,
            payload_bytes=send.length,
            how=how,
            operation=operation,
            sent_ns=sent,
            received_ns=received,
            offset_bytes=send.offset,
            whole_bytes=whole,
            step=send.step,
        )
