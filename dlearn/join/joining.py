"""Events of all ranks -> operations: what the program asked for."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dlearn.events.source import ServiceCall, in_use
from dlearn.join import buckets
from dlearn.join.ends import End, Group, OperationClass, bytes_of
from dlearn.join.rpc_messages import EndTable, with_rpc
from dlearn.join.selection import Selection, once
from dlearn.join.tables.operation_table import OperationTable
from dlearn.join.tables.operations import Operations


@once
def operations(trace: Selection) -> Operations:
    """Return what the program asked for, joined over ranks, in the order of first call.

    The sends that a glass-box collective consists of stand in its `steps`, all of them also in a selection.
    """
    table, chosen = _table(trace.whole), trace.rows.chosen
    if isinstance(table.events, EndTable):
        # Of RPC it has the ends whose request it has.
        chosen = np.append(chosen, np.isin(table.events.exchange, trace.rpc.exchanges.rows))
    mine = table.with_an_end(chosen)
    rows = np.flatnonzero(mine & ~table.is_step(mine & table.is_collective))
    order = np.argsort(table.start_ns[rows], kind="stable")
    return Operations(table, rows[order], trace.labels)


@once
def _table(whole: Selection) -> OperationTable:
    """Return all operations, with the buckets of DDP, and the calls of RPC and of services."""
    labels, label_of = buckets.assign(whole)
    met = replace(whole.met, labels=labels, label_of=label_of)
    table, more = with_rpc(met, whole.rpc.exchanges.table), [*_service_operations(whole)]
    if not more:
        return table
    rows = [table.events.row_of[call.rank, call.number] for _, call in more]
    like, counts = np.arange(len(more)), np.ones(len(more), np.intp)
    return table.with_more(table.events, [each for each, _ in more], like, counts, np.array(rows))


def _service_operations(trace: Selection) -> Iterator[tuple[OperationClass, End]]:
    """Yield each call of a service, of its caller and the rank that was asked, if its Source knows."""
    for source in in_use.values():
        kinds = tuple(kind.columns for kind in source.kinds if issubclass(kind.columns, ServiceCall))
        calls = trace.of(*kinds)
        hosts = source.hosts(trace.whole) if calls and source.hosts is not None else {}
        for call in calls:
            host = hosts.get((call.rank, call.number))
            members = (call.rank,) if host in (None, call.rank) else (call.rank, host)
            group = Group(source.name, source.name, members, default=False)
            like = OperationClass(
                op=call.op, group=group, sender=call.rank, receiver=host,
                payload_bytes=bytes_of(call.tensors),
            )  # fmt: skip
            yield like, call


def all_ranks(trace: Selection) -> set[int]:
    """Return the ranks that left a file, and those that others name."""
    asked = operations(trace)
    found = {*trace.ranks, *np.unique(asked.calls.rank).tolist()}
    for like in np.unique(asked.table.like[asked.rows]).tolist():
        one = asked.table.classes[like]
        found |= {*one.group.members, *({one.sender, one.receiver} - {None})}
    return found
