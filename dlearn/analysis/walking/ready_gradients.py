"""DDP's backward pass: gradients become ready, fill their buckets, and these travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dlearn.analysis.ddp.bucket_times import BucketTime, bucket_times
from dlearn.analysis.walking.steps import Board, Change, Step, WalkSource
from dlearn.join.unrolling import message_count
from dlearn.trace.event import Bucket, Collective
from dlearn.trace.message import Message
from dlearn.trace.trace import Trace

BOARD = "Buckets of gradients"
_MOST_STEPS = 120
"""Where there would be more gradients, a step is the last one of a bucket."""
_Names = dict[tuple[int, int], tuple[int, str]]
"""(model, index) of a bucket -> its place on the board, and what it is called there."""


def gradients(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    """A step for each gradient (or each full bucket), and the state of each bucket on each rank."""
    source = WalkSource()
    found = [each for each in bucket_times(trace).items if each.ready]
    every = sum(len(each.ready) for each in found) <= _MOST_STEPS
    names = _names(trace)
    for each in found:
        source.steps += _filling(each, trace, names, every=every)
    source.changes.update(_travelling(messages, names))
    if source.steps or source.changes:
        source.boards.append(Board(BOARD, lasting=True))
        if source.steps and not every:
            source.notes.append("A step is the last gradient of a bucket; the others before it are not steps.")
    return source


def _names(trace: Trace) -> _Names:
    keys = sorted({(each.model, each.index) for each in trace.whole.of(Bucket)})
    several = len({model for model, _ in keys}) > 1
    return {
        (model, index): (place, f"model {model}, bucket {index}" if several else f"bucket {index}")
        for place, (model, index) in enumerate(keys)
    }


def _filling(bucket: BucketTime, trace: Trace, names: _Names, *, every: bool) -> list[Step]:
    steps = []
    count = len(bucket.parameters)
    at, name = names[bucket.model, bucket.index]
    for number, (parameter, at_ns) in enumerate(bucket.ready, 1):
        if not every and number < len(bucket.ready):
            continue
        told = f"the gradient of {parameter} is ready: {number} of {count} in {name}"
        full = ", which is full" if number == count else ""
        change = Change(BOARD, bucket.rank, at, f"{name}: {number} of {count} ready", number / count / 2)
        steps.append(
            Step(
                rank=bucket.rank, at_ns=at_ns, op="gradient", mark=parameter, changes=(change,),
                span=bucket.step, phase="backward",
                sentence=f"{trace.label(bucket.rank)}: {told}{full} (observed).",
            )
        )  # fmt: skip
    return steps


def _travelling(messages: Sequence[Message], names: _Names) -> dict[int, list[Change]]:
    """With its first message a bucket travels; with its last one, if all came, every member has the average."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        carried = message.operation.bucket is not None and isinstance(message.operation.ends[0], Collective)
        if carried and message.how != "missing":
            places[id(message.operation)].append(place)
    changes: dict[int, list[Change]] = defaultdict(list)
    for of_one in places.values():
        operation = messages[of_one[0]].operation
        assert operation.bucket is not None
        at, name = names[operation.bucket.model, operation.bucket.index]
        stages = [(of_one[0], "travels", 0.75)]
        if len(of_one) == message_count(operation):
            stages.append((of_one[-1], "averaged", 1.0))
        for place, text, share in stages:
            changes[place] += [Change(BOARD, rank, at, f"{name}: {text}", share) for rank in operation.group.members]
    return changes
