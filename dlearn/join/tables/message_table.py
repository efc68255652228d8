"""The table of messages, as columns of numbers: a row becomes a `Message` when it is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import msgspec
import numpy as np

from dlearn.errors import optional
from dlearn.events.event import TensorInfo
from dlearn.events.event_table import NONE, Column, Lazy, Mask, Rows, or_none
from dlearn.join.ends import How
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations, whole_numbers
from dlearn.join.wording import EVERY_PARAMETER, Reason, reply_text, tensors_text
from dlearn.shown import Paragraph, Shown, Table, count_text

if TYPE_CHECKING:
    import pandas

_REASONS_SHOWN, _ROWS_SHOWN = 8, 10
_NAMES_SHOWN = 4  # Parameters of a bucket in a row; CSV, JSON and frames list all.

HOWS: tuple[How, ...] = get_args(How)


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Always exactly one sender and one receiver.

    `payload_bytes` is the data without framing; None where it is not known. `offset_bytes` and `whole_bytes` say which
    part of the operation's data it is. `sent_ns` and `received_ns` bracket it: those of a derived message share the
    operation's transfer among the steps of the algorithm, and are no measurement. `how` says how it is known:
    observed (hooks saw it) · derived (from the backend's algorithm) · inferred (a control message that follows from
    rules) · missing (expected, never came). `confirmed`: the kernel's socket counters agree, to the byte.
    """

    src: int
    dst: int
    op: str
    payload_bytes: int | None
    how: How
    operation: Operation
    sent_ns: int | None = None
    received_ns: int | None = None
    offset_bytes: int = 0
    whole_bytes: int = 0
    step: int = 0
    confirmed: bool = False
    control: bool = False  # Of an RPC: torch's own, without any of the program's data.
    known_by: str = ""  # Of an RPC, how its kind is known: python, window, rule or unknown.
    tensors: tuple[TensorInfo, ...] = ()
    packed_bytes: int | None = None
    """Of an RPC: the payload without its tensors; None where C++ packed it."""
    observer_bytes: int = 0  # What the recorder adds to it on the wire; in no other count.

    @property
    def what(self) -> str:
        """Return what it carries: "float32[8, 3]", "result of forward: float32[8, 10]"."""
        return self.describe()

    def describe(self, *, most: int = EVERY_PARAMETER, tensors: str = "") -> str:
        """Return what it carries, as `Operation.describe` does; of a reply, what comes back."""
        exchange = self.operation.exchange
        if exchange is None or not self.step:
            return self.operation.describe(most=most, tensors=tensors)
        return reply_text(exchange, tensors or tensors_text(self.carried))

    @property
    def carried(self) -> tuple[TensorInfo, ...]:
        """Return the tensors that `what` names: of a collective, the whole operation's."""
        return self.operation.tensors if self.operation.exchange is None else self.tensors


class Content(NamedTuple):
    """What a message carries: of one over RPC or of a service's; of any other its operation says it."""

    op: str = ""
    tensors: tuple[TensorInfo, ...] = ()
    packed_bytes: int | None = None
    observer_bytes: int = 0
    control: bool = False
    known_by: str = ""


AS_ITS_OPERATION = Content()


class MessageColumns(NamedTuple):
    """The fields of `Message` as numbers, or NONE; `operation`, `how` and `content` are places."""

    operation: Rows
    src: Rows
    dst: Rows
    payload_bytes: Column
    how: Rows
    sent_ns: Column
    received_ns: Column
    offset_bytes: Column
    whole_bytes: Column
    step: Column
    content: Rows

    def of(self, chosen: Rows | Mask) -> MessageColumns:
        return MessageColumns(*(column[chosen] for column in self))

    def made(
        self, operations: Sequence[Operation], contents: Sequence[Content], confirmed: Iterable[bool]
    ) -> list[Message]:
        """Return the messages themselves; `operations[i]` is the operation of the i-th."""
        # Field by field: this runs a million times, and a dict of the names takes four times as long.
        return [
            Message(
                operation=operation, op=of.op or operation.op, src=src, dst=dst, payload_bytes=size, how=HOWS[how],
                sent_ns=sent_ns, received_ns=received_ns, offset_bytes=offset, whole_bytes=whole, step=step,
                confirmed=agreed, tensors=of.tensors, packed_bytes=of.packed_bytes,
                observer_bytes=of.observer_bytes, control=of.control, known_by=of.known_by,
            )
            for operation, of, agreed, src, dst, size, how, sent_ns, received_ns, offset, whole, step in zip(
                operations, map(contents.__getitem__, self.content.tolist()), confirmed, *map(or_none, self[1:-1]),
                strict=True,
            )
        ]  # fmt: skip


_NARROW = {"src": np.int32, "dst": np.int32, "how": np.int8, "step": np.int32, "content": np.int32}
"""Columns of small numbers take less room: there may be a million rows."""


def together(parts: Sequence[MessageColumns], order: Rows | None = None) -> MessageColumns:
    """Return the rows of all parts, one part after the other, or in this order."""
    columns = (_column(parts, name) for name in MessageColumns._fields)
    return MessageColumns(*(columns if order is None else (column[order] for column in columns)))


def _column(parts: Sequence[MessageColumns], name: str) -> np.ndarray:
    dtype = _NARROW.get(name, np.int64)
    columns = [np.empty(0, dtype), *(getattr(part, name) for part in parts)]
    return np.concatenate(columns, dtype=dtype)


def order_of_sending(parts: Sequence[MessageColumns], operations: Operations) -> Rows:
    """Return the order of sending; what has no time is taken at its operation's first call."""
    operation, sent_ns, step = (_column(parts, name) for name in ("operation", "sent_ns", "step"))
    unknown = sent_ns == NONE
    sent_ns[unknown] = operations.start_ns[operation[unknown]]
    return np.lexsort((operation, step, sent_ns))


@dataclass(eq=False, repr=False)
class Messages(Lazy[Message], Shown):
    """All messages of a trace, in the order of sending, and why some operations gave none."""

    operations: Operations
    columns: MessageColumns
    contents: Sequence[Content]
    confirmed: Mask
    _reasons: Sequence[tuple[int, Reason]]

    def __post_init__(self) -> None:
        self.labels = self.operations.labels
        self._made: list[Message | None] = [None] * len(self.columns.src)

    def __len__(self) -> int:
        return len(self._made)

    def at(self, places: Rows) -> list[Message]:
        new = np.array([place for place in places.tolist() if self._made[place] is None], np.intp)
        columns = self.columns.of(new)
        operations = self.operations.at(columns.operation)
        made = columns.made(operations, self.contents, self.confirmed[new].tolist())
        for place, message in zip(new.tolist(), made, strict=True):
            self._made[place] = message
        return [message for place in places.tolist() if (message := self._made[place]) is not None]

    @property
    def missing(self) -> Mask:
        return np.asarray(self.columns.how == HOWS.index("missing"))

    @cached_property
    def reasons(self) -> tuple[tuple[Operation, Reason], ...]:
        return tuple((self.operations[place], reason) for place, reason in self._reasons)

    @property
    def unexplained(self) -> tuple[tuple[Operation, str], ...]:
        """Return each operation that gave no message, with the reason in words."""
        return tuple((operation, str(reason)) for operation, reason in self.reasons)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row a message (needs pandas); docs/own-questions.md describes the columns."""
        pandas, label, columns = optional("pandas", needed_by="to_frame"), self.labels, self.columns

        def same(question: Callable[[Operation], Any]) -> np.ndarray:
            return self.operations.ask_each_group(question)[columns.operation]

        def texts(name: str) -> np.ndarray:
            found, apart = same(attrgetter(name)), np.flatnonzero(columns.content)
            found[apart] = [getattr(message, name) for message in self.at(apart)]
            return found

        return pandas.DataFrame(
            {
                "src": [label[rank] for rank in columns.src.tolist()],
                "dst": [label[rank] for rank in columns.dst.tolist()],
                "op": texts("op"),
                "what": texts("what"),
                "payload_bytes": whole_numbers(columns.payload_bytes),
                "how": np.array(HOWS, object)[columns.how],
                "confirmed": self.confirmed,
                "sent_ns": whole_numbers(columns.sent_ns),
                "received_ns": whole_numbers(columns.received_ns),
                "step": whole_numbers(columns.step),
                "phase": same(lambda one: one.ends[0].phase),
                "site": same(lambda one: one.ends[0].site),
            }
        )

    def paragraphs(self) -> Iterator[Paragraph]:
        finding, *reasons = self.sentences()
        yield finding
        if len(self):
            yield Table([self.head, *self.table_rows(self[:_ROWS_SHOWN])], names=2, numbers=2)
        if len(self) > _ROWS_SHOWN:
            yield f"and {len(self) - _ROWS_SHOWN:,} more"
        yield from (f"  {each}" for each in reasons)

    def sentences(self) -> list[str]:
        total = len(np.unique(self.columns.operation))
        left = len(self._reasons)
        sent, not_explained = count_text(len(self), "message"), count_text(left, "operation")
        lines = [f"{sent} of {count_text(total, 'operation')}; {not_explained} not explained"]
        reasons = Counter((operation.op, reason) for operation, reason in self.reasons)
        for (op, reason), count in reasons.most_common(_REASONS_SHOWN):
            times = f", {count:,} times" if count > 1 else ""
            lines.append(f"not explained: {op}{times}: {reason}")
        if len(reasons) > _REASONS_SHOWN:
            lines.append(f"and {len(reasons) - _REASONS_SHOWN:,} more: see .unexplained")
        return lines

    head = ("from", "to", "payload bytes", "sent, ms", "how", "op", "what")

    def table_rows(self, some: Iterable[Message]) -> Iterator[tuple[str, ...]]:
        """Yield these messages as rows of a table; times from the first that was sent."""
        known = self.columns.sent_ns[self.columns.sent_ns != NONE]  # In the order of sending.
        first_ns = int(known[0]) if len(known) else 0
        for message in some:
            src, dst = self.labels[message.src], self.labels[message.dst]
            size = "?" if message.payload_bytes is None else f"{message.payload_bytes:,}"
            sent = "-" if message.sent_ns is None else f"{(message.sent_ns - first_ns) / 1e6:,.3f}"
            how = f"{message.how}, confirmed" if message.confirmed else message.how
            op = message.op + message.operation.group.over
            yield src, dst, size, sent, how, op, message.describe(most=_NAMES_SHOWN)
