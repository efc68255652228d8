"""Who reduced the gradients of each optimizer step: DDP, FSDP2, the program by hand, or no rank.

A judgement of a user's program needs all of it: a DDP model over two ranks or more, gradients of
its parameters on each, a step that used them, and no other call that could have averaged anything.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dlearn.events.event import Bucket, Collective, Event, Gradient, PhaseSpan, PointToPoint
from dlearn.events.event_table import NONE
from dlearn.events.job_facts import DdpModel, OptimizerMade
from dlearn.events.mpi_facts import OtherMpiCall
from dlearn.events.process import Process
from dlearn.join.buckets import reported_last
from dlearn.join.columns import grouped
from dlearn.join.ends import logical_bytes
from dlearn.join.gradients import passes
from dlearn.join.matching import join_groups
from dlearn.join.selection import once
from dlearn.trace import Trace

SMALL_SHARE = 64
"""Calls of less than this part of a model's bytes between two steps average none of it."""
Call = Collective | PointToPoint
Why = Literal["", "no forward", "no sync"]
"""Why no pass was reduced: DDP's forward was not called before, or in no_sync; "": unknown."""


class GradientStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an optimizer on one rank, and gradients of the DDP model `model` (None: no DDP).

    `number` counts the optimizer's steps from 1. Of the backward `passes` since the step before,
    `reduced` were summed over the ranks, `by` "DDP" or "FSDP2". `by_hand` is the largest call of
    the program's own since the first of them. `again` is whether all passes reduced the same,
    called from one line, for this step alone.
    """

    rank: int
    optimizer: int
    name: str
    model: int | None
    number: int
    passes: int
    reduced: int
    by: str
    why: Why
    site: str
    by_hand: Call | None
    again: bool


class Unreduced(msgspec.Struct, frozen=True):
    """Steps with gradients of `model` that these ranks did not reduce; `ever`: it ran forward."""

    optimizer: int
    name: str
    model: DdpModel
    why: Why
    site: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    ever: bool
    steps: tuple[int, ...]


class Repeated(msgspec.Struct, frozen=True):
    """Before every step of an optimizer the same gradients were reduced `times`, from one line."""

    optimizer: int
    name: str
    by: str
    site: str
    times: int
    steps: int


class Unsent(msgspec.Struct, frozen=True):
    """In its last pass no gradient of `parameters` came on these ranks: DDP sent no such bucket."""

    backward_pass: int
    parameters: tuple[str, ...]
    buckets: tuple[int, ...]
    ranks: tuple[int, ...]


# What each rank did -------------------------------------------------------------------------------


@once
def phases(trace: Trace) -> defaultdict[tuple[int, str], list[PhaseSpan]]:
    """Return the phases of each rank, by rank and kind, in the order of their start."""
    return grouped(trace.of(PhaseSpan), lambda span: (span.rank, span.phase))


def forwards_of(trace: Trace, rank: int, model: int | None) -> list[PhaseSpan]:
    return [span for span in phases(trace.whole)[rank, "forward"] if span.of == model]


def outer(spans: Iterable[PhaseSpan]) -> list[PhaseSpan]:
    """Leave out steps inside another's, as ZeRO's are."""
    found: list[PhaseSpan] = []
    for span in spans:
        if span.of is not None and (not found or span.start_ns >= (found[-1].end_ns or 0)):
            found.append(span)
    return found


START = attrgetter("start_ns")


def last_before(spans: Sequence[PhaseSpan], at_ns: int) -> PhaseSpan | None:
    """Return the last of these that began before this time."""
    index = bisect_left(spans, at_ns, key=START)
    return spans[index - 1] if index else None


class _Calls(NamedTuple):
    """The calls of one rank by start: their row, time, bytes, maker and backward pass."""

    rows: np.ndarray
    start_ns: np.ndarray
    size: np.ndarray
    by: np.ndarray
    task: np.ndarray


_OWN, _DDP, _FSDP2, _OF_TORCH = range(4)


def _maker(event: Event) -> int:
    if not isinstance(event, Collective):
        return _OWN
    if event.launcher:
        return _FSDP2 if event.launcher == "FSDP2" else _DDP
    return _OF_TORCH if event.role else _OWN


def _size(event: Event) -> int:
    return logical_bytes(event) if isinstance(event, Call) else 0


def _calls(trace: Trace, rank: int) -> _Calls:
    table = trace.table
    rows = np.flatnonzero((table.rank == rank) & table.is_a(Collective, PointToPoint))
    rows = rows[np.argsort(table.start_ns[rows], kind="stable")]
    makers, sizes = table.of_firsts(_maker, np.int64), table.of_firsts(_size, np.int64)
    task = table.column("backward")[rows]
    return _Calls(rows, table.start_ns[rows], sizes[rows], makers[rows], task)


class Backward(NamedTuple):
    """A backward pass: when, its line, the bytes of each call that reduced, or `why` none did."""

    start_ns: int
    site: str
    sent: tuple[int, ...]
    why: Why


def backwards_of(trace: Trace, rank: int, model: int | None) -> list[Backward]:
    """Return those in which gradients of this DDP model came; of None, in which FSDP2 sent."""

    def is_asked(event: Event) -> bool:
        if model is None:
            return _maker(event) == _FSDP2
        return isinstance(event, Gradient) and event.model == model

    table, calls, sent = trace.table, _calls(trace, rank), defaultdict(list)
    ours = calls.by == (_FSDP2 if model is None else _DDP)
    for task, size in zip(calls.task[ours].tolist(), calls.size[ours].tolist(), strict=True):
        sent[task].append(size)
    rows = np.flatnonzero((table.rank == rank) & table.of_firsts(is_asked))
    tasks, first = np.unique(table.column("backward")[rows], return_index=True)
    starts_ns, found = table.start_ns[rows[first]], list[Backward]()
    spans, forwards = phases(trace.whole)[rank, "backward"], forwards_of(trace, rank, model)
    for index in np.argsort(starts_ns, kind="stable"):
        at_ns, before_ns = int(starts_ns[index]), found[-1].start_ns if found else NONE
        caller: Event | None = table.firsts[table.like[rows[first[index]]]]
        why: Why = ""
        if model is not None:
            caller, forward = last_before(spans, at_ns), last_before(forwards, at_ns)
            if forward is None or forward.start_ns < before_ns:
                why = "no forward"
            elif not forward.synced:
                why = "no sync"
        site = caller.site if caller is not None else ""
        found.append(Backward(at_ns, site, tuple(sorted(sent[tasks[index]])), why))
    return found


# What each step used ------------------------------------------------------------------------------


@once
def gradient_steps(trace: Trace) -> tuple[GradientStep, ...]:
    return tuple(step for process in trace.processes for step in _steps_of(trace, process))


def _steps_of(trace: Trace, process: Process) -> Iterator[GradientStep]:
    """Yield the optimizer steps of one rank, once for each DDP model that the optimizer trains."""
    stepped = outer(phases(trace.whole)[process.rank, "optimizer"])
    if not stepped:
        return
    calls = _calls(trace, process.rank)
    models = (None, *process.models)
    passes = {model: backwards_of(trace, process.rank, model) for model in models}
    ends_ns: dict[int, list[int]] = defaultdict(lambda: [NONE])
    for span in stepped:
        of, end_ns = span.of or 0, span.end_ns or 0
        made = process.optimizers.get(of, OptimizerMade(optimizer=of, name="", models=()))
        for model in made.models or (None,):
            known = passes.get(model, [])
            used = known[_between(known, ends_ns[of][-1], end_ns)]
            first_ns = used[0].start_ns if used else end_ns
            sites = {each.site for each in used}
            whys = {each.why for each in used}
            reduced = [each.sent for each in used if each.sent]
            # What a closure of the optimizer computes, it may throw away; so may another step.
            alone = stepped[_between(stepped, first_ns, span.start_ns)] == [span]
            again = len(sites) == 1 and alone and used[-1].start_ns < span.start_ns
            same = len(reduced) == len(used) and (model is not None or len(set(reduced)) == 1)
            yield GradientStep(
                rank=process.rank, optimizer=of, name=made.name, model=model,
                number=len(ends_ns[of]), passes=len(used), reduced=len(reduced),
                by=("FSDP2" if model is None else "DDP") if reduced else "",
                why=whys.pop() if len(whys) == 1 and not reduced else "",
                site=sites.pop() if len(sites) == 1 else "",
                by_hand=_by_hand(trace, calls, first_ns, end_ns), again=again and same,
            )  # fmt: skip
        ends_ns[of].append(end_ns)


def _between(items: Sequence[PhaseSpan | Backward], after_ns: int, until_ns: int) -> slice:
    """Return which of these began after the first of these times, and not after the second."""
    return slice(*(bisect_right(items, at_ns, key=START) for at_ns in (after_ns, until_ns)))


def _by_hand(trace: Trace, calls: _Calls, first_ns: int, end_ns: int) -> Call | None:
    """Return the largest call of the program's own between these times."""
    begin, end = np.searchsorted(calls.start_ns, [first_ns, end_ns])
    own = begin + np.flatnonzero(calls.by[begin:end] == _OWN)
    if not len(own) or not calls.size[own].max():
        return None
    (event,) = trace.table.made(calls.rows[own[[int(calls.size[own].argmax())]]])
    return event if isinstance(event, Call) else None


# Judgements ---------------------------------------------------------------------------------------


@once
def unreduced(trace: Trace) -> tuple[Unreduced, ...]:
    """Find steps with gradients that DDP was to reduce, and did not, nor anything else."""
    if not _all_is_seen(trace):
        return ()
    by_step: dict[tuple[int, int, int], dict[int, GradientStep]] = defaultdict(dict)
    for step in gradient_steps(trace):
        if step.model is not None and step.passes:
            by_step[step.optimizer, step.model, step.number][step.rank] = step
    spans = (each for each in trace.table.firsts if isinstance(each, PhaseSpan))
    called = {each.of for each in spans if each.phase == "forward"}
    found: dict[Unreduced, list[int]] = defaultdict(list)
    for (optimizer, model, number), steps in sorted(by_step.items()):
        fact, members = _model_of(trace, model)
        if fact is None or len(members) < 2 or not set(members).issubset(steps):
            continue
        without = tuple(rank for rank in members if not steps[rank].reduced)
        whys: set[Why] = {steps[rank].why for rank in without}
        if len(whys) != 1 or "" in whys:
            continue
        first, others = steps[without[0]], tuple(rank for rank in members if rank not in without)
        what = (optimizer, first.name, fact, first.why, first.site)
        found[Unreduced(*what, without, others, model in called, ())].append(number)
    judged = [replace(each, steps=tuple(numbers)) for each, numbers in found.items()]
    return tuple(each for each in judged if not _may_average(trace, each))


def _all_is_seen(trace: Trace) -> bool:
    """Return whether all that ranks sent each other is in the trace."""
    whole = all(process.complete for process in trace.processes)
    footers = (process.footer for process in trace.processes)
    left_out = any(footer is not None and footer.left_out for footer in footers)
    others = trace.whole.rpc.exchanges or trace.whole.rows.has(OtherMpiCall)
    return whole and not left_out and not others


def _model_of(trace: Trace, model: int) -> tuple[DdpModel | None, tuple[int, ...]]:
    groups = join_groups(trace.processes)
    for process in trace.processes:
        fact = process.models.get(model)
        if fact is not None and (process.rank, fact.group) in groups:
            return fact, groups[process.rank, fact.group].members
    return None, ()


def _may_average(trace: Trace, found: Unreduced) -> bool:
    """Return whether between two steps a rank's own calls sent enough to average the model."""
    for rank in found.ranks + found.others:
        calls, steps = _calls(trace, rank), phases(trace.whole)[rank, "optimizer"]
        begun = backwards_of(trace, rank, found.model.model)[0]
        own = (calls.by == _OWN) & (calls.start_ns >= begun.start_ns)
        gap = np.searchsorted([each.end_ns or 0 for each in steps], calls.start_ns[own])
        if (np.bincount(gap, calls.size[own]) * SMALL_SHARE >= found.model.bytes).any():
            return True
    return False


@once
def repeated(trace: Trace) -> tuple[Repeated, ...]:
    """Find optimizers before each of whose steps gradients were reduced as often, and not once."""
    found: dict[tuple[object, ...], Repeated] = {}
    by_optimizer = attrgetter("optimizer", "rank", "model")
    for steps in grouped(gradient_steps(trace), by_optimizer).values():
        first, count = steps[0], len(steps)
        same = all(each.again and each.reduced == first.reduced for each in steps)
        if same and count > 1 and first.reduced > 1:
            what = (first.optimizer, first.name, first.by, first.site)
            found[what] = Repeated(*what, first.reduced, count)
    return tuple(found.values())


@once
def unsent(trace: Trace) -> tuple[Unsent, ...]:
    """Find buckets that a rank which ended by a RuntimeError had not sent for want of gradients."""
    ranks: dict[Unsent, list[int]] = defaultdict(list)
    for process in trace.processes:
        beat = process.heartbeat
        died = beat is not None and beat.ended == RuntimeError.__name__
        for fact in process.models.values() if died else ():
            found = _unsent(trace, process.rank, fact)
            if found is not None:
                ranks[found].append(process.rank)
    return tuple(replace(each, ranks=tuple(sorted(of))) for each, of in ranks.items())


def _unsent(trace: Trace, rank: int, model: DdpModel) -> Unsent | None:
    """Return parameters whose gradients never came in the last pass, and their unsent buckets."""
    done = passes(trace.whole).get((rank, model.model))
    if not done:
        return None
    last, at_ns = done[-1], done[-1].gradients[-1].start_ns
    forward = last_before(forwards_of(trace, rank, model.model), at_ns)
    backward = last_before(phases(trace.whole)[rank, "backward"], at_ns)
    if forward is None or not forward.synced or backward is None or backward.failed:
        return None
    if at_ns > (backward.end_ns or 0):
        return None
    own = (rank, model.model)
    reported = (each for each in trace.whole.of(Bucket) if (each.rank, each.model) == own)
    buckets = reported_last(reported)
    calls = _calls(trace, rank)
    sent = ((calls.task == last.task) & (calls.by == _DDP)).sum()
    late = [each for each in buckets if last.never_ready(each.parameters)]
    if not late or sent >= len(buckets):
        return None
    never = {name for each in late for name in last.never_ready(each.parameters)}
    parameters = tuple(name for name in model.parameters if name in never)
    return Unsent(len(done), parameters, tuple(each.index for each in late), ())
