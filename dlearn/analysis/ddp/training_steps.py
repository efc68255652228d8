"""The table of training steps: what each rank did when, in each step of a DDP program.

Forward, backward, optimizer and gradients are observed. A step ends with the optimizer's; in a
program that calls none, with a backward pass in which DDP sends something. All of DDP's operations
are over when the pass returns that launched them (it waits for them), so an end that was reported
later is taken to be then. Calls that wait at once are counted, too; of the program's other calls it
is not seen who waits for them, and when.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, starmap
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from dlearn.events.clocks import CUDA_EVENT_IN_LINE
from dlearn.events.event import Collective, Gradient, PhaseSpan, Span
from dlearn.join.ends import End
from dlearn.join.joining import operations
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wait_times import waited_until_ns
from dlearn.trace import Trace

Phase = Literal["forward", "backward", "optimizer", "between", "transfer", "waiting", "hidden"]
COMPUTED: tuple[Phase, ...] = ("forward", "backward", "optimizer", "between")


class StepCall(NamedTuple):
    """One rank's part in an operation: it waits for the last rank, from `last_arrival_ns` on it sends.

    `end_ns` is None where the end was not observed; then nothing is known of its waiting either.
    """

    operation: Operation
    start_ns: int
    last_arrival_ns: int
    end_ns: int | None

    @property
    def waited_ns(self) -> int:
        return self.last_arrival_ns - self.start_ns


class StepRow(NamedTuple):
    """A piece of a step in which nothing changes: what the rank computes, and what it sends.

    `work` is what is computed; `phase` what the time is spent on: what is `sent` ("transfer", or
    "waiting" where nothing travels) unless it is `hidden`, as gradients are still to come and no
    call waits. `awaited` are the operations that wait for their last rank, the first called first.
    """

    start_ns: int
    end_ns: int
    work: Phase
    phase: Phase
    sent: Phase | None
    hidden: bool
    awaited: tuple[Operation, ...]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Part(NamedTuple):
    """Rows of one phase that follow each other; of those that wait, for what at their end."""

    phase: Phase
    start_ns: int
    end_ns: int
    awaited: Operation | None = None


class Times(NamedTuple):
    """The time of one rank's communication in a step, in ns; at no moment two of the four."""

    hidden_transfer_ns: int
    hidden_waiting_ns: int
    exposed_transfer_ns: int
    exposed_waiting_ns: int

    @property
    def total_ns(self) -> int:
        """Return the time in which something travelled or waited."""
        return sum(self)


class TrainingStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank: its rows, which follow each other without a gap.

    `number` counts the rank's steps from 0; `title` is the user's span around it, if any. `calls`
    are DDP's own operations and calls that waited; `others` counts the program's other calls.
    """

    number: int
    rank: int
    title: str
    start_ns: int
    end_ns: int
    rows: tuple[StepRow, ...]
    calls: tuple[StepCall, ...]
    others: int

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def observed(self) -> bool:
        """Return whether the end of each call was observed; else no row has communication."""
        return all(call.end_ns is not None for call in self.calls)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Join the rows of each phase, then those in which communication is hidden."""
        by_phase = groupby(self.rows, key=lambda row: (row.phase, _late_rank(row)))
        hidden = groupby(self.rows, key=lambda row: row.hidden and row.sent is not None)
        parts = [_part(phase, list(rows)) for (phase, _), rows in by_phase]
        return (*parts, *(_part("hidden", list(rows)) for is_hidden, rows in hidden if is_hidden))

    def length_ns(self, *phases: Phase) -> int:
        """Return how long these phases took together."""
        return sum(part.end_ns - part.start_ns for part in self.parts if part.phase in phases)

    @property
    def exposed_ns(self) -> int:
        """Return how long communication was not hidden."""
        return self.length_ns("transfer", "waiting")

    @property
    def waited_ns(self) -> int | None:
        """Return how long something waited for a rank, hidden or not; None if not observed."""
        return sum(row.length_ns for row in self.rows if row.awaited) if self.observed else None

    @property
    def times(self) -> Times | None:
        """Sum up the communication; None if it was not observed."""
        if not self.observed:
            return None
        sums: Counter[tuple[bool, Phase | None]] = Counter()
        for row in self.rows:
            sums[row.hidden, row.sent] += row.length_ns
        hidden = sums[True, "transfer"], sums[True, "waiting"]
        return Times(*hidden, sums[False, "transfer"], sums[False, "waiting"])

    @property
    def hidden(self) -> float | None:
        """Return the hidden share of the communication, 0 to 1; None if not known, or of none."""
        times = self.times
        return sum(times[:2]) / times.total_ns if times is not None and times.total_ns else None

    @property
    def waits(self) -> Counter[int]:
        """Sum up the exposed waiting for each rank, in ns; several may be waited for at once."""
        waits: Counter[int] = Counter()
        for row in self.rows:
            if row.phase == "waiting":
                for rank in dict.fromkeys(call.last_rank for call in row.awaited):
                    waits[rank] += row.length_ns
        return waits


def _late_rank(row: StepRow) -> int | None:
    """Return the rank that this row's time waits for; of several, that of the first call."""
    return row.awaited[0].last_rank if row.phase == "waiting" else None


def _part(phase: Phase, rows: Sequence[StepRow]) -> Part:
    last = rows[-1]
    same = [call for call in last.awaited if call.last_rank == _late_rank(last)]
    awaited = min(same, key=lambda call: call.last_arrival_ns, default=None)
    return Part(phase, rows[0].start_ns, last.end_ns, awaited)


def by_number(steps: Sequence[TrainingStep]) -> list[list[TrainingStep]]:
    """Return the steps of each number, which are one step on all ranks."""
    return [list(of_ranks) for _, of_ranks in groupby(steps, key=lambda step: step.number)]


def last_step(trace: Trace) -> str:
    """Return the last of the user's spans whose name begins with "step"; "" where none does."""
    return next((name for name in reversed(trace.spans) if name.startswith("step")), "")


@once
def training_steps(trace: Trace) -> tuple[TrainingStep, ...]:
    """Fill the table: steps by number, then rank; of a selection those that it holds a part of."""
    whole = by_rank(trace.whole)
    wanted = {(event.rank, event.number) for event in trace.of(PhaseSpan)}
    steps = []
    for rank, of_rank in whole.phase_spans.items():
        for number, phase_spans in enumerate(_cut(of_rank, whole.calls[rank])):
            if not wanted.isdisjoint((rank, span.number) for span in phase_spans):
                steps.append(_step(number, rank, phase_spans, whole))
    return tuple(sorted(steps, key=lambda step: (step.number, step.rank)))


CalledEnd = tuple[Operation, End]


class RankEvents(msgspec.Struct):
    """Events of each rank, in the order of start; of phase spans those that ended well.

    `calls` are known only of a trace with phase spans. `spans` are the names by rank and number.
    """

    phase_spans: dict[int, list[PhaseSpan]]
    gradients: dict[int, list[int]]
    calls: dict[int, list[CalledEnd]]
    spans: dict[tuple[int, int | None], str]

    def backward_start_ns(self, rank: int, at_ns: int) -> int:
        """Return when the backward pass around this began; `at_ns` where that was not noted."""
        phase_spans = self.phase_spans[rank]
        begun = bisect_right(phase_spans, at_ns, key=lambda span: span.start_ns)
        for span in reversed(phase_spans[:begun]):
            if span.phase == "backward":
                return span.start_ns if at_ns <= (span.end_ns or 0) else at_ns
        return at_ns


@once
def by_rank(trace: Trace) -> RankEvents:
    """Sort the events of a DDP program by rank; a forward pass begins with what DDP sends before it."""
    events = RankEvents(defaultdict(list), defaultdict(list), defaultdict(list), {})
    events.spans.update({(span.rank, span.number): span.name for span in trace.of(Span)})
    for gradient in trace.of(Gradient):
        events.gradients[gradient.rank].append(gradient.start_ns)
    for operation in operations(trace) if trace.rows.has(PhaseSpan) else ():
        for end in operation.ends:
            events.calls[end.rank].append((operation, end))
    for calls in events.calls.values():
        calls.sort(key=lambda call: call[1].start_ns)
    for span in trace.of(PhaseSpan):
        if span.end_ns is None or span.failed:
            continue
        earlier = events.phase_spans[span.rank]
        if span.phase == "forward":  # DDP sends buckets and buffers before it.
            over_ns = earlier[-1].end_ns or 0 if earlier else 0
            before = _between(events.calls[span.rank], over_ns, span.start_ns)
            sent = (end.start_ns for _, end in before if of_ddp(end) and end.phase == "forward")
            span = replace(span, start_ns=min(sent, default=span.start_ns))
        earlier.append(span)
    return events


def _between(calls: Sequence[CalledEnd], after_ns: int, until_ns: int) -> Sequence[CalledEnd]:
    first = bisect_right(calls, after_ns, key=lambda call: call[1].start_ns)
    return calls[first : bisect_right(calls, until_ns, key=lambda call: call[1].start_ns)]


def _within(calls: Sequence[CalledEnd], phase_span: PhaseSpan) -> Sequence[CalledEnd]:
    return _between(calls, phase_span.start_ns - 1, phase_span.end_ns or phase_span.start_ns)


def of_ddp(end: End) -> bool:
    """Return whether DDP launched it: the reducer, a hook, or the module before forward."""
    if not isinstance(end, Collective):
        return False
    if end.phase != "backward":
        return end.phase == "forward" and end.role.startswith("DDP")
    by_callback = bool(end.thread) and end.backward is None
    return by_callback or end.launcher in ("reducer", "comm hook")


def _blocks(end: End) -> bool:
    """Return whether the program's thread waited inside the call, or its stream on a GPU did.

    (A reduce_scatter's end is seen by a later wait, too.)
    """
    if not isinstance(end, Collective):
        return False
    on_host = end.ended_by == "wait" and not end.thread and "reduce_scatter" not in end.op
    return on_host or end.ended_by == CUDA_EVENT_IN_LINE


def _cut(phase_spans: Sequence[PhaseSpan], calls: Sequence[CalledEnd]) -> list[list[PhaseSpan]]:
    """Begin a step with the first forward pass after the end of the one before."""
    by_optimizer = any(span.phase == "optimizer" for span in phase_spans)
    steps: list[list[PhaseSpan]] = []
    over = True
    for span in phase_spans:
        if not steps or (over and span.phase == "forward"):
            steps.append([])
            over = False
        steps[-1].append(span)
        if by_optimizer:
            over |= span.phase == "optimizer"
        elif span.phase == "backward":
            over |= any(of_ddp(end) for _, end in _within(calls, span))
    return steps


def _step(number: int, rank: int, phase_spans: Sequence[PhaseSpan], events: RankEvents) -> TrainingStep:
    calls: list[StepCall] = []
    marks: list[Interval] = []
    others = 0
    for phase_span in phase_spans:
        end_ns = phase_span.end_ns or 0
        marks.append((phase_span.start_ns, end_ns, phase_span.phase))
        ready = bisect_right(events.gradients[rank], end_ns)
        if phase_span.phase == "backward" and ready:
            last_ns = events.gradients[rank][ready - 1]
            marks.append((phase_span.start_ns, last_ns, "gradients to come"))
        for operation, end in _within(events.calls[rank], phase_span):
            if not (_blocks(end) or (of_ddp(end) and end.phase == phase_span.phase)):
                others += 1
                continue
            calls.append(_call(operation, end, end_ns))
            if _blocks(end):
                marks.append((end.start_ns, calls[-1].end_ns or 0, "blocked"))
    if all(call.end_ns is not None for call in calls):
        marks += [(call.start_ns, call.last_arrival_ns, call.operation) for call in calls]
        marks += [(call.last_arrival_ns, call.end_ns or 0, "travels") for call in calls]
    return TrainingStep(
        number=number,
        rank=rank,
        title=events.spans.get((rank, phase_spans[0].parent)) or f"training step {number}",
        start_ns=phase_spans[0].start_ns,
        end_ns=max(span.end_ns or 0 for span in phase_spans),
        rows=tuple(starmap(_row, pieces(marks))),
        calls=tuple(calls),
        others=others,
    )


Interval = tuple[int, int, str | Operation]
"""From, to, in ns; and what lasts so long."""


def pieces(intervals: Iterable[Interval]) -> Iterator[tuple[int, int, list[str | Operation]]]:
    """Cut time wherever something begins or ends; yield what lasts in each piece."""
    begins: dict[int, list[Interval]] = defaultdict(list)
    times: set[int] = set()
    for interval in intervals:
        if interval[0] < interval[1]:
            begins[interval[0]].append(interval)
            times.update(interval[:2])
    lasting: list[Interval] = []
    for start_ns, end_ns in pairwise(sorted(times)):
        lasting = [each for each in (*lasting, *begins[start_ns]) if each[1] > start_ns]
        yield start_ns, end_ns, [what for _, _, what in lasting]


def _call(operation: Operation, end: End, phase_end_ns: int) -> StepCall:
    last_arrival_ns = waited_until_ns(operation, end)
    if end.end_ns is None or end.failed or last_arrival_ns is None:
        return StepCall(operation, end.start_ns, end.start_ns, None)
    over_ns = min(end.end_ns, phase_end_ns)
    began_ns = min(max(last_arrival_ns, end.start_ns), over_ns)
    return StepCall(operation, end.start_ns, began_ns, over_ns)


def _row(start_ns: int, end_ns: int, lasting: Sequence[str | Operation]) -> StepRow:
    work: Phase = next((phase for phase in COMPUTED if phase in lasting), "between")
    hidden = "gradients to come" in lasting and "blocked" not in lasting
    awaited = tuple(each for each in lasting if isinstance(each, Operation))
    sent: Phase | None = "waiting" if awaited else None
    if "travels" in lasting:
        sent = "transfer"
    phase: Phase = work if hidden or sent is None else sent
    return StepRow(start_ns, end_ns, work, phase, sent, hidden, awaited)
