"""Events of all ranks -> operations: what the program asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import TypeVar

from dlearn.analysis import buckets
from dlearn.analysis.buckets import EventKey
from dlearn.analysis.rpc import rpc_operations
from dlearn.analysis.services import service_operations
from dlearn.shown import first_few
from dlearn.trace.event import Bucket, Collective, PointToPoint, TensorInfo
from dlearn.trace.matching import Match
from dlearn.trace.message import End, Operation, Operations
from dlearn.trace.mpi import PICKLED
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


Answer = TypeVar("Answer")


def once(question: Callable[[Trace], Answer]) -> Callable[[Trace], Answer]:
    """Work out the answer at the first call for a trace, and remember it there."""
    name = f"{question.__module__}.{question.__qualname__}"

    @wraps(question)
    def answer(trace: Trace) -> Answer:
        if name not in trace.answers:
            trace.answers[name] = question(trace)
        found: Answer = trace.answers[name]
        return found

    return answer


@once
def operations(trace: Trace) -> Operations:
    """What the program asked for, joined over ranks, in the order of first call. Nothing is left out.

    The sends that a glass-box collective consists of stand in its `steps`.
    """
    carried, steps = _carried(trace.whole), _steps(trace.whole)
    collectives = {(end.rank, end.number) for each in trace.matches if _is_collective(each) for end in each.ends}
    top = [
        each if _is_collective(each) else _point_to_point(each)
        for each in trace.matches
        if _is_collective(each) or _parent(each, collectives) is None
    ]
    found = [
        each
        if isinstance(each, Operation)
        else _collective(each, carried, [step for end in each.ends for step in steps.get((end.rank, end.number), ())])
        for each in top
    ]
    calls = [*rpc_operations(trace), *service_operations(trace)]
    ordered = sorted(found + calls, key=lambda each: each.start_ns) if calls else found
    return Operations.of(ordered, dict(trace.labels))


def everybody(trace: Trace) -> set[int]:
    """The ranks that left a file, and those that others name."""
    asked = operations(trace)
    found = {*trace.ranks, *(end.rank for each in asked for end in each.ends)}
    found |= {rank for each in asked for rank in (each.sender, each.receiver) if rank is not None}
    return found | {rank for group in {id(each.group): each.group for each in asked}.values() for rank in group.members}


@once
def _steps(whole: Trace) -> dict[EventKey, list[Operation]]:
    """The sends that each collective consists of, by the end that began them: of a selection, too, it has them all."""
    collectives = {(end.rank, end.number) for each in whole.matches if _is_collective(each) for end in each.ends}
    steps: dict[EventKey, list[Operation]] = defaultdict(list)
    for each in whole.matches:
        outer = None if _is_collective(each) else _parent(each, collectives)
        if outer is not None:
            steps[outer].append(_point_to_point(each))
    return steps


@once
def _carried(trace: Trace) -> dict[EventKey, Bucket | str]:
    return buckets.assign(trace.events)


def _parent(match: Match, collectives: set[EventKey]) -> EventKey | None:
    """The collective that a send or recv is a step of."""
    for end in match.ends:
        if end.parent is not None and (end.rank, end.parent) in collectives:
            return end.rank, end.parent
    return None


def _is_collective(match: Match) -> bool:
    return isinstance(match.ends[0], Collective)


def payload_bytes(call: End) -> int:
    """What one rank hands to the transport in this call: what it gives, or, if it gives nothing, what it gets.

    Of an RPC the tensors of its arguments.
    """
    return _bytes(_tensors(call))


def _bytes(tensors: Sequence[TensorInfo]) -> int:
    return sum([tensor.payload_bytes for tensor in tensors])


# Operations -----------------------------------------------------------------------------------------------------------


def _point_to_point(match: Match) -> Operation:
    tensors, paired = _tensors(match.ends[0]), match.sender is not None and match.receiver is not None
    return Operation(
        op="send" if paired else match.ends[0].op,
        group=match.group,
        seq=match.seq,
        ends=match.ends,
        missing=match.missing,
        problem=_does_not_fit(*match.ends) if len(match.ends) == 2 else "",
        what=_tensors_text(tensors) + _tag_text(match.ends[0]),
        sender=match.sender,
        receiver=match.receiver,
        payload_bytes=_bytes(tensors),
    )


def _collective(match: Match, carried: dict[EventKey, Bucket | str], steps: Sequence[Operation]) -> Operation:
    found = [carried.get((end.rank, end.number)) for end in match.ends]
    bucket = next((each for each in found if isinstance(each, Bucket)), None)
    note = next((each for each in found if isinstance(each, str)), "")
    ops = list(dict.fromkeys([end.op for end in match.ends]))
    return Operation(
        op="/".join(ops),
        group=match.group,
        seq=match.seq,
        ends=match.ends,
        missing=match.missing,
        problem=_problem(match.ends, ops),
        bucket=bucket,
        # Of a scatter the root alone has what travels.
        what=_what(
            next((end for end in match.ends if isinstance(end, Collective) and end.inputs), match.ends[0]), bucket, note
        ),
        steps=tuple(sorted(steps, key=_in_order)),
    )


def _in_order(step: Operation) -> tuple[int, int]:
    """By the number of the step: a rank may post its recv long before."""
    first = step.ends[0]
    return first.step if isinstance(first, PointToPoint) else 0, step.start_ns


def _does_not_fit(send: End, recv: End) -> str:
    given, room = _tensors(send), _tensors(recv)
    if given == room or _bytes(given) <= _bytes(room):
        return ""
    return f"sends {_bytes(given):,} B into a buffer of {_bytes(room):,} B"


def _problem(ends: Sequence[End], ops: list[str]) -> str:
    if len({end.rank for end in ends}) < len(ends):
        return "a rank appears twice: two groups of the same name, or a damaged trace"
    if len(ops) > 1:
        return f"the ranks called different operations: {', '.join(ops)}"
    comparable = ops[0] in _EQUAL_SIZES and not _of_objects(ends)
    if comparable and len({_logical_bytes(end) for end in ends}) > 1:
        sizes_text = ", ".join(f"{_logical_bytes(end):,}" for end in ends[:8])
        return f"the ranks called it with different sizes: {sizes_text} B"
    first = _tensors(ends[0])
    if comparable and any(_tensors(end) != first for end in ends):
        types = list(dict.fromkeys(map(_dtypes, ends)))
        if len(types) > 1:
            return f"the ranks called it with different dtypes: {', '.join(types[:8])}"
    if len({end.root for end in ends if isinstance(end, Collective)}) > 1:
        return "the ranks called it with different roots"
    return ""


def _of_objects(ends: Sequence[End]) -> bool:
    """Python objects: each rank's are as large as they are."""
    return any(tensor.dtype == PICKLED for end in ends for tensor in _tensors(end))


def _logical_bytes(call: End) -> int:
    """Of sparse tensors the same on all ranks, however many values each has."""
    return sum([tensor.logical_bytes for tensor in _tensors(call)])


def _tensors(call: End) -> tuple[TensorInfo, ...]:
    return (call.inputs or call.outputs) if isinstance(call, Collective) else call.tensors


def tag_of(operation: Operation) -> int | None:
    """The program's own tag of a message: a glass-box step has none, and the hidden default, 0, is none either."""
    return _tag_of(operation.ends[0])


def _tag_of(call: End) -> int | None:
    return call.tag if isinstance(call, PointToPoint) and call.tag > 0 and not call.step else None


def _tag_text(call: End) -> str:
    tag = _tag_of(call)
    return "" if tag is None else f", tag {tag}"


def _dtypes(call: End) -> str:
    return "+".join(dict.fromkeys(tensor.dtype for tensor in _tensors(call)))


def _what(first: End, bucket: Bucket | None, note: str) -> str:
    if bucket is not None:
        return bucket_text(bucket)
    if note:
        return note
    if isinstance(first, Collective) and first.role:
        return first.role
    return _tensors_text(_tensors(first))


# Of a million calls only a few differ: their texts are made once, and kept once.


@lru_cache
def bucket_text(bucket: Bucket, most: int = 1_000_000) -> str:
    """Name what travels, with the first `most` of its parameters."""
    return f"gradient of bucket {bucket.index}: {first_few(bucket.parameters, most)}"


@lru_cache
def _tensors_text(tensors: tuple[TensorInfo, ...]) -> str:
    told = ["Python object" if each.dtype == PICKLED else f"{each.dtype}{list(each.shape)}" for each in tensors]
    return first_few(told, 3)
