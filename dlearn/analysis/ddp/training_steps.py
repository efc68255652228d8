"""Training steps of a DDP program on each rank: where they begin and end, what they computed, and what they sent.

Forward, backward, optimizer and gradients are observed. A step ends with the optimizer's; in a program that calls none,
with a backward pass in which DDP sends something. All of DDP's own operations are over when the pass returns that
launched them (it waits for them), so an end that was reported later is taken to be then. Calls that wait at once are
counted, too; who waits for others of the program's own, and when, is not seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from dlearn.analysis.ddp.intervals import Interval, union, without
from dlearn.analysis.findings import time_text
from dlearn.join.joining import once, operations
from dlearn.join.waiting import waited_until_ns
from dlearn.trace.device_times import CUDA_EVENT_IN_LINE, DeviceSpan
from dlearn.trace.ends import End
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, Gradient, Span, Stretch
from dlearn.trace.tables.operation_table import Operation
from dlearn.trace.trace import Trace


class BucketShare(NamedTuple):
    """One rank's part in one operation: it waits for `operation.last_rank`, from `transfer_ns` on it sends.

    `transfer_ns` and `end_ns` are None where the end was not observed.
    """

    operation: Operation
    start_ns: int
    transfer_ns: int | None
    end_ns: int | None


class TrainingStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one rank. `number` counts the rank's steps from 0; `name` is the user's span around it, if any.

    `computing` are the stretches in which gradients were still to come and no call waited: what is sent meanwhile is
    hidden. `parts` are DDP's own operations and calls that waited; of the `others` it is not known who waited when.
    """

    number: int
    rank: int
    name: str
    stretches: tuple[Stretch, ...]
    computing: tuple[Interval, ...]
    parts: tuple[BucketShare, ...]
    others: int

    @property
    def title(self) -> str:
        return self.name or f"training step {self.number}"

    @property
    def start_ns(self) -> int:
        return self.stretches[0].start_ns

    @property
    def end_ns(self) -> int:
        return max(end for _, end in self.of())

    def of(self, *phases: str) -> list[Interval]:
        """The stretches of these phases, or all."""
        return [
            (each.start_ns, each.end_ns)
            for each in self.stretches
            if each.end_ns is not None and (not phases or each.phase in phases)
        ]


@once
def training_steps(trace: Trace) -> tuple[TrainingStep, ...]:
    """By number, then rank. Of a selection those of which it holds a stretch, with all that belongs to them."""
    whole = by_rank(trace.whole)
    wanted = {(event.rank, event.number) for event in trace.of(Stretch)}
    steps = [
        step
        for rank, stretches in whole.stretches.items()
        for step in _steps(rank, stretches, whole)
        if any((rank, each.number) in wanted for each in step.stretches)
    ]
    return tuple(sorted(steps, key=lambda step: (step.number, step.rank)))


def last_step(trace: Trace) -> str:
    """The last of the user's spans whose name begins with "step"; "" where there is none."""
    return next((name for name in reversed(trace.spans) if name.startswith("step")), "")


def unseen_note(trace: Trace) -> str:
    """Why a program that makes a DDP model shows no step of it; nothing where it does, or makes none."""
    seen = trace.whole.rows.has(Gradient, Stretch)
    made = any(isinstance(event, Collective) and event.role.startswith("DDP") for event in trace.table.firsts)
    if seen or not made:
        return ""
    return "A DDP model was made, and no forward pass of it was seen: torch.compile's Python reducer leaves none."


def of_ddp(end: End) -> bool:
    """Whether DDP launched it: its reducer, a communication hook or a callback of one, or the module before forward."""
    if not isinstance(end, Collective):
        return False
    by_hook = end.launcher in ("reducer", "comm hook") or bool(end.thread and end.backward is None)
    return by_hook if end.phase == "backward" else end.phase == "forward" and end.role.startswith("DDP")


def waits(end: End) -> bool:
    """Whether the program's thread waited inside the call, or its stream on a GPU did.

    (A reduce_scatter's end is seen by a later wait, too.)
    """
    if not isinstance(end, Collective):
        return False
    on_host = end.ended_by == "wait" and not end.thread and "reduce_scatter" not in end.op
    return on_host or end.ended_by == CUDA_EVENT_IN_LINE


class RankEvents(NamedTuple):
    """What each rank has shown, in the order of start; of stretches those that have ended, and not by an error."""

    stretches: dict[int, list[Stretch]]
    gradients: dict[int, list[int]]
    calls: dict[int, list[tuple[Operation, End]]]
    spans: dict[tuple[int, int], Span]


@once
def by_rank(trace: Trace) -> RankEvents:
    found = RankEvents(defaultdict(list), defaultdict(list), defaultdict(list), {})
    for event in trace.of(Stretch, Gradient, Span):
        match event:
            case Stretch() if event.end_ns is not None and not event.failed:
                found.stretches[event.rank].append(event)
            case Gradient():
                found.gradients[event.rank].append(event.start_ns)
            case Span():
                found.spans[event.rank, event.number] = event
            case _:
                pass
    for operation in operations(trace):
        for end in operation.ends:
            found.calls[end.rank].append((operation, end))
    for calls in found.calls.values():
        calls.sort(key=lambda call: call[1].start_ns)
    for rank, stretches in found.stretches.items():
        found.stretches[rank] = _from_ddps_first_call(stretches, found.calls[rank])
    return found


def _from_ddps_first_call(stretches: Sequence[Stretch], calls: Sequence[tuple[Operation, End]]) -> list[Stretch]:
    """Forward passes with what DDP sends before its module's: to agree on the buckets, and the buffers."""
    over_ns = 0
    widened = []
    for each in stretches:
        if each.phase == "forward":
            first = bisect_right(calls, over_ns, key=lambda call: call[1].start_ns)
            last = bisect_right(calls, each.start_ns, key=lambda call: call[1].start_ns)
            before = [end.start_ns for _, end in calls[first:last] if of_ddp(end) and end.phase == "forward"]
            each = msgspec.structs.replace(each, start_ns=min([*before, each.start_ns]))
        widened.append(each)
        over_ns = each.end_ns or each.start_ns
    return widened


def _steps(rank: int, stretches: Sequence[Stretch], found: RankEvents) -> list[TrainingStep]:
    calls = found.calls[rank]
    steps_end_with_optimizer = any(each.phase == "optimizer" for each in stretches)
    cut: list[list[Stretch]] = []
    over = True
    for each in stretches:
        if over and (each.phase == "forward" or not cut):
            cut.append([])
            over = False
        cut[-1].append(each)
        if steps_end_with_optimizer:
            over = over or each.phase == "optimizer"
        else:
            over = over or (each.phase == "backward" and any(of_ddp(end) for _, end in _within(calls, each)))
    return [_step(number, rank, own, found) for number, own in enumerate(cut)]


def _within(calls: Sequence[tuple[Operation, End]], stretch: Event) -> Sequence[tuple[Operation, End]]:
    """The calls that were made in this stretch."""
    first = bisect_right(calls, stretch.start_ns - 1, key=lambda call: call[1].start_ns)
    last = bisect_right(calls, stretch.end_ns or stretch.start_ns, key=lambda call: call[1].start_ns)
    return calls[first:last]


def _step(number: int, rank: int, stretches: Sequence[Stretch], found: RankEvents) -> TrainingStep:
    parts: list[BucketShare] = []
    waited: list[Interval] = []
    others = 0
    for stretch in stretches:
        for operation, end in _within(found.calls[rank], stretch):
            if not (waits(end) or (of_ddp(end) and end.phase == stretch.phase)):
                others += 1
                continue
            part = _part(operation, end, stretch)
            parts.append(part)
            if waits(end) and part.end_ns is not None:
                waited.append((part.start_ns, part.end_ns))
    parent = stretches[0].parent
    around = found.spans.get((rank, parent)) if parent is not None else None
    return TrainingStep(
        number=number,
        rank=rank,
        name=around.name if around is not None else "",
        stretches=tuple(stretches),
        computing=tuple(without(_computing(stretches, found.gradients[rank]), union(waited))),
        parts=tuple(parts),
        others=others,
    )


def _part(operation: Operation, end: End, stretch: Stretch) -> BucketShare:
    transfer = waited_until_ns(operation, end)
    if end.end_ns is None or stretch.end_ns is None or end.failed or transfer is None:
        return BucketShare(operation, end.start_ns, None, None)
    over = min(end.end_ns, stretch.end_ns)
    return BucketShare(operation, end.start_ns, min(max(transfer, end.start_ns), over), over)


def _computing(stretches: Sequence[Stretch], gradients: Sequence[int]) -> list[Interval]:
    """From the start of each backward pass to its last gradient."""
    found: list[Interval] = []
    for each in stretches:
        if each.phase == "backward" and each.end_ns is not None:
            place = bisect_right(gradients, each.end_ns) - 1
            if place >= 0 and gradients[place] >= each.start_ns:
                found.append((each.start_ns, gradients[place]))
    return found


# The same trace in the time of the GPUs ------------------------------------------------------------------------------


@once
def on_device(trace: Trace) -> Trace:
    """Stretches, gradients and collectives in the time of the GPUs: when kernels ran, and not when they were launched.

    All or nothing: a GPU lags behind its CPU by as much as is queued, so the two kinds of times never stand side by
    side. Where one that is needed is not known, on any rank, it is the trace itself, in the times of the host, which
    saw no end on NCCL.
    """
    if trace.selected_from is not None:
        whole = on_device(trace.whole)
        if whole is trace.whole:
            return trace
        mine = {(event.rank, event.number) for event in trace.events}
        events = tuple(event for event in whole.events if (event.rank, event.number) in mine)
        return Trace(trace.path, trace.processes, events, trace.problems, whole)
    spans = {(each.rank, number): span for each in trace.processes for number, span in each.device_spans.items()}
    if not spans or not all((event.rank, event.number) in spans for event in trace.events if _is_needed(event)):
        return trace
    moved = [_moved(event, spans.get((event.rank, event.number))) for event in trace.events]
    moved.sort(key=lambda event: (event.start_ns, event.rank, event.number))
    return Trace(trace.path, trace.processes, tuple(moved), trace.problems)


def _is_needed(event: Event) -> bool:
    """What hides, and what is hidden: of the program's own collectives it is not known who waits for them when."""
    if isinstance(event, Stretch):
        return event.end_ns is not None and not event.failed
    return isinstance(event, Gradient) or (isinstance(event, Collective) and of_ddp(event) and not _on_cpu(event))


def _on_cpu(event: Collective) -> bool:
    return all(each.device == "cpu" for each in (*event.inputs, *event.outputs))


def _moved(event: Event, span: DeviceSpan | None) -> Event:
    if isinstance(event, Gradient) and span is not None:
        return replace(event, start_ns=span.start_ns)
    if span is not None:
        return replace(event, start_ns=span.start_ns, end_ns=span.end_ns, ended_by=span.ended_by)
    if isinstance(event, Collective) and not (_on_cpu(event) or event.failed or event.pending):
        return replace(event, end_ns=None, ended_by=NOT_OBSERVED)
    return event


def device_note(trace: Trace) -> str:
    """Whose times these are, and by how much they may be wrong; nothing where they are the host's."""
    if on_device(trace) is trace:
        return ""
    error = max(span.error_ns for each in trace.processes for span in each.device_spans.values())
    return f"Times of the GPUs, by CUDA events; against those of the CPUs they may be wrong by {time_text(error)}."
