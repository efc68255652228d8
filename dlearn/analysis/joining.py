"""Events of all ranks -> operations: what the program asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dlearn.analysis import buckets
from dlearn.analysis.buckets import Key
from dlearn.analysis.rpc import rpc_operations
from dlearn.trace.event import Bucket, Collective, PointToPoint, TensorInfo
from dlearn.trace.matching import Match
from dlearn.trace.message import End, Operation, RpcEnd
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


def operations(trace: Trace) -> tuple[Operation, ...]:
    """What the program asked for, joined over ranks, in the order of first call. Nothing is left out.

    The sends that a glass-box collective consists of stand in its `steps`.
    """
    carried = buckets.assign(trace.whole.events)
    collectives = {(end.rank, end.number) for each in trace.matches if _is_collective(each) for end in each.ends}
    steps: dict[Key, list[Operation]] = defaultdict(list)
    top: list[Match] = []
    for each in trace.matches:
        parents = [(end.rank, end.parent) for end in each.ends if end.parent is not None]
        outer = next((parent for parent in parents if parent in collectives), None)
        if outer is None or _is_collective(each):
            top.append(each)
        else:
            steps[outer].append(_operation(each, carried, ()))
    found = [
        _operation(each, carried, [step for end in each.ends for step in steps.get((end.rank, end.number), ())])
        for each in top
    ]
    calls = list(rpc_operations(trace))
    return tuple(sorted(found + calls, key=lambda each: each.start_ns) if calls else found)


def _is_collective(match: Match) -> bool:
    return isinstance(match.ends[0], Collective)


def payload_bytes(call: End) -> int:
    """What one rank hands to the transport in this call: what it gives, or, if it gives nothing, what it gets.

    Of an RPC the tensors of its arguments.
    """
    if isinstance(call, PointToPoint | RpcEnd):
        return _bytes(call.tensors)
    return _bytes(call.inputs or call.outputs)


def _bytes(tensors: Sequence[TensorInfo]) -> int:
    return sum(tensor.payload_bytes for tensor in tensors)


# Operations -----------------------------------------------------------------------------------------------------------


def _operation(match: Match, carried: dict[Key, Bucket | str], steps: Sequence[Operation]) -> Operation:
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
        steps=tuple(sorted(steps, key=_in_order)),
    )


def _in_order(step: Operation) -> tuple[int, int]:
    """By the number of the step: a rank may post its recv long before."""
    first = step.ends[0]
    return first.step if isinstance(first, PointToPoint) else 0, step.start_ns


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
    if ops[0] in _EQUAL_SIZES and len({_logical_bytes(end) for end in ends}) > 1:
        sizes_text = ", ".join(f"{_logical_bytes(end):,}" for end in ends[:8])
        return f"the ranks called it with different sizes: {sizes_text} B"
    if ops[0] in _EQUAL_SIZES and len(types := list(dict.fromkeys(_dtypes(end) for end in ends))) > 1:
        return f"the ranks called it with different dtypes: {', '.join(types[:8])}"
    if len({end.root for end in ends if isinstance(end, Collective)}) > 1:
        return "the ranks called it with different roots"
    return ""


def _logical_bytes(call: Collective | PointToPoint) -> int:
    """Of sparse tensors the same on all ranks, however many values each has."""
    tensors = call.tensors if isinstance(call, PointToPoint) else call.inputs or call.outputs
    return sum(tensor.logical_bytes for tensor in tensors)


def _dtypes(call: Collective | PointToPoint) -> str:
    tensors = call.tensors if isinstance(call, PointToPoint) else call.inputs or call.outputs
    return "+".join(dict.fromkeys(tensor.dtype for tensor in tensors))


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
