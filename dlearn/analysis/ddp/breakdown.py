"""Where the time of a training step goes: forward, backward, communication that is not hidden, optimizer.

All are observed: on a GPU by CUDA events, else on the CPU that calls. (Of a GPU without these that is the time to
launch its kernels, which run on by themselves.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from dlearn.analysis.ddp.device_view import device_note, on_device
from dlearn.analysis.ddp.intervals import length_ns, union, without
from dlearn.analysis.ddp.overlap import Times, moments, share_of
from dlearn.analysis.ddp.training_steps import TrainingStep, training_steps, unseen_note
from dlearn.analysis.findings import time_text
from dlearn.shown import Answer, Paragraph, RankNames, Table, ms
from dlearn.trace.event import Collective
from dlearn.trace.trace import Trace


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank, in ns: forward, backward, optimizer, between and what `times` has as exposed add up to all.

    `times` is None where the end of an operation was not observed: then forward and backward hold the communication,
    too, exposed or not. What is hidden happens during the backward.
    """

    number: int
    title: str
    rank: int
    total_ns: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    between_ns: int
    times: Times | None


class Breakdown(Answer, frozen=True):
    """The parts of each training step on each rank. `note` is what a reader must know of a GPU's times; else empty."""

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
        times = [each.times.exposed_ns for each in shown if each.times is not None]
        return sum(times) / sum(each.total_ns for each in shown) if shown and len(times) == len(shown) else None

    @property
    def finding(self) -> str:
        """How long the median step took, and how all its ranks' time together was spent."""
        shown = self.middle
        if not shown:
            return "No training step of a DDP model"
        count = len({each.number for each in self.items})
        which = shown[0].title + (f" (the median of {count} by length)" if count > 1 else "")
        whole = sum(each.total_ns for each in shown)
        said = f"{which[:1].upper()}{which[1:]}, {time_text(_longest(shown))}"
        forward = sum(each.forward_ns for each in shown) / whole
        backward = sum(each.backward_ns for each in shown) / whole
        together = f"of {len(shown)} ranks' time together, " if len(shown) > 1 else ""
        said += f": {together}{forward:.0%} forward, {backward:.0%} backward"
        if self.exposed is None:
            return f"{said}, communication included: nobody saw when it ended"
        return f"{said}, {self.exposed:.0%} communication that is not hidden"

    def rows(self) -> list[list[str]]:
        """A head, and a row for each rank of the median step; ms."""
        names = [
            "forward",
            "backward",
            "exposed transfer",
            "exposed waiting",
            "optimizer",
            "between",
            "all",
            "(hidden)",
        ]
        table = [["step", "rank", *names]]
        for each in self.middle:
            seen = each.times
            exposed = ["not observed"] * 2
            if seen is not None:
                exposed = [ms(seen.exposed_transfer_ns), ms(seen.exposed_waiting_ns)]
            own = [ms(each.forward_ns), ms(each.backward_ns), *exposed, ms(each.optimizer_ns), ms(each.between_ns)]
            hidden = ms(seen.hidden_ns) if seen is not None else "not observed"
            label = self.labels[each.rank]
            table.append([each.title, label, *own, ms(each.total_ns), hidden])
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
    return Breakdown(tuple(_parts(step) for step in steps), trace.labels, note)


_LAUNCHED = "On a GPU: the times of the CPU that launches the kernels, which run on by themselves."


def _parts(step: TrainingStep) -> StepTimes:
    travels, waits = moments(step)
    busy = union([*travels, *(each for found in waits.values() for each in found)])
    exposed = without(busy, union(step.computing))
    forward, backward = union(step.of("forward")), union(step.of("backward"))
    optimizer = without(union(step.of("optimizer")), [*forward, *backward])
    times = share_of(step).times
    if times is None:
        exposed = []
    total = step.end_ns - step.start_ns
    inside = union([*forward, *backward, *optimizer])
    return StepTimes(
        number=step.number,
        title=step.title,
        rank=step.rank,
        total_ns=total,
        forward_ns=length_ns(without(forward, exposed)),
        backward_ns=length_ns(without(without(backward, forward), exposed)),
        optimizer_ns=length_ns(without(optimizer, exposed)),
        between_ns=total - length_ns(inside),
        times=times,
    )


def _longest(step: Sequence[StepTimes]) -> int:
    return max(each.total_ns for each in step)
