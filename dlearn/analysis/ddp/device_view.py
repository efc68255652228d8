"""The same trace in the time of the GPUs: overlap is about when kernels ran, and not about when they were launched.

All or nothing: a GPU lags behind its CPU by as much as is queued, so the two kinds of times never stand side by side.
Where one that is needed is not known, on any rank, the times are the host's, which saw no end on NCCL.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlearn.analysis.ddp.training_steps import of_ddp
from dlearn.analysis.findings import time_text
from dlearn.join.joining import once
from dlearn.trace.device_times import DeviceSpan
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, Gradient, Stretch
from dlearn.trace.trace import Trace


@once
def on_device(trace: Trace) -> Trace:
    """Stretches, gradients and collectives when the GPUs were at them; the trace itself where not all is known."""
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
    return Trace(trace.path, trace.processes, tuple(sorted(moved, key=_by_start)), trace.problems)


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


def _by_start(event: Event) -> tuple[int, int, int]:
    return event.start_ns, event.rank, event.number


def device_note(trace: Trace) -> str:
    """Whose times these are, and by how much they may be wrong; nothing where they are the host's."""
    if on_device(trace) is trace:
        return ""
    error = max(span.error_ns for each in trace.processes for span in each.device_spans.values())
    return f"Times of the GPUs, by CUDA events; against those of the CPUs they may be wrong by {time_text(error)}."
