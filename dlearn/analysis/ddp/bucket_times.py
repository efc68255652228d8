"""DDP's buckets over time: when each gradient was ready, and when its bucket was sent and done.

These are observed. Which all-reduce sends which bucket is inferred (buckets.py), or not known.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from dlearn.analysis.ddp.step_clock import clock_note, on_device
from dlearn.events.event import Bucket, Collective, Gradient
from dlearn.join.buckets import UNKNOWN, reported_last
from dlearn.join.columns import grouped
from dlearn.join.gradients import Pass, passes
from dlearn.join.joining import operations
from dlearn.join.training_phases import CalledEnd, phases_by_rank, span_names
from dlearn.join.wait_times import waited_until_ns
from dlearn.shown import (
    Paragraph,
    RankNames,
    Result,
    Table,
    capital,
    capitalized,
    count_text,
    first_few,
    ms,
    time_text,
    waits,
)
from dlearn.trace import Trace

Calls = list[CalledEnd]
_ROWS_SHOWN = 48
_NAMES_SHOWN = 12
_SENT = "launched", "waits for", "waiting", "transfer", "done"
_BUILT = {
    "first": "the first buckets",
    "rebuilt": "buckets rebuilt in the order in which the gradients came",
}


class BucketTime(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket in one backward pass on one rank; times in ns on the trace's clock.

    `backward` counts the rank's backward passes through DDP models, from 0; `step` is the user's
    span around it. `ready` are its gradients in the order in which they came, `never_ready` those
    that did not. `launched_ns` is None where it was not sent, as in `no_sync`, or where its call is
    not known. Until `last_arrival_ns` it waited for `last_rank`, which called last. A launched
    bucket waits for ever for the ranks `missing`, which never sent it.
    """

    rank: int
    backward: int
    step: str
    model: int
    index: int
    bytes: int
    built: str
    parameters: tuple[str, ...]
    begins_ns: int
    ready: tuple[tuple[str, int], ...]
    never_ready: tuple[str, ...] = ()
    launched_ns: int | None = None
    last_arrival_ns: int | None = None
    done_ns: int | None = None
    last_rank: int | None = None
    missing: tuple[int, ...] = ()

    @property
    def waited_ns(self) -> int | None:
        """Return the time from its launch to that of the last rank."""
        if self.launched_ns is None or self.last_arrival_ns is None:
            return None
        return self.last_arrival_ns - self.launched_ns

    @property
    def title(self) -> str:
        """Return "step 1", or the number of the pass, which counts from 1 as in a hang's sentences."""
        return self.step or f"backward pass {self.backward + 1}"


class BucketTimes(Result, frozen=True):
    """Every bucket of every backward pass, and how many all-reduces were of unknown bucket."""

    items: tuple[BucketTime, ...]
    labels: RankNames
    unknown_calls: int = 0
    note: str = ""

    @property
    def tables(self) -> tuple[tuple[BucketTime, ...], ...]:
        """Return the buckets of each model as first made and as rebuilt, as one rank had them."""
        tables: dict[tuple[int, str], dict[int, BucketTime]] = defaultdict(dict)
        for bucket in self.items:
            tables[bucket.model, bucket.built].setdefault(bucket.index, bucket)
        return tuple(tuple(table.values()) for _, table in sorted(tables.items()))

    @property
    def stuck(self) -> tuple[BucketTime, ...]:
        """Return the buckets that were launched, and wait for a rank that never sent them."""
        return tuple(bucket for bucket in self.items if bucket.missing)

    @property
    def examples(self) -> tuple[BucketTime, ...]:
        """Return the first pass that sent the first buckets, or rebuilt ones, and one that hangs."""
        latest_first = sorted(self.items, key=lambda each: -each.backward)
        sent_last = sorted(latest_first, key=lambda each: each.launched_ns is not None)
        first = {(bucket.model, bucket.built): bucket.backward for bucket in sent_last}
        shown = {*first.values(), *(bucket.backward for bucket in self.stuck[:1])}
        return tuple(bucket for bucket in self.items if bucket.backward in shown)

    @property
    def finding(self) -> str:
        """Say how long before the last gradient the last example launched its first bucket."""
        if not self.items:
            return "No backward pass through a DDP model"
        if self.stuck:
            return self._why_stuck(self.stuck[0])
        sent = [bucket for bucket in self.examples if bucket.launched_ns is not None]
        last = (sent or self.examples)[-1].backward
        shown = [bucket for bucket in self.examples if bucket.backward == last]
        buckets = [bucket for bucket in shown if bucket.rank == shown[0].rank]
        launched = [each.launched_ns for each in buckets if each.launched_ns is not None]
        ready_ns = max((at_ns for each in buckets for _, at_ns in each.ready), default=0)
        first = f"the first of {len(buckets)} buckets" if len(buckets) > 1 else "the only bucket"
        if not launched:
            text = f"{count_text(len(buckets), 'bucket')}, none is sent"
        elif min(launched) >= ready_ns:
            text = f"{first} is launched when all gradients are ready"
        else:
            before = time_text(ready_ns - min(launched))
            text = f"{first} is launched {before} before the last gradient is ready"
        whose = f" ({self.labels[buckets[0].rank]})" if len(buckets) < len(shown) else ""
        return f"{capitalized(buckets[0].title)}: {text}{whose}"

    def _why_stuck(self, stuck: BucketTime) -> str:
        """Write "Rank 0 waits for rank 1 in bucket 0 of step 3: there b.weight is never ready"."""
        key = stuck.backward, stuck.model, stuck.index
        same = [each for each in self.items if (each.backward, each.model, each.index) == key]
        waiting = sorted(each.rank for each in same if each.missing)
        names, whom = self.labels.together(waiting), self.labels.together(stuck.missing)
        said = f"{names} {waits(len(waiting))} for {whom} in bucket {stuck.index} of {stuck.title}"
        for late in same:
            if late.rank == stuck.missing[0] and late.never_ready:
                verb = "is" if len(late.never_ready) == 1 else "are"
                said += f": there {first_few(late.never_ready, 1)} {verb} never ready"
        return capital(said, stuck.rank, self.labels)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each bucket: the fields of `BucketTime`, ranks by their names."""
        for each in self.items:
            row = msgspec.structs.asdict(each) | {"rank": self.labels[each.rank]}
            row["last_rank"] = None if each.last_rank is None else self.labels[each.last_rank]
            yield row | {"missing": self.labels.listed(each.missing) if each.missing else ""}

    def rows(self) -> list[list[str]]:
        """Return a head, and a row for each bucket of the examples; ms from the pass's start."""
        table = [["pass", "rank", "bucket", "first ready", *_SENT]]
        begins = begins_of(self.examples)
        for each in self.examples[:_ROWS_SHOWN]:
            at = begins[each.backward]
            ready = ms(each.ready[0][1] - at) if each.ready else "never"
            row = [each.title, self.labels[each.rank], str(each.index), ready]
            if each.launched_ns is None:
                table.append([*row, "not sent", "", "", "", ""])
                continue
            waited, whom = "", [*each.missing[:1]]
            if each.waited_ns and each.last_rank is not None:
                waited, whom = ms(each.waited_ns), [each.last_rank]
            done, transfer = "never" if each.missing else "not observed", ""
            if each.done_ns is not None and each.last_arrival_ns is not None:
                done, transfer = ms(each.done_ns - at), ms(each.done_ns - each.last_arrival_ns)
            row += [ms(each.launched_ns - at), "".join(self.labels[rank] for rank in whom)]
            table.append([*row, waited, transfer, done])
        return table

    def paragraphs(self) -> Iterator[Paragraph]:
        if not self.items:
            yield "no backward pass through a DDP model"
        for table in self.tables:
            size = sum(each.bytes for each in table)
            yield f"{_BUILT.get(table[0].built, table[0].built)}: {len(table)}, {size:,} B"
            for each in table:
                names = first_few(each.parameters, _NAMES_SHOWN)
                yield f"  bucket {each.index}: {each.bytes:,} B: {names}"
        if self.items:
            yield Table(self.rows(), names=3, title="ms from the start of the backward pass:")
        if len(self.examples) > _ROWS_SHOWN:
            yield f"({len(self.examples) - _ROWS_SHOWN:,} more rows)"
        if self.note:
            yield self.note
        if self.items and self.unknown_calls:
            yield f"{count_text(self.unknown_calls, 'all-reduce')} of which the bucket is not known"


def begins_of(items: Iterable[BucketTime]) -> dict[int, int]:
    """Return when each backward pass began on the first rank, in ns."""
    latest_first = sorted(items, key=lambda each: -each.begins_ns)
    return {each.backward: each.begins_ns for each in latest_first}


def bucket_times(trace: Trace) -> BucketTimes:
    """Return when each gradient was ready and what became of its bucket, in each backward pass."""
    note = clock_note(trace)
    trace = on_device(trace)
    every = operations(trace)
    labelled = every.table.with_an_end(every.table.label_of > 0)
    reductions = every.at(np.flatnonzero(labelled[every.rows]))
    # By rank, its graph task, model and bucket.
    calls: dict[tuple[int, int | None, int, int], Calls] = defaultdict(list)
    for operation in reductions:
        for end in operation.ends:
            if operation.bucket is not None and isinstance(end, Collective):
                model, index = operation.bucket.model, operation.bucket.index
                calls[end.rank, end.backward, model, index].append((operation, end))
    reported = grouped(trace.whole.of(Bucket), lambda event: (event.rank, event.model))
    wanted = {(event.rank, event.number) for event in trace.of(Gradient)}
    names = span_names(trace.whole)
    items = []
    for backward in chain.from_iterable(passes(trace.whole).values()):
        rank, model, gradients = backward.rank, backward.model, backward.gradients
        if wanted.isdisjoint((rank, gradient.number) for gradient in gradients):
            continue
        begins_ns = _begin_ns(trace.whole, rank, gradients[0].start_ns)
        step = names.get((rank, gradients[0].parent), "")
        for bucket in reported_last(reported[rank, model], gradients[0].number):
            its_calls = calls[rank, backward.task, model, bucket.index]
            items.append(_timed(backward, bucket, step, begins_ns, its_calls))
    items.sort(key=lambda item: (item.backward, item.rank, item.model, item.index))
    unknown = sum(each.bucket is None and each.role == UNKNOWN for each in reductions)
    return BucketTimes(tuple(items), trace.labels, unknown, note)


def _begin_ns(trace: Trace, rank: int, at_ns: int) -> int:
    """Return when the backward pass around this began; `at_ns` where that was not noted."""
    phases = phases_by_rank(trace)[rank]
    begun = bisect_right(phases, at_ns, key=lambda phase: phase[0].start_ns)
    for span, _ in reversed(phases[:begun]):
        if span.phase == "backward":
            return span.start_ns if at_ns <= (span.end_ns or 0) else at_ns
    return at_ns


def _timed(backward: Pass, bucket: Bucket, step: str, begins_ns: int, calls: Calls) -> BucketTime:
    """Measure one bucket; of several calls, as of a hook, from the first launch to the last end."""
    names = {*bucket.parameters}
    own = [gradient for gradient in backward.gradients if gradient.parameter in names]
    ready = tuple((gradient.parameter, gradient.start_ns) for gradient in own)
    sent: dict[str, Any] = {}
    if calls:
        operation, end = min(calls, key=lambda call: call[1].start_ns)
        ends = [each.end_ns for _, each in calls]
        sent = {"launched_ns": end.start_ns, "last_arrival_ns": waited_until_ns(operation, end)}
        sent["done_ns"] = None if None in ends else max(each or 0 for each in ends)
        sent |= {"last_rank": operation.last_rank, "missing": operation.missing}
    return BucketTime(
        rank=backward.rank,
        backward=backward.number,
        step=step,
        model=backward.model,
        index=bucket.index,
        bytes=bucket.bytes,
        built=bucket.built,
        parameters=bucket.parameters,
        begins_ns=begins_ns,
        ready=ready,
        never_ready=backward.never_ready(bucket.parameters),
        **sent,
    )
