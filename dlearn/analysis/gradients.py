"""Which gradients of a bucket a rank never produced: what DDP's all-reduce of that bucket waits for."""

from __future__ import annotations

import msgspec

from dlearn.trace.event import Bucket, Collective, Gradient
from dlearn.trace.message import Operation
from dlearn.trace.trace import Trace


class Unready(msgspec.Struct, frozen=True):
    """In its backward pass number `backward_pass` (from 1) a rank never produced the gradients of `parameters`.

    `begun` is False where no gradient of this model became ready in it: the rank never came that far.
    """

    backward_pass: int
    parameters: tuple[str, ...]
    begun: bool


def unready(operation: Operation, rank: int, trace: Trace) -> Unready | None:
    """What keeps `rank` from launching the bucket of `operation`; None where no gradient does, or nobody knows.

    Passes of different processes are the same by their order: each rank's third pass through a model is one step.
    """
    bucket, launch = operation.bucket, operation.ends[0]
    if bucket is None or not isinstance(launch, Collective) or launch.backward is None:
        return None
    ours, theirs = (_ready(trace, each, bucket) for each in (launch.rank, rank))
    if launch.backward not in ours:
        return None
    index = list(ours).index(launch.backward)
    if index >= len(theirs):
        return Unready(index + 1, bucket.parameters, begun=False)
    ready = list(theirs.values())[index]
    missing = tuple(name for name in bucket.parameters if name not in ready)
    return Unready(index + 1, missing, begun=True) if missing else None


def _ready(trace: Trace, rank: int, bucket: Bucket) -> dict[int | None, set[str]]:
    """The parameters whose gradients became ready on this rank, by backward pass, in the order of passes."""
    passes: dict[int | None, set[str]] = {}
    for event in trace.whole.events:
        if isinstance(event, Gradient) and event.rank == rank and event.model == bucket.model:
            passes.setdefault(event.backward, set()).add(event.parameter)
    return passes
