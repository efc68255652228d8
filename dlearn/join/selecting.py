"""Parts of a trace: what `Trace.where`, `within` and `between` select by."""

from __future__ import annotations

from typing import get_args

import numpy as np

from dlearn.errors import TraceError
from dlearn.events.event import Event, Span
from dlearn.events.event_table import Column, EventTable, Mask
from dlearn.events.job_facts import AnyLine
from dlearn.events.source import in_use
from dlearn.join.ends import family_of_op
from dlearn.join.rpc.rpc_kinds import Rpc
from dlearn.join.tables.operation_table import OperationTable

PHASES = ("setup", "forward", "backward", "optimizer", "cleanup", "none")
KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyLine) if issubclass(kind, Event))
FAMILIES = tuple(dict.fromkeys(kind.split()[0] for kind in KINDS))
"""The kinds, with "rpc" for "rpc call", "rpc run" and the like."""
OPS = {"all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce"}
OPS |= {"reduce_scatter", "scatter", "send"}
"""Families of torch.distributed's ops: "all_gather" stands for "all_gather_single", too."""


def kind_of(event: Event) -> str:
    return str(type(event).__struct_config__.tag)


def check_kind(kind: str) -> None:
    """Raise TraceError if neither dlearn nor a Source in use has such a kind of events."""
    others = [each.tag for source in in_use.values() for each in source.kinds]
    known = dict.fromkeys((*KINDS, *FAMILIES, *others, *(tag.split()[0] for tag in others)))
    if kind not in known:
        raise TraceError(f"there is no kind {kind!r} of events; the kinds are: {', '.join(known)}")


def check_op(op: str, table: EventTable) -> None:
    """Raise TraceError if neither torch.distributed, nor its RPC, nor this trace has such an op."""
    seen = {str(first.op) for first in table.firsts if hasattr(first, "op")}
    if op not in {*seen, "rpc_sync", "rpc_async", "remote"} and family_of_op(op) not in OPS:
        raise TraceError(f"there is no op {op!r}; this trace has: {', '.join(sorted(seen)[:30])}")


# Spans ----------------------------------------------------------------------------------------------------------------


def caused_within(table: EventTable, met: OperationTable, rpc: Rpc, span: str) -> Mask:
    """Return which rows are inside spans of this name, or caused by them on other ranks."""
    enclosing = table.of_firsts(lambda first: isinstance(first, Span) and first.name == span)
    inside = _below(table, enclosing)
    inside[met.end_row[met.ends_of(np.flatnonzero(met.with_an_end(inside)))]] = True
    exchanges = rpc.exchanges.table
    ran = (exchanges.call >= 0) & (exchanges.run >= 0)
    call, run = exchanges.call[ran], exchanges.run[ran]
    # What calls of RPC have set going on other ranks, and what that called in turn.
    while (set_going := inside[call] & ~inside[run]).any():
        inside[run[set_going]] = True
        inside |= _below(table, inside)
    return inside


def _below(table: EventTable, enclosing: Mask) -> Mask:
    """Return which rows are inside of these, however deep."""
    inside = np.zeros(len(table), bool)
    has_parent = np.flatnonzero(table.parent_row >= 0)
    parent = table.parent_row[has_parent]
    before = -1
    while (count := int(inside.sum())) > before:
        before = count
        inside[has_parent] |= enclosing[parent] | inside[parent]
    return inside


# Time -----------------------------------------------------------------------------------------------------------------


def begins_of_operations(table: EventTable, met: OperationTable, rpc: Rpc) -> Column:
    """Return when the operation of each event began, in ns, else the event itself.

    A step begins with its whole collective, an RPC's run and reply with the call.
    """
    begins = table.start_ns.copy()
    start_ns = np.where(met.outer >= 0, met.start_ns[met.outer], met.start_ns) if len(met) else met.start_ns
    begins[met.end_row] = np.repeat(start_ns, np.diff(met.first))
    exchanges = rpc.exchanges.table
    for rows in (exchanges.run, exchanges.reply, exchanges.arrival):
        known = (rows >= 0) & (exchanges.call >= 0)
        begins[rows[known]] = table.start_ns[exchanges.call[known]]
    return begins
