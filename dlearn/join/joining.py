"""Events of all ranks -> operations: what the program asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TypeVar

import numpy as np

from dlearn.join import buckets
from dlearn.join.rpc_messages import rpc_operations
from dlearn.join.services import service_operations
from dlearn.trace.tables.operation_table import OperationTable
from dlearn.trace.tables.operations import Operations
from dlearn.trace.trace import Trace

Answer = TypeVar("Answer")


def once(question: Callable[[Trace], Answer]) -> Callable[[Trace], Answer]:
    """Work out the answer at the first call for a trace, and remember it there."""
    name = f"{question.__module__}.{question.__qualname__}"

    @wraps(question)
    def answer(trace: Trace) -> Answer:
        if name not in trace.answers:
            trace.answers[name] = question(trace)
        found: Answer = trace.answers[name]
        return found

    return answer


@once
def operations(trace: Trace) -> Operations:
    """What the program asked for, joined over ranks, in the order of first call. Nothing is left out.

    The sends that a glass-box collective consists of stand in its `steps`, all of them also in a selection.
    """
    table, mine = _table(trace.whole), trace.taken_part
    rows = np.flatnonzero(mine & ~table.is_step(mine & table.is_collective))
    return Operations(table, rows, trace.labels, [*rpc_operations(trace), *service_operations(trace)])


@once
def _table(whole: Trace) -> OperationTable:
    """All that was met, with what DDP has it carry."""
    return replace(whole.met, cargo=buckets.assign(whole))


def everybody(trace: Trace) -> set[int]:
    """The ranks that left a file, and those that others name."""
    asked = operations(trace)
    likes = [asked.table.likes[like] for like in np.unique(asked.table.like[asked.rows[asked.rows >= 0]]).tolist()]
    found = {*trace.ranks, *(rank for each in (*likes, *asked.others) for rank in each.group.members)}
    found |= {rank for each in (*likes, *asked.others) for rank in (each.sender, each.receiver) if rank is not None}
    return found | set(np.unique(asked.calls.rank).tolist())
