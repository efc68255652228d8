"""The table of operations: which events are their ends, and what those with equal ends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dlearn.events.event import Bucket, Collective, PointToPoint, TensorInfo
from dlearn.events.event_table import NONE, WAS_REFUSED, Column, EventTable, Mask, Rows
from dlearn.events.source import ServiceCall
from dlearn.join.columns import number_rows
from dlearn.join.ends import End, OperationClass, RpcEnd, bytes_of, tensors_of
from dlearn.join.wording import EVERY_PARAMETER, bucket_text, request_text, tensors_text
from dlearn.shown import RankNames


class BucketLabel(NamedTuple):
    """What an all-reduce of DDP sends: a bucket, or a role; of other calls neither."""

    bucket: Bucket | None = None
    role: str = ""


def _in_column(name: str, doc: str) -> Any:
    """Return a property of an operation that its table has as a column."""
    return property(lambda one: getattr(one._table, name)[one._row].item(), doc=doc)


class Operation:
    """A collective with all its members, a send with its recv, an RPC request with its reply (`exchange`), or a call
    of another service, whose only end is the caller's: a view of a row of the table.

    `ends` are each member's own events, in the order of ranks; a send stands before its recv. `mismatch` says why they
    do not fit together; None where they do. Of a point-to-point operation `sender`, `receiver` and `payload_bytes` say
    from whom, to whom, how much.
    """

    __slots__ = (
        *("_class", "_row", "_table", "ends", "exchange", "group"),
        *("mismatch", "op", "payload_bytes", "receiver", "sender"),
    )

    def __init__(self, table: OperationTable, row: int, ends: tuple[End, ...]) -> None:
        self._table, self._row, self.ends = table, row, ends
        self._class: OperationClass = table.classes[int(table.like[row])]
        self.op, self.group, self.mismatch = self._class.op, self._class.group, self._class.mismatch
        self.sender, self.receiver = self._class.sender, self._class.receiver
        self.payload_bytes = self._class.payload_bytes
        self.exchange = ends[0].exchange if isinstance(ends[0], RpcEnd) else None

    start_ns: int = _in_column("start_ns", "When the first rank called it, in ns.")
    last_arrival_ns: int = _in_column("last_arrival_ns", "When the last did: others wait.")
    pending: bool = _in_column("pending", "Whether some rank is still inside it.")
    failed: bool = _in_column("failed", "Whether it raised on some rank.")
    refused: bool = _in_column("refused", "Whether every call raised at once: nothing was sent.")
    is_call: bool = _in_column("is_call", "Whether it is one of RPC or of a service.")

    def __repr__(self) -> str:
        return f"Operation(op={self.op!r}, seq={self.seq}, ranks={self.ranks}, what={self.what!r})"

    @property
    def seq(self) -> int:
        """Return its number in the group, as its first end has counted."""
        return self.ends[0].seq

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that never called it."""
        return self._table.missing.get(self._row, ())

    @property
    def bucket(self) -> Bucket | None:
        return next((each.bucket for each in self._table.labels_of(self._row) if each.bucket is not None), None)

    @property
    def role(self) -> str:
        """Return what torch makes it for, where no program asked: "DDP sends rank 0's model"."""
        return next((each.role for each in self._table.labels_of(self._row) if each.role), self._class.role)

    @property
    def steps(self) -> tuple[Operation, ...]:
        """Return the sends that a glass-box collective consists of."""
        steps, begins = self._table.steps
        return tuple(self._table.made(steps[begins[self._row] : begins[self._row + 1]]))

    @property
    def is_message(self) -> bool:
        """Return whether it is a send with its recv, or one of the two alone."""
        return self.sender is not None or self.receiver is not None

    @property
    def problem(self) -> str:
        """Return why the ends do not fit together, in words, or nothing."""
        return "" if self.mismatch is None else str(self.mismatch)

    @property
    def what(self) -> str:
        """Return what travels, in words: "gradient of bucket 0: fc2.weight, fc2.bias"."""
        return self.describe()

    def describe(self, *, most: int = EVERY_PARAMETER, tagged: bool = True, tensors: str = "") -> str:
        """Return what travels, with `most` parameters, and `tensors` in place of their own text."""
        if self.bucket is not None:
            return bucket_text(self.bucket, most)
        if self.role:
            return self.role
        tensors = tensors or tensors_text(self.tensors)
        if self.exchange is not None:
            return request_text(self.exchange, tensors)
        if isinstance(self.ends[0], ServiceCall):
            return self.ends[0].about
        if tagged and self.micro_batch is not None:
            return f"micro-batch {self.micro_batch}: {tensors}"
        return tensors if self.tag is None or not tagged else f"{tensors}, tag {self.tag}"

    def row(self, labels: RankNames) -> dict[str, object]:
        """Return which operation it is, for a frame of what was found in it."""
        missing = ", ".join(labels[rank] for rank in self.missing)
        return {"op": self.op, "group": self.group.name, "seq": self.seq, "missing": missing}

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the tensors that are named: those of the first rank that gives any."""
        givers = (end for end in self.ends if isinstance(end, Collective) and end.inputs)
        return tensors_of(next(givers, self.ends[0]))

    @property
    def micro_batch(self) -> int | None:
        """Return whose data one of torch's pipeline schedules sends."""
        call = self.ends[0]
        return call.micro_batch if isinstance(call, PointToPoint) else None

    @property
    def tag(self) -> int | None:
        """Return the program's own tag of a message; the hidden default, 0, is none."""
        call = self.ends[0]
        return call.tag if isinstance(call, PointToPoint) and call.tag > 0 and not call.step else None

    @property
    def end_ns(self) -> int | None:
        """Return when the last rank was done, in ns; None if some rank is not, or not seen."""
        end_ns = int(self._table.end_ns[self._row])
        return None if end_ns == NONE else end_ns

    @property
    def times(self) -> TransferTimes:
        return self._table.times(np.array([self._row]))

    @property
    def last_rank(self) -> int:
        """Return the rank that called it last: the one that the others waited for."""
        return max(self.ends, key=lambda end: end.start_ns).rank

    @property
    def last_ranks(self) -> tuple[int, ...]:
        """Return all ranks that called it last: where clocks are coarse, more than one."""
        last = self.last_arrival_ns
        return tuple(sorted(end.rank for end in self.ends if end.start_ns == last))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that called it."""
        return tuple(end.rank for end in self.ends)

    @property
    def given_bytes(self) -> int:
        """Return what a rank hands to it: of a collective the most that any rank gives."""
        if self.is_message:
            return self.payload_bytes
        calls = [end for end in self.ends if isinstance(end, Collective)]
        return max((bytes_of(call.inputs) for call in calls), default=0)

    @property
    def unseen(self) -> tuple[int, ...]:
        """Return the ranks that may have called it: their file, or lines of it, are not here."""
        members = (self.sender, self.receiver) if self.is_message else self.group.members
        seen = {*self.ranks, *self.missing}
        return tuple(rank for rank in members if rank is not None and rank not in seen)


class TransferTimes(NamedTuple):
    """Times of operations in ns, a row each, of their ends a column each; NONE if not known."""

    last_arrival_ns: Column
    end_ns: Column
    starts_ns: np.ndarray
    ends_ns: np.ndarray


@dataclass(eq=False)
class OperationTable:
    """The ends of row i are the events in rows `end_row[first[i] : first[i + 1]]`: members by rank, a send before its
    recv. What it shares with others of such ends says `classes[like[i]]`. `missing` holds the ranks that never called
    it; `labels[label_of[row]]` is what DDP sends in the event of this row, and the first label is none.
    Columns with a name of `Operation` say the same of every row; NONE stands for no time.
    """

    events: EventTable
    classes: list[OperationClass]
    like: Rows
    first: Rows
    end_row: Rows
    missing: dict[int, tuple[int, ...]]
    labels: Sequence[BucketLabel] = (BucketLabel(),)
    label_of: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if more := len(self.events) - len(self.label_of):  # No event behind the recorded ones has a label.
            self.label_of = np.append(self.label_of, np.zeros(more, np.int32))
        self._made: list[Operation | None] = [None] * len(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def ends_of(self, chosen: Rows) -> Rows:
        """Return the indices in `end_row` of all ends, one operation after the other."""
        counts = self.first[chosen + 1] - self.first[chosen]
        shift = self.first[chosen] - (np.cumsum(counts) - counts)
        return np.repeat(shift, counts) + np.arange(counts.sum())

    def end_rows(self, rows: Rows) -> Rows:
        """Return the events, as rows, of operations of as many ends each: a row for each."""
        return self.end_row[self.ends_of(rows)].reshape(len(rows), -1)

    def with_more(
        self,
        events: EventTable,
        classes: Sequence[OperationClass],
        like: Rows,
        counts: Rows,
        end_row: Rows,
    ) -> OperationTable:
        """Return the table with rows behind its own, of these `classes`, of `counts` ends each."""
        return replace(
            self,
            events=events,
            classes=[*self.classes, *classes],
            like=np.append(self.like, len(self.classes) + like),
            first=np.append(self.first, self.first[-1] + np.cumsum(counts)),
            end_row=np.append(self.end_row, end_row),
        )

    @cached_property
    def is_collective(self) -> Mask:
        return self.events.is_a(Collective)[self.end_row[self.first[:-1]]]

    @cached_property
    def is_call(self) -> Mask:
        """Return which are calls of RPC or of a service: no rank waits for the last one."""
        return ~self.events.is_a(Collective, PointToPoint)[self.end_row[self.first[:-1]]]

    @cached_property
    def _outer_of_ends(self) -> tuple[Rows, Rows]:
        """Return the collectives around the first and the last end of each send; -1: none."""
        collective = np.full(len(self.events) + 1, -1, np.intp)
        number = np.repeat(np.arange(len(self)), np.diff(self.first))
        inside = self.is_collective[number]
        collective[self.end_row[inside]] = number[inside]
        first, last = (
            np.where(self.is_collective | self.is_call, -1, collective[self.events.parent_row[self.end_row[places]]])
            for places in (self.first[:-1], self.first[1:] - 1)
        )
        return first, last

    @cached_property
    def outer(self) -> Rows:
        """Return the collective that a send or recv is a step of, or -1."""
        first, last = self._outer_of_ends
        return np.where(first >= 0, first, last)

    def is_step(self, chosen: Mask) -> Mask:
        """Return which are steps of one of the chosen collectives."""
        chosen = np.append(chosen, False)
        first, last = self._outer_of_ends
        return np.asarray(chosen[first] | chosen[last])

    @cached_property
    def steps(self) -> tuple[Rows, Rows]:
        """Return the steps of all collectives in the algorithm's order, and where each begins."""
        inner = np.flatnonzero(self.outer >= 0)
        step = self.events.of_firsts(lambda first: getattr(first, "step", 0), np.int64)
        # A rank may post its recv long before.
        order = np.lexsort((inner, self.start_ns[inner], step[self.end_row[self.first[inner]]], self.outer[inner]))
        inner = inner[order]
        return inner, np.searchsorted(self.outer[inner], np.arange(len(self) + 1))

    @cached_property
    def kinds(self) -> Column:
        """Return one number for all that differ only in times; one with steps has its own."""
        numbers = {missing: number for number, missing in enumerate(self.missing.values(), 1)}
        absent = np.zeros(len(self), np.int64)
        absent[list(self.missing)] = [numbers[missing] for missing in self.missing.values()]
        own = np.full(len(self), -1)
        own[self.outer[self.outer >= 0]] = self.outer[self.outer >= 0]
        labels = (self.over_ends(np.maximum, self.label_of), self.over_ends(np.minimum, self.label_of))
        ended = (self.pending, self.failed, self.refused)
        return number_rows(self.like, absent, *ended, *labels, own)[0]

    @cached_property
    def start_ns(self) -> Column:
        return self.over_ends(np.minimum, self.events.start_ns)

    @cached_property
    def last_arrival_ns(self) -> Column:
        return self.over_ends(np.maximum, self.events.start_ns)

    @cached_property
    def end_ns(self) -> Column:
        end_ns = self.over_ends(np.maximum, self.events.end_ns)
        unknown = self.over_ends(np.minimum, self.events.end_ns) == NONE
        return np.where(unknown | self.is_missing, NONE, end_ns)

    @cached_property
    def pending(self) -> Mask:
        return self.over_ends(np.logical_or, self.events.pending)

    @cached_property
    def failed(self) -> Mask:
        return self.over_ends(np.logical_or, self.events.of_firsts(lambda first: bool(first.error)))

    @cached_property
    def refused(self) -> Mask:
        return np.asarray(self.events.ended_by[self.end_row[self.first[:-1]]] == WAS_REFUSED)

    @cached_property
    def is_missing(self) -> Mask:
        found = np.zeros(len(self), bool)
        found[list(self.missing)] = True
        return found

    @cached_property
    def unusual(self) -> Mask:
        """Return which did not simply end on every rank."""
        mismatch = np.fromiter((each.mismatch is not None for each in self.classes), bool, len(self.classes))
        return np.asarray((self.end_ns == NONE) | self.failed | self.refused | mismatch[self.like])

    @cached_property
    def waits_for_none(self) -> Mask:
        """Return where no rank waits for the last: it never came, all were refused, or a call."""
        return np.asarray(self.is_missing | self.refused | self.is_call)

    def over_ends(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Return values of events, reduced over the ends of each operation."""
        found = values[self.end_row]
        return np.asarray(how.reduceat(found, self.first[:-1])) if len(found) else found

    def with_an_end(self, chosen: Mask) -> Mask:
        return self.over_ends(np.logical_or, chosen)

    def labels_of(self, row: int) -> list[BucketLabel]:
        ends = self.end_row[self.first[row] : self.first[row + 1]]
        return [self.labels[label] for label in self.label_of[ends].tolist()]

    def times(self, rows: Rows) -> TransferTimes:
        """Return the times of operations of as many ends each."""
        ends = self.end_rows(rows)
        starts_ns, ends_ns = self.events.start_ns[ends], self.events.end_ns[ends]
        return TransferTimes(self.last_arrival_ns[rows], self.end_ns[rows], starts_ns, ends_ns)

    def made(self, rows: Rows) -> list[Operation]:
        """Return the operations in these rows, each made once."""
        new = np.array([row for row in rows.tolist() if self._made[row] is None], np.intp)
        if len(new):
            # The events of all at once: one by one they take ten times as long.
            ends: list[Any] = self.events.made(self.end_row[self.ends_of(new)])
            lasts = np.cumsum(self.first[new + 1] - self.first[new]).tolist()
            for row, (begin, last) in zip(new.tolist(), pairwise([0, *lasts]), strict=True):
                self._made[row] = Operation(self, row, tuple(ends[begin:last]))
        return [operation for row in rows.tolist() if (operation := self._made[row]) is not None]
