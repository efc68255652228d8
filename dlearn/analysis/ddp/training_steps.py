"""The table of training steps: what each rank did when, in each step of a DDP program.

A step ends with the optimizer's; in a program that calls none, with a backward pass in which DDP
sends something. All of DDP's operations are over when the pass returns that launched them, so an
end that was reported later is taken to be then. Of the program's own calls only those that wait at
once are counted: of others it is not seen who waits for them.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, starmap
from typing import Literal, NamedTuple

import msgspec

from dlearn.events.clocks import CUDA_EVENT_IN_LINE
from dlearn.events.event import Collective, Gradient, PhaseSpan, Span
from dlearn.join.ends import End
from dlearn.join.selection import once
from dlearn.join.tables.operation_table import Operation
from dlearn.join.training_phases import StepPhases, of_ddp, steps_by_phases
from dlearn.join.wait_times import waited_until_ns
from dlearn.trace import Trace

Phase = Literal["forward", "backward", "optimizer", "between", "transfer", "waiting", "hidden"]
COMPUTED: tuple[Phase, ...] = ("forward", "backward", "optimizer", "between")
COMMUNICATION: tuple[Phase, ...] = ("hidden", "transfer", "waiting")


class StepCall(NamedTuple):
    """A rank's part in an operation: it sends from `last_arrival_ns`. No `end_ns`: not seen."""

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

    @property
    def late_rank(self) -> int | None:
        """Return the rank that its time waits for; of several, that of the first call."""
        return self.awaited[0].last_rank if self.phase == "waiting" else None


class Part(NamedTuple):
    """Rows of one phase that follow each other; of those that wait, for what at their end."""

    phase: Phase
    start_ns: int
    end_ns: int
    awaited: Operation | None = None


class TrainingStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank: its rows, which follow each other without a gap.

    `number` counts from 0; `calls` are DDP's own and those that waited; `others` counts all others.
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
        by_phase = groupby(self.rows, key=lambda row: (row.phase, row.late_rank))
        hidden = groupby(self.rows, key=lambda row: row.hidden and row.sent is not None)
        parts = [_part(phase, list(rows)) for (phase, _), rows in by_phase]
        return (*parts, *(_part("hidden", list(rows)) for is_hidden, rows in hidden if is_hidden))

    def length_ns(self, *phases: Phase) -> int:
        lengths: Counter[Phase] = Counter()
        for row in self.rows:
            lengths[row.phase] += row.length_ns
            if row.hidden and row.sent is not None:
                lengths["hidden"] += row.length_ns
        return sum(lengths[phase] for phase in phases)

    @property
    def waited_ns(self) -> int | None:
        """Return how long something waited for a rank, hidden or not; None if not observed."""
        return sum(row.length_ns for row in self.rows if row.awaited) if self.observed else None

    @property
    def hidden(self) -> float | None:
        """Return the hidden share of the communication, 0 to 1; None if not known, or of none."""
        total_ns = self.length_ns(*COMMUNICATION)
        return self.length_ns("hidden") / total_ns if total_ns else None

    @property
    def waits(self) -> Counter[int]:
        """Sum up the exposed waiting for each rank, in ns; several may be waited for at once."""
        waits: Counter[int] = Counter()
        for row in self.rows:
            if row.phase == "waiting":
                for rank in dict.fromkeys(call.last_rank for call in row.awaited):
                    waits[rank] += row.length_ns
        return waits


def _part(phase: Phase, rows: Sequence[StepRow]) -> Part:
    last = rows[-1]
    same = [call for call in last.awaited if call.last_rank == last.late_rank]
    awaited = min(same, key=lambda call: call.last_arrival_ns, default=None)
    return Part(phase, rows[0].start_ns, last.end_ns, awaited)


def by_number(steps: Sequence[TrainingStep]) -> list[list[TrainingStep]]:
    """Return the steps of each number, which are one step on all ranks."""
    return [list(of_ranks) for _, of_ranks in groupby(steps, key=lambda step: step.number)]


def last_step(trace: Trace) -> str:
    names = dict.fromkeys(span.name for span in trace.of(Span) if not span.of_profiler)
    return next((name for name in reversed(names) if name.startswith("step")), "")


@once
def training_steps(trace: Trace) -> tuple[TrainingStep, ...]:
    """Fill the table: steps by number, then rank; of a selection those that it holds a part of."""
    wanted = {(event.rank, event.number) for event in trace.of(PhaseSpan)}
    gradients: dict[int, list[int]] = defaultdict(list)
    for gradient in trace.whole.of(Gradient):
        gradients[gradient.rank].append(gradient.start_ns)
    steps = []
    for step in steps_by_phases(trace.whole):
        if not wanted.isdisjoint((step.rank, span.number) for span, _ in step.phases):
            steps.append(_step(step, gradients[step.rank]))
    return tuple(sorted(steps, key=lambda step: (step.number, step.rank)))


def _blocks(end: End) -> bool:
    """Return whether the program's thread waited inside the call, or its stream on a GPU did."""
    if not isinstance(end, Collective):
        return False
    # A reduce_scatter's end is seen by a later wait, too.
    on_host = end.ended_by == "wait" and not end.thread and "reduce_scatter" not in end.op
    return on_host or end.ended_by == CUDA_EVENT_IN_LINE


def _step(of_rank: StepPhases, gradients: list[int]) -> TrainingStep:
    calls: list[StepCall] = []
    marks: list[Interval] = []
    others = 0
    for span, called in of_rank.phases:
        end_ns = span.end_ns or 0
        marks.append((span.start_ns, end_ns, span.phase))
        ready = bisect_right(gradients, end_ns)
        if span.phase == "backward" and ready:
            marks.append((span.start_ns, gradients[ready - 1], "gradients to come"))
        for operation, end in called:
            if not (_blocks(end) or (of_ddp(end) and end.phase == span.phase)):
                others += 1
                continue
            calls.append(step_call(operation, end, end_ns))
            if _blocks(end):
                marks.append((end.start_ns, calls[-1].end_ns or 0, "blocked"))
    if all(call.end_ns is not None for call in calls):
        marks += [(call.start_ns, call.last_arrival_ns, call.operation) for call in calls]
        marks += [(call.last_arrival_ns, call.end_ns or 0, "travels") for call in calls]
    return TrainingStep(
        number=of_rank.number,
        rank=of_rank.rank,
        title=of_rank.title,
        start_ns=of_rank.start_ns,
        end_ns=of_rank.end_ns,
        rows=tuple(starmap(_row, pieces(marks))),
        calls=tuple(calls),
        others=others,
    )


Interval = tuple[int, int, str | Operation]  # From, to, in ns; and what lasts so long.


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


def step_call(operation: Operation, end: End, phase_end_ns: int) -> StepCall:
    """Measure how long a rank's call waited and sent, in a phase that ends then."""
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
