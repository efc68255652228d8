"""How much of the communication is hidden behind the backward pass, and what a step waited for.

Hidden is what happens while gradients of the same pass are still to come, and the program does not
wait in a call. (A hook that calls without waiting, and then waits, is not distinguished.)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

import msgspec

from dlearn.analysis.ddp.step_clock import on_device, step_note
from dlearn.analysis.ddp.training_steps import (
    COMMUNICATION,
    COMPUTED,
    TrainingStep,
    by_number,
    training_steps,
)
from dlearn.shown import Paragraph, RankNames, Result, Table, count_text, ms, time_text
from dlearn.trace import Trace

_ROWS_SHOWN = 24
_HEAD = "step", "rank", "communication", "hidden", "exposed transfer", "exposed waiting"


class Leg(NamedTuple):
    """A part of a step's critical path: what the step's end waited for, in ns."""

    rank: int
    what: str
    start_ns: int
    end_ns: int


class StepOverlap(msgspec.Struct, frozen=True):
    """One step on all ranks. `path` is empty where an end was not observed."""

    shares: tuple[TrainingStep, ...]
    path: tuple[Leg, ...]

    @property
    def path_ns(self) -> int:
        return self.path[-1].end_ns - self.path[0].start_ns if self.path else -1


class Overlap(Result, frozen=True):
    """The communication of each training step: hidden and exposed, and the critical path."""

    steps: tuple[StepOverlap, ...]
    labels: RankNames
    note: str = ""

    @property
    def _shares(self) -> list[TrainingStep]:
        return [share for step in self.steps for share in step.shares]

    @property
    def finding(self) -> str:
        """Name the median share that is hidden, and the rank that is waited for longest."""
        shares = self._shares
        hidden = [share.hidden for share in shares]
        known = [part for part in hidden if part is not None]
        if not self.steps:
            return "No training step of a DDP model"
        if not known and not all(share.observed for share in shares):
            return "Not observed: when the operations ended"
        if not known:
            return "Nothing is sent in these steps"
        spread = f", {min(known):.0%} to {max(known):.0%}" if len(known) > 1 else ""
        ranks = count_text(len({share.rank for share in shares}), "rank")
        said = f"{median(known):.0%} of the communication time is hidden behind the backward pass"
        said += f" (median of {count_text(len(self.steps), 'step')} on {ranks}{spread})"
        waited = sum((share.waits for share in shares), Counter[int]())
        for rank, duration_ns in waited.most_common(1):
            longest = f"{self.labels[rank]}: {time_text(duration_ns)}"
            said += f"; ranks stand waiting longest for {longest}"
        return said

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each rank in each step; what was not observed is None."""
        for share in self._shares:
            row: dict[str, object] = {"step": share.title, "rank": self.labels[share.rank]}
            lengths: list[int | None] = [None] * 3
            if share.observed:
                parts = COMMUNICATION, ("transfer",), ("waiting",)
                lengths = [share.length_ns(*part) for part in parts]
            row |= zip(("communication_ns", "transfer_ns", "waiting_ns"), lengths, strict=True)
            longest = [self.labels[rank] for rank, _ in share.waits.most_common(1)]
            yield row | {"hidden": share.hidden, "waits_for": "".join(longest)}

    def rows(self) -> list[list[str]]:
        """Return a head, and a row for each rank in each step, the last ones of many; in ms."""
        table = [[*_HEAD, "waits longest for"]]
        for share in self._shares[-_ROWS_SHOWN:]:
            row = [share.title, self.labels[share.rank]]
            if not share.observed:
                table.append([*row, "not observed", "", "", "", ""])
                continue
            hidden = "" if share.hidden is None else f"{share.hidden:.0%}"
            lengths = [ms(share.length_ns(phase)) for phase in ("transfer", "waiting")]
            longest = "".join(self.labels[rank] for rank, _ in share.waits.most_common(1))
            sent = ms(share.length_ns(*COMMUNICATION))
            table.append([*row, sent, hidden, *lengths, longest])
        return table

    def path_sentence(self, step: StepOverlap) -> str:
        """Write "step 1, 83.0 ms: rank 2 forward 5.10 ms, backward 45.0 ms; bucket 2 travels ..."."""
        title, texts = step.shares[0].title, []
        if not step.path:
            return f"{title}: what it waited for was not observed"
        of_ranks = groupby(step.path, key=lambda leg: (leg.what in COMPUTED, leg.rank))
        for (computes, rank), legs in of_ranks:
            name = f"{self.labels[rank]} " if computes else ""
            lengths = [f"{leg.what} {time_text(leg.end_ns - leg.start_ns)}" for leg in legs]
            texts.append(name + ", ".join(lengths))
        return f"{title}, {time_text(step.path_ns)}: {'; '.join(texts)}"

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.steps:
            yield Table(self.rows(), names=2)
            left = len(self._shares) - _ROWS_SHOWN
            if left > 0:
                yield f"({left:,} earlier rows)"
            yield "The critical path of the longest step:"
            yield f"  {self.path_sentence(max(self.steps, key=lambda step: step.path_ns))}"
        if self.note:
            yield self.note
        others = sum(share.others for share in self._shares)
        if others:
            elsewhere = "for which the program waits elsewhere, or not at all"
            yield f"not counted: {count_text(others, 'call')} {elsewhere}"


def overlap(trace: Trace) -> Overlap:
    """Return how much communication is hidden in each step, and the step's critical path."""
    steps = by_number(training_steps(on_device(trace)))
    items = [StepOverlap(tuple(of_ranks), critical_path(of_ranks)) for of_ranks in steps]
    return Overlap(tuple(items), trace.labels, step_note(trace))


def critical_path(steps: Sequence[TrainingStep]) -> tuple[Leg, ...]:
    """Return what the end of a step waited for, backwards.

    That is the rank that ended last, and, where its backward pass ended with a transfer that was
    not hidden, that transfer, and the rank that launched it last. What held up a rank's own
    computation in turn (busy cores, buffers that came late) is not followed.
    """
    last = max(steps, key=lambda step: step.end_ns)
    if not all(step.observed for step in steps):
        return ()
    computed = max((row.end_ns for row in last.rows if row.hidden), default=last.start_ns)
    call = max(last.calls, key=lambda call: call.end_ns or 0, default=None)
    if call is None or (call.end_ns or 0) <= computed:
        return tuple(_legs(last, last.start_ns, last.end_ns))
    sent_ns, done_ns = call.last_arrival_ns, call.end_ns or 0
    # In a selection of ranks the one that launched last may be left out.
    launchers = [step for step in steps if step.rank == call.operation.last_rank]
    before = [leg for step in launchers for leg in _legs(step, step.start_ns, sent_ns)]
    bucket = call.operation.bucket
    what = f"bucket {bucket.index}" if bucket is not None else call.operation.op
    travels = Leg(last.rank, f"{what} travels", sent_ns, done_ns)
    return (*before, travels, *_legs(last, done_ns, last.end_ns))


def _legs(step: TrainingStep, start_ns: int, end_ns: int) -> Iterator[Leg]:
    """Yield what this rank computed in this time, which may go on after its step."""
    computed = [Leg(step.rank, row.work, row.start_ns, row.end_ns) for row in step.rows]
    computed.append(Leg(step.rank, "between", step.end_ns, end_ns))
    inside = (leg for leg in computed if leg.start_ns < end_ns and leg.end_ns > start_ns)
    for work, same in groupby(inside, key=lambda leg: leg.what):
        legs = list(same)
        left_ns, right_ns = max(legs[0].start_ns, start_ns), min(legs[-1].end_ns, end_ns)
        yield Leg(step.rank, work, left_ns, right_ns)
