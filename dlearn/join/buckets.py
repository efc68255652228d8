"""Which all-reduce carries which bucket of DDP: inferred from the trace, and left open where it cannot be told.

DDP's reducer launches buckets in the order of their index, once per backward pass, each as soon as all its gradients
are ready. So the next all-reduce that the reducer makes in a pass is the next bucket of a model whose gradients of
that bucket are ready and as large. Below a communication hook no inference is needed: its argument says the bucket.
With skip_all_reduce_unused_params a bucket that no rank has used is left out: the next one may be a later one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from math import inf
from typing import cast

import numpy as np

from dlearn.events.event import Bucket, Collective, Event, Gradient
from dlearn.join.selection import Selection
from dlearn.join.tables.operation_table import BucketLabel

UNKNOWN = "bucket unknown"
USED_MAP = "DDP's map of used parameters"

Tables = dict[int, dict[int, Bucket]]
"""The buckets that a process has shown so far: of each model, by their index."""


def assign(whole: Selection) -> tuple[list[BucketLabel], np.ndarray]:
    """Return what DDP's all-reduces send (first: nothing), and the index of it for each event."""
    table = whole.table
    backward, is_bucket = table.column("backward"), table.is_a(Bucket)
    in_backward = table.of_firsts(lambda first: first.phase == "backward")
    is_call = table.is_a(Collective) & in_backward
    rows = np.flatnonzero(is_bucket | is_call | table.is_a(Gradient))
    rows = rows[np.lexsort((table.number[rows], table.rank[rows]))]
    shown = np.cumsum(is_bucket[rows])
    tables = _tables(table.made(rows[is_bucket[rows]]))
    order = np.lexsort((table.number[rows], backward[rows], table.rank[rows]))
    order = order[~is_bucket[rows[order]]]
    rows, shown = rows[order], shown[order]
    happened = np.stack([table.like[rows], shown], axis=1)
    new = (np.diff(backward[rows]) != 0) | (np.diff(table.rank[rows]) != 0)
    numbers = {BucketLabel(): 0}
    label = np.zeros(len(table), np.int32)
    seen: dict[bytes, list[int]] = {}
    for begin, end in pairwise([0, *(np.flatnonzero(new) + 1).tolist(), len(rows)]):
        same = happened[begin:end].tobytes()
        if same not in seen:
            events = cast("list[Gradient | Collective]", table.made(rows[begin:end]))
            known = [tables.get((each.rank, count), {}) for each, count in zip(events, shown[begin:end], strict=True)]
            labels = _Pass().labels(events, known)
            seen[same] = [numbers.setdefault(each, len(numbers)) for each in labels]
        label[rows[begin:end]] = seen[same]
    return list(numbers), label


def _tables(shown: Sequence[Event]) -> dict[tuple[int, int], Tables]:
    """Return what each rank has shown, after so many buckets of all ranks."""
    found: dict[tuple[int, int], Tables] = {}
    latest: dict[int, Tables] = defaultdict(dict)
    for count, bucket in enumerate(shown, 1):
        assert isinstance(bucket, Bucket)
        before = latest[bucket.rank].get(bucket.model, {}) if bucket.index else {}
        latest[bucket.rank] = latest[bucket.rank] | {bucket.model: before | {bucket.index: bucket}}
        found[bucket.rank, count] = latest[bucket.rank]
    return found


def reported_last(reported: Iterable[Bucket], number: float = inf) -> list[Bucket]:
    """Return the buckets of a model that one rank has reported last before event `number`."""
    table: list[Bucket] = []
    for bucket in takewhile(lambda bucket: bucket.number < number, reported):
        table = [bucket] if bucket.index == 0 else [*table, bucket]
    return table


class _Pass:
    """What has happened so far in one backward pass of one process: gradients that are ready, and launches."""

    def __init__(self) -> None:
        self.tables: Tables = {}
        self.ready: dict[int, set[str]] = defaultdict(set)
        self._launched: dict[int, int] = defaultdict(int)

    def labels(
        self, events: Sequence[Gradient | Collective], tables: Sequence[Tables]
    ) -> Iterator[BucketLabel]:  # fmt: skip
        """Yield what each collective sends; `tables` are those known at each event."""
        for event, self.tables in zip(events, tables, strict=True):
            if isinstance(event, Gradient):
                self.ready[event.model].add(event.parameter)
            is_call = isinstance(event, Collective) and (self.tables or event.launcher == "reducer")
            yield self._label_of(cast("Collective", event)) if is_call else BucketLabel()

    def _label_of(self, call: Collective) -> BucketLabel:
        if call.launcher == "comm hook":
            index, tables = call.bucket_index, self.tables.values()
            named = [table[index] for table in tables if index in table]
            # A callback on a thread of gloo's does not know its pass.
            return _only(named if call.backward is None else [*filter(self._is_ready, named)])
        if call.launcher == "reducer":
            return self._next_bucket(call) if call.op == "all_reduce" else _only([])
        if call.thread and call.backward is None:
            # Made by a callback of a communication hook, on a thread of gloo's: only elimination can tell.
            return _only([bucket for table in self.tables.values() for bucket in table.values()])
        return BucketLabel()

    def _next_bucket(self, call: Collective) -> BucketLabel:
        size = sum(tensor.logical_bytes for tensor in call.inputs)
        fitting: list[Bucket] = []
        ready: list[Bucket] = []
        for model, table in self.tables.items():
            launched = self._launched[model]
            coming = [bucket for index, bucket in sorted(table.items()) if index >= launched]
            if coming and not coming[0].may_be_skipped:
                coming = coming[:1]
            fits = [each for each in coming if each.bytes == size]
            fitting += fits
            # One behind a bucket that fits, too, is not taken for it: other ranks may have used that one.
            ready += filter(self._is_ready, fits[:1])
        # With find_unused_parameters a bucket also goes when its other gradients will never come.
        candidates = ready or fitting
        if len(candidates) == 1:
            self._launched[candidates[0].model] = candidates[0].index + 1
            return BucketLabel(candidates[0])
        if not candidates and call.inputs and all(tensor.dtype == "int32" for tensor in call.inputs):
            return BucketLabel(role=USED_MAP)
        return BucketLabel(role=UNKNOWN)

    def _is_ready(self, bucket: Bucket) -> bool:
        return self.ready[bucket.model].issuperset(bucket.parameters)


def _only(candidates: Sequence[Bucket]) -> BucketLabel:
    """Return the one candidate; of several, or none, the bucket is unknown."""
    return BucketLabel(candidates[0]) if len(candidates) == 1 else BucketLabel(role=UNKNOWN)
