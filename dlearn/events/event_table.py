"""The table of events: one row for each that a process saw, as columns of numbers.

Events say the same in each step of a program, so a row holds only what differs from the first of its like; it becomes
an event when somebody looks at it. What is asked of millions of them is asked of the columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dlearn.events.event import NOT_OBSERVED, REFUSED, Collective, Event, Gradient, PointToPoint, Stretch
from dlearn.events.short_lines import ENDED_BY

Kind = TypeVar("Kind", bound=Event)
Item = TypeVar("Item")

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]

NONE = np.iinfo(np.int64).min
"""In a column of numbers: there is none."""
NO_END, OTHER = -1, len(ENDED_BY)
"""In `ended_by`: nobody saw the end, and somebody who has no place in `ENDED_BY`."""
WAS_REFUSED, UNSEEN = ENDED_BY.index(REFUSED), ENDED_BY.index(NOT_OBSERVED)
_WORDS = (*ENDED_BY, "", "")
_COLUMNS = ("like", "rank", "number", "start_ns", "end_ns", "ended_by", "parent", "seq", "backward")
_VARYING = ("number", "start_ns", "end_ns", "parent", "seq", "backward")
"""The columns that are fields of an event, as they stand there."""
# By name, for this runs a million times: a dict of the names takes four times as long.
_MAKE: dict[type[Event], Callable[..., Event]] = {
    Collective: lambda first, by, n, s, e, p, seq, backward: replace(
        first, number=n, start_ns=s, end_ns=e, ended_by=by, parent=p, seq=seq, backward=backward
    ),
    PointToPoint: lambda first, by, n, s, e, p, seq, _: replace(
        first, number=n, start_ns=s, end_ns=e, ended_by=by, parent=p, seq=seq
    ),
    Gradient: lambda first, by, n, s, e, p, _, backward: replace(
        first, number=n, start_ns=s, end_ns=e, ended_by=by, parent=p, backward=backward
    ),
    Stretch: lambda first, by, n, s, e, p, *_: replace(first, number=n, start_ns=s, end_ns=e, ended_by=by, parent=p),
}


@dataclass(eq=False)
class EventTable:
    """Row i is like `firsts[like[i]]`, but for its own numbers. Times in ns; what there is not is NONE.

    `ended_by` is the place in `ENDED_BY`, or NO_END or OTHER; `parent` the number of the enclosing event.
    """

    firsts: list[Event]
    """An event is the first of its like, or, as it was told at length, the only one."""
    like: Rows
    rank: Column
    number: Column
    start_ns: Column
    end_ns: Column
    ended_by: NDArray[np.int8]
    parent: Column
    seq: Column
    backward: Column

    def __post_init__(self) -> None:
        self._made = np.full(len(self.like), None, dtype=object)
        self._is_made = np.zeros(len(self.like), bool)
        self._first_number = np.fromiter((first.number for first in self.firsts), np.int64, len(self.firsts))

    def __len__(self) -> int:
        return len(self.like)

    def part(self, chosen: Rows | Mask) -> EventTable:
        """A table of some of these rows."""
        return EventTable(self.firsts, *(getattr(self, name)[chosen] for name in _COLUMNS))

    def with_more(self, events: Collection[Event]) -> EventTable:
        """Return the table with rows for these events behind its own, which keep their places."""
        more = of_events(events)
        columns = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in _COLUMNS}
        columns["like"][len(self) :] += len(self.firsts)
        return EventTable([*self.firsts, *more.firsts], **columns)

    def of_firsts(self, question: Callable[[Event], Any], dtype: Any = bool) -> NDArray[Any]:
        """The answer of each row to what is the same for all that are alike."""
        answers = np.fromiter(map(question, self.firsts), dtype, len(self.firsts))
        return np.asarray(answers[self.like])

    def is_a(self, *kinds: type[Event]) -> Mask:
        """Which rows are of these classes."""
        return self.of_firsts(lambda first: isinstance(first, kinds))

    @cached_property
    def pending(self) -> Mask:
        """Which were begun, should end, and nobody has seen the end."""
        lasts = self.of_firsts(lambda first: first.ends)
        return np.asarray(lasts & (self.end_ns == NONE) & (self.ended_by != UNSEEN))

    @cached_property
    def parent_row(self) -> Rows:
        """The row of the enclosing event, -1 where that is not here. It has a lower number: none encloses itself."""
        found = np.full(len(self), -1, np.intp)
        for rank in np.unique(self.rank):
            mine = np.flatnonzero(self.rank == rank)
            mine = mine[np.argsort(self.number[mine], kind="stable")]
            place, known = find(self.parent[mine], self.number[mine])
            known &= self.parent[mine] < self.number[mine]
            found[mine[known]] = mine[place[known]]
        return found

    def row_of(self, rank: int, number: int) -> int:
        """The row of this event."""
        return self._rows_by_key[rank, number]

    @cached_property
    def _rows_by_key(self) -> dict[tuple[int, int], int]:
        return {key: row for row, key in enumerate(zip(self.rank.tolist(), self.number.tolist(), strict=True))}

    def made(self, rows: Rows) -> list[Event]:
        """The events of these rows, each made once."""
        missing = rows[~self._is_made[rows]]
        if len(missing):
            self._make(missing)
        found: list[Event] = self._made[rows].tolist()
        return found

    def _make(self, rows: Rows) -> None:
        own = self._first_number[self.like[rows]] == self.number[rows]
        self._made[rows[own]] = np.fromiter(map(self.firsts.__getitem__, self.like[rows[own]]), object, int(own.sum()))
        self._is_made[rows] = True
        rows = rows[~own]
        rows = rows[np.argsort(self.like[rows], kind="stable")]
        if not len(rows):
            return
        for alike in np.split(rows, np.flatnonzero(np.diff(self.like[rows])) + 1):
            self._made[alike] = np.fromiter(self._alike(alike), object, len(alike))

    def _alike(self, rows: Rows) -> Iterator[Event]:
        """The events of rows that are like the same first one, each with its own numbers."""
        first = self.firsts[self.like[rows[0]]]
        columns = [or_none(getattr(self, name)[rows]) for name in _VARYING]
        ended_by = [_WORDS[place] for place in self.ended_by[rows].tolist()]
        return map(partial(_MAKE[type(first)], first), ended_by, *columns)


def or_none(values: Column) -> list[int | None]:
    """As Python's numbers, and None for NONE."""
    none = np.flatnonzero(values == NONE)
    found: list[int | None] = values.tolist()
    for place in none.tolist():
        found[place] = None
    return found


def of_events(events: Collection[Event]) -> EventTable:
    """The table of these events, in their order: each the only one of its like."""
    count = len(events)
    columns: dict[str, Any] = {}
    for name in ("rank", *_VARYING):
        values = (getattr(event, name, None) for event in events)
        columns[name] = np.fromiter((NONE if value is None else value for value in values), np.int64, count)
    places = {"": NO_END} | {by: place for place, by in enumerate(ENDED_BY)}
    ended_by = np.fromiter((places.get(event.ended_by, OTHER) for event in events), np.int8, count)
    return EventTable(list(events), np.arange(count), ended_by=ended_by, **columns)


def joined(tables: Sequence[EventTable]) -> EventTable:
    """All their rows, in the order of their start; of those where it is the same, by rank and number."""
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in _COLUMNS}
    kinds = np.cumsum([0, *(len(table.firsts) for table in tables)])
    columns["like"] += np.repeat(kinds[:-1], [len(table) for table in tables])
    order = np.lexsort((columns["number"], columns["rank"], columns["start_ns"]))
    return EventTable([first for table in tables for first in table.firsts], **columns).part(order)


def find(numbers: Column, among: Column) -> tuple[Rows, Mask]:
    """Where in the sorted `among` each number stands, and whether it stands there."""
    if not len(among):
        return np.zeros(len(numbers), np.intp), np.zeros(len(numbers), bool)
    place = np.searchsorted(among, numbers).clip(max=len(among) - 1)
    return place, among[place] == numbers


class Lazy(Sequence[Item]):
    """Equal to any sequence of the same items. A slice of it is a list."""

    @abstractmethod
    def at(self, places: Rows) -> list[Item]:
        """The items at these places; any may be there twice."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        places = range(len(self))[index]
        return self.at(np.array(places, np.intp)) if isinstance(places, range) else self.at(np.array([places]))[0]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.at(np.arange(len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Events(Lazy[Event]):
    """Events of a trace, in the order of their start: rows of its table, made into events when they are looked at."""

    def __init__(self, table: EventTable, rows: Rows | None = None) -> None:
        self.table = table
        self.rows = np.arange(len(table)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Rows) -> list[Event]:
        return self.table.made(self.rows[places])

    def of(self, *kinds: type[Kind]) -> list[Kind]:
        """Those of these classes."""
        found: list[Any] = self.table.made(self.rows[self.table.is_a(*kinds)[self.rows]])
        return found

    def has(self, *kinds: type[Event]) -> bool:
        """Whether there is one of these classes."""
        return bool(self.table.is_a(*kinds)[self.rows].any())

    def counts(self) -> list[tuple[Event, int]]:
        """One event of each like, and how many there are of it."""
        likes, counts = np.unique(self.table.like[self.rows], return_counts=True)
        return [(self.table.firsts[like], count) for like, count in zip(likes.tolist(), counts.tolist(), strict=True)]

    def firsts(self) -> list[Event]:
        """One event of each like: for what all that are alike share, as their phase or their op."""
        return [first for first, _ in self.counts()]

    @property
    def chosen(self) -> Mask:
        """Of each row of the table, whether it is one of these."""
        mask = np.zeros(len(self.table), bool)
        mask[self.rows] = True
        return mask

    def where(self, chosen: Mask) -> Events:
        """Those whose row of the table is chosen."""
        return Events(self.table, self.rows[chosen[self.rows]])
