"""Operations and messages as pandas frames, one row each; docs/own-questions.md describes the columns.

What a million have in common is asked of one of them; the rest are columns already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from dlearn.errors import optional
from dlearn.trace.message import How
from dlearn.trace.tables.event_table import NONE, Column

if TYPE_CHECKING:
    import pandas

    from dlearn.trace.message import Message, Operation
    from dlearn.trace.tables.message_table import Messages
    from dlearn.trace.tables.operations import Operations


def frame_of_operations(operations: Operations) -> pandas.DataFrame:
    """Times are nanoseconds of the trace's clock, sizes bytes."""
    pandas = optional("pandas", needed_by="to_frame")
    label, calls = operations.labels, operations.calls
    came_last = np.flatnonzero(calls.start_ns == calls.transfer_ns)
    _, first = np.unique(calls.operation[came_last], return_index=True)

    def same(question: Callable[[Operation], Any]) -> np.ndarray:
        return _of_alike(operations, question)

    return pandas.DataFrame(
        {
            "op": same(lambda one: one.op),
            "group": same(lambda one: one.group.name),
            "seq": operations.seq,
            "ranks": same(lambda one: len(one.ends)).astype(np.int64),
            "src": same(lambda one: None if one.sender is None else label[one.sender]),
            "dst": same(lambda one: None if one.receiver is None else label[one.receiver]),
            "phase": same(lambda one: one.ends[0].phase),
            "site": same(lambda one: one.ends[0].site),
            "start_ns": operations.start_ns,
            "transfer_ns": operations.transfer_ns,
            "end_ns": _numbers(operations.end_ns),
            "last_rank": [label[rank] for rank in calls.rank[came_last[first]].tolist()],
            "given_bytes": same(lambda one: one.given_bytes).astype(np.int64),
            "bucket": pandas.array(same(lambda one: None if one.bucket is None else one.bucket.index), dtype="Int64"),
            "missing": same(lambda one: ", ".join(label[rank] for rank in one.missing)),
            "problem": same(lambda one: one.problem),
            "what": same(lambda one: one.what),
        }
    )


def frame_of_messages(messages: Messages) -> pandas.DataFrame:
    """Times are nanoseconds of the trace's clock, sizes bytes."""
    pandas = optional("pandas", needed_by="to_frame")
    columns, operations, label = messages.columns, messages.operations, messages.labels
    hows = np.array(get_args(How), object)

    def known(values: np.ndarray, question: Callable[[Message], Any]) -> np.ndarray:
        """A column of all: of a message of RPC or of a service the answer."""
        others = np.empty(len(messages.others), values.dtype)
        for place, message in enumerate(reversed(messages.others)):
            others[place] = question(message)
        return np.asarray(np.concatenate([values, others])[messages.rows])

    def whole(values: Column, question: Callable[[Message], int | None]) -> Any:
        return _numbers(known(values, lambda message: NONE if (found := question(message)) is None else found))

    def same(of_operation: Callable[[Operation], Any], question: Callable[[Message], Any]) -> np.ndarray:
        return known(_of_alike(operations, of_operation)[columns.operation], question)

    def names(ranks: np.ndarray) -> list[str]:
        return [label[rank] for rank in ranks.tolist()]

    return pandas.DataFrame(
        {
            "src": names(known(columns.src, lambda message: message.src)),
            "dst": names(known(columns.dst, lambda message: message.dst)),
            "op": same(lambda one: one.op, lambda message: message.op),
            "what": same(lambda one: one.what, lambda message: message.what),
            "payload_bytes": whole(columns.payload_bytes, lambda message: message.payload_bytes),
            "how": known(hows[columns.how], lambda message: message.how),
            "confirmed": known(messages.confirmed, lambda message: message.confirmed),
            "sent_ns": whole(columns.sent_ns, lambda message: message.sent_ns),
            "received_ns": whole(columns.received_ns, lambda message: message.received_ns),
            "step": whole(columns.step, lambda message: message.step),
            "phase": same(lambda one: one.ends[0].phase, lambda message: message.operation.ends[0].phase),
            "site": same(lambda one: one.ends[0].site, lambda message: message.operation.ends[0].site),
        }
    )


def _of_alike(operations: Operations, question: Callable[[Operation], Any]) -> np.ndarray:
    """The answer of each operation to what those that are alike share."""
    found = np.empty(len(operations), object)
    for one, places in operations.alike():
        found[places] = question(one)
    return found


def _numbers(values: Column) -> Any:
    """Whole numbers; of pandas' kind that has room for none where one is not known."""
    if not (values == NONE).any():
        return values
    return optional("pandas", needed_by="to_frame").arrays.IntegerArray(values, values == NONE)
