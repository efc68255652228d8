"""One operation -> its messages: who sent what to whom.

A send and its recv are a message that was observed, and so are the steps of a glass-box collective. Those of any other
collective are derived from the backend's algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

import msgspec

from dlearn.analysis import gloo
from dlearn.analysis.gloo_schedules import Schedule, Send
from dlearn.analysis.rpc import messages_of_exchange
from dlearn.analysis.services import messages_of_call
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import How, Message, Operation
from dlearn.trace.mpi import CANCELLED
from dlearn.trace.source import ServiceCall, in_use


class PairSum(NamedTuple):
    """What one rank sends another in one operation: payload in bytes (None: not known), and in how many messages."""

    src: int
    dst: int
    how: How
    payload_bytes: int | None
    message_count: int


def messages_of(operation: Operation) -> list[Message] | str:
    """The messages of one operation, or why they are not known: its steps', else those of the backend's algorithm."""
    if operation.exchange is not None:
        return messages_of_exchange(operation)
    if operation.refused:
        return []
    if isinstance(call := operation.ends[0], ServiceCall):
        return messages_of_call(operation, call)
    if operation.steps:
        return _of_steps(operation)
    if operation.sender is not None or operation.receiver is not None:
        message = _p2p_message(operation)
        return message if isinstance(message, str) else [message]
    schedule = _schedule(operation)
    return schedule if isinstance(schedule, str) else list(_derived(operation, schedule.sends))


def message_count(operation: Operation) -> int:
    """How many messages `messages_of` would make, if none of them is unknown."""
    if operation.exchange is not None:
        return 2
    if operation.refused:
        return 0
    if isinstance(call := operation.ends[0], ServiceCall):
        found = messages_of_call(operation, call)
        return 0 if isinstance(found, str) else len(found)
    if operation.steps or operation.sender is not None or operation.receiver is not None:
        return len(operation.steps) or 1
    schedule = _schedule(operation)
    return 0 if isinstance(schedule, str) else len(schedule.sends)


def sums_of(operation: Operation) -> list[PairSum] | str:
    """`messages_of` summed for each pair of ranks, at the price of one message each."""
    if operation.steps or operation.exchange is not None or isinstance(operation.ends[0], ServiceCall):
        found = messages_of(operation)
        return found if isinstance(found, str) else [PairSum(m.src, m.dst, m.how, m.payload_bytes, 1) for m in found]
    if operation.refused:
        return []
    if operation.sender is not None and operation.receiver is not None:
        return [PairSum(operation.sender, operation.receiver, how_sent(operation), operation.payload_bytes, 1)]
    if operation.sender is not None or operation.receiver is not None:
        return _why_alone(operation)
    schedule = _schedule(operation)
    if isinstance(schedule, str):
        return schedule
    members, how = operation.group.members, _how(operation)
    return [
        PairSum(members[src], members[dst], how, schedule.bytes_by_pair[src, dst], count)
        for (src, dst), count in schedule.count_by_pair.items()
    ]


def how_sent(operation: Operation) -> How:
    """Of a send with its recv."""
    return "missing" if operation.missing or operation.failed else "observed"


def _how(operation: Operation) -> How:
    return "missing" if operation.missing else "derived"


def _of_steps(operation: Operation) -> list[Message] | str:
    """The sends of a glass-box collective, as messages of the collective."""
    answers = [_p2p_message(step) for step in operation.steps]
    found = [answer for answer in answers if not isinstance(answer, str)]
    if not found:
        return next(answer for answer in answers if isinstance(answer, str))
    return [
        msgspec.structs.replace(message, op=operation.op, what=operation.what, operation=operation) for message in found
    ]


def _p2p_message(operation: Operation) -> Message | str:
    if operation.sender is None or operation.receiver is None:
        return _why_alone(operation)
    first, last = operation.ends[0], operation.ends[-1]
    known = operation.payload_bytes
    offset, whole, step = 0, 0, 0
    if isinstance(first, PointToPoint) and first.op == "send":
        offset, whole, step = first.offset_bytes, first.whole_bytes, first.step
    return Message(
        src=operation.sender,
        dst=operation.receiver,
        op="send",
        what=operation.what,
        payload_bytes=known,
        how=how_sent(operation),
        operation=operation,
        sent_ns=first.start_ns if first.op == "send" else None,
        received_ns=last.end_ns if last.op == "recv" else None,
        offset_bytes=offset,
        whole_bytes=whole or known,
        step=step,
    )


def _why_alone(operation: Operation) -> str:
    end = operation.ends[0]
    if not operation.group.members:
        return "the line that describes its process group is lost"
    if end.error == CANCELLED:
        return f"a {end.op} that the program took back"
    if isinstance(end, PointToPoint) and end.peer is None:
        return f"a {end.op} whose peer is known at its end only, and nobody saw that end"
    return "its peer is no member of the process group: a damaged trace"


def _schedule(operation: Operation) -> gloo.Schedule | str:
    if operation.problem:
        return operation.problem
    if not operation.group.members:
        return "the line that describes its process group is lost"
    if operation.group.backend == "mpi4py":
        return "MPI's library chooses how, and does not say"
    source = in_use.get(operation.group.backend) if operation.group.backend != "gloo" else None
    if operation.group.backend != "gloo" and (source is None or not source.schedule):
        return f"no schedule of {operation.group.backend}'s {operation.op} is known here yet"
    if operation.pending and not operation.missing:
        return "not every rank has come out of it: which of its messages have travelled is not known"
    if operation.failed and not operation.missing:
        return "it failed: which of its messages have travelled is not known"
    members = operation.group.members
    calls = [end for end in operation.ends if isinstance(end, Collective)]
    calls.sort(key=lambda call: members.index(call.rank))
    if source is None:
        return gloo.schedule_of(calls, len(members))
    steps = source.schedule if isinstance(source.schedule, str) else source.schedule(calls, len(members))
    return steps if isinstance(steps, str) else Schedule(tuple(starmap(Send, steps)))


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
            what=operation.what,
            payload_bytes=send.length,
            how=how,
            operation=operation,
            sent_ns=sent,
            received_ns=received,
            offset_bytes=send.offset,
            whole_bytes=whole,
            step=send.step,
        )


def answers(asked: Iterable[Operation]) -> Iterator[tuple[Operation, list[Message] | str]]:
    """Each operation with its messages, or why they are not known; one at a time."""
    for operation in asked:
        yield operation, messages_of(operation)
