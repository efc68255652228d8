"""Operations and messages as pandas frames, one row each; docs/own-questions.md describes the columns.

What a million have in common is asked of one of them; the rest are columns already.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
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
    label = operations.labels

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
            "last_rank": [label[rank] for rank in operations.calls.last_rank.tolist()],
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

    def with_others(values: np.ndarray, question: Callable[[Message], Any]) -> np.ndarray:
        """A column of all: of a message of RPC or of a service the answer."""
        others = np.empty(len(messages.others), values.dtype)
        for place, message in enumerate(reversed(messages.others)):
            others[place] = question(message)
        return np.asarray(np.concatenate([values, others])[messages.rows])

    def known(name: str) -> np.ndarray:
        def value(message: Message) -> Any:
            found = getattr(message, name)
            return NONE if found is None else found

        return with_others(getattr(columns, name), value)

    def same(of_operation: Callable[[Operation], Any], question: Callable[[Message], Any]) -> np.ndarray:
        return with_others(_of_alike(operations, of_operation)[columns.operation], question)

    return pandas.DataFrame(
        {
            "src": [label[rank] for rank in known("src").tolist()],
            "dst": [label[rank] for rank in known("dst").tolist()],
            "op": same(attrgetter("op"), attrgetter("op")),
            "what": same(attrgetter("what"), attrgetter("what")),
            "payload_bytes": _numbers(known("payload_bytes")),
            "how": with_others(hows[columns.how], attrgetter("how")),
            "confirmed": with_others(messages.confirmed, attrgetter("confirmed")),
            "sent_ns": _numbers(known("sent_ns")),
            "received_ns": _numbers(known("received_ns")),
            "step": _numbers(known("step")),
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
