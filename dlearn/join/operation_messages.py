"""Operations -> messages: who sent what to whom.

A send with its recv, or a step of a glass-box collective, was observed; the messages of any other
collective are derived from the backend's algorithm. Those of a million operations that are alike
(`Operations.groups`) are made at once, as columns.
"""

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from dlearn.events.event import Collective, PointToPoint
from dlearn.events.event_table import NONE
from dlearn.events.mpi_facts import CANCELLED
from dlearn.events.source import ServiceCall, in_use
from dlearn.join import gloo, nccl_rings
from dlearn.join.ends import How, bytes_of
from dlearn.join.gloo_schedules import Schedule, Send
from dlearn.join.mismatch import ALL_TO_ALL, MPI
from dlearn.join.rpc_messages import EndTable, messages_of_exchange, why_nothing_sent
from dlearn.join.tables.message_table import AS_ITS_OPERATION, HOWS, Content, Message, MessageColumns, together
from dlearn.join.tables.operation_table import Operation, TransferTimes
from dlearn.join.tables.operations import Operations
from dlearn.join.wording import Reason, ReasonKind


class PairSum(NamedTuple):
    """What one rank sends another in one operation: payload in bytes (None: not known), and in how many messages."""

    src: int
    dst: int
    how: How
    payload_bytes: int | None
    message_count: int


def messages_of(operation: Operation) -> list[Message]:
    """Return the messages of one operation; none where `why_unknown` has a reason."""
    if operation.is_call:
        return [*_of_call(operation)]
    if operation.refused:
        return []
    columns = together([columns_of(part, part.times) for part in operation.steps or (operation,)])
    count = len(columns.src)
    return columns.made([operation] * count, [AS_ITS_OPERATION], [False] * count)


def columns_of_calls(asked: Operations) -> tuple[MessageColumns, list[Content]]:
    """Return the messages of all calls and their contents; in a class only their times differ."""
    contents = {AS_ITS_OPERATION: 0}
    calls, events = np.flatnonzero(asked.is_call), asked.table.events
    likes = asked.table.like[asked.rows[calls]]
    _, first, group = np.unique(likes, return_index=True, return_inverse=True)
    facts = np.full((2, 7, len(first)), NONE)
    for index, one in enumerate(asked.at(calls[first])):
        for sent in _of_call(one):
            content = Content(*(getattr(sent, name) for name in Content._fields))
            number = contents.setdefault(content, len(contents))
            sizes = (sent.src, sent.dst, sent.payload_bytes, HOWS.index(sent.how))
            values = (*sizes, sent.sent_ns, sent.received_ns, number)
            facts[sent.step, :, index] = [NONE if value is None else value for value in values]
    parts = []
    for step in (0, 1):
        is_sent = facts[step, 0, group] != NONE
        src, dst, size, how, *times, content_number = facts[step][:, group[is_sent]]
        if isinstance(events, EndTable):
            times = [*events.times(asked.first_ends[calls[is_sent]], step, times)]
        zero = np.zeros(len(src), np.int64)
        fields = (src, dst, size, how, *times, zero, zero, zero + step, content_number)
        parts.append(MessageColumns(calls[is_sent], *fields))
    return together(parts), [*contents]


def times_of_calls(asked: Operations) -> np.ndarray:
    """Return when requests (step 0) and replies (1) of calls were sent and received: [operations, 2, 2] in ns."""
    sent, _ = columns_of_calls(asked)
    times = np.full((len(asked), 2, 2), NONE)
    times[sent.operation, sent.step] = np.column_stack([sent.sent_ns, sent.received_ns])
    return times


def _of_call(operation: Operation) -> Iterator[Message]:
    """Yield the request and, once it has come, the reply; nothing where it is not known who was asked."""
    call, src, dst = operation.ends[0], operation.sender, operation.receiver
    if operation.exchange is not None:
        yield from messages_of_exchange(operation, operation.exchange)
    if src is None or dst is None or not isinstance(call, ServiceCall) or call.refused:
        return
    request = Message(
        operation=operation, op=operation.op, src=src, dst=dst,
        payload_bytes=operation.payload_bytes, how="observed", sent_ns=call.start_ns,
        tensors=call.tensors,
    )  # fmt: skip
    yield request
    if not (call.one_way or call.end_ns is None or call.failed):
        size, control = bytes_of(call.outputs), not call.outputs
        back = {"src": dst, "dst": src, "sent_ns": None, "received_ns": call.end_ns, "step": 1}
        yield replace(request, **back, payload_bytes=size, tensors=call.outputs, control=control)


def why_unknown(operation: Operation) -> Reason | None:
    """Return why the messages of an operation are not known; None: known, or it has none."""
    if operation.exchange is not None:
        return why_nothing_sent(operation.exchange)
    if operation.refused:
        return None
    if operation.is_call:
        return Reason(ReasonKind.HOST_UNKNOWN) if operation.receiver is None else None
    sends = operation.steps or ((operation,) if operation.is_message else ())
    if not sends:
        return _schedule(operation).unknown
    paired = any(send.sender is not None and send.receiver is not None for send in sends)
    return None if paired else _why_alone(sends[0])


def message_count(operation: Operation) -> int:
    return sum([each.message_count for each in sums_of(operation)])


def sums_of(operation: Operation) -> list[PairSum]:
    """Sum up the messages of one operation; those of a schedule for each pair of ranks, without making them.

    Of steps, RPC and services an entry for each message: there a pair may come several times.
    """
    if operation.is_call or operation.is_message or operation.steps:
        return [PairSum(each.src, each.dst, each.how, each.payload_bytes, 1) for each in messages_of(operation)]
    if operation.refused:
        return []
    schedule, members = _schedule(operation), operation.group.members
    how = _how(operation, schedule)
    return [
        PairSum(members[src], members[dst], how, sum(sizes), len(sizes))
        for (src, dst), sizes in schedule.sizes_by_pair.items()
    ]


def columns_of(one: Operation, times: TransferTimes, places: Sequence[int] | np.ndarray = (0,)) -> MessageColumns:
    """Return the messages of operations like `one`, without steps; `places` are their indices."""
    if one.refused:
        return together(())
    places = np.asarray(places)
    return _sent(one, times, places) if one.is_message else _derived(one, times, places)


def _how(operation: Operation, schedule: Schedule | None = None) -> How:
    """Return how messages are known: of a collective by its schedule."""
    if operation.missing or (schedule is None and operation.failed):
        return "missing"
    if schedule is None:
        return "observed"
    return "inferred" if schedule.inferred else "derived"


def _sent(send: Operation, times: TransferTimes, places: np.ndarray) -> MessageColumns:
    """Return a message for each send with its recv; none where the other end is not known."""
    if send.sender is None or send.receiver is None:
        return together(())
    first, last = send.ends[0], send.ends[-1]
    offset, whole, step = 0, 0, 0
    if isinstance(first, PointToPoint) and first.op == "send":
        offset, whole, step = first.offset_bytes, first.whole_bytes, first.step

    def each(value: int) -> np.ndarray:
        """Return a column of the same number that takes no room."""
        return np.broadcast_to(value, len(places))

    return MessageColumns(
        operation=places, src=each(send.sender), dst=each(send.receiver),
        payload_bytes=each(send.payload_bytes), how=each(HOWS.index(_how(send))),
        sent_ns=times.starts_ns[:, 0] if first.op == "send" else each(NONE),
        received_ns=times.ends_ns[:, -1] if last.op == "recv" else each(NONE),
        offset_bytes=each(offset), whole_bytes=each(whole or send.payload_bytes), step=each(step),
        content=each(0),
    )  # fmt: skip


def _why_alone(operation: Operation) -> Reason:
    end = operation.ends[0]
    if not operation.group.members:
        return Reason(ReasonKind.GROUP_LOST)
    if end.error == CANCELLED:
        return Reason.of(ReasonKind.TAKEN_BACK, end.op)
    if isinstance(end, PointToPoint) and end.peer is None:
        return Reason.of(ReasonKind.PEER_NOT_SEEN, end.op)
    return Reason(ReasonKind.PEER_OUTSIDE)


def _schedule(operation: Operation) -> Schedule:
    members, backend = operation.group.members, operation.group.backend
    source = in_use.get(backend) if backend != "gloo" else None
    if operation.mismatch is not None:
        return Schedule(unknown=operation.mismatch)
    if not members:
        return gloo.unknown(ReasonKind.GROUP_LOST)
    if backend in MPI:
        return gloo.unknown(ReasonKind.MPI_CHOOSES)
    # torch sends each part of an all-to-all by NCCL's send and recv (torch/csrc/cuda/nccl.cpp): straight to its rank.
    straight = backend == "nccl" and operation.op in ALL_TO_ALL
    wiring = operation.group.wiring if backend == "nccl" and not straight else None
    if backend != "gloo" and not straight and wiring is None and (source is None or not source.schedule):
        return gloo.unknown(ReasonKind.NO_SCHEDULE, backend, operation.op)
    if operation.pending and not operation.missing:
        return gloo.unknown(ReasonKind.NOT_OVER)
    if operation.failed and not operation.missing:
        return gloo.unknown(ReasonKind.FAILED)
    calls = [end for end in operation.ends if isinstance(end, Collective)]
    calls.sort(key=lambda call: members.index(call.rank))
    if wiring is not None:
        return nccl_rings.schedule_of(calls[0], len(members), wiring)
    if source is None:
        return gloo.schedule_of(calls, len(members))
    steps = source.schedule if isinstance(source.schedule, str) else source.schedule(calls, len(members))
    if isinstance(steps, str):
        return gloo.unknown(ReasonKind.SOURCE_SAYS, steps)
    return Schedule(tuple(starmap(Send, steps)))


def _derived(one: Operation, times: TransferTimes, places: np.ndarray) -> MessageColumns:
    """Return the messages of a schedule. Each step takes an equal share of the transfer from the last call on.

    A rank that was done early had received all by then: the messages that it needed are before that.
    """
    schedule = _schedule(one)
    sends = schedule.sends
    if not sends:
        return together(())
    step, src, dst, offset, length = schedule.columns
    count, steps = len(places), int(step.max()) + 1
    last_arrival_ns, end_ns = times.last_arrival_ns[:, None], times.end_ns[:, None]
    members = np.array(one.group.members)
    columns = [one.group.members.index(end.rank) for end in one.ends]
    begun, over = (np.repeat(each, len(members), axis=1) for each in (last_arrival_ns, end_ns))
    begun[:, columns] = times.starts_ns
    over[:, columns] = np.where(times.ends_ns == NONE, over[:, columns], times.ends_ns)

    def moments(at: np.ndarray, begun_ns: np.ndarray, until_ns: np.ndarray) -> np.ndarray:
        """Return when so many steps are over, from the call until a rank is done."""
        begin = np.where(until_ns > last_arrival_ns, last_arrival_ns, np.minimum(begun_ns, until_ns))
        took = until_ns - begin
        # As took * at // steps, which might be too large a number.
        moment = begin + took // steps * at + took % steps * at // steps
        return np.where(end_ns == NONE, NONE, moment)

    def each(values: np.ndarray | int) -> np.ndarray:
        return np.broadcast_to(values, (count, len(sends))).reshape(-1)

    sent_until, received_until = _latest(step, src, dst, over)
    # Seen backwards in time, what is needed is what needs.
    received_from, sent_from = _latest(-step, dst, src, -begun)
    return MessageColumns(
        operation=np.repeat(places, len(sends)), src=each(members[src]), dst=each(members[dst]),
        payload_bytes=each(length), how=each(HOWS.index(_how(one, schedule))),
        sent_ns=each(moments(step, -sent_from, sent_until)),
        received_ns=each(moments(step + 1, -received_from, received_until)),
        offset_bytes=each(offset), whole_bytes=each(int((offset + length).max())), step=each(step),
        content=each(0),
    )  # fmt: skip


def _latest(step: np.ndarray, src: np.ndarray, dst: np.ndarray, over: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the earliest end, by `over`, of the ranks that need each message, sent and received.

    A rank takes part in one step after the other, so its earlier messages are needed as well.
    """
    sent = np.empty((len(over), len(step)), np.int64)
    received = np.empty_like(sent)
    over = over.copy()
    for at in np.unique(step)[::-1]:
        now = np.flatnonzero(step == at)
        now = now[np.argsort(src[now], kind="stable")]
        received[:, now] = over[:, dst[now]]
        sent[:, now] = np.minimum(over[:, src[now]], received[:, now])
        senders, first = np.unique(src[now], return_index=True)
        over[:, senders] = np.minimum.reduceat(sent[:, now], first, axis=1)
    return sent, received
