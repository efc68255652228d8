"""The operations of a trace, or of a part of it: rows of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dlearn.errors import optional
from dlearn.events.event_table import NONE, Column, Mask, Rows, View
from dlearn.join.tables.operation_table import Operation, OperationTable, TransferTimes
from dlearn.shown import Paragraph, RankNames, Shown, Table, count_text, first_few

if TYPE_CHECKING:
    import pandas

_ROWS_SHOWN = 10
_OPS_SHOWN = 6
_RANKS_SHOWN = 4
_LONGEST_WHAT = 80  # Characters of what travels, in a table of operations.


@dataclass(frozen=True, eq=False)
class Calls:
    """Ends of operations, one operation after the other: place i of each column is of one end. Times in ns."""

    operation: Rows  # Its place among the operations.
    rank: Column
    start_ns: Column
    end_ns: Column  # NONE where it was not seen.
    pending: Mask
    last_arrival_ns: Column
    op: Rows  # What this rank itself called: the same number for the same op.

    def __len__(self) -> int:
        return len(self.operation)

    @cached_property
    def last_rank(self) -> Column:
        """Return of each operation the first of the ranks that called it last."""
        last = np.flatnonzero(self.start_ns == self.last_arrival_ns)
        _, first = np.unique(self.operation[last], return_index=True)
        return np.asarray(self.rank[last[first]])

    @cached_property
    def ended(self) -> Mask:
        return np.asarray(self.end_ns != NONE)


def _in_column(name: str) -> Any:
    """Return a column of the table, for these rows of it."""
    return cached_property(lambda some: getattr(some.table, name)[some.rows])


class Operations(View[Operation], Shown):
    """The operations of a trace, in the order of first call: rows of a table."""

    table: OperationTable
    start_ns: Column = _in_column("start_ns")
    last_arrival_ns: Column = _in_column("last_arrival_ns")
    end_ns: Column = _in_column("end_ns")
    is_call: Mask = _in_column("is_call")

    def __init__(self, table: OperationTable, rows: Rows, labels: RankNames) -> None:
        super().__init__(table, rows)
        self.labels = labels

    @property
    def first_ends(self) -> Rows:
        return self.table.end_row[self.table.first[self.rows]]

    def unusual(self) -> list[Operation]:
        return self.at(np.flatnonzero(self.table.unusual[self.rows]))

    @cached_property
    def _all_groups(self) -> list[tuple[Operation, Rows]]:
        return self.groups(np.arange(len(self)))

    def groups(self, places: Rows | None = None) -> list[tuple[Operation, Rows]]:
        """Return one of each group that differs only in times, and the indices of all in it."""
        if places is None:
            return self._all_groups
        kinds = self.table.kinds[self.rows[places]]
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        order = np.argsort(kind, kind="stable")
        groups = np.split(places[order], np.cumsum(np.bincount(kind))[:-1]) if len(kind) else []
        ones = zip(self.at(places[first]), groups, strict=True)
        return sorted(ones, key=lambda group: int(group[1][0]))

    def ask_each_group(self, question: Callable[[Operation], Any]) -> np.ndarray:
        """Return the answer of each operation, asked of one operation of each group."""
        found = np.empty(len(self), object)
        for one, places in self.groups():
            found[places] = question(one)
        return found

    @cached_property
    def several_dimensions(self) -> bool:
        """Return whether meshes call their groups by different names: else no picture says it."""
        return len({one.group.dimension for one, _ in self._all_groups}) > 1

    def group_sizes(self) -> list[tuple[Operation, int]]:
        """Return one operation of each group, and how many the group has."""
        return [(one, len(places)) for one, places in self.groups()]

    def leaves(self) -> tuple[Operations, Rows]:
        """Return these with their steps instead, if not refused; and the index here of each."""
        steps, begins = self.table.steps
        inner = np.where(self.table.refused, 0, np.diff(begins))[self.rows]
        places = np.repeat(np.arange(len(self)), np.maximum(1, inner))
        turn = np.arange(len(places)) - np.searchsorted(places, places)
        has_steps = inner[places] > 0
        rows = self.rows[places]
        rows[has_steps] = steps[begins[rows[has_steps]] + turn[has_steps]]
        return Operations(self.table, rows, self.labels), places

    def times(self, places: Rows) -> TransferTimes:
        return self.table.times(self.rows[places])

    @cached_property
    def calls(self) -> Calls:
        table, events = self.table, self.table.events
        counts = np.diff(table.first)[self.rows]
        rows = table.end_row[table.ends_of(self.rows)]
        ops = [getattr(first, "op", "") for first in events.firsts]
        op = np.unique(ops, return_inverse=True)[1][events.like[rows]]
        operation = np.repeat(np.arange(len(self)), counts)
        spans = events.start_ns[rows], events.end_ns[rows], events.pending[rows]
        last_arrival_ns = self.last_arrival_ns[operation]
        return Calls(operation, events.rank[rows], *spans, last_arrival_ns, op)

    def to_frame(self) -> pandas.DataFrame:
        """Return a row an operation (needs pandas); docs/own-questions.md has the columns."""
        pandas, label, same = optional("pandas", needed_by="to_frame"), self.labels, self.ask_each_group
        return pandas.DataFrame(
            {
                "op": same(lambda one: one.op),
                "group": same(lambda one: one.group.name),
                "seq": self.table.events.column("seq")[self.first_ends],
                "ranks": same(lambda one: len(one.ends)).astype(np.int64),
                "src": same(lambda one: None if one.sender is None else label[one.sender]),
                "dst": same(lambda one: None if one.receiver is None else label[one.receiver]),
                "phase": same(lambda one: one.ends[0].phase),
                "site": same(lambda one: one.ends[0].site),
                "start_ns": self.start_ns,
                "last_arrival_ns": self.last_arrival_ns,
                "end_ns": whole_numbers(self.end_ns),
                "last_rank": [label[rank] for rank in self.calls.last_rank.tolist()],
                "given_bytes": same(lambda one: one.given_bytes).astype(np.int64),
                "bucket": pandas.array(same(lambda one: one.bucket and one.bucket.index), dtype="Int64"),
                "missing": same(lambda one: ", ".join(label[rank] for rank in one.missing)),
                "problem": same(lambda one: one.problem),
                "what": same(lambda one: one.what),
            }
        )

    def paragraphs(self) -> Iterator[Paragraph]:
        kinds = Counter[str]()
        for one, times in self.group_sizes():
            kinds[one.op] += times
        named = first_few([f"{count:,} {op}" for op, count in kinds.most_common()], _OPS_SHOWN)
        yield f"{count_text(len(self), 'operation')}{': ' if self else ''}{named}"
        if self:
            begin = self[0].start_ns
            head = ("operation", "ranks", "at, ms", "took, ms", "gives, B", "what")
            rows = [self._row(each, begin) for each in self[:_ROWS_SHOWN]]
            yield Table([head, *rows], names=2, numbers=3)
        if len(self) > _ROWS_SHOWN:
            yield f"and {len(self) - _ROWS_SHOWN:,} more"

    def _row(self, each: Operation, begin: int) -> tuple[str, ...]:
        took = "-" if each.end_ns is None else f"{(each.end_ns - each.start_ns) / 1e6:,.2f}"
        what = each.what or each.problem
        short = what if len(what) <= _LONGEST_WHAT else f"{what[: _LONGEST_WHAT - 3]}..."
        at = f"{(each.start_ns - begin) / 1e6:,.2f}"
        return each.op, self._ranks(each), at, took, f"{each.given_bytes:,}", short

    def _ranks(self, each: Operation) -> str:
        """Return "rank 0, rank 1"; of a group with a name "shard: rank 0, rank 1"."""
        of_group = f"{each.group.dimension}: " if each.group.dimensions else ""
        if each.sender is not None and each.receiver is not None:
            return f"{of_group}{self.labels[each.sender]} -> {self.labels[each.receiver]}"
        return of_group + first_few([self.labels[rank] for rank in each.ranks], _RANKS_SHOWN)


def whole_numbers(values: Column) -> Any:
    """Return a column for pandas; of its kind that has room for none where one is not known."""
    if not (values == NONE).any():
        return values
    return optional("pandas", needed_by="to_frame").arrays.IntegerArray(values, values == NONE)
