"""Operations and messages as pandas frames, one row each; docs/own-questions.md describes the columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlearn.errors import optional

if TYPE_CHECKING:
    import pandas

    from dlearn.trace.tables.message_table import Messages
    from dlearn.trace.tables.operations import Operations


def frame_of_operations(operations: Operations) -> pandas.DataFrame:
    """Times are nanoseconds of the trace's clock, sizes bytes."""
    pandas = optional("pandas", needed_by="to_frame")

    label = operations.labels
    first = [each.ends[0] for each in operations]
    frame = pandas.DataFrame(
        {
            "op": [each.op for each in operations],
            "group": [each.group.name for each in operations],
            "seq": [each.seq for each in operations],
            "ranks": [len(each.ends) for each in operations],
            "src": [None if each.sender is None else label[each.sender] for each in operations],
            "dst": [None if each.receiver is None else label[each.receiver] for each in operations],
            "phase": [end.phase for end in first],
            "site": [end.site for end in first],
            "start_ns": [each.start_ns for each in operations],
            "transfer_ns": [each.transfer_ns for each in operations],
            "end_ns": [each.end_ns for each in operations],
            "last_rank": [label[each.last_rank] for each in operations],
            "given_bytes": [each.given_bytes for each in operations],
            "bucket": [None if each.bucket is None else each.bucket.index for each in operations],
            "missing": [", ".join(label[rank] for rank in each.missing) for each in operations],
            "problem": [each.problem for each in operations],
            "what": [each.what for each in operations],
        }
    )
    # Whole numbers, though some are not known.
    return frame.astype({"end_ns": "Int64", "bucket": "Int64"})


def frame_of_messages(messages: Messages) -> pandas.DataFrame:
    """Times are nanoseconds of the trace's clock, sizes bytes."""
    pandas = optional("pandas", needed_by="to_frame")

    label = messages.labels
    first = [message.operation.ends[0] for message in messages]
    columns = ("op", "what", "payload_bytes", "how", "confirmed", "sent_ns", "received_ns", "step")
    return pandas.DataFrame(
        {
            "src": [label[message.src] for message in messages],
            "dst": [label[message.dst] for message in messages],
            **{column: [getattr(message, column) for message in messages] for column in columns},
            "phase": [end.phase for end in first],
            "site": [end.site for end in first],
        }
    )
