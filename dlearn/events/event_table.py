"""The table of events: a row for each event that a process saw, as columns of numbers.

Events repeat in each step of a program: a row holds only what differs from the first such event.
It becomes an object when it is looked at; questions about millions of events go to the columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, repeat
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlearn.events.event import NOT_OBSERVED, REFUSED, Event
from dlearn.events.short_lines import ENDED_BY, INDEX_OF, names_of_numbers, with_numbers

Kind = TypeVar("Kind", bound=Event)
Item = TypeVar("Item")

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]

NONE = np.iinfo(np.int64).min  # In a column of numbers: there is none.
NO_END, OTHER = -1, len(ENDED_BY)
"""In `ended_by`: the end was not seen, or what saw it has no index in `ENDED_BY`."""
WAS_REFUSED, UNSEEN = ENDED_BY.index(REFUSED), ENDED_BY.index(NOT_OBSERVED)
_WORDS = (*ENDED_BY, "", "")
_OF_ALL = ("number", "start_ns", "end_ns", "parent")  # The columns that every event has.
_COLUMNS = ("like", "rank", "ended_by", *_OF_ALL)


@dataclass(eq=False)
class EventTable:
    """Events as columns, times in ns: row i repeats `firsts[like[i]]` but for its own numbers.

    NONE: it has none. `ended_by`: index in `ENDED_BY`, NO_END or OTHER; `parent`: a number.
    """

    firsts: list[Event]
    like: Rows
    rank: Column
    ended_by: NDArray[np.int8]
    number: Column
    start_ns: Column
    end_ns: Column
    parent: Column
    own: dict[str, Column] = field(default_factory=dict)
    """The other own numbers of the events that are here, by the name of the field (`Event.own`)."""

    def __post_init__(self) -> None:
        self._made = np.full(len(self.like), None, dtype=object)
        self._is_made = np.zeros(len(self.like), bool)
        self._first_number = np.fromiter((first.number for first in self.firsts), np.int64, len(self.firsts))

    def __len__(self) -> int:
        return len(self.like)

    def column(self, name: str) -> Column:
        """Return the number `name` of every row: a field in `Event.own` ("call"), or NONE.

        Every other field is the same for all rows that repeat an event: `of_firsts` answers for it.
        """
        found = self.own.get(name)
        return np.full(len(self), NONE) if found is None else found

    def part(self, chosen: Rows | Mask) -> EventTable:
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        own = {name: column[chosen] for name, column in self.own.items()}
        return EventTable(self.firsts, **columns, own=own)

    def of_firsts(self, question: Callable[[Event], Any], dtype: Any = bool) -> NDArray[Any]:
        """Return each row's answer to a question about the event that it repeats."""
        answers = np.fromiter(map(question, self.firsts), dtype, len(self.firsts))
        return np.asarray(answers[self.like])

    def is_a(self, *kinds: type[Event]) -> Mask:
        return self.of_firsts(lambda first: isinstance(first, kinds))

    @cached_property
    def pending(self) -> Mask:
        lasts = self.of_firsts(lambda first: first.ends)
        return np.asarray(lasts & (self.end_ns == NONE) & (self.ended_by != UNSEEN))

    @cached_property
    def parent_row(self) -> Rows:
        """Return the row of each enclosing event, whose number is lower; -1 if it is not here."""
        parents = np.full(len(self), -1, np.intp)
        for rank in np.unique(self.rank):
            rows = np.flatnonzero(self.rank == rank)
            rows = rows[np.argsort(self.number[rows], kind="stable")]
            index, known = find(self.parent[rows], self.number[rows])
            known &= self.parent[rows] < self.number[rows]
            parents[rows[known]] = rows[index[known]]
        return parents

    def around(self, values: Column) -> Column:
        """Return the value, from 0 on, of the nearest event around each row with one; -1: none."""
        found = np.append(values, -1)[self.parent_row]
        while True:  # As deep as events lie in each other.
            deeper = np.where(found < 0, np.append(found, -1)[self.parent_row], found)
            if (deeper == found).all():
                return found
            found = deeper

    @cached_property
    def row_of(self) -> dict[tuple[int, int], int]:
        return {key: row for row, key in enumerate(zip(self.rank.tolist(), self.number.tolist(), strict=True))}

    def made(self, rows: Rows) -> list[Event]:
        """Return the events of these rows, each made once."""
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
        for same in np.split(rows, np.flatnonzero(np.diff(self.like[rows])) + 1):
            self._made[same] = np.fromiter(self._repeat(same), object, len(same))

    def _repeat(self, rows: Rows) -> list[Event]:
        """Return the events of rows that repeat the same first one, each with its own numbers."""
        first = self.firsts[self.like[rows[0]]]
        made = [first.__copy__() for _ in range(len(rows))]
        for name in _OF_ALL:
            _set_all(made, name, or_none(getattr(self, name)[rows]))
        words = (*_WORDS[:OTHER], first.ended_by, "")
        _set_all(made, "ended_by", [words[index] for index in self.ended_by[rows].tolist()])
        for name in first.own or ():
            value = getattr(first, name)
            if value is None or type(value) is int:
                _set_all(made, name, or_none(self.column(name)[rows]))
                continue
            columns = [self.own[each][rows].tolist() for each in names_of_numbers(name, value)]
            own_numbers = map(iter, zip(*columns, strict=True))
            _set_all(made, name, map(with_numbers, repeat(value), own_numbers))
        return made


def _set_all(events: Iterable[Event], name: str, values: Iterable[Any]) -> None:
    """Set a field of these events: they are frozen, but are being made here, by millions."""
    deque(map(msgspec.structs.force_setattr, events, repeat(name), values), maxlen=0)


def or_none(values: Column) -> list[int | None]:
    """Return the values as Python's numbers, with None for NONE."""
    none = np.flatnonzero(values == NONE)
    found: list[int | None] = values.tolist()
    for index in none.tolist():
        found[index] = None
    return found


def of_events(events: Collection[Event]) -> EventTable:
    """Return the table of these events, in their order. None of them repeats another."""
    by_kind: dict[type[Event], list[int]] = defaultdict(list)
    for row, event in enumerate(events):
        by_kind[type(event)].append(row)
    firsts = list(events)
    own: dict[str, Column] = {}
    for kind, rows in by_kind.items():
        # What has a `seq` without a field of that name counts its calls otherwise (`ServiceCall`).
        for name in dict.fromkeys(("seq", *(kind.own or ()))):
            values = [getattr(firsts[row], name, None) for row in rows]
            if any(type(value) is int for value in values):
                column = own.setdefault(name, np.full(len(firsts), NONE))
                column[rows] = _numbers(values)
    columns: dict[str, Column] = {}
    for name in ("rank", *_OF_ALL):
        columns[name] = _numbers([getattr(event, name) for event in firsts])
    index = INDEX_OF | {"": NO_END}
    return EventTable(
        firsts,
        like=np.arange(len(firsts)),
        ended_by=np.array([index.get(event.ended_by, OTHER) for event in firsts], np.int8),
        own=own,
        **columns,
    )


def _numbers(values: Sequence[int | None]) -> Column:
    known = (NONE if value is None else value for value in values)
    return np.fromiter(known, np.int64, len(values))


def stacked(tables: Sequence[EventTable], order: Rows | slice = slice(None)) -> EventTable:
    """Return the rows of all tables, one table after the other; of these, the rows of `order`."""
    columns: dict[str, Any] = {}
    for name in _COLUMNS:  # One after the other: the columns of millions of rows are large.
        columns[name] = _column_of_all(tables, name)[order]
    own: dict[str, Column] = {}
    for name in dict.fromkeys(chain.from_iterable(table.own for table in tables)):
        own[name] = np.concatenate([table.column(name) for table in tables])[order]
    firsts = chain.from_iterable(table.firsts for table in tables)
    return EventTable(list(firsts), **columns, own=own)


def _column_of_all(tables: Sequence[EventTable], name: str) -> np.ndarray:
    columns = [getattr(table, name) for table in tables]
    if name == "like":
        kinds = np.cumsum([0, *(len(table.firsts) for table in tables)])
        columns = [like + first for like, first in zip(columns, kinds.tolist(), strict=False)]
    return np.concatenate(columns)


def joined(tables: Sequence[EventTable]) -> EventTable:
    """Return all their rows in the order of start, rank and number."""
    keys = [_column_of_all(tables, name) for name in ("number", "rank", "start_ns")]
    return stacked(tables, np.lexsort(keys))


def find(numbers: Column, among: Column) -> tuple[Rows, Mask]:
    """Return the index of each number in the sorted `among`, and whether it is there."""
    if not len(among):
        return np.zeros(len(numbers), np.intp), np.zeros(len(numbers), bool)
    index = np.searchsorted(among, numbers).clip(max=len(among) - 1)
    return index, among[index] == numbers


class Lazy(Sequence[Item]):
    """A sequence that makes its items when they are looked at. A slice of it is a list."""

    @abstractmethod
    def at(self, indices: Rows) -> list[Item]:
        """Return the items at these indices; an index may be there twice."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return self.at(np.array(chosen, np.intp))
        return self.at(np.array([chosen]))[0]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.at(np.arange(len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class View(Lazy[Item]):
    """Some rows of a table, as objects on demand."""

    table: Any

    def __init__(self, table: Any, rows: Rows | None = None) -> None:
        self.table = table
        self.rows = np.arange(len(table)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, indices: Rows) -> list[Item]:
        made: list[Item] = self.table.made(self.rows[indices])
        return made


class Events(View[Event]):
    """Events of a trace, in the order of their start."""

    table: EventTable

    def of(self, *kinds: type[Kind]) -> list[Kind]:
        found: list[Any] = self.table.made(self.rows[self.table.is_a(*kinds)[self.rows]])
        return found

    def has(self, *kinds: type[Event]) -> bool:
        return bool(self.table.is_a(*kinds)[self.rows].any())

    def counts(self) -> list[tuple[Event, int]]:
        """Return each event that rows repeat, and how many rows do."""
        likes, counts = np.unique(self.table.like[self.rows], return_counts=True)
        return [(self.table.firsts[like], count) for like, count in zip(likes.tolist(), counts.tolist(), strict=True)]

    def firsts(self) -> list[Event]:
        """Return each event that rows repeat: for what these share, as their phase or their op."""
        return [first for first, _ in self.counts()]

    @property
    def chosen(self) -> Mask:
        mask = np.zeros(len(self.table), bool)
        mask[self.rows] = True
        return mask

    def where(self, chosen: Mask) -> Events:
        return Events(self.table, self.rows[chosen[self.rows]])
