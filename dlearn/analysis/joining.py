"""Events of all ranks -> operations (what the program asked for) -> messages (who sent what to whom)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from dlearn.analysis import buckets, gloo
from dlearn.trace.event import Bucket, Collective, PointToPoint, TensorInfo
from dlearn.trace.matching import Match
from dlearn.trace.message import How, Message, Messages, Operation
from dlearn.trace.trace import Trace

_EQUAL_SIZES = {
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
}
"""Collectives that every rank must call with as many bytes as the others."""

MOST_MESSAGES = 1_000_000
"""That `messages` holds at once: about 300 MB. `traffic` sums without making them, and has no limit."""

_ITEMSIZE = {"64": 8, "128": 16, "32": 4, "16": 2, "8": 1}


def operations(trace: Trace) -> tuple[Operation, ...]:
    """What the program asked for, joined over ranks, in the order of first call. Nothing is left out."""
    carried = buckets.assign(trace.whole.events)
    return tuple(_operation(each, carried) for each in trace.matches)


def messages(trace: Trace) -> Messages:
    """Every message, in the order of sending, each with one sender and one receiver.

    Those of a collective are derived from the backend's algorithm. An operation that gives none is listed, with the
    reason.
    """
    found: list[Message] = []
    unexplained: list[tuple[Operation, str]] = []
    for operation in operations(trace):
        sums = sums_of(operation)
        fits = isinstance(sums, str) or len(found) + sum(pair.message_count for pair in sums) <= MOST_MESSAGES
        too_many = f"the trace has more than {MOST_MESSAGES:,} messages; ask for a part of it"
        answer = messages_of(operation) if fits else too_many
        if isinstance(answer, str):
            unexplained.append((operation, answer))
        else:
            found += answer
    # A derived time is a share of the operation's; one without a time comes when its operation was called.
    found.sort(key=lambda message: message.sent_ns if message.sent_ns is not None else message.operation.start_ns)
    return Messages(tuple(found), tuple(unexplained), dict(trace.labels))


def answers(asked: Iterable[Operation]) -> Iterator[tuple[Operation, list[Message] | str]]:
    """Each operation with its messages, or why they are not known; one at a time."""
    for operation in asked:
        yield operation, messages_of(operation)


def payload_bytes(call: Collective | PointToPoint) -> int:
    """What one rank hands to the transport in this call: what it gives, or, if it gives nothing, what it gets."""
    if isinstance(call, PointToPoint):
        return _bytes(call.tensors)
    return _bytes(call.inputs or call.outputs)


def _bytes(tensors: Sequence[TensorInfo]) -> int:
    return sum(tensor.payload_bytes for tensor in tensors)


# Operations -----------------------------------------------------------------------------------------------------------


def _operation(match: Match, carried: dict[buckets.Key, Bucket | str]) -> Operation:
    found = [carried.get((end.rank, end.number)) for end in match.ends]
    bucket = next((each for each in found if isinstance(each, Bucket)), None)
    note = next((each for each in found if isinstance(each, str)), "")
    ops = list(dict.fromkeys(end.op for end in match.ends))
    paired = match.sender is not None and match.receiver is not None
    return Operation(
        op="send" if paired else "/".join(ops),
        group=match.group,
        seq=match.seq,
        ends=match.ends,
        missing=match.missing,
        problem=_problem(match, ops),
        bucket=bucket,
        what=_what(match, bucket, note),
        sender=match.sender,
        receiver=match.receiver,
    )


def _problem(match: Match, ops: list[str]) -> str:
    ends = match.ends
    if match.sender is not None or match.receiver is not None:
        sizes = [_bytes(end.tensors) for end in ends if isinstance(end, PointToPoint)]
        if len(sizes) == 2 and sizes[0] > sizes[1]:
            return f"sends {sizes[0]:,} B into a buffer of {sizes[1]:,} B"
        return ""
    if len({end.rank for end in ends}) < len(ends):
        return "a rank appears twice: two groups of the same name, or a damaged trace"
    if len(ops) > 1:
        return f"the ranks called different operations: {', '.join(ops)}"
    if ops[0] in _EQUAL_SIZES and len({payload_bytes(end) for end in ends}) > 1:
        sizes_text = ", ".join(f"{payload_bytes(end):,}" for end in ends[:8])
        return f"the ranks called it with different sizes: {sizes_text} B"
    if len({end.root for end in ends if isinstance(end, Collective)}) > 1:
        return "the ranks called it with different roots"
    return ""


def _what(match: Match, bucket: Bucket | None, note: str) -> str:
    if bucket is not None:
        return f"gradient of bucket {bucket.index}: {', '.join(bucket.parameters)}"
    first = match.ends[0]
    if note:
        return note
    if isinstance(first, Collective) and first.role:
        return first.role
    tensors = first.tensors if isinstance(first, PointToPoint) else first.inputs or first.outputs
    shown = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors[:3]]
    return ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")


# Messages -------------------------------------------------------------------------------------------------------------


class PairSum(NamedTuple):
    """What one rank sends another in one operation: payload in bytes, and in how many messages."""

    src: int
    dst: int
    how: How
    payload_bytes: int
    message_count: int


def messages_of(operation: Operation) -> list[Message] | str:
    """The messages of one operation, or why they are not known."""
    if operation.sender is not None or operation.receiver is not None:
        return _p2p_message(operation)
    schedule = _schedule(operation)
    return schedule if isinstance(schedule, str) else list(_derived(operation, schedule.sends))


def sums_of(operation: Operation) -> list[PairSum] | str:
    """`messages_of` summed for each pair of ranks, at the price of one message each."""
    if operation.sender is not None or operation.receiver is not None:
        found = _p2p_message(operation)
        return found if isinstance(found, str) else [PairSum(m.src, m.dst, m.how, m.payload_bytes, 1) for m in found]
    schedule = _schedule(operation)
    if isinstance(schedule, str):
        return schedule
    members, how = operation.group.members, _how(operation)
    return [
        PairSum(members[src], members[dst], how, schedule.bytes_by_pair[src, dst], count)
        for (src, dst), count in schedule.count_by_pair.items()
    ]


def _how(operation: Operation) -> How:
    return "missing" if operation.missing or operation.failed else "derived"


def _p2p_message(operation: Operation) -> list[Message] | str:
    if operation.sender is None or operation.receiver is None:
        return _why_alone(operation)
    send = next((end for end in operation.ends if end.op == "send"), None)
    recv = next((end for end in operation.ends if end.op == "recv"), None)
    known = payload_bytes(operation.ends[0])
    return [
        Message(
            src=operation.sender,
            dst=operation.receiver,
            op="send",
            what=operation.what,
            payload_bytes=known,
            how="missing" if operation.missing or operation.failed else "observed",
            operation=operation,
            sent_ns=send.start_ns if send is not None else None,
            received_ns=recv.end_ns if recv is not None else None,
            whole_bytes=known,
        )
    ]


def _why_alone(operation: Operation) -> str:
    end = operation.ends[0]
    if not operation.group.members:
        return "the line that describes its process group is lost"
    if isinstance(end, PointToPoint) and end.peer is None:
        return f"a {end.op} whose peer is known at its end only, and nobody saw that end"
    return "its peer is no member of the process group: a damaged trace"


def _schedule(operation: Operation) -> gloo.Schedule | str:
    if operation.problem:
        return operation.problem
    if not operation.group.members:
        return "the line that describes its process group is lost"
    if operation.group.backend != "gloo":
        return f"no schedule of {operation.group.backend}'s {operation.op} is known here yet"
    if operation.pending and not operation.missing:
        return "not every rank has come out of it: which of its messages have travelled is not known"
    call = next(end for end in operation.ends if isinstance(end, Collective))
    tensors = call.inputs or call.outputs
    if any(tensor.payload_bytes != tensor.logical_bytes for tensor in tensors):
        return "gloo gathers the indices and values of sparse tensors; no schedule of that is known here yet"
    return gloo.schedule(
        operation.op,
        ranks=len(operation.group.members),
        payload=payload_bytes(call),
        itemsize=max((_itemsize(tensor.dtype) for tensor in tensors), default=1),
        root=call.root,
    )


@lru_cache
def _itemsize(dtype: str) -> int:
    """Bytes of one element, from the name: float32, bfloat16, complex64, float8_e4m3fn, bool."""
    base = dtype.split("_")[0]
    return next((size for suffix, size in _ITEMSIZE.items() if base.endswith(suffix)), 1)


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
