"""Short lines (short_lines.py), read: columns of numbers, and the table of their events."""

import warnings
from collections.abc import Collection, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlearn.events.event import Event, RpcReply
from dlearn.events.event_table import NO_END, NONE, OTHER, UNSEEN, EventTable, find, of_events, stacked
from dlearn.events.short_lines import COMMON, ENDED_BY, INDEX_OF, LONGEST_NUMBER, layout

_END = 3
_OPEN, _CLOSE, _COMMA, _NEWLINE = b"[],\n"
_COMMON = 1 + 1 + len(COMMON)
"""Columns before an event's further numbers: the line, the event that it repeats, and `COMMON`."""

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Damage = dict[int, str]  # Of a line, by its number, why it cannot be used.


class Lines(NamedTuple):
    begins: list[Rows]
    """[n, 1 + numbers] for each count of numbers in a line: the line, and its numbers."""
    ends: Rows  # [n, 4]: the line, the event, at_ns and the index in `ENDED_BY`.
    others: dict[int, bytes]
    """Every other line, by its number; among them short lines that are damaged."""
    lines: int


def split(data: bytes, first_line: int) -> Lines:
    """Sort the lines of `data`, which begins with line `first_line`: the short become numbers."""
    cut_off = not data.endswith(b"\n")
    text = np.frombuffer(data + b"\n" * cut_off, np.uint8)
    marks = np.flatnonzero((text == _COMMA) | (text == _NEWLINE))
    last = np.flatnonzero(text[marks] == _NEWLINE)
    counts = np.diff(last, prepend=-1)
    stops = marks[last]
    starts = np.append(0, stops + 1)[:-1]
    short = (text[starts] == _OPEN) & (text[stops - 1] == _CLOSE) & (counts >= _END)
    short[-1:] &= not cut_off
    values = _numbers(text[np.repeat(short, stops + 1 - starts)].tobytes())
    if len(values) != counts[short].sum():  # One of them is damaged: each is read alone.
        read: list[Rows] = [values[:0]]
        for line in np.flatnonzero(short).tolist():
            alone = _numbers(data[starts[line] : stops[line] + 1])
            short[line] = len(alone) == counts[line]
            if short[line]:
                read.append(alone)
        values = np.concatenate(read)
    lines, counts = np.flatnonzero(short), counts[short]
    offsets = np.cumsum(counts) - counts
    rows: list[Rows] = []
    ends = np.empty((0, 1 + _END), np.int64)
    for count in np.unique(counts).tolist():
        chosen = counts == count
        of_count = values[offsets[chosen, None] + np.arange(count)]
        of_count = np.column_stack([lines[chosen] + first_line, of_count])
        if count > _END:
            rows.append(of_count)
            continue
        is_known = (of_count[:, 3] >= 0) & (of_count[:, 3] < len(ENDED_BY))
        short[of_count[~is_known, 0] - first_line] = False
        ends = of_count[is_known]
    others: dict[int, bytes] = {}
    for line in np.flatnonzero(~short).tolist():
        others[line + first_line] = data[starts[line] : stops[line] + 1]
    return Lines(rows, ends, others, len(starts))


def _numbers(lines: bytes) -> Rows:
    """Return the numbers of these lines; none if a line holds anything but whole numbers."""
    text = lines[1:-2].replace(b"]\n[", b",")
    with warnings.catch_warnings(action="error"):
        try:
            values = np.fromstring(text, np.int64, sep=",")
        except (ValueError, DeprecationWarning):  # Older numpy only warns of text that is no number.
            return np.empty(0, np.int64)
    is_good = b"-," not in text + b"," and (np.abs(values) < 10**LONGEST_NUMBER).all()
    return values if is_good else values[:0]


def short_table(
    begins: list[Rows], events: Mapping[int, Event], unknown: dict[int, str]
) -> tuple[EventTable, Rows, Damage]:
    """Return the table of all `Lines.begins`, the ends of runs by their replies, and the damage."""
    tables, lines, damage = [of_events(())], [np.empty(0, np.int64)], Damage()
    for found in begins:
        is_unknown = np.isin(found[:, 1], list(unknown))
        for like, number in found[is_unknown, 1:3].tolist():
            unknown[number] = unknown[like]
        table, of_lines, damaged = _begins_table(found[~is_unknown], events)
        tables.append(table)
        lines.append(of_lines)
        damage |= damaged
    table, line = stacked(tables), np.concatenate(lines)
    table, line, damaged = _without_repeated_numbers(table, line, events)
    return table, _ends_by_reply(table, line), damage | damaged


def _begins_table(begins: Rows, events: Mapping[int, Event]) -> tuple[EventTable, Rows, Damage]:
    """Return the table of lines with one count of numbers, each row's line, and the damage."""
    damage: Damage = {}
    repeated = [events.get(number) for number in np.unique(begins[:, 1]).tolist()]
    firsts = [copy(first) for first in repeated if first is not None and first.own is not None]
    like, known = find(begins[:, 1], np.array([first.number for first in firsts], np.int64))
    for line, number in begins[~known, :2].tolist():
        damage[line] = f": like event {number}, which is not in the file"
    layouts = [layout(first) for first in firsts]
    fits = np.array([len(names) == begins.shape[1] - _COMMON for names in layouts], bool)
    wrong = known.copy()
    wrong[known] = ~fits[like[known]]
    for line, number in begins[wrong, :2].tolist():
        damage[line] = f": not the numbers of an event like event {number}"
    good = known & ~wrong
    begins, like = begins[good], like[good]
    own, below = _own_numbers(begins, like, layouts)
    damage |= dict.fromkeys(begins[below, 0].tolist(), ": a number below 0")
    end_ns = own.pop("end_ns", np.full(len(begins), NONE))
    early = ~below & (end_ns != NONE) & (end_ns < begins[:, 3])
    for line, number in begins[early][:, [0, 2]].tolist():
        damage[line] = f": event {number} ends before it starts"
    words = np.array([INDEX_OF.get(first.ended_by, OTHER) for first in firsts], np.int8)
    table = EventTable(
        firsts,
        like,
        rank=np.full(len(begins), -1),
        ended_by=np.where(end_ns == NONE, NO_END, words[like]).astype(np.int8),
        number=begins[:, 2],
        start_ns=begins[:, 3],
        end_ns=end_ns,
        parent=np.where(begins[:, 4] < 0, NONE, begins[:, 4]),
        own=own,
    )
    kept = ~(below | early)
    return table.part(kept), begins[kept, 0], damage


def _own_numbers(begins: Rows, like: Rows, layouts: list[tuple[str, ...]]) -> tuple[dict[str, Rows], Mask]:
    """Return the columns that the layouts name, and which lines hold an impossible number."""
    own: dict[str, Rows] = {}
    below = (begins[:, 2] < 0) | (begins[:, 4] < -1)
    for names in dict.fromkeys(layouts):
        rows = np.flatnonzero(np.array([each == names for each in layouts], bool)[like])
        if not len(rows):
            continue
        for name, values in zip(names, begins[rows, _COMMON:].T, strict=True):
            column = own.setdefault(name, np.full(len(begins), NONE))
            column[rows] = np.where(values == -1, NONE, values)
            if not name.endswith("_ns"):
                below[rows] |= values < -1
    return own, below


def _without_repeated_numbers(
    table: EventTable, lines: Rows, others: Collection[int]
) -> tuple[EventTable, Rows, Damage]:
    """Return the rows, and their lines, sorted by number; rows with another's number are damage."""
    order = np.argsort(table.number, kind="stable")
    numbers = table.number[order]
    again = find(numbers, np.array(sorted(others), np.int64))[1]
    again[1:] |= np.diff(numbers) == 0
    damage: Damage = {}
    for row in order[again].tolist():
        damage[int(lines[row])] = f": event {table.number[row]} a second time"
    return table.part(order[~again]), lines[order[~again]], damage


def _ends_by_reply(table: EventTable, lines: Rows) -> Rows:
    """Return the ends, as `Lines.ends`, of the runs whose replies are rows of the table."""
    run, returned_ns = table.column("run"), table.column("returned_ns")
    rows = np.flatnonzero(table.is_a(RpcReply) & (run != NONE) & (returned_ns != NONE))
    by = np.full(len(rows), ENDED_BY.index("return"))
    return np.column_stack([lines[rows], run[rows], returned_ns[rows], by])


def fill_in_ends(table: EventTable, ends: Rows) -> tuple[Rows, Damage]:
    """Take `Lines.ends` into the table. Return those of other events, and the damaged lines."""
    damage: Damage = {}
    row, is_here = find(ends[:, 1], table.number)
    others, ends, row = ends[~is_here], ends[is_here], row[is_here]
    again = table.ended_by[row] != NO_END
    first = np.zeros(len(ends), bool)
    first[np.unique(row, return_index=True)[1]] = True
    again |= ~first
    for line, number in ends[again, :2].tolist():
        damage[line] = f": the end of event {number} a second time"
    before = ends[:, 2] < table.start_ns[row]
    for line, number in ends[before & ~again, :2].tolist():
        damage[line] = f": event {number} ends before it starts"
    good = ~(again | before)
    at_ns, by = ends[good, 2:].T
    table.end_ns[row[good]], table.ended_by[row[good]] = np.where(by == UNSEEN, NONE, at_ns), by
    return others, damage
