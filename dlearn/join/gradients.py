"""Each backward pass of a DDP model, the gradients that became ready in it, and those that never did.

DDP sends a bucket when all its gradients are ready: one that never comes is what the other ranks' all-reduce waits for.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from dlearn.events.event import Collective, Gradient
from dlearn.join.columns import grouped
from dlearn.join.selection import Selection, once
from dlearn.join.tables.operation_table import Operation


class Pass(msgspec.Struct, frozen=True):
    """A rank's backward pass of one model, the `number`-th (from 0), `task` in torch's count."""

    rank: int
    number: int
    task: int | None
    model: int
    gradients: tuple[Gradient, ...]

    def never_ready(self, parameters: Sequence[str]) -> tuple[str, ...]:
        came = {gradient.parameter for gradient in self.gradients}
        return tuple(name for name in parameters if name not in came)


@once
def passes(trace: Selection) -> dict[tuple[int, int], list[Pass]]:
    ready = grouped(trace.of(Gradient), lambda each: (each.rank, each.backward, each.model))
    numbers: dict[int, dict[int | None, int]] = defaultdict(dict)
    found: dict[tuple[int, int], list[Pass]] = defaultdict(list)
    for (rank, task, model), gradients in ready.items():
        number = numbers[rank].setdefault(task, len(numbers[rank]))
        found[rank, model].append(Pass(rank, number, task, model, tuple(gradients)))
    return dict(found)


class Unready(msgspec.Struct, frozen=True):
    """In `backward_pass` (from 1) these gradients never came; if it is not `begun`, none at all."""

    backward_pass: int
    parameters: tuple[str, ...]
    begun: bool


def unready(operation: Operation, rank: int, trace: Selection) -> Unready | None:
    """Return what keeps `rank` from launching this bucket; None: no gradient, or not known.

    Passes of different processes are the same by their order: each rank's third pass through a model is one step.
    """
    bucket, launch = operation.bucket, operation.ends[0]
    if bucket is None or not isinstance(launch, Collective) or launch.backward is None:
        return None
    known = passes(trace.whole)
    tasks = [each.task for each in known.get((launch.rank, bucket.model), ())]
    theirs = known.get((rank, bucket.model), ())
    if launch.backward not in tasks:
        return None
    index = tasks.index(launch.backward)
    if index >= len(theirs):
        return Unready(index + 1, bucket.parameters, begun=False)
    missing = theirs[index].never_ready(bucket.parameters)
    return Unready(index + 1, missing, begun=True) if missing else None
