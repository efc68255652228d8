"""DDP's backward pass: gradients become ready, fill their buckets, and these travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dlearn.analysis.bucket_times import BucketTime, bucket_times
from dlearn.analysis.unrolling import message_count
from dlearn.analysis.walking.steps import Board, Change, Source, Step
from dlearn.trace.event import Collective
from dlearn.trace.message import Message
from dlearn.trace.trace import Trace

BOARD = "Buckets of gradients"
_MOST_STEPS = 120
"""Where there would be more gradients, a step is the last one of a bucket."""


def gradients(trace: Trace, messages: Sequence[Message]) -> Source:
    """A step for each gradient (or each full bucket), and the state of each bucket on each rank."""
    source = Source()
    found = [each for each in bucket_times(trace).items if each.ready]
    every = sum(len(each.ready) for each in found) <= _MOST_STEPS
    for each in found:
        source.steps += _filling(each, trace, every=every)
    for place, changes in _travelling(messages).items():
        source.changes[place] = changes
    if source.steps:
        source.boards.append(Board(BOARD, lasting=True))
        if not every:
            source.notes.append("A step is the last gradient of a bucket; the others before it are not steps.")
    return source


def _filling(bucket: BucketTime, trace: Trace, *, every: bool) -> list[Step]:
    steps = []
    count = len(bucket.parameters)
    for number, (parameter, at_ns) in enumerate(bucket.ready, 1):
        if not every and number < len(bucket.ready):
            continue
        told = f"the gradient of {parameter} is ready: {number} of {count} in bucket {bucket.index}"
        full = ", which is full" if number == count else ""
        change = Change(
            BOARD, bucket.rank, bucket.index, f"bucket {bucket.index}: {number} of {count} ready", number / count / 2
        )
        steps.append(
            Step(
                rank=bucket.rank, at_ns=at_ns, op="gradient", mark=parameter, changes=(change,),
                span=bucket.step, phase="backward",
                sentence=f"{trace.label(bucket.rank)}: {told}{full} (observed).",
            )
        )  # fmt: skip
    return steps


def _travelling(messages: Sequence[Message]) -> dict[int, list[Change]]:
    """With its first message a bucket travels; with its last one, if none is missing, every member has the average."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        operation = message.operation
        if operation.bucket is not None and isinstance(operation.ends[0], Collective) and message.how != "missing":
            places[id(operation)].append(place)
    changes: dict[int, list[Change]] = defaultdict(list)
    for of_one in places.values():
        operation = messages[of_one[0]].operation
        assert operation.bucket is not None
        index, states = operation.bucket.index, [(of_one[0], "travels", 0.75)]
        if len(of_one) == message_count(operation):
            states.append((of_one[-1], "averaged", 1.0))
        for place, text, share in states:
            changes[place] += [
                Change(BOARD, rank, index, f"bucket {index}: {text}", share) for rank in operation.group.members
            ]
    return changes
