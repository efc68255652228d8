"""Short lines (short_lines.py), read: columns of numbers, and the events made from them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlearn.events.event import Event
from dlearn.events.event_table import NO_END, NONE, UNSEEN, EventTable, find
from dlearn.events.short_lines import ENDED_BY, LONGEST_NUMBER

_BEGIN, _END = 6, 3
_OPEN, _CLOSE, _COMMA, _NEWLINE = b"[],\n"

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
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
    text = np.frombuffer(data + b"\n" * cut_off, np.uint8)
    marks = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    last = np.flatnonzero(text[marks] == _NEWLINE)
    numbers = np.diff(last, prepend=-1)
    stops = marks[last]
    starts = np.append(0, stops + 1)[:-1]
    short = (text[starts] == _OPEN) & (text[stops - 1] == _CLOSE)
    short[-1:] &= not cut_off
    rows, good = [], np.zeros(len(starts), bool)
    for count in (_BEGIN, _END):
        chosen = short & (numbers == count)
        lines = np.flatnonzero(chosen)
        values = _numbers(text[np.repeat(chosen, stops + 1 - starts)].tobytes())
        if len(values) != count * len(lines):  # One of them is damaged: each is read alone.
            alone = [_numbers(data[starts[line] : stops[line] + 1]) for line in lines.tolist()]
            lines = lines[[len(each) == count for each in alone]]
            values = np.concatenate([values[:0], *(each for each in alone if len(each) == count)])
        found = np.column_stack([lines + first_line, values.reshape(-1, count)])
        if count == _END:
            found = found[(found[:, 3] >= 0) & (found[:, 3] < len(ENDED_BY))]
        good[found[:, 0] - first_line] = True
        rows.append(found)
    others = {line + first_line: data[starts[line] : stops[line] + 1] for line in np.flatnonzero(~good).tolist()}
    return Lines(rows[0], rows[1], others, len(starts))


def _numbers(lines: bytes) -> Rows:
    """The numbers of lines of nothing but whole numbers; none if anything is wrong with any."""
    text = lines[1:-2].replace(b"]\n[", b",")
    with warnings.catch_warnings(action="error"):
        try:
            values = np.fromstring(text, np.int64, sep=",")
        except (ValueError, DeprecationWarning):  # Older numpy only warns of text that is no number.
            return np.empty(0, np.int64)
    is_good = b"-," not in text + b"," and (np.abs(values) < 10**LONGEST_NUMBER).all()
    return values if is_good else values[:0]


def table_of(begins: Rows, firsts: Mapping[int, Event], others: Collection[int]) -> tuple[EventTable, Damage]:
    """The events of `Lines.begins` of a whole file, in the order of their numbers, and which lines are damage.

    `firsts` are those that they may be like, `others` the numbers of all other events of the file.
    """
    damage: Damage = {}
    numbers = _sorted(firsts)
    line, like, number, start_ns, parent, seq, backward = begins.T
    kind, known = find(like, numbers)
    damage |= {line: f": like event {like}, which is not in the file" for line, like in begins[~known, :2].tolist()}
    below = known & ((number < 0) | (parent < -1) | (seq < -1) | (backward < -1))
    damage |= dict.fromkeys(line[below].tolist(), ": a number below 0")
    order = np.flatnonzero(known & ~below)
    order = order[np.argsort(number[order], kind="stable")]
    again = find(number[order], _sorted(others))[1]
    again[1:] |= np.diff(number[order]) == 0
    damage |= {line: f": event {number} a second time" for line, number in begins[order[again]][:, [0, 2]].tolist()}
    order = order[~again]
    table = EventTable(
        firsts=[firsts[number] for number in numbers.tolist()],
        like=kind[order],
        rank=np.full(len(order), -1),
        number=number[order],
        start_ns=start_ns[order],
        end_ns=np.full(len(order), NONE),
        ended_by=np.full(len(order), NO_END, np.int8),
        parent=np.where(parent < 0, NONE, parent)[order],
        seq=seq[order],
        backward=np.where(backward < 0, NONE, backward)[order],
    )
    return table, damage


def fill_in_ends(table: EventTable, ends: Rows) -> tuple[Rows, Damage]:
    """Take `Lines.ends` into the table; gives back those of other events, and which lines are damage."""
    damage: Damage = {}
    row, mine = find(ends[:, 1], table.number)
    others, ends, row = ends[~mine], ends[mine], row[mine]
    again = np.ones(len(ends), bool)
    again[np.unique(row, return_index=True)[1]] = False
    for line, number in ends[again, :2].tolist():
        damage[line] = f": the end of event {number} a second time"
    before = ends[:, 2] < table.start_ns[row]
    for line, number in ends[before & ~again, :2].tolist():
        damage[line] = f": event {number} ends before it starts"
    good = ~(again | before)
    at_ns, by = ends[good, 2:].T
    table.end_ns[row[good]], table.ended_by[row[good]] = np.where(by == UNSEEN, NONE, at_ns), by
    return others, damage


def take_out(table: EventTable, numbers: Collection[int]) -> tuple[EventTable, list[Event]]:
    """The table without the events of these numbers, and these: more is known of them than a row holds."""
    chosen = find(table.number, _sorted(numbers))[1]
    return table.part(~chosen), table.made(np.flatnonzero(chosen))


def _sorted(numbers: Collection[int]) -> Rows:
    return np.sort(np.fromiter(numbers, np.int64))
