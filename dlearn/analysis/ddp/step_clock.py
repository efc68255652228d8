"""The clock of training steps, the CPUs' or the GPUs', and notes on it."""

from collections import Counter, defaultdict

from msgspec.structs import replace

from dlearn.analysis.ddp.training_steps import Interval, pieces
from dlearn.events.clocks import DeviceSpan
from dlearn.events.event import NOT_OBSERVED, Collective, Event, Gradient, PhaseSpan, Span
from dlearn.join.joining import operations
from dlearn.join.selection import once
from dlearn.join.training_phases import of_ddp
from dlearn.shown import time_text
from dlearn.trace import Trace


@once
def on_device(trace: Trace) -> Trace:
    """Return the trace with phase spans, gradients and collectives in the time of the GPUs.

    All or nothing: a GPU lags behind its CPU by as much as is queued, so the two kinds of times
    never stand side by side. Where one that is needed is not known, on any rank, it is the trace
    itself, in the times of the host, which saw no end on NCCL.
    """
    if trace.selected_from is not None:
        whole = on_device(trace.whole)
        if whole is trace.whole:
            return trace
        # The selected events are looked up by rank and number, and have the GPU's times there.
        return Trace(trace.path, trace.processes, tuple(trace.events), trace.problems, whole)
    spans: dict[tuple[int, int], DeviceSpan] = {}
    for each in trace.processes:
        spans |= {(each.rank, number): span for number, span in each.device_spans.items()}
    needed = filter(_is_needed, trace.events)
    if not spans or not all((event.rank, event.number) in spans for event in needed):
        return trace
    moved = [_moved(event, spans.get((event.rank, event.number))) for event in trace.events]
    moved.sort(key=lambda event: (event.start_ns, event.rank, event.number))
    return Trace(trace.path, trace.processes, tuple(moved), trace.problems)


def _is_needed(event: Event) -> bool:
    """Return whether it hides or is hidden; of the program's own calls no waits are known."""
    if isinstance(event, PhaseSpan):
        return event.end_ns is not None and not event.failed
    if isinstance(event, Collective):
        return of_ddp(event) and not _on_cpu(event)
    return isinstance(event, Gradient)


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


def clock_note(trace: Trace, launched: str = "") -> str:
    """Say that times are the GPUs', and their error; else `launched`, or why no step is seen."""
    if on_device(trace) is trace:
        return launched or _unseen_note(trace)
    spans = [span for process in trace.processes for span in process.device_spans.values()]
    error = time_text(max(span.error_ns for span in spans))
    text = "Times of the GPUs, by CUDA events; against those of the CPUs"
    return f"{text} they may be wrong by {error}."


def step_note(trace: Trace, launched: str = "") -> str:
    return f"{clock_note(trace, launched)} {gate_note(trace)}".strip()


@once
def gate_note(trace: Trace) -> str:
    """Write "Held: rank 1 stood 2.01 s at the gate, and ..."; "" of a job without breakpoints."""
    lasting: dict[int, list[Interval]] = defaultdict(list)
    for span in trace.of(Span):
        if span.held and span.end_ns is not None:
            lasting[span.rank].append((span.start_ns, span.end_ns, "gate"))
    for operation in operations(trace) if lasting else ():
        if operation.last_rank in lasting:
            waited = (operation.start_ns, operation.last_arrival_ns, "waited for")
            lasting[operation.last_rank].append(waited)
    texts = []
    for rank, intervals in sorted(lasting.items()):
        at_gate: Counter[bool] = Counter()
        for start_ns, end_ns, whats in pieces(intervals):
            if "gate" in whats:
                at_gate["waited for" in whats] += end_ns - start_ns
        stood = f"{trace.label(rank)} stood {time_text(at_gate.total())} at the gate"
        of_it = f", and {time_text(at_gate[True])} of the waiting for it were the gate's"
        texts.append(stood + of_it if at_gate[True] else stood)
    return f"Held: {'; '.join(texts)}." if texts else ""


def _unseen_note(trace: Trace) -> str:
    firsts = trace.table.firsts
    made = any(isinstance(event, Collective) and event.role.startswith("DDP") for event in firsts)
    seen = any(isinstance(event, PhaseSpan) and event.phase == "forward" for event in firsts)
    if seen or not made:
        return ""
    unseen = "no forward pass of it was seen: torch.compile's Python reducer leaves none"
    return f"A DDP model was made, and {unseen}."
