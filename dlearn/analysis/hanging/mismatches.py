"""What went through without an error, and may be wrong all the same: the ranks met, but not in the same call.

Observations, not verdicts: a program may well call all_reduce from one line on rank 0 and from another on rank 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from dlearn.analysis.hanging.hang_words import call_text, called_at, listed, sites_text
from dlearn.analysis.hanging.stuck import hangs
from dlearn.events.event import Collective
from dlearn.join.joining import operations
from dlearn.join.tables.operation_table import Operation
from dlearn.trace import Trace

_ROOTED = {"broadcast", "reduce", "gather", "gather_single", "scatter", "barrier", "monitored_barrier"}
"""Here the root may well stand in a branch of its own, or nothing is computed."""


Suspicion = Literal["calls", "sites", "data"]


class Mismatch(msgspec.Struct, frozen=True):
    """`why`: "calls" do not fit together · called from different "sites" · the same "data" from all ranks.

    "data" needs `record(checksums=True)`, and an all-reduce before it in which the ranks gave different data of that
    size: it may have summed them already.
    """

    operation: Operation
    why: Suspicion


def mismatches(trace: Trace) -> tuple[Mismatch, ...]:
    """Every collective that all ranks called and that ended, and yet may be wrong; the first called first."""
    stuck = {id(hang.operation) for hang in hangs(trace)}
    summed: set[tuple[str, int]] = set()
    found = []
    asked = operations(trace)
    suspects = [place for one, places in asked.alike() if _may_be_wrong(one) for place in places.tolist()]
    for operation in asked.at(np.array(sorted(suspects), np.intp)):
        calls = [end for end in operation.ends if isinstance(end, Collective)]
        if len(calls) > 1 and not operation.missing and not operation.refused and id(operation) not in stuck:
            why = _why(operation, calls, summed)
            if why is not None:
                found.append(Mismatch(operation, why))
    return tuple(found)


def _may_be_wrong(one: Operation) -> bool:
    """Whether there is anything to look at in an operation, and in those like it."""
    calls = [end for end in one.ends if isinstance(end, Collective)]
    checked = any(call.checksum is not None for call in calls)
    return one.misfit is not None or checked or len({call.site for call in calls}) > 1


def _why(operation: Operation, calls: Sequence[Collective], summed: set[tuple[str, int]]) -> Suspicion | None:
    if operation.misfit is not None:
        return "calls"
    if operation.op == "all_reduce" and _is_summed_again(operation, calls, summed):
        return "data"
    if operation.op in _ROOTED or len({call.site for call in calls}) == 1:
        return None
    of_the_program = not any(call.launcher or call.role or call.thread or not call.site for call in calls)
    return "sites" if of_the_program else None


def _is_summed_again(operation: Operation, calls: Sequence[Collective], summed: set[tuple[str, int]]) -> bool:
    """`summed` keeps the group and size of each sum of different data so far."""
    if calls[0].checksum is None:
        return False
    sums = {call.checksum for call in calls}
    key = (operation.group.name, sum(tensor.logical_bytes for tensor in calls[0].inputs))
    if len(sums) == 1:
        return key in summed
    if None not in sums:
        summed.add(key)
    return False


def mismatch_sentences(found: Iterable[Mismatch], trace: Trace) -> list[str]:
    """A sentence for each, those from the same lines together."""
    alike: dict[tuple[object, ...], list[Mismatch]] = {}
    for each in found:
        operation = each.operation
        key = (each.why, operation.op, operation.misfit, *(end.site for end in operation.ends))
        alike.setdefault(key, []).append(each)
    return [mismatch_sentence(group[0], trace, times=len(group)) for group in alike.values()]


def mismatch_sentence(mismatch: Mismatch, trace: Trace, times: int = 1) -> str:
    """ "rank 0 called all_reduce #3 at a.py:5, rank 1 at a.py:6; if these were not to meet, its result is wrong"."""
    operation = mismatch.operation
    again = f" (and {times - 1:,} more from there)" if times > 1 else ""
    call = f"{operation.op} #{operation.seq}{again}"
    if mismatch.why == "calls":
        return f"{call} went through, and {operation.misfit}: its results mean nothing{sites_text(operation, trace)}"
    if mismatch.why == "sites":
        return f"{called_at(operation, trace, call)}; if these were not to meet, its result is wrong"
    who = listed([trace.label(end.rank) for end in operation.ends])
    return (
        f"{call_text(operation.ends[0])}{again}: {who} gave the same data, as if these had been summed before;"
        f" then they are now {len(operation.ends)} times too large"
    )
