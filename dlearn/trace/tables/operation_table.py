"""The table of operations: which events are their ends, and what operations with the same ends share.

A row becomes an `Operation` when somebody looks at it; what is asked of a million is asked of the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dlearn.trace.event import Bucket, Collective, PointToPoint
from dlearn.trace.message import End, Operation, RpcEnd
from dlearn.trace.tables.event_table import NONE, WAS_REFUSED, Column, EventTable, Mask, Rows


class Cargo(NamedTuple):
    """What an all-reduce of DDP carries: a bucket, or a role."""

    bucket: Bucket | None = None
    role: str = ""


@dataclass(eq=False)
class OperationTable:
    """The ends of row i are the events in rows `end_row[first[i] : first[i + 1]]`: members by rank, a send before its
    recv. What it shares with others of such ends says `likes[like[i]]`, an operation without ends. `missing` holds the
    ranks that never called it; `cargo` what DDP has it carry, by the row of an end.
    """

    events: EventTable
    likes: list[Operation]
    like: Rows
    first: Rows
    end_row: Rows
    missing: dict[int, tuple[int, ...]]
    cargo: Mapping[int, Cargo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made: list[Operation | None] = [None] * len(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def ends_of(self, chosen: Rows) -> Rows:
        """The places in `end_row` of all ends of these operations, one operation after the other."""
        counts = self.first[chosen + 1] - self.first[chosen]
        shift = self.first[chosen] - (np.cumsum(counts) - counts)
        return np.repeat(shift, counts) + np.arange(counts.sum())

    def with_more(self, operations: Sequence[Operation]) -> OperationTable:
        """Return the table with rows for these operations behind its own: each the only one of its like.

        Their ends become rows of `events`, unless they stand there: a call of RPC has ends that no process wrote down.
        """
        made = [end for each in operations for end in each.ends if isinstance(end, RpcEnd)]
        events = self.events.with_more(made) if made else self.events
        new_rows = iter(range(len(self.events), len(events)))
        rows = [
            next(new_rows) if isinstance(end, RpcEnd) else events.row_of(end.rank, end.number)
            for each in operations
            for end in each.ends
        ]
        counts = np.fromiter((len(each.ends) for each in operations), np.intp, len(operations))
        table = replace(
            self,
            events=events,
            likes=[*self.likes, *operations],
            like=np.append(self.like, len(self.likes) + np.arange(len(operations))),
            first=np.append(self.first, self.first[-1] + np.cumsum(counts)),
            end_row=np.append(self.end_row, np.array(rows, np.intp)),
        )
        table._made[len(self) :] = operations
        return table

    @cached_property
    def is_collective(self) -> Mask:
        return self.events.is_a(Collective)[self.end_row[self.first[:-1]]]

    @cached_property
    def is_call(self) -> Mask:
        """Which are calls of RPC or of a service, in which no rank waits for the last one."""
        return ~self.events.is_a(Collective, PointToPoint)[self.end_row[self.first[:-1]]]

    @cached_property
    def _outer_of_ends(self) -> tuple[Rows, Rows]:
        """The collective that the first and the last end of each send are called in; -1 where in none."""
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
        """The collective that a send or recv is a step of, or -1."""
        first, last = self._outer_of_ends
        return np.where(first >= 0, first, last)

    def is_step(self, chosen: Mask) -> Mask:
        """Which are steps of one of the chosen collectives."""
        chosen = np.append(chosen, False)
        first, last = self._outer_of_ends
        return np.asarray(chosen[first] | chosen[last])

    @cached_property
    def steps(self) -> tuple[Rows, Rows]:
        """The steps of all collectives, one collective after the other, and where those of each begin.

        They stand in the order of the algorithm: a rank may post its recv long before.
        """
        inner = np.flatnonzero(self.outer >= 0)
        step = self.events.of_firsts(lambda first: getattr(first, "step", 0), np.int64)
        order = np.lexsort((inner, self.start_ns[inner], step[self.end_row[self.first[inner]]], self.outer[inner]))
        inner = inner[order]
        return inner, np.searchsorted(self.outer[inner], np.arange(len(self) + 1))

    @cached_property
    def kinds(self) -> Column:
        """The same number for operations that differ in nothing but their times; below 0 for one that has steps."""
        fates = {missing: number for number, missing in enumerate(dict.fromkeys([(), *self.missing.values()]))}
        fate = np.zeros(len(self), np.int64)
        fate[list(self.missing)] = [fates[missing] for missing in self.missing.values()]
        for flags in (self.pending, self.failed, self.refused):
            fate = 2 * fate + flags
        carried = self._carried()
        fate = fate * (carried.max(initial=0) + 1) + carried
        with_steps = self.outer[self.outer >= 0]
        kinds = self.like * (fate.max(initial=0) + 1) + fate
        kinds[with_steps] = ~with_steps
        return np.asarray(kinds)

    def _carried(self) -> Column:
        """The same number for operations that carry the same; 0 for nothing."""
        numbers: dict[int, int] = {}
        carried = np.zeros(len(self.events), np.int64)
        for row, cargo in self.cargo.items():
            carried[row] = numbers.setdefault(id(cargo.bucket or cargo.role), len(numbers) + 1)
        most, least = self.over_ends(np.maximum, carried), self.over_ends(np.minimum, carried)
        return np.asarray(most * (len(numbers) + 1) + least)

    @cached_property
    def start_ns(self) -> Column:
        """When the first rank called it."""
        return self.over_ends(np.minimum, self.events.start_ns)

    @cached_property
    def transfer_ns(self) -> Column:
        """When the last rank called it."""
        return self.over_ends(np.maximum, self.events.start_ns)

    @cached_property
    def end_ns(self) -> Column:
        """When the last rank was done; NONE where some rank is not, or nobody saw it."""
        end_ns = self.over_ends(np.maximum, self.events.end_ns)
        unknown = self.over_ends(np.minimum, self.events.end_ns) == NONE
        unknown[list(self.missing)] = True
        return np.where(unknown, NONE, end_ns)

    @cached_property
    def pending(self) -> Mask:
        """Some rank is still inside it."""
        return self.over_ends(np.logical_or, self.events.pending)

    @cached_property
    def failed(self) -> Mask:
        return self.over_ends(np.logical_or, self.events.of_firsts(lambda first: bool(first.error)))

    @cached_property
    def refused(self) -> Mask:
        return np.asarray(self.events.ended_by[self.end_row[self.first[:-1]]] == WAS_REFUSED)

    @cached_property
    def is_missing(self) -> Mask:
        """Some rank never called it."""
        found = np.zeros(len(self), bool)
        found[list(self.missing)] = True
        return found

    @cached_property
    def unusual(self) -> Mask:
        """All that did not simply end on every rank, and all calls of RPC and of services."""
        misfit = np.fromiter((like.misfit is not None for like in self.likes), bool, len(self.likes))
        return np.asarray((self.end_ns == NONE) | self.failed | self.refused | misfit[self.like] | self.is_call)

    @cached_property
    def waits_for_none(self) -> Mask:
        """Those in which no rank waits for the last: one never came, all were refused, or it is a call."""
        return np.asarray(self.is_missing | self.refused | self.is_call)

    def over_ends(self, how: np.ufunc, values: np.ndarray) -> np.ndarray:
        """These values of events, reduced over the ends of each operation."""
        found = values[self.end_row]
        return np.asarray(how.reduceat(found, self.first[:-1])) if len(found) else found

    def with_an_end(self, chosen: Mask) -> Mask:
        """Which of them have an end among the chosen events."""
        return self.over_ends(np.logical_or, chosen)

    def made(self, rows: Rows) -> list[Operation]:
        """The operations in these rows, each made once."""
        missing = np.array([row for row in rows.tolist() if self._made[row] is None], np.intp)
        if len(missing):
            end_rows = self.end_row[self.ends_of(missing)]
            found: list[Any] = self.events.made(end_rows)
            lasts = np.cumsum(self.first[missing + 1] - self.first[missing]).tolist()
            steps, begins = self.steps
            inner = zip(begins[missing].tolist(), begins[missing + 1].tolist(), strict=True)
            for row, (begin, last), within in zip(missing.tolist(), pairwise([0, *lasts]), inner, strict=True):
                ends = end_rows[begin:last].tolist() if self.cargo else ()
                self._made[row] = self._operation(row, tuple(found[begin:last]), ends, steps[slice(*within)])
        return [self._made[row] for row in rows.tolist()]

    def _operation(self, row: int, ends: tuple[End, ...], rows: Sequence[int], inner: Rows) -> Operation:
        like = self.likes[self.like[row]]
        carried = [self.cargo[each] for each in rows if each in self.cargo]
        found: Operation = msgspec.structs.replace(
            like,
            seq=ends[0].seq,
            ends=ends,
            missing=self.missing.get(row, ()),
            bucket=next((each.bucket for each in carried if each.bucket is not None), None),
            role=next((each.role for each in carried if each.role), like.role),
            steps=tuple(self.made(inner)) if len(inner) else (),
        )
        return found
