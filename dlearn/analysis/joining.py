"""Events of all ranks -> operations (what the program asked for) -> messages (who sent what to whom)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

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

_ITEMSIZE = {"64": 8, "128": 16, "32": 4, "16": 2, "8": 1}


def operations(trace: Trace) -> tuple[Operation, ...]:
    """What the program asked for, joined over ranks, in the order of first call. Nothing is left out."""
    carried = buckets.assign(trace.whole.events)
    return tuple(_operation(each, carried) for each in trace.matches)


def messages(trace: Trace) -> Messages:
    """Every message, in the order of sending, each with one sender and one receiver.

    Those of a collective are derived from the backend's algorithm. An operation that gives none is listed, with the reason.
    """
    found: list[Message] = []
    unexplained: list[tuple[Operation, str]] = []
    for operation in operations(trace):
        answer = messages_of(operation)
        if isinstance(answer, str):
            unexplained.append((operation, answer))
        else:
            found += answer
    # A derived time is a share of the operation's; one without a time comes when its operation was called.
    found.sort(
        key=lambda message: message.sent_ns if message.sent_ns is not None else message.operation.start_ns
    )
    return Messages(tuple(found), tuple(unexplained), dict(trace.labels))


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
    paired = match.sender is not None or match.receiver is not None
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


def messages_of(operation: Operation) -> list[Message] | str:
    """The messages of one operation, or why they are not known."""
    if operation.sender is not None or operation.receiver is not None:
        return _p2p_message(operation)
    if operation.problem:
        return operation.problem
    if operation.group.backend != "gloo":
        return f"no schedule of {operation.group.backend}'s {operation.op} is known here yet"
    sends = _schedule(operation)
    if isinstance(sends, str):
        return sends
    how: How = "missing" if operation.missing or operation.failed else "derived"
    return list(_derived(operation, sends, how))


def _p2p_message(operation: Operation) -> list[Message] | str:
    if operation.sender is None:
        return "a recv from any source that has not ended: nobody knows who sends"
    if operation.receiver is None:
        return "a send to a rank that its group does not have: a damaged trace"
    send = next((end for end in operation.ends if end.rank == operation.sender and end.op == "send"), None)
    recv = next((end for end in operation.ends if end is not send), None)
    known = send or operation.ends[0]
    arrived = recv.end_ns if recv is not None and recv.end_ns is not None else None
    return [
        Message(
            src=operation.sender,
            dst=operation.receiver,
            op="send",
            what=operation.what,
            payload_bytes=payload_bytes(known),
            how="missing" if operation.missing or operation.failed else "observed",
            operation=operation,
            sent_ns=send.start_ns if send is not None else None,
            received_ns=arrived,
            whole_bytes=payload_bytes(known),
        )
    ]


def _schedule(operation: Operation) -> list[gloo.Send] | str:
    call = operation.ends[0]
    assert isinstance(call, Collective)
    tensors = call.inputs or call.outputs
    if any(tensor.payload_bytes != tensor.logical_bytes for tensor in tensors):
        return "gloo gathers the indices and values of sparse tensors; no schedule of that is known here yet"
    sends = gloo.schedule(
        operation.op,
        ranks=len(operation.group.members),
        payload=payload_bytes(call),
        itemsize=max((_itemsize(tensor.dtype) for tensor in tensors), default=1),
        root=call.root,
    )
    return sends if isinstance(sends, str) else list(sends)


@lru_cache
def _itemsize(dtype: str) -> int:
    """Bytes of one element, from the name: float32, bfloat16, complex64, float8_e4m3fn, bool."""
    base = dtype.split("_")[0]
    return next((size for suffix, size in _ITEMSIZE.items() if base.endswith(suffix)), 1)


def _derived(operation: Operation, sends: list[gloo.Send], how: How) -> Iterator[Message]:
    """Each step takes an equal share of the transfer, which begins when the last rank has called."""
    members = operation.group.members
    steps = max((send.step for send in sends), default=0) + 1
    start, end = operation.transfer_ns, operation.end_ns
    whole = max((send.offset + send.length for send in sends), default=0)
    for send in sends:
        timed = end is not None and how == "derived"
        duration = (end - start) if timed and end is not None else 0
        yield Message(
            src=members[send.src],
            dst=members[send.dst],
            op=operation.op,
            what=operation.what,
            payload_bytes=send.length,
            how=how,
            operation=operation,
            sent_ns=start + duration * send.step // steps if timed else None,
            received_ns=start + duration * (send.step + 1) // steps if timed else None,
            offset_bytes=send.offset,
            whole_bytes=whole,
            step=send.step,
        )
