"""The table of messages: always one sender and one receiver, as columns of numbers.

A row becomes a `Message` when somebody looks at it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from dlearn.errors import optional
from dlearn.shown import Paragraph, Shown, Table
from dlearn.trace.message import How, Message, Operation
from dlearn.trace.tables.event_table import NONE, Column, Lazy, Mask, Rows, or_none
from dlearn.trace.tables.operations import Operations, whole_numbers
from dlearn.trace.wording import Reason

if TYPE_CHECKING:
    import pandas

_REASONS_SHOWN = 8
_ROWS_SHOWN = 10

HOWS: tuple[How, ...] = get_args(How)


class MessageColumns(NamedTuple):
    """The fields of `Message` of those that a send or a schedule tells, as numbers; NONE where there is none.

    `operation` is a place among the operations, `how` one in HOWS.
    """

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

    def of(self, chosen: Rows | Mask) -> MessageColumns:
        """Some of these."""
        return MessageColumns(*(column[chosen] for column in self))

    def made(self, operations: Sequence[Operation], confirmed: Iterable[bool]) -> list[Message]:
        """The messages themselves; `operations[i]` is the operation of the i-th."""
        # Field by field: this runs a million times, and a dict of the names takes four times as long.
        return [
            Message(
                operation=operation, op=operation.op, src=src, dst=dst, payload_bytes=size, how=HOWS[how],
                sent_ns=sent_ns, received_ns=received_ns, offset_bytes=offset, whole_bytes=whole, step=step,
                confirmed=agreed,
            )
            for operation, agreed, src, dst, size, how, sent_ns, received_ns, offset, whole, step in zip(
                operations, confirmed, *map(or_none, self[1:]), strict=True
            )
        ]  # fmt: skip


def together(parts: Sequence[MessageColumns]) -> MessageColumns:
    """All of these, one after the other."""
    none = MessageColumns(*(np.empty(0, np.int64) for _ in MessageColumns._fields))
    return MessageColumns(*map(np.concatenate, zip(none, *parts, strict=True)))


class Messages(Lazy[Message], Shown):
    """All messages of a trace, in the order of sending, and each operation that gave none, with the reason.

    Shows their number and the first ten. `columns` are those that a send or a schedule tells, `others` those of RPC
    and of services, each with the place of its operation. `rows` is the order of all; ~i stands for the i-th of the
    others.
    """

    def __init__(
        self,
        operations: Operations,
        columns: MessageColumns,
        confirmed: Mask,
        others: Sequence[tuple[int, Message]],
        reasons: Sequence[tuple[int, Reason]],
    ) -> None:
        self.operations = operations
        self.labels = operations.labels
        self.columns = columns
        self.confirmed = confirmed
        self.others = [message for _, message in others]
        self._reasons = reasons
        turn = np.append(columns.operation, [place for place, _ in others]).astype(np.intp)
        sent_ns = np.append(columns.sent_ns, [NONE if m.sent_ns is None else m.sent_ns for m in self.others])
        step = np.append(columns.step, [message.step for message in self.others])
        # A derived time is a share of the operation's; one without a time comes when its operation was called.
        at_ns = np.where(sent_ns == NONE, operations.start_ns[turn], sent_ns).astype(np.int64)
        order = np.lexsort((turn, step, at_ns))
        count = len(columns.src)
        self.rows = np.where(order < count, order, count - 1 - order)
        self._made: list[Message | None] = [None] * len(order)

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Rows) -> list[Message]:
        new = np.array([place for place in places.tolist() if self._made[place] is None], np.intp)
        rows = self.rows[new]
        mine = rows[rows >= 0]
        columns = self.columns.of(mine)
        found = iter(columns.made(self.operations.at(columns.operation), self.confirmed[mine].tolist()))
        for place, row in zip(new.tolist(), rows.tolist(), strict=True):
            self._made[place] = next(found) if row >= 0 else self.others[~row]
        return [message for place in places.tolist() if (message := self._made[place]) is not None]

    def _with_others(self, values: np.ndarray, question: Callable[[Message], Any]) -> np.ndarray:
        """A column of all: of a message of RPC or of a service the answer."""
        others = np.empty(len(self.others), values.dtype)
        others[:] = [question(message) for message in reversed(self.others)]
        return np.asarray(np.concatenate([values, others])[self.rows])

    @property
    def src(self) -> Rows:
        """Who sent each of them."""
        return self._with_others(self.columns.src, attrgetter("src"))

    @cached_property
    def operation(self) -> Rows:
        """The place among the operations of what each is part of; -1 of one of RPC or of a service."""
        return self._with_others(self.columns.operation, lambda _: -1)

    @property
    def missing(self) -> Mask:
        """Those that never came."""
        how = self._with_others(self.columns.how, lambda message: HOWS.index(message.how))
        return np.asarray(how == HOWS.index("missing"))

    @property
    def called_ns(self) -> Column:
        """When its sender called the operation of each; NONE where nobody saw that."""
        calls, ranks = self.operations.calls, 1 + max(self.labels, default=0)
        keys = calls.operation * ranks + calls.rank
        order = np.argsort(keys, kind="stable")
        wanted = self.columns.operation * ranks + self.columns.src
        place = order[np.searchsorted(keys[order], wanted).clip(max=len(keys) - 1)] if len(keys) else wanted
        start_ns = np.where(keys[place] == wanted, calls.start_ns[place], NONE)

        def of_other(message: Message) -> int:
            return next((end.start_ns for end in message.operation.ends if end.rank == message.src), NONE)

        return self._with_others(start_ns, of_other)

    @cached_property
    def reasons(self) -> tuple[tuple[Operation, Reason], ...]:
        """Each operation that gave no message, with the reason."""
        return tuple((self.operations[place], reason) for place, reason in self._reasons)

    @property
    def unexplained(self) -> tuple[tuple[Operation, str], ...]:
        """Each operation that gave no message, with the reason in words."""
        return tuple((operation, str(reason)) for operation, reason in self.reasons)

    def to_frame(self) -> pandas.DataFrame:
        """One row a message (needs pandas); docs/own-questions.md describes the columns."""
        pandas, label = optional("pandas", needed_by="to_frame"), self.labels

        def known(name: str) -> np.ndarray:
            def value(message: Message) -> Any:
                found = getattr(message, name)
                return NONE if found is None else found

            return self._with_others(getattr(self.columns, name), value)

        def same(of_operation: Callable[[Operation], Any], question: Callable[[Message], Any]) -> np.ndarray:
            return self._with_others(self.operations.of_alike(of_operation)[self.columns.operation], question)

        return pandas.DataFrame(
            {
                "src": [label[rank] for rank in known("src").tolist()],
                "dst": [label[rank] for rank in known("dst").tolist()],
                "op": same(attrgetter("op"), attrgetter("op")),
                "what": same(attrgetter("what"), attrgetter("what")),
                "payload_bytes": whole_numbers(known("payload_bytes")),
                "how": self._with_others(np.array(HOWS, object)[self.columns.how], attrgetter("how")),
                "confirmed": self._with_others(self.confirmed, attrgetter("confirmed")),
                "sent_ns": whole_numbers(known("sent_ns")),
                "received_ns": whole_numbers(known("received_ns")),
                "step": whole_numbers(known("step")),
                "phase": same(lambda one: one.ends[0].phase, lambda message: message.operation.ends[0].phase),
                "site": same(lambda one: one.ends[0].site, lambda message: message.operation.ends[0].site),
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
        """How many they are, and why some operations gave none."""
        total = len(np.unique(self.columns.operation)) + len({id(message.operation) for message in self.others})
        left = len(self._reasons)
        lines = [f"{len(self):,} messages of {total:,} operations; {left:,} operations not explained"]
        reasons = Counter((operation.op, reason) for operation, reason in self.reasons)
        for (op, reason), count in reasons.most_common(_REASONS_SHOWN):
            times = f", {count:,} times" if count > 1 else ""
            lines.append(f"not explained: {op}{times}: {reason}")
        if len(reasons) > _REASONS_SHOWN:
            lines.append(f"and {len(reasons) - _REASONS_SHOWN:,} more: see .unexplained")
        return lines

    head = ("from", "to", "payload bytes", "sent, ms", "how", "op", "what")

    def table_rows(self, some: Iterable[Message]) -> Iterator[tuple[str, ...]]:
        """Some of these messages as rows of a table; times from the first that was sent."""
        # They stand in the order of sending; one without a time stands where its operation was called.
        every = (message for place in range(len(self)) for message in self.at(np.array([place])))
        first_ns = next((message.sent_ns for message in every if message.sent_ns is not None), 0)
        for message in some:
            yield self._row(message, first_ns)

    def _row(self, message: Message, first_ns: int) -> tuple[str, ...]:
        size = "?" if message.payload_bytes is None else f"{message.payload_bytes:,}"
        sent = "-" if message.sent_ns is None else f"{(message.sent_ns - first_ns) / 1e6:,.3f}"
        how = f"{message.how}, confirmed" if message.confirmed else message.how
        return self.labels[message.src], self.labels[message.dst], size, sent, how, message.op, message.what
