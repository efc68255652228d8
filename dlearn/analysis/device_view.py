"""The same trace in the time of the GPUs: overlap is about when kernels ran, and not about when they were launched.

Host and GPU times are not mixed within a stretch of a training step: where the GPU's are not known of all that happens
in it, the stretch keeps the host's, and when its collectives ended is not observed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from msgspec.structs import replace

from dlearn.analysis.findings import time_text
from dlearn.analysis.joining import once
from dlearn.trace.device_times import DeviceSpan
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, Gradient, Stretch
from dlearn.trace.trace import Trace

_TIMED = (Collective, Gradient, Stretch)


@once
def on_device(trace: Trace) -> Trace:
    """Stretches, gradients and collectives when the GPU was at them; the trace itself where no GPU told."""
    if trace.selected_from is not None:
        whole = on_device(trace.whole)
        if whole is trace.whole:
            return trace
        mine = {(event.rank, event.number) for event in trace.events}
        events = tuple(event for event in whole.events if (event.rank, event.number) in mine)
        return Trace(trace.path, trace.processes, events, trace.problems, whole)
    spans = {(each.rank, number): span for each in trace.processes for number, span in each.device_spans.items()}
    ranks = {each.rank for each in trace.events if isinstance(each, Collective) and (each.rank, each.number) in spans}
    if not ranks:
        return trace
    moved = [event for rank in ranks for event in _of_rank(trace, rank, spans)]
    others = [event for event in trace.events if event.rank not in ranks]
    events = tuple(sorted([*others, *moved], key=lambda event: (event.start_ns, event.rank, event.number)))
    return Trace(trace.path, trace.processes, events, trace.problems)


def _of_rank(trace: Trace, rank: int, spans: dict[tuple[int, int], DeviceSpan]) -> list[Event]:
    mine = [event for event in trace.events if event.rank == rank]
    stretches = [event for event in mine if isinstance(event, Stretch) and event.end_ns is not None]
    inside: dict[int, list[Event]] = defaultdict(list)
    for event in mine:
        place = bisect_right(stretches, event.start_ns, key=lambda each: each.start_ns) - 1
        if isinstance(event, _TIMED) and place >= 0 and event.start_ns <= (stretches[place].end_ns or 0):
            inside[place].append(event)
    known = {
        event.number
        for events in inside.values()
        if all((rank, event.number) in spans for event in events if not _on_cpu(event))
        for event in events
    }
    return [_moved(event, spans.get((rank, event.number)), event.number in known) for event in mine]


def _on_cpu(event: Event) -> bool:
    """Of a step on a GPU some calls may still send what lies in the host's memory."""
    return isinstance(event, Collective) and all(each.device == "cpu" for each in (*event.inputs, *event.outputs))


def _moved(event: Event, span: DeviceSpan | None, known: bool) -> Event:
    if known and span is not None:
        if isinstance(event, Gradient):
            return replace(event, start_ns=span.start_ns)
        return replace(event, start_ns=span.start_ns, end_ns=span.end_ns, ended_by=span.ended_by)
    if isinstance(event, Collective) and not event.failed and not _on_cpu(event) and not event.pending:
        return replace(event, end_ns=None, ended_by=NOT_OBSERVED)
    return event


def device_note(trace: Trace) -> str:
    """Whose times these are, and by how much they may be wrong; nothing where no GPU told."""
    if on_device(trace) is trace:
        return ""
    error = max(span.error_ns for each in trace.processes for span in each.device_spans.values())
    return f"Times of the GPUs, by CUDA events; against those of the CPUs they may be wrong by {time_text(error)}."
