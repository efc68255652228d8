"""Where the time of a training step goes: forward, backward, communication that is not hidden, optimizer.

All are observed: on a GPU by CUDA events, else on the CPU that calls. (Of a GPU without these that is the time to
launch its kernels, which run on by themselves.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from dlearn.analysis.ddp.gate_time import gate_note
from dlearn.analysis.ddp.intervals import Interval, common, union, without
from dlearn.analysis.ddp.overlap import moments
from dlearn.analysis.ddp.training_steps import TrainingStep, device_note, on_device, training_steps, unseen_note
from dlearn.analysis.findings import time_text
from dlearn.shown import Answer, Paragraph, RankNames, Table, ms
from dlearn.trace.event import Collective
from dlearn.trace.tables.operation_table import Operation
from dlearn.trace.trace import Trace

Phase = Literal["forward", "backward", "waiting", "transfer", "optimizer", "between", "hidden"]
_COLUMNS: tuple[Phase, ...] = ("forward", "backward", "transfer", "waiting", "optimizer", "between")


class Part(NamedTuple):
    """What a rank did from `start_ns` to `end_ns` on the trace's clock; of what waits: in which operation."""

    phase: Phase
    start_ns: int
    end_ns: int
    awaited: Operation | None = None


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank: its `parts`. All but what is hidden, which happens during the backward, add up to it.

    `observed` is False where the end of an operation was not: then forward and backward hold the communication, too.
    """

    number: int
    title: str
    rank: int
    observed: bool
    parts: tuple[Part, ...]

    def length_ns(self, *phases: Phase) -> int:
        """How long these phases took together."""
        return sum(part.end_ns - part.start_ns for part in self.parts if part.phase in phases)

    @property
    def exposed_ns(self) -> int:
        """Communication that is not hidden."""
        return self.length_ns("transfer", "waiting")

    @property
    def total_ns(self) -> int:
        return self.length_ns("forward", "backward", "optimizer", "between") + self.exposed_ns


class Breakdown(Answer, frozen=True):
    """The parts of each training step on each rank. `note` is what a reader must know of a GPU's or a held job's
    times; else empty."""

    items: tuple[StepTimes, ...]
    labels: RankNames
    note: str = ""

    @property
    def middle(self) -> tuple[StepTimes, ...]:
        """All ranks of the step of median length: by its longest rank, of two the shorter, among complete ones."""
        steps: dict[int, list[StepTimes]] = defaultdict(list)
        for each in self.items:
            steps[each.number].append(each)
        most = max((len(step) for step in steps.values()), default=0)
        whole = sorted((step for step in steps.values() if len(step) == most), key=_longest)
        return tuple(whole[(len(whole) - 1) // 2]) if whole else ()

    @property
    def exposed(self) -> float | None:
        """The share of the median step, over its ranks, that is communication not hidden; None if not observed."""
        shown = self.middle
        if not shown or not all(each.observed for each in shown):
            return None
        return sum(each.exposed_ns for each in shown) / sum(each.total_ns for each in shown)

    @property
    def finding(self) -> str:
        """How long the median step took, and how all its ranks' time together was spent."""
        shown = self.middle
        if not shown:
            return "No training step of a DDP model"
        count = len({each.number for each in self.items})
        which = f" (the median of {count} by length)" if count > 1 else ""
        together = f"of {len(shown)} ranks' time together, " if len(shown) > 1 else ""
        said = f"{self._step(which)}: {together}{self.shares_text}"
        return f"{said}: nobody saw when it ended" if self.exposed is None else said

    @property
    def headline(self) -> str:
        """The largest share, as a title: "Step 1, 35.0 ms: 50% is backward"."""
        if not self.middle:
            return self.finding
        part, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{self._step()}: {share:.0%} is {part}"

    def _step(self, which: str = "") -> str:
        title = self.middle[0].title
        return f"{title[:1].upper()}{title[1:]}{which}, {time_text(_longest(self.middle))}"

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of all ranks' time together in the median step, by the name of the part."""
        shown = self.middle
        whole = sum(each.total_ns for each in shown)
        shares = {phase: sum(each.length_ns(phase) for each in shown) / whole for phase in ("forward", "backward")}
        if self.exposed is not None:
            shares["communication that is not hidden"] = self.exposed
        return shares

    @property
    def shares_text(self) -> str:
        """Return "7% forward, 50% backward, 40% communication that is not hidden"."""
        parts = [f"{share:.0%} {part}" for part, share in self.shares.items()]
        return ", ".join(parts if self.exposed is not None else [*parts, "communication included"])

    def rows(self) -> list[list[str]]:
        """A head, and a row for each rank of the median step; ms."""
        parts = ("forward", "backward", "exposed transfer", "exposed waiting", "optimizer", "between")
        table = [["step", "rank", *parts, "all", "(hidden)"]]
        for each in self.middle:
            cells = [ms(each.length_ns(phase)) for phase in _COLUMNS]
            hidden = ms(each.length_ns("hidden"))
            if not each.observed:
                cells[2:4], hidden = ["not observed"] * 2, "not observed"
            table.append([each.title, self.labels[each.rank], *cells, ms(each.total_ns), hidden])
        return table

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.items:
            yield Table(self.rows(), names=2, title="ms:")
        if self.note:
            yield self.note


def breakdown(trace: Trace) -> Breakdown:
    """Where the time of each training step of a DDP program goes, on each rank."""
    steps = training_steps(on_device(trace))
    calls = [end for step in steps for part in step.parts for end in part.operation.ends if isinstance(end, Collective)]
    on_gpu = any(tensor.device != "cpu" for call in calls for tensor in call.inputs)
    note = device_note(trace) or (_LAUNCHED if on_gpu else "") or unseen_note(trace)
    notes = " ".join(filter(None, (note, gate_note(trace))))
    return Breakdown(tuple(_parts(step) for step in steps), trace.labels, notes)


_LAUNCHED = "On a GPU: the times of the CPU that launches the kernels, which run on by themselves."


def _parts(step: TrainingStep) -> StepTimes:
    observed = all(part.end_ns is not None for part in step.parts)
    travels, waits = moments(step) if observed else ([], {})
    computing = union(step.computing)
    transfer, waiting = without(travels, computing), dict[int, list[Interval]]()
    taken = [*travels, *computing]
    # No moment is told twice, where something waits for several ranks at once.
    for rank, found in waits.items():
        waiting[rank] = without(found, union(taken))
        taken += waiting[rank]
    busy = union([*travels, *(each for found in waits.values() for each in found)])
    exposed = without(busy, computing)
    forward, backward = union(step.of("forward")), union(step.of("backward"))
    optimizer = without(union(step.of("optimizer")), [*forward, *backward])
    inside = union([*forward, *backward, *optimizer])
    told: list[tuple[Phase, list[Interval]]] = [
        ("forward", without(forward, exposed)),
        ("backward", without(without(backward, forward), exposed)),
        ("optimizer", without(optimizer, exposed)),
        ("between", without([(step.start_ns, step.end_ns)], inside)),
        ("transfer", transfer),
        ("hidden", common(busy, computing)),
    ]
    parts = [Part(phase, *each) for phase, intervals in told for each in intervals]
    parts += [Part("waiting", *each, _awaited(step, last, each)) for last in waiting for each in waiting[last]]
    return StepTimes(number=step.number, title=step.title, rank=step.rank, observed=observed, parts=tuple(parts))


def _awaited(step: TrainingStep, last: int, wait: Interval) -> Operation:
    """The operation to which the last rank came when this wait ended; of several waits in one, the last."""
    shares = [part for part in step.parts if part.operation.last_rank == last and part.start_ns < wait[1]]
    begun = [part for part in shares if part.transfer_ns is not None and part.transfer_ns >= wait[1]]
    return min(begun, key=lambda part: part.transfer_ns or 0).operation


def _longest(step: Sequence[StepTimes]) -> int:
    return max(each.total_ns for each in step)
