"""Short lines (short_lines.py), read: columns of numbers, and the events made from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from dlearn.trace.event import NOT_OBSERVED, Collective, Event, Gradient, PointToPoint
from dlearn.trace.short_lines import ENDED_BY, LONGEST_NUMBER, VARYING

_BEGIN, _END = 6, 3
_OPEN, _CLOSE, _COMMA, _NEWLINE, _MINUS, _ZERO = b"[],\n-0"
_UNSEEN = ENDED_BY.index(NOT_OBSERVED)
_NO_END = -1
_WORDS = (*ENDED_BY, "")  # The last one is the place -1.

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Places = NDArray[np.intp]
Damage = dict[int, str]
"""Of a line, by its number, why it cannot be used."""


class Lines(NamedTuple):
    """Some lines of a file."""

    begins: Rows
    """[n, 7]: the line, the event that it is like, and its `VARYING`."""
    ends: Rows
    """[n, 4]: the line, the event, at_ns and the place in `ENDED_BY`."""
    others: dict[int, bytes]
    """Every other line, by its number; among them short lines that are damaged."""
    lines: int


def split(data: bytes, first_line: int) -> Lines:
    """Sort the lines of `data`: its short ones as numbers, the others as they stand in the file.

    The first of them is line `first_line` of the file.
    """
    text: Bytes = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(text == _NEWLINE)
    if not data.endswith(b"\n"):
        stops = np.append(stops, len(text))
    starts = np.append(0, stops[:-1] + 1)
    short = text[starts] == _OPEN
    short &= text[stops - 1] == _CLOSE
    short[stops >= len(text)] = False
    # Between two commas, or a comma and a bracket, is a number.
    commas = np.flatnonzero(text == _COMMA)
    first, last = np.searchsorted(commas, starts), np.searchsorted(commas, stops)
    rows, good = [], np.zeros(len(starts), bool)
    for count in (_BEGIN, _END):
        lines = np.flatnonzero(short & (last - first == count - 1))
        inner = commas[first[lines][:, None] + np.arange(count - 1)]
        found, valid = _numbers(text, np.column_stack([starts[lines], inner, stops[lines] - 1]))
        if count == _END:
            valid &= (found[:, 2] >= 0) & (found[:, 2] < len(ENDED_BY))
        good[lines[valid]] = True
        rows.append(np.column_stack([lines[valid] + first_line, found[valid]]))
    others = {line + first_line: data[starts[line] : stops[line] + 1] for line in np.flatnonzero(~good).tolist()}
    return Lines(rows[0], rows[1], others, len(starts))


def _numbers(text: Bytes, edges: NDArray[np.intp]) -> tuple[Rows, Mask]:
    """Of each row of edges the numbers between them, and whether they are numbers."""
    rows, good = np.empty((len(edges), edges.shape[1] - 1), np.int64), np.ones(len(edges), bool)
    for column in range(rows.shape[1]):
        rows[:, column], valid = _decimals(text, edges[:, column] + 1, edges[:, column + 1])
        good &= valid
    return rows, good


def _decimals(text: Bytes, starts: Places, stops: Places) -> tuple[Rows, NDArray[np.bool_]]:
    """The whole numbers that stand between these places, and whether each is one."""
    negative = text[starts] == _MINUS
    width = stops - starts - negative
    valid = (width > 0) & (width <= LONGEST_NUMBER)
    values = np.zeros(len(starts), np.int64)
    for digit in range(min(int(width.max(initial=0)), LONGEST_NUMBER)):
        # Where the number is shorter, the place is one before it: it counts as a zero.
        value = text[stops - 1 - digit] - np.uint8(_ZERO)
        inside = width > digit
        valid &= (value <= 9) | ~inside
        values += np.where(inside, value, 0).astype(np.int64) * 10**digit
    return np.where(negative, -values, values), valid


class ShortEvents:
    """The events of one file that stood in short lines, a row each, in the order of their numbers.

    `like` is the number of the event that it is like, one of `firsts`; `ended_by` the place in `ENDED_BY`, or
    -1 where there was no end. Of `parent`, `seq` and `backward` -1 is none.
    """

    def __init__(self, firsts: Mapping[int, Event]) -> None:
        self.firsts = firsts
        self.like, self.number, self.start_ns, self.parent, self.seq, self.backward = np.empty((6, 0), np.int64)
        self.end_ns, self.ended_by = np.empty((2, 0), np.int64)

    def __len__(self) -> int:
        return len(self.number)

    def add(self, begins: Rows, others: Collection[int]) -> Damage:
        """Take in `Lines.begins` of the whole file, in which `others` are the numbers of all other events."""
        damage: Damage = {}
        known = _find(begins[:, 1], _sorted(self.firsts))[1]
        for line, like in begins[~known, :2].tolist():
            damage[line] = f": like event {like}, which is not in the file"
        begins = begins[known]
        below = (begins[:, 2] < 0) | (begins[:, 4:] < -1).any(axis=1)
        for line in begins[below, 0].tolist():
            damage[line] = ": a number below 0"
        begins = begins[~below]
        begins = begins[np.argsort(begins[:, 2], kind="stable")]
        again = _find(begins[:, 2], _sorted(others))[1]
        again[1:] |= begins[1:, 2] == begins[:-1, 2]
        for line, number in begins[again][:, [0, 2]].tolist():
            damage[line] = f": event {number} a second time"
        _, self.like, self.number, self.start_ns, self.parent, self.seq, self.backward = begins[~again].T.copy()
        self.end_ns = np.zeros(len(self), np.int64)
        self.ended_by = np.full(len(self), _NO_END)
        return damage

    def end(self, ends: Rows) -> tuple[Rows, Damage]:
        """Take in `Lines.ends`; gives back those of other events."""
        damage: Damage = {}
        row, mine = _find(ends[:, 1], self.number)
        others, ends, row = ends[~mine], ends[mine], row[mine]
        again = np.ones(len(ends), bool)
        again[np.unique(row, return_index=True)[1]] = False
        for line, number in ends[again, :2].tolist():
            damage[line] = f": the end of event {number} a second time"
        before = ends[:, 2] < self.start_ns[row]
        for line, number in ends[before & ~again, :2].tolist():
            damage[line] = f": event {number} ends before it starts"
        good = ~(again | before)
        self.end_ns[row[good]], self.ended_by[row[good]] = ends[good, 2], ends[good, 3]
        return others, damage

    def __contains__(self, number: int) -> bool:
        return bool(_find(np.array([number]), self.number)[1][0])

    def take_out(self, numbers: Collection[int]) -> list[Event]:
        """Those of these events that are here: from now on somebody else has them, as more is known of them."""
        chosen = _find(self.number, _sorted(numbers))[1]
        events = list(self._keep(chosen).made())
        self.__dict__.update(self._keep(~chosen).__dict__)
        return events

    def _keep(self, chosen: Mask) -> ShortEvents:
        kept = ShortEvents(self.firsts)
        for name in (*VARYING, "like", "end_ns", "ended_by"):
            setattr(kept, name, getattr(self, name)[chosen])
        return kept

    def excuse_ends(self) -> None:
        """Where lines are lost, ends may be among them: an event without one is no hang."""
        lasting = [number for number, first in self.firsts.items() if first.ends]
        self.ended_by[(self.ended_by == _NO_END) & _find(self.like, _sorted(lasting))[1]] = _UNSEEN

    def move(self, to_reference: Callable[[int], int]) -> None:
        """To another clock."""
        self.start_ns = np.array([to_reference(at_ns) for at_ns in self.start_ns.tolist()], np.int64)
        self.end_ns = np.array([to_reference(at_ns) for at_ns in self.end_ns.tolist()], np.int64)

    def made(self) -> Iterator[Event]:
        """The events themselves, those that are alike one after the other."""
        order = np.argsort(self.like, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(self.like[order])) + 1):
            if len(rows):
                yield from self._alike(self.firsts[int(self.like[rows[0]])], rows)

    def _alike(self, first: Event, rows: Places) -> list[Event]:
        # One by one, and by name: this runs a million times, and a dictionary of the names takes three times as long.
        by = self.ended_by[rows]
        common = (
            self.number[rows].tolist(),
            self.start_ns[rows].tolist(),
            _or_none(self.end_ns[rows], (by == _NO_END) | (by == _UNSEEN)),
            [_WORDS[place] for place in by.tolist()],
            _or_none(self.parent[rows], self.parent[rows] < 0),
        )
        seqs, backwards = self.seq[rows].tolist(), _or_none(self.backward[rows], self.backward[rows] < 0)
        match first:
            case Collective():
                return [
                    replace(first, number=n, start_ns=s, end_ns=e, ended_by=b, parent=p, seq=q, backward=w)
                    for n, s, e, b, p, q, w in zip(*common, seqs, backwards, strict=True)
                ]
            case PointToPoint():
                return [
                    replace(first, number=n, start_ns=s, end_ns=e, ended_by=b, parent=p, seq=q)
                    for n, s, e, b, p, q in zip(*common, seqs, strict=True)
                ]
            case Gradient():
                return [
                    replace(first, number=n, start_ns=s, end_ns=e, ended_by=b, parent=p, backward=w)
                    for n, s, e, b, p, w in zip(*common, backwards, strict=True)
                ]
        return [
            replace(first, number=n, start_ns=s, end_ns=e, ended_by=b, parent=p)
            for n, s, e, b, p in zip(*common, strict=True)
        ]


def _sorted(numbers: Collection[int]) -> Rows:
    return np.sort(np.fromiter(numbers, np.int64))


def _find(numbers: Rows, among: Rows) -> tuple[Places, Mask]:
    """Where in the sorted `among` each number stands, and whether it stands there."""
    if not len(among):
        return np.zeros(len(numbers), np.intp), np.zeros(len(numbers), bool)
    place = np.searchsorted(among, numbers).clip(max=len(among) - 1)
    return place, among[place] == numbers


def _or_none(values: Rows, none: Mask) -> list[int | None]:
    if none.all():
        return [None] * len(values)
    found: list[int | None] = values.tolist()
    for place in np.flatnonzero(none).tolist():
        found[place] = None
    return found
