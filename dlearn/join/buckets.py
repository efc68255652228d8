"""Which all-reduce carries which bucket of DDP: inferred from the trace, and left open where it cannot be told.

DDP's reducer launches buckets in the order of their index, once per backward pass, each as soon as all its gradients
are ready. So the next all-reduce that the reducer makes in a pass is the next bucket of a model whose gradients of
that bucket are ready and as large. Below a communication hook no inference is needed: its argument says the bucket.
With skip_all_reduce_unused_params a bucket that no rank has used is left out: the next one may be a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from dlearn.trace.event import Bucket, Collective, Event, Gradient

UNKNOWN = "bucket unknown"
USED_MAP = "DDP's map of used parameters"
_TELLING = (Bucket, Gradient, Collective)

EventKey = tuple[int, int]


class Cargo(NamedTuple):
    """What an all-reduce of DDP carries: a bucket, or the role UNKNOWN or USED_MAP."""

    bucket: Bucket | None = None
    role: str = ""


def assign(events: Iterable[Event]) -> dict[EventKey, Cargo]:
    """(rank, number) of each all-reduce that DDP makes -> what it carries. `events` of a whole trace."""
    processes: dict[int, _Process] = defaultdict(_Process)
    found: dict[EventKey, Cargo] = {}
    telling = [event for event in events if isinstance(event, _TELLING)]
    for event in sorted(telling, key=attrgetter("rank", "number")):
        process = processes[event.rank]
        match event:
            case Bucket():
                process.learn(event)
            case Gradient():
                process.ready[event.backward, event.model].add(event.parameter)
            case Collective(phase="backward") if process.tables or event.launcher == "reducer":
                cargo = process.cargo_of(event)
                if cargo is not None:
                    found[event.rank, event.number] = cargo
            case _:
                pass
    return found


class _Process:
    """What one process has shown so far: the buckets of each model, ready gradients and launches of each pass."""

    def __init__(self) -> None:
        self.tables: dict[int, dict[int, Bucket]] = {}
        self.ready: dict[tuple[int | None, int], set[str]] = defaultdict(set)
        self._launched: dict[tuple[int | None, int], int] = defaultdict(int)

    def learn(self, bucket: Bucket) -> None:
        if bucket.index == 0:
            self.tables[bucket.model] = {}
        self.tables.setdefault(bucket.model, {})[bucket.index] = bucket

    def cargo_of(self, call: Collective) -> Cargo | None:
        if call.launcher == "comm hook":
            named = [
                table[call.bucket_index]
                for model, table in self.tables.items()
                if call.bucket_index in table and self._may_travel(table[call.bucket_index], call.backward, model)
            ]
            return _only(named)
        if call.launcher == "reducer":
            return self._next_bucket(call) if call.op == "all_reduce" else _only([])
        if call.thread and call.backward is None:
            # Made by a callback of a communication hook, on a thread of gloo's: only elimination can tell.
            return _only([bucket for table in self.tables.values() for bucket in table.values()])
        return None

    def _next_bucket(self, call: Collective) -> Cargo:
        size = sum(tensor.logical_bytes for tensor in call.inputs)
        fitting: list[tuple[int, Bucket]] = []
        ready: list[tuple[int, Bucket]] = []
        for model, table in self.tables.items():
            fits = [each for each in self._coming(table, self._launched[call.backward, model]) if each.bytes == size]
            fitting += [(model, each) for each in fits]
            # One behind a bucket that fits, too, is not taken for it: other ranks may have used that one.
            ready += [(model, each) for each in fits[:1] if self._is_ready(each, call.backward, model)]
        # With find_unused_parameters a bucket also goes when its other gradients will never come.
        candidates = ready or fitting
        if len(candidates) == 1:
            model, bucket = candidates[0]
            self._launched[call.backward, model] = bucket.index + 1
            return Cargo(bucket)
        if not candidates and call.inputs and all(tensor.dtype == "int32" for tensor in call.inputs):
            return Cargo(role=USED_MAP)
        return Cargo(role=UNKNOWN)

    @staticmethod
    def _coming(table: dict[int, Bucket], launched: int) -> list[Bucket]:
        """The next bucket of a model; where DDP may skip it, those after it, too."""
        coming = [bucket for index, bucket in sorted(table.items()) if index >= launched]
        return coming if coming and coming[0].may_be_skipped else coming[:1]

    def _may_travel(self, bucket: Bucket, backward: int | None, model: int) -> bool:
        """A callback on a thread of gloo's does not know its pass."""
        return backward is None or self._is_ready(bucket, backward, model)

    def _is_ready(self, bucket: Bucket, backward: int | None, model: int) -> bool:
        return set(bucket.parameters) <= self.ready[backward, model]


def _only(candidates: Sequence[Bucket]) -> Cargo:
    """The one candidate; of several, or none, it is not known which bucket travels."""
    return Cargo(candidates[0]) if len(candidates) == 1 else Cargo(role=UNKNOWN)
