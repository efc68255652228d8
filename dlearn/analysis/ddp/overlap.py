"""How much of the communication is hidden behind the backward pass, whom the rest waits for, and what takes long.

Hidden is what happens while gradients of the same pass are still to come, and the program does not wait in a call. (A
communication hook that calls without waiting, and then waits, is not told apart.) Waiting for a late rank is told apart
from transfer; at a moment at which one bucket travels and another one waits, something travels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

import msgspec

from dlearn.analysis.ddp.gate_time import gate_note
from dlearn.analysis.ddp.intervals import Interval, common, length_ns, union, without
from dlearn.analysis.ddp.training_steps import TrainingStep, device_note, on_device, training_steps, unseen_note
from dlearn.analysis.findings import time_text
from dlearn.shown import Answer, Paragraph, RankNames, Table, count_text, ms
from dlearn.trace.trace import Trace

_ROWS_SHOWN = 24


class Times(NamedTuple):
    """How long one rank's communication took in a step, in ns; at no moment two of the four."""

    hidden_transfer_ns: int
    hidden_waiting_ns: int
    exposed_transfer_ns: int
    exposed_waiting_ns: int

    @property
    def hidden_ns(self) -> int:
        return self.hidden_transfer_ns + self.hidden_waiting_ns

    @property
    def exposed_ns(self) -> int:
        return self.exposed_transfer_ns + self.exposed_waiting_ns

    @property
    def total_ns(self) -> int:
        """The time in which something travelled or waited."""
        return self.hidden_ns + self.exposed_ns


class Share(msgspec.Struct, frozen=True):
    """One rank's communication in one step. `times` is None where the end of one of its operations was not observed.

    `waits` are ns of exposed waiting for each rank; operations that wait at the same time may wait for several.
    """

    rank: int
    times: Times | None
    waits: dict[int, int]

    @property
    def hidden(self) -> float | None:
        """The share of the communication that is hidden, 0 to 1. None where it is not known, or there is none."""
        return self.times.hidden_ns / self.times.total_ns if self.times is not None and self.times.total_ns else None


class Leg(NamedTuple):
    """A part of a step's critical path: what the step's end was waiting for, in ns on the trace's clock."""

    rank: int
    what: str
    start_ns: int
    end_ns: int


class StepOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """One step on all ranks. `path` is empty where an end was not observed. `others`: calls left out."""

    number: int
    title: str
    shares: tuple[Share, ...]
    path: tuple[Leg, ...]
    others: int


class Overlap(Answer, frozen=True):
    """The communication of each training step: hidden and exposed, waiting and transfer, and the critical path.

    `note`: whose times they are, where they are a GPU's, and which waiting was the gate's of a held job.
    """

    steps: tuple[StepOverlap, ...]
    labels: RankNames
    note: str = ""

    @property
    def finding(self) -> str:
        """The median share that is hidden, and the rank that is waited for longest."""
        shares = [share for step in self.steps for share in step.shares]
        known = [share.hidden for share in shares if share.hidden is not None]
        if not self.steps:
            return "No training step of a DDP model"
        if not known:
            unseen = any(share.times is None for share in shares)
            return "Not observed: nobody saw when the operations ended" if unseen else "Nothing is sent in these steps"
        spread = f", {min(known):.0%} to {max(known):.0%}" if len(known) > 1 else ""
        ranks = count_text(len({share.rank for share in shares}), "rank")
        said = f"{median(known):.0%} of the communication time is hidden behind the backward pass"
        said = f"{said} (median of {count_text(len(self.steps), 'step')} on {ranks}{spread})"
        waited: dict[int, int] = defaultdict(int)
        for share in shares:
            for rank, duration in share.waits.items():
                waited[rank] += duration
        if waited:
            rank = max(waited, key=lambda rank: waited[rank])
            said += f"; ranks stand waiting longest for {self.labels[rank]}: {time_text(waited[rank])}"
        return said

    def rows(self) -> list[list[str]]:
        """A head, and a row for each rank in each step, the last ones of many; times in ms."""
        table = [
            ["step", "rank", "communication", "hidden", "exposed transfer", "exposed waiting", "waits longest for"]
        ]
        shares = [(step, share) for step in self.steps for share in step.shares]
        for step, share in shares[-_ROWS_SHOWN:]:
            row = [step.title, self.labels[share.rank]]
            if share.times is None:
                table.append([*row, "not observed", "", "", "", ""])
                continue
            hidden = "" if share.hidden is None else f"{share.hidden:.0%}"
            parts = share.times.exposed_transfer_ns, share.times.exposed_waiting_ns
            who = self.labels[max(share.waits, key=lambda rank: share.waits[rank])] if share.waits else ""
            table.append([*row, ms(share.times.total_ns), hidden, *map(ms, parts), who])
        return table

    def path_sentence(self, step: StepOverlap) -> str:
        """ "step 1, 83.0 ms: rank 2 forward 5.10 ms, backward 45.0 ms; bucket 2 travels 32.4 ms; rank 2 ..."."""
        if not step.path:
            return f"{step.title}: what it waited for was not observed"
        told = []
        for rank, legs in groupby(step.path, key=lambda leg: leg.rank if leg.what in COMPUTED else None):
            name = "" if rank is None else f"{self.labels[rank]} "
            told.append(name + ", ".join(f"{leg.what} {time_text(leg.end_ns - leg.start_ns)}" for leg in legs))
        return f"{step.title}, {time_text(step.path[-1].end_ns - step.path[0].start_ns)}: {'; '.join(told)}"

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.steps:
            yield Table(self.rows(), names=2)
            left = sum(len(step.shares) for step in self.steps) - _ROWS_SHOWN
            if left > 0:
                yield f"({left:,} earlier rows)"
            yield "The critical path of the longest step:"
            yield f"  {self.path_sentence(self.longest)}"
        if self.note:
            yield self.note
        others = sum(step.others for step in self.steps)
        if others:
            yield f"not counted: {count_text(others, 'call')} for which the program waits elsewhere, or not at all"

    @property
    def longest(self) -> StepOverlap:
        return max(self.steps, key=lambda step: step.path[-1].end_ns - step.path[0].start_ns if step.path else -1)


COMPUTED = ("forward", "backward", "optimizer", "between")


def overlap(trace: Trace) -> Overlap:
    """How much of DDP's communication is hidden in each training step on each rank, and the step's critical path."""
    steps: dict[int, list[TrainingStep]] = defaultdict(list)
    for step in training_steps(on_device(trace)):
        steps[step.number].append(step)
    found = [
        StepOverlap(
            number=number,
            title=of_ranks[0].title,
            shares=tuple(share_of(step) for step in of_ranks),
            path=critical_path(of_ranks),
            others=sum(step.others for step in of_ranks),
        )
        for number, of_ranks in sorted(steps.items())
    ]
    notes = filter(None, (device_note(trace) or unseen_note(trace), gate_note(trace)))
    return Overlap(tuple(found), trace.labels, " ".join(notes))


def share_of(step: TrainingStep) -> Share:
    """What of one rank's communication in one step is hidden, and for whom the rest waits."""
    travels, waits = moments(step)
    if any(part.end_ns is None for part in step.parts):
        return Share(step.rank, None, {})
    hidden = union(step.computing)
    waiting = without(union(each for found in waits.values() for each in found), travels)
    times = Times(
        hidden_transfer_ns=length_ns(common(travels, hidden)),
        hidden_waiting_ns=length_ns(common(waiting, hidden)),
        exposed_transfer_ns=length_ns(without(travels, hidden)),
        exposed_waiting_ns=length_ns(without(waiting, hidden)),
    )
    for_each = {rank: length_ns(without(without(found, travels), hidden)) for rank, found in waits.items()}
    return Share(step.rank, times, {rank: duration for rank, duration in for_each.items() if duration})


def moments(step: TrainingStep) -> tuple[list[Interval], dict[int, list[Interval]]]:
    """When something of this rank's travels, and when something waits, by the rank that it waits for."""
    travels: list[Interval] = []
    waits: dict[int, list[Interval]] = defaultdict(list)
    for part in step.parts:
        if part.transfer_ns is not None and part.end_ns is not None:
            travels.append((part.transfer_ns, part.end_ns))
            waits[part.operation.last_rank].append((part.start_ns, part.transfer_ns))
    return union(travels), {rank: union(found) for rank, found in waits.items()}


# The critical path ----------------------------------------------------------------------------------------------------


def critical_path(steps: Sequence[TrainingStep]) -> tuple[Leg, ...]:
    """What the end of a step waited for, backwards: the rank that ended last, and, where its backward pass ended with
    a transfer that was not hidden, that transfer, and the rank that launched it last.

    What held up a rank's own computation in turn (busy cores, buffers that came late) is not followed.
    """
    last = max(steps, key=lambda step: step.end_ns)
    if any(part.end_ns is None for step in steps for part in step.parts):
        return ()
    computed = max((end for _, end in last.computing), default=last.start_ns)
    late = [part for part in last.parts if part.end_ns is not None and part.end_ns > computed]
    if not late:
        return tuple(_legs(last, last.start_ns, last.end_ns))
    part = max(late, key=lambda part: part.end_ns or 0)
    assert part.transfer_ns is not None
    assert part.end_ns is not None
    # In a selection of ranks the one that launched last may be left out.
    launchers = [step for step in steps if step.rank == part.operation.last_rank]
    bucket = part.operation.bucket
    what = f"bucket {bucket.index} travels" if bucket is not None else f"{part.operation.op} travels"
    before = [leg for step in launchers for leg in _legs(step, step.start_ns, part.transfer_ns)]
    return (*before, Leg(last.rank, what, part.transfer_ns, part.end_ns), *_legs(last, part.end_ns, last.end_ns))


def _legs(step: TrainingStep, start: int, end: int) -> list[Leg]:
    """What this rank did from `start` to `end`."""
    legs: list[Leg] = []
    at = start
    for stretch in step.stretches:
        left, right = max(stretch.start_ns, at), min(stretch.end_ns or stretch.start_ns, end)
        if left < right:
            legs += [Leg(step.rank, "between", at, left)] if left > at else []
            legs.append(Leg(step.rank, stretch.phase, left, right))
            at = right
    return legs + ([Leg(step.rank, "between", at, end)] if at < end else [])
