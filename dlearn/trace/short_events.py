"""Short lines (short_lines.py), read: columns of numbers, and the events made from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlearn.trace.event import Event
from dlearn.trace.short_lines import ENDED_BY, LONGEST_NUMBER, VARYING
from dlearn.trace.tables.event_table import NO_END, NONE, UNSEEN, EventTable, find

_BEGIN, _END = 6, 3
_OPEN, _CLOSE, _COMMA, _NEWLINE, _MINUS = b"[],\n-"

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
    cut_off = not data.endswith(b"\n")
    words = Words(data + b"\n" * cut_off)
    text = words.text
    marks = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    last = np.flatnonzero(text[marks] == _NEWLINE)
    first = np.append(0, last + 1)[:-1]
    stops = marks[last]
    starts = np.append(0, stops + 1)[:-1]
    short = (text[starts] == _OPEN) & (text[stops - 1] == _CLOSE)
    short[-1:] &= not cut_off
    # Between two commas, or a comma and a bracket, is a number.
    rows, good = [], np.zeros(len(starts), bool)
    for count in (_BEGIN, _END):
        lines = np.flatnonzero(short & (last - first == count - 1))
        edges = marks[first[lines] + np.arange(-1, count)[:, None]]
        edges[0], edges[-1] = starts[lines], stops[lines] - 1
        found, valid = _numbers(words, edges)
        if count == _END:
            valid &= (found[2] >= 0) & (found[2] < len(ENDED_BY))
        good[lines[valid]] = True
        rows.append(np.stack([lines + first_line, *found], axis=1)[valid])
    others = {line + first_line: data[starts[line] : stops[line] + 1] for line in np.flatnonzero(~good).tolist()}
    return Lines(rows[0], rows[1], others, len(starts))


def _numbers(words: Words, edges: NDArray[np.intp]) -> tuple[list[Rows], Mask]:
    """The numbers between the edges of each column, and in which of the columns all are numbers."""
    found, good = [], np.ones(edges.shape[1], bool)
    for left, right in pairwise(edges):
        values, valid = _decimals(words, left + 1, right)
        found.append(values)
        good &= valid
    return found, good


def _decimals(words: Words, starts: Places, stops: Places) -> tuple[Rows, Mask]:
    """The whole numbers that stand between these places, and whether each is one.

    Eight digits at a time, each a byte of a word: neighbours are added up to pairs, pairs to fours, fours to eights.
    """
    negative = words.text[starts] == _MINUS
    width = stops - starts - negative
    valid = (width > 0) & (width <= LONGEST_NUMBER)
    values = np.zeros(len(starts), np.int64)
    wrong = np.zeros(len(starts), np.uint64)
    for right in range(0, min(int(width.max(initial=0)), LONGEST_NUMBER), 8):
        # What stands before the number counts as zeros.
        digits = (words.before(stops - right) ^ _ZEROS) & _KEPT[(width - right).clip(0, 8)]
        wrong |= digits | (digits + _OVER_NINE)
        pairs = (digits * np.uint64(10) + (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
        fours = (pairs * np.uint64(100) + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
        eights = (fours * np.uint64(10_000) + (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
        values += eights.astype(np.int64) * 10**right
    valid &= wrong & _HIGH_BITS == 0
    return np.where(negative, -values, values), valid


_ZEROS, _OVER_NINE, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (0x30, 0x76, 0x80))
"""The digits from 0x30 on become 0 to 9; with 0x76 more, all else has its high bit set."""
_KEPT = np.array([(1 << 64) - (1 << 8 * (8 - digits)) for digits in range(9)], np.uint64)
"""Of a word whose last so many bytes are digits of the number."""


class Words:
    """The bytes of a text, and the eight bytes before each place as one number, the last one highest."""

    def __init__(self, data: bytes) -> None:
        padded: Bytes = np.frombuffer(bytes(LONGEST_NUMBER + 8) + data, np.uint8)
        self.text = padded[LONGEST_NUMBER + 8 :]
        self._words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))

    def before(self, places: Places) -> NDArray[np.uint64]:
        return self._words[places + LONGEST_NUMBER]


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
        line, like, number, start_ns, parent, seq, backward = begins.T.copy()
        known = find(like, _sorted(self.firsts))[1]
        damage |= {line: f": like event {like}, which is not in the file" for line, like in begins[~known, :2].tolist()}
        below = known & ((number < 0) | (parent < -1) | (seq < -1) | (backward < -1))
        damage |= dict.fromkeys(line[below].tolist(), ": a number below 0")
        order = np.flatnonzero(known & ~below)
        order = order[np.argsort(number[order], kind="stable")]
        again = find(number[order], _sorted(others))[1]
        again[1:] |= np.diff(number[order]) == 0
        damage |= {line: f": event {number} a second time" for line, number in begins[order[again]][:, [0, 2]].tolist()}
        order = order[~again]
        if len(order) < len(begins) or (order[1:] < order[:-1]).any():
            columns = (like, number, start_ns, parent, seq, backward)
            like, number, start_ns, parent, seq, backward = (column[order] for column in columns)
        self.like, self.number, self.start_ns = like, number, start_ns
        self.parent, self.seq, self.backward = parent, seq, backward
        self.end_ns = np.zeros(len(self), np.int64)
        self.ended_by = np.full(len(self), NO_END)
        return damage

    def end(self, ends: Rows) -> tuple[Rows, Damage]:
        """Take in `Lines.ends`; gives back those of other events."""
        damage: Damage = {}
        row, mine = find(ends[:, 1], self.number)
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
        return bool(find(np.array([number]), self.number)[1][0])

    def take_out(self, numbers: Collection[int]) -> list[Event]:
        """Those of these events that are here: from now on somebody else has them, as more is known of them."""
        chosen = find(self.number, _sorted(numbers))[1]
        events = self._keep(chosen).table().events()
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
        self.ended_by[(self.ended_by == NO_END) & find(self.like, _sorted(lasting))[1]] = UNSEEN

    def move(self, to_reference: Callable[[int], int]) -> None:
        """To another clock."""
        self.start_ns = np.array([to_reference(at_ns) for at_ns in self.start_ns.tolist()], np.int64)
        self.end_ns = np.array([to_reference(at_ns) for at_ns in self.end_ns.tolist()], np.int64)

    def table(self) -> EventTable:
        """As rows of the table of events."""
        numbers = np.fromiter(self.firsts, np.int64, len(self.firsts))
        order = np.argsort(numbers)
        ended = (self.ended_by != NO_END) & (self.ended_by != UNSEEN)
        return EventTable(
            firsts=[self.firsts[number] for number in numbers[order].tolist()],
            like=find(self.like, numbers[order])[0],
            rank=np.full(len(self), -1),
            number=self.number,
            start_ns=self.start_ns,
            end_ns=np.where(ended, self.end_ns, NONE),
            ended_by=self.ended_by.astype(np.int8),
            parent=np.where(self.parent < 0, NONE, self.parent),
            seq=self.seq,
            backward=np.where(self.backward < 0, NONE, self.backward),
        )


def _sorted(numbers: Collection[int]) -> Rows:
    return np.sort(np.fromiter(numbers, np.int64))
