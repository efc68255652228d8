"""The first all-reduce of a DDP model in which ranks had come differently far, before one hangs.

The k-th all-reduce of one rank meets the k-th of another: a rank that skipped a backward pass, or
made one inside no_sync, is averaged with another pass of the others, and in the end one rank waits
for a call that is not made. Only then are counts compared: batches may well differ in number.
"""

import signal
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dlearn.diagnosis import reductions
from dlearn.diagnosis.reductions import Backward, last_before
from dlearn.events.event import PhaseSpan
from dlearn.events.event_table import NONE
from dlearn.events.job_facts import EXITED, RETURNED
from dlearn.events.process import Process
from dlearn.join.joining import operations
from dlearn.join.tables.operation_table import Operation
from dlearn.trace import Trace

What = Literal["forward pass", "backward pass", "optimizer step"]
Why = Literal["", "skipped", "no sync"]


class Parting(msgspec.Struct, frozen=True):
    """From the all-reduce `operation` on `rank` has made `ahead` more of `what` than others.

    `why`: it "skipped" backward after its forward pass `number` (from 1), called at `site`; or
    backward pass `number` was inside no_sync. `mixed` all-reduces met so before the one that hangs.
    `ahead` is 0 of a rank that did so last of all.
    """

    operation: Operation
    rank: int
    what: What
    ahead: int
    why: Why
    number: int
    site: str
    mixed: int


_KINDS: tuple[What, ...] = ("backward pass", "forward pass", "optimizer step")
_Progress = tuple[int, int, int]
"""How many of each kind a rank had made with a model when it called something."""
_Met = dict[int, _Progress]
"""The progress of each rank when it made its call of one all-reduce."""


class _Way(NamedTuple):
    """The training of one DDP model on one rank."""

    passes: list[Backward]
    forwards: list[PhaseSpan]
    steps: list[PhaseSpan]

    def progress(self, at_ns: int) -> _Progress:
        passes, forwards, steps = (bisect_left(each, at_ns, key=reductions.START) for each in self)
        return passes, forwards, steps

    def fault(self, what: What, until: int) -> tuple[Why, int, str]:
        """Return what was done last otherwise before so many passes: why, in which, and its line."""
        for number in range(until - 1, 0, -1):
            if what == "forward pass":
                forward, following = self.forwards[number - 1 : number + 1]
                begun = [self.progress(each.start_ns)[0] for each in (forward, following)]
                if begun[0] == begun[1]:
                    return "skipped", number, forward.site
            elif what == "backward pass":
                called = self.forward_of(number)
                if called is not None and not called.synced:
                    return "no sync", number, called.site
        return "", 0, ""

    def forward_of(self, number: int) -> PhaseSpan | None:
        """Return the forward pass before a backward pass, by the number of this."""
        return last_before(self.forwards, self.passes[number - 1].start_ns)


def parting(hung: Operation, trace: Trace) -> Parting | None:
    """Find where ranks parted before a DDP model's all-reduce that hangs; None if not known."""
    bucket, missing, members = hung.bucket, hung.missing, hung.group.members
    processes = {process.rank: process for process in trace.processes}
    if bucket is None or not missing or not set(members).issubset(processes):
        return None
    if any(_died(processes[rank]) for rank in missing):
        return None
    ways = {rank: _way(trace, processes[rank], bucket.model) for rank in members}
    if not all(way.forwards for way in ways.values()):
        return None  # In older files they are not told apart.
    table, progress, parted = trace.table, {}, []
    for row, calls in _sums(trace, hung, bucket.model):
        if (table.column("backward")[calls] == NONE).any():
            return None  # A rank that has joined takes part without a pass of its own.
        made = zip(table.rank[calls].tolist(), table.start_ns[calls].tolist(), strict=True)
        progress = {rank: ways[rank].progress(at_ns) for rank, at_ns in made}
        if len(set(progress.values())) > 1:
            parted.append((row, progress))
    if parted and parted[-1][1] is progress and not _in_step([each for _, each in parted]):
        (operation,) = operations(trace.whole).table.made(np.array([parted[0][0]]))
        found = _parting(operation, parted[0][1], ways, len(parted))
        # Who does more between two sums makes fewer of them, and is missing in the end.
        return found if found.rank in missing else None
    ended = (rank for rank in missing if _ended(processes[rank]) in (RETURNED, EXITED))
    return next(filter(None, (_last(hung, rank, ways[rank]) for rank in ended)), None)


def _way(trace: Trace, process: Process, model: int) -> _Way:
    forwards = reductions.forwards_of(trace, process.rank, model)
    # One in evaluation mode has no backward pass, unless all are, with frozen normalisation.
    forwards = [each for each in forwards if each.training] or forwards
    held = {number for number, made in process.optimizers.items() if model in made.models}
    steps = reductions.phases(trace.whole)[process.rank, "optimizer"]
    steps = reductions.outer(each for each in steps if each.of in held)
    return _Way(reductions.backwards_of(trace, process.rank, model), forwards, steps)


def _in_step(met: list[_Met]) -> bool:
    """Return whether each sum was for one optimizer step of all ranks, of however many batches."""
    stepped = False
    for progress in met:
        steps = {made for _, _, made in progress.values()}
        if len(steps) > 1:
            return False
        stepped |= steps != {0}
    return stepped and len({passes for passes, _, _ in met[0].values()}) > 1


def _last(hung: Operation, rank: int, way: _Way) -> Parting | None:
    """Say that a rank's last pass was inside no_sync, or a forward pass alone."""
    last, number, forwards = way.forwards[-1], len(way.passes), len(way.forwards)
    if not number or way.passes[-1].start_ns < last.start_ns:
        return Parting(hung, rank, "forward pass", 0, "skipped", forwards, last.site, 0)
    forward = way.forward_of(number)
    if forward is None or forward.synced:
        return None
    return Parting(hung, rank, "backward pass", 0, "no sync", number, forward.site, 0)


def _ended(process: Process) -> str:
    return process.heartbeat.ended if process.heartbeat is not None else ""


def _died(process: Process) -> bool:
    """Return whether a rank ended by a fault of its own, which explains that it is missing."""
    by_fault = process.exit_status not in (None, 0, -signal.SIGTERM)
    return by_fault or _ended(process) not in ("", RETURNED, EXITED)


def _sums(trace: Trace, hung: Operation, model: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield all-reduces that all ranks called, by their row, and the rows of the calls."""
    met = operations(trace.whole).table
    of_model = [label.bucket is not None and label.bucket.model == model for label in met.labels]
    rows = np.flatnonzero(met.over_ends(np.logical_or, np.array(of_model)[met.label_of]))
    for row in rows[np.argsort(met.start_ns[rows], kind="stable")].tolist():
        ends = met.end_row[met.first[row] : met.first[row + 1]]
        if len(ends) == len(hung.group.members):
            yield row, ends


def _parting(operation: Operation, progress: _Met, ways: dict[int, _Way], mixed: int) -> Parting:
    """Say which rank is ahead, in backward passes if in any, and what it did otherwise before."""
    columns = zip(*progress.values(), strict=True)
    index = next(index for index, counts in enumerate(columns) if len(set(counts)) > 1)
    counts = {rank: progress[rank][index] for rank in sorted(progress)}
    rank = max(counts, key=lambda rank: counts[rank])
    ahead, what = counts[rank] - min(counts.values()), _KINDS[index]
    return Parting(operation, rank, what, ahead, *ways[rank].fault(what, counts[rank]), mixed)
