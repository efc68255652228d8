"""One step of a long trace: the part that a picture or a page can show whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from dlearn.analysis.hangs import hangs
from dlearn.analysis.iteration import iteration, iterations
from dlearn.analysis.training_steps import step_spans, training_steps
from dlearn.trace.event import Event, RpcWindow, Span
from dlearn.trace.trace import Trace

Name = TypeVar("Name")


class Part(NamedTuple):
    """What is shown, and `which` part of the trace it is, in words."""

    trace: Trace
    which: str


def one_step(trace: Trace) -> Part:
    """The last complete iteration, "step" span or training step; of a job that hangs the last of its spans.

    Where none is to be found, or the trace is a part already, all of it.
    """
    if trace.selected_from is not None:
        return Part(trace, "the part that was chosen")
    if iterations(trace):
        return _last_iteration(trace)
    names = step_spans(trace)
    ended = _complete(trace)
    complete = names if hangs(trace) else [name for name in names if name in ended]
    if complete:
        return Part(trace.within(complete[-1]), f"{complete[-1]!r}, the last complete one of {len(names):,} steps")
    return _last_training_step(trace)


def _complete(trace: Trace) -> set[str]:
    """The spans whose end was seen on every rank that has spans."""
    spans = [event for event in trace.events if isinstance(event, Span)]
    everywhere = _everywhere(((span.name, span.rank) for span in spans), {span.rank for span in spans})
    return {*everywhere} - {span.name for span in spans if span.pending}


def _everywhere(seen: Iterable[tuple[Name, int]], ranks: set[int]) -> list[Name]:
    """What was seen on each of these ranks."""
    found: dict[Name, set[int]] = defaultdict(set)
    for name, rank in seen:
        found[name].add(rank)
    return [name for name, where in found.items() if where == ranks]


def _last_iteration(trace: Trace) -> Part:
    """What belongs to a distributed autograd context of it: the n-th of each driver."""
    told = iteration(trace)
    contexts = [event for event in trace.events if isinstance(event, RpcWindow) and event.op == "context"]
    mine = [[each for each in contexts if each.rank == rank][told.number] for rank in told.drivers]
    count = iterations(trace)
    which = f"iteration {told.number}, the last of {count:,}, counted from 0"
    return Part(_select(trace, lambda event: any(event is each for each in mine)), which)


def _last_training_step(trace: Trace) -> Part:
    steps = training_steps(trace)
    everywhere = _everywhere(((step.number, step.rank) for step in steps), set(trace.ranks))
    if not everywhere:
        return Part(trace, "the whole trace")
    last = max(everywhere)
    mine = {step.rank: (step.start_ns, step.end_ns) for step in steps if step.number == last}
    part = _select(trace, lambda event: mine[event.rank][0] <= event.start_ns <= mine[event.rank][1])
    return Part(part, f"training step {last}, the last complete one, counted from 0")


def _select(trace: Trace, wanted: Callable[[Event], bool]) -> Trace:
    events = tuple(event for event in trace.events if wanted(event))
    return Trace(trace.path, trace.processes, events, trace.problems, trace)
