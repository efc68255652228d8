"""Where training steps begin and end: by DDP's phases, the user's spans, or FSDP's optimizer."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from dlearn.events.event import Collective, PhaseSpan, Span
from dlearn.events.event_table import NONE, Column
from dlearn.join.columns import grouped
from dlearn.join.ends import End
from dlearn.join.joining import operations
from dlearn.join.selection import Selection, once
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations

_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"[^\W\d]{3,}\D*\d+")
"""A word and a number: what is called "F3" is a part of something."""
ENDLESS = 1 << 62

CalledEnd = tuple[Operation, End]
CalledPhase = tuple[PhaseSpan, Sequence[CalledEnd]]
"""A phase span, and the calls that began in it, in the order of start."""


class StepPhases(NamedTuple):
    """One step of DDP on one rank, whose steps `number` counts; it is `over` if all was seen."""

    number: int
    rank: int
    title: str
    phases: list[CalledPhase]
    over: bool

    @property
    def start_ns(self) -> int:
        return self.phases[0][0].start_ns

    @property
    def end_ns(self) -> int:
        return max(span.end_ns or 0 for span, _ in self.phases)


@once
def steps_by_phases(trace: Selection) -> list[StepPhases]:
    """Return every rank's steps; the title of one is the user's span around it, if any."""
    whole = trace.whole
    names, steps = span_names(whole), []
    for rank, of_rank in phases_by_rank(whole).items():
        for index, (phases, over) in enumerate(_cut(of_rank)):
            title = names.get((rank, phases[0][0].parent)) or f"training step {index}"
            steps.append(StepPhases(index, rank, title, phases, over))
    return steps


def span_names(whole: Selection) -> dict[tuple[int, int | None], str]:
    """Return each span's name; of a range of the profiler that of the span around it."""
    names: dict[tuple[int, int | None], str] = {}
    for span in whole.of(Span):
        outer = names.get((span.rank, span.parent), "")
        names[span.rank, span.number] = outer if span.of_profiler else span.name
    return names


@once
def phases_by_rank(trace: Selection) -> dict[int, list[CalledPhase]]:
    """Return each rank's phases that ended well; a forward begins with what DDP sends before it."""
    spans = [span for span in trace.of(PhaseSpan) if span.end_ns is not None and not span.failed]
    calls = calls_by_rank(trace) if spans else {}
    phases: dict[int, list[CalledPhase]] = defaultdict(list)
    for span in spans:
        if span.phase != "forward" and span.site and span.rank not in phases:
            continue  # Before DDP's first forward; older files, which have no sites, begin there.
        earlier = phases[span.rank]
        if span.phase == "forward":
            over_ns = earlier[-1][0].end_ns or 0 if earlier else 0
            before = between(calls[span.rank], over_ns, span.start_ns)
            sent = (end.start_ns for _, end in before if of_ddp(end) and end.phase == "forward")
            span = replace(span, start_ns=min(sent, default=span.start_ns))
        within = between(calls[span.rank], span.start_ns - 1, span.end_ns or 0)
        earlier.append((span, within))
    return phases


def calls_by_rank(trace: Selection) -> dict[int, list[CalledEnd]]:
    """Return all calls of each rank, in the order of start."""
    calls: dict[int, list[CalledEnd]] = defaultdict(list)
    for operation in operations(trace):
        for end in operation.ends:
            calls[end.rank].append((operation, end))
    for of_rank in calls.values():
        of_rank.sort(key=lambda call: call[1].start_ns)
    return calls


def between(calls: Sequence[CalledEnd], after_ns: int, until_ns: int) -> Sequence[CalledEnd]:
    """Return the calls that began after the first of these times, and not after the second."""
    first = bisect_right(calls, after_ns, key=lambda call: call[1].start_ns)
    return calls[first : bisect_right(calls, until_ns, key=lambda call: call[1].start_ns)]


def of_ddp(end: End) -> bool:
    """Return whether DDP launched it: the reducer, a hook, or the module before forward."""
    if not isinstance(end, Collective):
        return False
    if end.phase != "backward":
        return end.phase == "forward" and end.role.startswith("DDP")
    by_callback = bool(end.thread) and end.backward is None
    return by_callback or end.launcher in ("reducer", "comm hook")


def _cut(phases: Sequence[CalledPhase]) -> list[tuple[list[CalledPhase], bool]]:
    """Begin a step with the first forward pass after the one before. Return whether it is over."""
    by_optimizer = any(span.phase == "optimizer" for span, _ in phases)
    steps: list[list[CalledPhase]] = []
    over = True
    for span, calls in phases:
        if not steps or (over and span.phase == "forward"):
            steps.append([])
            over = False
        steps[-1].append((span, calls))
        if by_optimizer:
            over |= span.phase == "optimizer"
        elif span.phase == "backward":
            over |= any(of_ddp(end) for _, end in calls)
    return [(step, over or step is not steps[-1]) for step in steps]


def step_spans(trace: Selection) -> dict[str, list[Span]]:
    """Take the most usual kind of the user's spans for steps, by name, in the order of start."""
    named = (span for span in trace.of(Span) if _NUMBERED.match(span.name) and not span.of_profiler)
    kinds = grouped(named, lambda span: _NUMBER.sub("#", span.name))
    usual = max(kinds.values(), key=len, default=[])
    return grouped(sorted(usual, key=lambda span: span.start_ns), lambda span: span.name)


@once
def numbered_steps(whole: Selection) -> dict[int, str]:
    """Return the title of each step by the number in it, or by its index."""
    titles = {index: f"training step {index}" for _, index, *_ in windows_of_steps(whole)}
    titles |= {step.number: step.title for step in steps_by_phases(whole)}
    found = [titles[index] for index in sorted(titles)] or [*step_spans(whole)]
    numbers = [int(_NUMBER.findall(title)[-1]) if _NUMBER.search(title) else -1 for title in found]
    if -1 in numbers or len({*numbers}) < len(numbers):
        numbers = [*range(len(found))]
    return dict(zip(numbers, found, strict=True))


Window = tuple[int, int, int, int]
"""A rank, the index of its step, when it began and ended there; one that never ended is ENDLESS."""


@once
def windows_of_steps(whole: Selection) -> list[Window]:
    table = whole.rows.table
    passes = table.of_firsts(lambda first: first.phase in ("forward", "backward"))
    windows = []
    for step in steps_by_phases(whole):
        end_ns = step.end_ns if step.over else ENDLESS
        windows.append((step.rank, step.number, step.start_ns, end_ns))
    if not windows and not step_spans(whole):
        windows += _between_optimizers(whole, table.start_ns[passes].min(initial=ENDLESS))
    # In a pass that has never ended a rank may hang.
    stuck = table.pending & passes
    for rank, index, _, end_ns in {window[0]: window for window in windows}.values():
        if (stuck & (table.rank == rank) & (table.start_ns > end_ns)).any():
            windows.append((rank, index + 1, end_ns + 1, ENDLESS))
    return windows


def _between_optimizers(whole: Selection, begin_ns: int) -> Iterator[Window]:
    """Yield the steps of FSDP: from one step of the rank's first optimizer to its next."""
    last: dict[int, Window] = {}
    first: dict[int, PhaseSpan] = {}
    for span in whole.of(PhaseSpan):
        if span.end_ns is not None and span.of == first.setdefault(span.rank, span).of:
            _, before, _, end_ns = last.get(span.rank, (0, -1, 0, begin_ns - 1))
            last[span.rank] = (span.rank, before + 1, end_ns + 1, span.end_ns)
            yield last[span.rank]


@once
def step_of_rows(whole: Selection) -> Column:
    """Return the index of the step in which each event began on its rank; NONE outside of steps."""
    table, found = whole.rows.table, np.full(len(whole.rows.table), NONE)
    windows = np.array(sorted(windows_of_steps(whole)), np.int64).reshape(-1, 4)
    for rank in {*windows[:, 0].tolist()}:
        _, index, begin_ns, end_ns = windows[windows[:, 0] == rank].T
        rows = np.flatnonzero((table.rank == rank) & (table.start_ns >= begin_ns[0]))
        at = np.searchsorted(begin_ns, table.start_ns[rows], side="right") - 1
        found[rows] = np.where(table.start_ns[rows] <= end_ns[at], index[at], NONE)
    return found


def steps_of(asked: Operations, whole: Selection) -> Column:
    """Return the index of the step in which each operation was called; NONE outside of steps."""
    known = step_of_rows(whole)
    known = np.append(known, np.full(len(asked.table.events) - len(known), NONE))  # RPC adds rows.
    return np.asarray(asked.table.over_ends(np.maximum, known)[asked.rows])
