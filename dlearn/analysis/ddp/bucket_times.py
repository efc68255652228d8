"""DDP's buckets over time: when each gradient was ready, when its bucket went, how long it waited, when it was done.

Ready, launched and done are observed. Which all-reduce carries which bucket is inferred (buckets.py); where that cannot
be told, the bucket has no times, and `not_told` counts the calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from dlearn.analysis.ddp.training_steps import RankEvents, by_rank, device_note, on_device, unseen_note
from dlearn.analysis.findings import capital, time_text
from dlearn.join.buckets import UNKNOWN
from dlearn.join.gradients import Pass, passes
from dlearn.join.joining import operations
from dlearn.join.waiting import waited_until_ns
from dlearn.shown import Answer, Paragraph, RankNames, Table, count_text, first_few, ms
from dlearn.trace.ends import End
from dlearn.trace.event import Bucket, Collective, Event, Gradient, Stretch
from dlearn.trace.tables.operation_table import Operation
from dlearn.trace.trace import Trace


class BucketTime(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket in one backward pass on one rank; times in ns on the trace's clock.

    `backward` counts the rank's backward passes through DDP models, from 0; `step` is the user's span around it.
    `ready` are its gradients in the order in which they came. `launched_ns` is None where it was not sent, as in
    `no_sync`, or nobody knows by which call. Until `transfer_ns` it waited for `last_rank`, which called last.
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
    """The parameters whose gradient did not come in this pass."""
    launched_ns: int | None = None
    transfer_ns: int | None = None
    done_ns: int | None = None
    last_rank: int | None = None
    missing: tuple[int, ...] = ()
    """The ranks that never sent this bucket, of one that was launched here: it waits for them for ever."""

    @property
    def waited_ns(self) -> int | None:
        """From its launch to that of the last rank."""
        if self.launched_ns is None or self.transfer_ns is None:
            return None
        return self.transfer_ns - self.launched_ns

    @property
    def title(self) -> str:
        """ "step 1", or the number of the pass."""
        return self.step or f"backward pass {self.backward}"


class BucketTimes(Answer, frozen=True):
    """Every bucket of every backward pass, by pass, rank and bucket. `not_told`: calls of unknown bucket.

    `note`: whose times they are, where they are a GPU's.
    """

    items: tuple[BucketTime, ...]
    labels: RankNames
    not_told: int = 0
    note: str = ""

    @property
    def tables(self) -> tuple[tuple[BucketTime, ...], ...]:
        """The buckets of each model as they were first and as they were rebuilt, as one rank had them."""
        found: dict[tuple[int, str], dict[int, BucketTime]] = defaultdict(dict)
        for each in self.items:
            found[each.model, each.built].setdefault(each.index, each)
        return tuple(tuple(table.values()) for _, table in sorted(found.items()))

    @property
    def stuck(self) -> tuple[BucketTime, ...]:
        """The buckets that were launched, and wait for a rank that never sent them."""
        return tuple(each for each in self.items if each.missing)

    @property
    def examples(self) -> tuple[BucketTime, ...]:
        """Before and after: the first pass with the first buckets, and with the rebuilt ones. And one that hangs."""
        passes: dict[tuple[int, str], int] = {}
        for each in self.items:
            passes.setdefault((each.model, each.built), each.backward)
        shown = {*passes.values(), *(each.backward for each in self.stuck[:1])}
        return tuple(each for each in self.items if each.backward in shown)

    @property
    def finding(self) -> str:
        """What the last example shows of the first rank: how long before the last gradient its first launch was."""
        if not self.items:
            return "No backward pass through a DDP model"
        if self.stuck:
            return self._why_stuck(self.stuck[0])
        last = max(each.backward for each in self.examples)
        shown = [each for each in self.examples if each.backward == last]
        mine = [each for each in shown if each.rank == shown[0].rank]
        launched = [each.launched_ns for each in mine if each.launched_ns is not None]
        ready = [at for each in mine for _, at in each.ready]
        first = f"the first of {len(mine)} buckets" if len(mine) > 1 else "the only bucket"
        if not launched:
            told = f"{count_text(len(mine), 'bucket')}, none is sent"
        elif not ready or min(launched) >= max(ready):
            told = f"{first} is launched when all gradients are ready"
        else:
            told = f"{first} is launched {time_text(max(ready) - min(launched))} before the last gradient is ready"
        whose = f" ({self.labels[shown[0].rank]})" if len({each.rank for each in shown}) > 1 else ""
        title = mine[0].title
        return f"{title[:1].upper()}{title[1:]}: {told}{whose}"

    def _why_stuck(self, stuck: BucketTime) -> str:
        """ "Ranks 0 and 2 wait for rank 1 in bucket 0 of step 3: there b.weight, b.bias are never ready"."""
        same = {
            each.rank: each
            for each in self.items
            if (each.backward, each.model, each.index) == (stuck.backward, stuck.model, stuck.index)
        }
        waiting = sorted(rank for rank, each in same.items() if each.missing)
        said = f"{self.labels.together(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for"
        said += f" {self.labels.together(stuck.missing)} in bucket {stuck.index} of {stuck.title}"
        late = same.get(stuck.missing[0])
        if late is not None and late.never_ready:
            verb = "is" if len(late.never_ready) == 1 else "are"
            said += f": there {first_few(late.never_ready, 1)} {verb} never ready"
        return capital(said, stuck.rank, self.labels)

    def rows(self) -> list[list[str]]:
        """A head, and a row for each bucket on each rank in the examples; ms from the start of the pass."""
        table = [["pass", "rank", "bucket", "first ready", "launched", "waits for", "waiting", "transfer", "done"]]
        begins = begins_of(self.examples)
        for each in self.examples[:_ROWS_SHOWN]:
            at = begins[each.backward]
            ready = ms(each.ready[0][1] - at) if each.ready else "never"
            row = [each.title, self.labels[each.rank], str(each.index), ready]
            if each.launched_ns is None:
                table.append([*row, "not sent", "", "", "", ""])
                continue
            waited = ms(each.waited_ns) if each.waited_ns else ""
            last = each.last_rank if each.waited_ns else next(iter(each.missing), None)
            who = self.labels[last] if last is not None else ""
            done, transfer = "never" if each.missing else "not observed", ""
            if each.done_ns is not None and each.transfer_ns is not None:
                done, transfer = ms(each.done_ns - at), ms(each.done_ns - each.transfer_ns)
            table.append([*row, ms(each.launched_ns - at), who, waited, transfer, done])
        return table

    def paragraphs(self) -> Iterator[Paragraph]:
        if not self.items:
            yield "no backward pass through a DDP model"
        for table in self.tables:
            size = sum(each.bytes for each in table)
            yield f"{_BUILT.get(table[0].built, table[0].built)}: {len(table)}, {size:,} B"
            for each in table:
                yield f"  bucket {each.index}: {each.bytes:,} B: {first_few(each.parameters, _NAMES_SHOWN)}"
        if self.items:
            yield Table(self.rows(), names=3, title="ms from the start of the backward pass:")
        if len(self.examples) > _ROWS_SHOWN:
            yield f"({len(self.examples) - _ROWS_SHOWN:,} more rows)"
        if self.note:
            yield self.note
        if self.items and self.not_told:
            yield f"not told: {self.not_told:,} all-reduces, of which nobody knows what bucket they carry"


_ROWS_SHOWN = 48
_NAMES_SHOWN = 12
_BUILT = {
    "first": "the first buckets",
    "rebuilt": "buckets rebuilt in the order in which the gradients came",
}


def begins_of(items: Iterable[BucketTime]) -> dict[int, int]:
    """When each backward pass began on the first rank, in ns."""
    begins: dict[int, int] = {}
    for each in items:
        begins[each.backward] = min(each.begins_ns, begins.get(each.backward, each.begins_ns))
    return begins


def bucket_times(trace: Trace) -> BucketTimes:
    """When each gradient was ready and what became of its bucket, in each backward pass on each rank."""
    note = device_note(trace) or unseen_note(trace)
    trace = on_device(trace)
    asked = operations(trace)
    # By rank, its graph task, model and bucket.
    carriers: dict[tuple[int, int | None, int, int], list[tuple[Operation, End]]] = defaultdict(list)
    for operation in asked:
        for end in operation.ends:
            if operation.bucket is not None and isinstance(end, Collective):
                key = (end.rank, end.backward, operation.bucket.model, operation.bucket.index)
                carriers[key].append((operation, end))
    wanted = {(event.rank, event.number) for event in trace.of(Gradient)}
    tables: dict[tuple[int, int], list[Bucket]] = defaultdict(list)
    for event in trace.whole.of(Bucket):
        tables[event.rank, event.model].append(event)
    known = by_rank(trace.whole)
    items = []
    for each in (each for of_model in passes(trace.whole).values() for each in of_model):
        if wanted.isdisjoint((gradient.rank, gradient.number) for gradient in each.gradients):
            continue
        for bucket in _table_at(tables[each.rank, each.model], each.gradients[0].number):
            calls = carriers.get((each.rank, each.task, each.model, bucket.index), [])
            items.append(_bucket_time(each, bucket, known, calls))
    items.sort(key=lambda each: (each.backward, each.rank, each.model, each.index))
    not_told = sum(operation.bucket is None and operation.role == UNKNOWN for operation in asked)
    return BucketTimes(tuple(items), trace.labels, not_told, note)


def _table_at(known: Sequence[Bucket], number: int) -> tuple[Bucket, ...]:
    """The buckets that were reported last before this event."""
    before = [bucket for bucket in known if bucket.number < number]
    last = max((place for place, bucket in enumerate(before) if bucket.index == 0), default=0)
    return tuple(before[last:])


def _begin(stretches: Sequence[Stretch], first: Event) -> int:
    """The start of the backward pass; where nobody noted that, its first gradient."""
    place = bisect_right(stretches, first.start_ns, key=lambda each: each.start_ns)
    before = (stretches[at] for at in range(place - 1, -1, -1) if stretches[at].phase == "backward")
    around = next(before, None)
    return around.start_ns if around is not None and first.start_ns <= (around.end_ns or 0) else first.start_ns


def _bucket_time(found: Pass, bucket: Bucket, around: RankEvents, calls: Sequence[tuple[Operation, End]]) -> BucketTime:
    """Of several calls for one bucket (a communication hook may make some) from the first launch to the last end."""
    own = set(bucket.parameters)
    first = found.gradients[0]
    span = around.spans.get((found.rank, first.parent)) if first.parent is not None else None
    bare = BucketTime(
        rank=found.rank,
        backward=found.number,
        step=span.name if span is not None else "",
        model=found.model,
        index=bucket.index,
        bytes=bucket.bytes,
        built=bucket.built,
        parameters=bucket.parameters,
        begins_ns=_begin(around.stretches[found.rank], first),
        ready=tuple((each.parameter, each.start_ns) for each in found.gradients if each.parameter in own),
        never_ready=found.never_ready(bucket.parameters),
    )
    if not calls:
        return bare
    operation, end = min(calls, key=lambda call: call[1].start_ns)
    ends = [each.end_ns for _, each in calls]
    return msgspec.structs.replace(
        bare,
        launched_ns=end.start_ns,
        transfer_ns=waited_until_ns(operation, end),
        done_ns=max(each for each in ends if each is not None) if None not in ends else None,
        last_rank=operation.last_rank,
        missing=operation.missing,
    )
