"""Which waiting was the gate's: in a held job a rank may be late because somebody had its call wait."""

from __future__ import annotations

from collections import defaultdict

from dlearn.analysis.ddp.intervals import Interval, common, length_ns, union
from dlearn.analysis.findings import time_text
from dlearn.join.joining import once, operations
from dlearn.trace.event import Span
from dlearn.trace.trace import Trace


@once
def gate_note(trace: Trace) -> str:
    """ "Held: rank 1 stood 2.01 s at the gate, and 2.00 s of the waiting for it were the gate's"; "" of no held job."""
    at_gate: dict[int, list[Interval]] = defaultdict(list)
    for span in trace.of(Span):
        if span.held and span.end_ns is not None:
            at_gate[span.rank].append((span.start_ns, span.end_ns))
    if not at_gate:
        return ""
    waited: dict[int, list[Interval]] = defaultdict(list)
    for operation in operations(trace):
        if operation.last_rank in at_gate and operation.transfer_ns is not None:
            first_ns = min(end.start_ns for end in operation.ends)
            waited[operation.last_rank] += common([(first_ns, operation.transfer_ns)], at_gate[operation.last_rank])
    told = []
    for rank, found in sorted(at_gate.items()):
        stood = f"{trace.label(rank)} stood {time_text(length_ns(union(found)))} at the gate"
        of_it = length_ns(union(waited[rank]))
        told.append(f"{stood}, and {time_text(of_it)} of the waiting for it were the gate's" if of_it else stood)
    return f"Held: {'; '.join(told)}."
