"""Events of all ranks -> operations: what the program asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import msgspec

from dlearn.join import buckets
from dlearn.join.buckets import Cargo, EventKey
from dlearn.join.rpc_messages import rpc_operations
from dlearn.join.services import service_operations
from dlearn.trace.event import Collective, PointToPoint
from dlearn.trace.message import Operation, Operations
from dlearn.trace.trace import Trace

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
    found = [
        _complete(each, carried, steps) if _is_collective(each) else each
        for each in trace.matches
        if _is_collective(each) or _parent(each, collectives) is None
    ]
    calls = [*rpc_operations(trace), *service_operations(trace)]
    ordered = sorted(found + calls, key=lambda each: each.start_ns) if calls else found
    return Operations.of(ordered, trace.labels)


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
            steps[outer].append(each)
    return steps


@once
def _carried(trace: Trace) -> dict[EventKey, Cargo]:
    return buckets.assign(trace.events)


def _parent(operation: Operation, collectives: set[EventKey]) -> EventKey | None:
    """The collective that a send or recv is a step of."""
    for end in operation.ends:
        if end.parent is not None and (end.rank, end.parent) in collectives:
            return end.rank, end.parent
    return None


def _is_collective(operation: Operation) -> bool:
    return isinstance(operation.ends[0], Collective)


def _complete(call: Operation, carried: dict[EventKey, Cargo], steps: dict[EventKey, list[Operation]]) -> Operation:
    """A collective with the bucket or role that DDP has it carry, and with its steps."""
    keys = [(end.rank, end.number) for end in call.ends]
    found = [carried[key] for key in keys if key in carried]
    sends = [step for key in keys for step in steps.get(key, ())]
    if not found and not sends:
        return call
    return msgspec.structs.replace(
        call,
        bucket=next((each.bucket for each in found if each.bucket is not None), None),
        role=next((each.role for each in found if each.role), call.role),
        steps=tuple(sorted(sends, key=_in_order)),
    )


def _in_order(step: Operation) -> tuple[int, int]:
    """By the number of the step: a rank may post its recv long before."""
    first = step.ends[0]
    return first.step if isinstance(first, PointToPoint) else 0, step.start_ns
