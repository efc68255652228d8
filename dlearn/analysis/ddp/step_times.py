"""How long each step took on each rank, and which one is odd: which rank the others waited for.

Steps are DDP's training steps; where there are none, the user's spans that are called the same up
to a number ("step 3", "iteration 7"), or FSDP's from one optimizer's step to the next.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from dlearn.analysis.ddp.step_clock import gate_note
from dlearn.analysis.ddp.training_steps import StepCall, TrainingStep, by_number, pieces, step_call, training_steps
from dlearn.diagnosis.hang_detection import Hang, hangs
from dlearn.events.event import PhaseSpan
from dlearn.join import training_phases as phases
from dlearn.join.tables.operation_table import Operation
from dlearn.join.training_phases import ENDLESS, numbered_steps
from dlearn.shown import Paragraph, RankNames, Result, Table, capitalized, count_text, ms, time_text, waits
from dlearn.trace import Trace

ODD, ODD_AMONG_EQUALS, APART = 2.0, 1.5, 8.0
"""An odd step takes more than two medians; or 1.5, if it is eight times as far from the median as
the next."""
_FEWEST = 5  # Of fewer steps none is called odd.
_OFTEN = 0.8  # A rank that comes late to such a share of the steps does not do so by chance.
_ROWS_SHOWN = 12


class StepOnRank(NamedTuple):
    """One step on one rank, in ns; None: it never finished, or its waiting was not observed."""

    start_ns: int
    length_ns: int | None
    waited_ns: int | None


class Late(NamedTuple):
    """The ranks that others waited for: several if they came at once, or (0 ns) not at all."""

    ranks: tuple[int, ...]
    waited_ns: int
    bucket: int | None


class RunStep(msgspec.Struct):
    """A step of a run: its name and number, what each rank had of it, and whom they waited for."""

    title: str
    number: int
    cells: dict[int, StepOnRank]
    late: Late | None = None

    @property
    def length_ns(self) -> int | None:
        """Return how long it took on its longest rank; None where a rank never finished it."""
        lengths = [cell.length_ns for cell in self.cells.values()]
        return None if None in lengths else max(length or 0 for length in lengths)

    @property
    def order_ns(self) -> int:
        """Return its length, to order by; a step that never ended is the longest."""
        return self.length_ns or ENDLESS

    @property
    def longest_wait_ns(self) -> int:
        return self.late.waited_ns if self.late is not None else 0


class RunSteps(Result, frozen=True):
    """The steps of a run, in their order. `note`: which waiting was the gate's of a held job."""

    steps: tuple[RunStep, ...]
    ranks: tuple[int, ...]
    labels: RankNames
    note: str = ""

    @property
    def finished(self) -> dict[int, int]:
        """Return the length in ns of each step that every rank has finished, by its index."""
        lengths = {at: step.length_ns for at, step in enumerate(self.steps)}
        return {at: length_ns for at, length_ns in lengths.items() if length_ns is not None}

    @property
    def lengths_ns(self) -> list[int]:
        return [*self.finished.values()]

    @property
    def _waits_ns(self) -> list[int]:
        return [cell.waited_ns or 0 for step in self.steps for cell in step.cells.values()]

    @property
    def wait_shares(self) -> list[float]:
        """Return the share of each step that its ranks waited, in the mean, where that was seen."""
        shares = []
        for at, length_ns in self.finished.items():
            waits = [cell.waited_ns for cell in self.steps[at].cells.values()]
            if length_ns and None not in waits:
                shares.append(sum(filter(None, waits)) / len(waits) / length_ns)
        return shares

    @property
    def waits_seen(self) -> bool:
        """Return whether it is known how long ranks waited, which a cell's shade then shows."""
        return any(self._waits_ns)

    @property
    def full_ns(self) -> int:
        """Return what the strongest shade means: a wait of a median step; or the longest step."""
        if not self.lengths_ns:
            return max(self._waits_ns, default=0) or 1
        return round(median(self.lengths_ns)) if self.waits_seen else max(self.lengths_ns)

    @property
    def shades(self) -> list[dict[int, float]]:
        """Return each step on each rank from 0 to 1: it waited, or took, `full_ns` or longer."""
        seen, full_ns, shades = self.waits_seen, self.full_ns, []
        for step in self.steps:
            cells = step.cells.items()
            times = {rank: cell.waited_ns if seen else cell.length_ns for rank, cell in cells}
            shades.append({rank: min(1.0, (ns or 0) / full_ns) for rank, ns in times.items()})
        return shades

    @property
    def odd(self) -> int | None:
        """Return the index of the longest step, if it is odd; the first, a warm-up, does not count."""
        lengths = {at: length for at, length in self.finished.items() if at}
        if len(lengths) < _FEWEST:
            return None
        middle, (second, most) = median(lengths.values()), sorted(lengths.values())[-2:]
        alone = most > ODD_AMONG_EQUALS * middle and most - middle > APART * (second - middle)
        longest = max(lengths, key=lambda at: lengths[at])
        return longest if alone or most > ODD * middle else None

    @property
    def reported(self) -> int | None:
        """Return the index of the one step that the finding is about, if it is about one."""
        if len(self.steps) == 1:
            return 0
        never = (at for at, step in enumerate(self.steps) if step.length_ns is None)
        return next(never, self.odd)

    @property
    def to_draw(self) -> RunStep:
        """Return one that never ended, else the one of the longest wait, else the last."""
        never = (step for step in self.steps if step.length_ns is None)
        return next(never, max(self.steps[:0:-1], key=lambda step: step.longest_wait_ns))

    @property
    def finding(self) -> str:
        lengths = self.lengths_ns
        step = self.steps[self.reported] if self.reported is not None else None
        if step is not None and step.length_ns is None:
            return self._unfinished(step)
        if not lengths:
            return 'No steps: give them names, as in dlearn.span("step 3")'
        if step is not None and len(lengths) == 1:
            why = self._because(step) or self._longest_wait(step)
            return f"{capitalized(step.title)} took {time_text(lengths[0])}{why}"
        middle, least, most = map(time_text, (round(median(lengths)), min(lengths), max(lengths)))
        spread = f"{middle} each" if least == most else f"{middle} (median), {least} to {most}"
        return self.odd_sentence or f"{count_text(len(lengths), 'step')} of {spread}{self._often_late}"

    @property
    def _often_late(self) -> str:
        """Write "; rank 1 came late to 5 of them", of a rank that made nearly all of them longer."""
        came = Counter(step.late.ranks[:1] for step in self.steps if step.late and self._because(step))
        for (rank,), count in came.most_common(1):
            if count >= max(_FEWEST, _OFTEN * len(self.lengths_ns)):
                return f"; {self.labels[rank]} came late to {count:,} of them"
        return ""

    def _unfinished(self, step: RunStep) -> str:
        stuck = [rank for rank, cell in step.cells.items() if cell.length_ns is None]
        names = self.labels.together(stuck)
        never = f"{capitalized(step.title)} was never finished"
        if step.late is None:
            return f"{never} by {names}"
        some = names if len(stuck) < 3 else f"{len(stuck)} ranks"
        whom = self.labels.together(step.late.ranks)
        return f"{never}: {some} {waits(len(stuck))} for {whom}"

    @property
    def odd_sentence(self) -> str:
        """Write "Step 17 took 206 ms, the median is 34.0 ms: rank 1 came late to bucket 0", or ""."""
        if self.odd is None:
            return ""
        step, middle = self.steps[self.odd], time_text(round(median(self.lengths_ns)))
        took = f"{capitalized(step.title)} took {time_text(step.length_ns or 0)}"
        return f"{took}, the median is {middle}{self._because(step)}"

    @property
    def longest_sentence(self) -> str:
        """Write "The longest is step 40: 29.1 ms: rank 1 ..."; "" where the finding says so."""
        lengths = self.lengths_ns
        finished = self.finished
        longest = max(finished, key=lambda at: finished[at], default=self.reported)
        if longest == self.reported or time_text(max(lengths)) == time_text(min(lengths)):
            return ""
        step = self.steps[longest or 0]
        return f"The longest is {step.title}: {time_text(max(lengths))}{self._because(step)}"

    def _because(self, step: RunStep) -> str:
        """Name the rank that came late, if others waited for a quarter of the step."""
        late = step.late
        if late is None or late.waited_ns < (step.length_ns or 0) // 4:
            return ""
        where = "" if late.bucket is None else f" to bucket {late.bucket}"
        return f": {self.labels.together(late.ranks)} came late{where}"

    def _longest_wait(self, step: RunStep) -> str:
        """Name the rank of the longest wait; where no wait was seen, the rank that needed longest."""
        if step.late is not None:
            waited = time_text(step.late.waited_ns)
            return f"; the longest wait is {waited}, for {self.labels.together(step.late.ranks)}"
        lengths = {rank: cell.length_ns or 0 for rank, cell in step.cells.items()}
        longest = max(lengths, key=lambda rank: lengths[rank])
        shortest = time_text(min(lengths.values()))
        if shortest == time_text(lengths[longest]):
            return " on every rank"
        return f" on {self.labels[longest]}, the longest; the shortest {shortest}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each rank in each step; None where it never finished, or was not observed."""
        for step in self.steps:
            for rank, cell in step.cells.items():
                yield {"step": step.title, "rank": self.labels[rank], **cell._asdict()}

    def rows(self) -> list[list[str]]:
        """Return a head, and a row for each of the longest steps."""
        rows = [["step", "ms", "waits longest for", "ms"]]
        for step in sorted(self.steps, key=lambda step: -step.order_ns)[:_ROWS_SHOWN]:
            took, waited, whom = "never finished", "still", ""
            if step.length_ns is not None:
                took, waited = ms(step.length_ns), ms(step.late.waited_ns) if step.late else ""
            if step.late is not None:
                whom = self.labels.together(step.late.ranks)
            rows.append([step.title, took, whom, waited if whom else ""])
        return rows

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.steps:
            yield Table(self.rows(), title="The longest first:")
        if self.note:
            yield self.note


def step_times(trace: Trace) -> RunSteps:
    """Measure each step on each rank; of a selection those of which it holds a part."""
    # To look for steps, all operations are made: not of a million sends that belong to none.
    found = training_steps(trace) if trace.whole.rows.has(PhaseSpan) else ()
    numbers = [*numbered_steps(trace.whole)] if found else []
    steps = [_run_step(of_ranks, numbers) for of_ranks in by_number(found)] or _spans(trace)
    over = {step.rank: step.rows[-1].work == "optimizer" for step in found if step.rows}
    if not steps:
        steps, over = _of_fsdp(trace)
    # Of DDP the steps have their waits; spans around messages of other kinds have none.
    of_fsdp = bool(steps) and not found and trace.whole.rows.has(PhaseSpan)
    if of_fsdp:
        _measure_waits(steps, trace)
    for hang in hangs(trace) if steps else ():
        _mark(hang, over, steps)
    ranks = sorted({rank for step in steps for rank in step.cells})
    run = RunSteps(tuple(steps), tuple(ranks), trace.labels, gate_note(trace))
    if run.note or not of_fsdp:
        return run
    waited = f"Collectives waited for their last rank: {shares_text(run.wait_shares)}."
    return replace(run, note=waited)


def shares_text(shares: Sequence[float]) -> str:
    """Write "35% of a step (the median of 7; 20% to 60%)"; one step shows no spread."""
    if len(shares) < 2:
        return f"{shares[0]:.0%} of the one step seen" if shares else "not measured"
    spread = f"the median of {len(shares)}; {min(shares):.0%} to {max(shares):.0%}"
    return f"{median(shares):.0%} of a step ({spread})"


def _measure_waits(steps: Sequence[RunStep], trace: Trace) -> None:
    """Add how long FSDP2's collectives waited for their last rank, where their ends were seen."""
    calls = phases.calls_by_rank(trace.whole)
    for step in steps:
        made: list[StepCall] = []
        for rank, cell in step.cells.items():
            last_ns = cell.start_ns + (cell.length_ns or 0) - 1
            called = phases.between(calls[rank], cell.start_ns - 1, last_ns)
            mine = [step_call(operation, end, ENDLESS) for operation, end in called]
            if cell.length_ns is not None and all(call.end_ns is not None for call in mine):
                waits = pieces((call.start_ns, call.last_arrival_ns, "waits") for call in mine)
                waited_ns = sum(end_ns - start_ns for start_ns, end_ns, what in waits if what)
                step.cells[rank] = cell._replace(waited_ns=waited_ns)
            made += mine
        step.late = _longest(made)


def _run_step(of_ranks: Sequence[TrainingStep], numbers: Sequence[int]) -> RunStep:
    cells = {one.rank: StepOnRank(one.start_ns, one.total_ns, one.waited_ns) for one in of_ranks}
    late = _longest(call for each in of_ranks for call in each.calls)
    return RunStep(of_ranks[0].title, numbers[of_ranks[0].number], cells, late)


def _longest(calls: Iterable[StepCall]) -> Late | None:
    """Return the rank, or ranks, of the longest wait; None where no call waited."""
    longest = max(calls, key=attrgetter("waited_ns"), default=None)
    if longest is None or not longest.waited_ns:
        return None
    return _late(longest.operation, longest.waited_ns)


def _late(operation: Operation, waited_ns: int) -> Late:
    index = None if operation.bucket is None else operation.bucket.index
    return Late(operation.missing or operation.last_ranks, waited_ns, index)


def _mark(hang: Hang, over: dict[int, bool], steps: list[RunStep]) -> None:
    """Mark the step in which ranks are stuck; `over`: whether all of a rank's last one was seen."""
    for end in hang.operation.ends:
        began = [index for index, step in enumerate(steps) if end.rank in step.cells]
        if end.rank not in hang.waiting or not began:
            continue
        if steps[began[-1]].cells[end.rank].start_ns > end.start_ns:
            continue
        index = began[-1] + over.get(end.rank, False)
        if index == len(steps):
            steps.append(RunStep(f"training step {index}", steps[-1].number + 1, {}))
        step = steps[index]
        cell = step.cells.get(end.rank)
        step.cells[end.rank] = StepOnRank(cell.start_ns if cell else end.start_ns, None, None)
        if hang.operation.missing:
            step.late = step.late or _late(hang.operation, 0)


def _spans(trace: Trace) -> list[RunStep]:
    numbers = {title: number for number, title in numbered_steps(trace.whole).items()}
    steps: list[RunStep] = []
    for name, spans in phases.step_spans(trace).items():
        steps.append(RunStep(name, numbers.get(name, len(steps)), {}))
        for span in spans:
            length_ns = None if span.end_ns is None else span.end_ns - span.start_ns
            steps[-1].cells[span.rank] = StepOnRank(span.start_ns, length_ns, None)
    return steps


def _of_fsdp(trace: Trace) -> tuple[list[RunStep], dict[int, bool]]:
    """Return the steps from optimizer to optimizer, and of which ranks all of the last was seen."""
    here = set(phases.step_of_rows(trace.whole)[trace.rows.rows].tolist())
    steps: dict[int, RunStep] = {}
    over = {}
    for rank, index, start_ns, end_ns in phases.windows_of_steps(trace.whole):
        if index in here:
            step = steps.setdefault(index, RunStep(f"training step {index}", index, {}))
            over[rank] = end_ns != ENDLESS
            length_ns = end_ns - start_ns if over[rank] else None
            step.cells[rank] = StepOnRank(start_ns, length_ns, None)
    return [steps[index] for index in sorted(steps)], over
