"""How long each step took on each rank, and which one is odd: the rank, step and bucket that all others waited for.

Steps are DDP's training steps; where there are none, the user's spans that are called the same up to a number
("step 3", "iteration 7"). A step is odd if it took more than twice the median, and more than all but a few steps do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from statistics import median
from typing import NamedTuple

from dlearn.analysis.ddp.gate_time import gate_note
from dlearn.analysis.ddp.intervals import length_ns, union
from dlearn.analysis.ddp.training_steps import BucketShare, TrainingStep, training_steps
from dlearn.analysis.findings import time_text
from dlearn.analysis.hanging.stuck import Hang, hangs
from dlearn.shown import Answer, Paragraph, RankNames, Table, count_text, ms
from dlearn.trace.event import Span, Stretch
from dlearn.trace.trace import Trace

ODD = 2.0
"""An odd step takes so many times the median."""
_FEWEST = 5
"""Of fewer steps none is called odd."""
_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"[^\W\d]{3,}\D*\d+")
"""A word and a number: what is called "F3" is a part of something."""
_ROWS_SHOWN = 12


class StepOnRank(NamedTuple):
    """One step on one rank, in ns. `length_ns` is None where the rank never finished it; `waited_ns` where nobody saw
    how long it waited for others."""

    start_ns: int
    length_ns: int | None
    waited_ns: int | None


class Late(NamedTuple):
    """Whom the others waited for in a step (several only where they came at the same nanosecond, or not at all), for
    how many ns, and in which bucket, if it was one; 0 ns where they still do."""

    ranks: tuple[int, ...]
    waited_ns: int
    bucket: int | None


class RunSteps(Answer, frozen=True):
    """By step, in order, its name and what each rank had of it. `note`: which waiting was the gate's of a held job."""

    titles: tuple[str, ...]
    cells: tuple[dict[int, StepOnRank], ...]
    late: tuple[Late | None, ...]
    ranks: tuple[int, ...]
    labels: RankNames
    note: str = ""

    def length_ns(self, place: int) -> int | None:
        """How long a step took, on the rank that needed longest; None where a rank never finished it."""
        lengths = [cell.length_ns for cell in self.cells[place].values()]
        return None if None in lengths else max(length for length in lengths if length is not None)

    @property
    def _finished(self) -> dict[int, int]:
        """Place and length of all steps that every rank has finished."""
        lengths = {place: self.length_ns(place) for place in range(len(self.titles))}
        return {place: length for place, length in lengths.items() if length is not None}

    @property
    def lengths_ns(self) -> list[int]:
        """Of all steps that every rank has finished."""
        return list(self._finished.values())

    @property
    def waits_seen(self) -> bool:
        """Whether it is known how long ranks waited: then that is what a cell's shade shows, else how long it took."""
        return any(cell.waited_ns for each in self.cells for cell in each.values())

    @property
    def full_ns(self) -> int:
        """What the strongest shade means: waiting for a whole step, as they are in the median; or the longest step."""
        if not self.lengths_ns:
            return max((cell.waited_ns or 0 for each in self.cells for cell in each.values()), default=0) or 1
        return round(median(self.lengths_ns)) if self.waits_seen else max(self.lengths_ns)

    @property
    def shades(self) -> list[dict[int, float]]:
        """Of each step on each rank a number from 0 to 1: that waited, or took, `full_ns` or longer."""
        column = "waited_ns" if self.waits_seen else "length_ns"
        full_ns = self.full_ns
        return [
            {rank: min(1.0, (getattr(cell, column) or 0) / full_ns) for rank, cell in each.items()}
            for each in self.cells
        ]

    @property
    def longest_sentence(self) -> str:
        """ "The longest is step 40: 29.1 ms: rank 1 came late to bucket 1"; empty where the finding says so."""
        lengths = self._finished
        longest = max(lengths, key=lambda place: lengths[place], default=None)
        if longest is None or longest == self.told or time_text(lengths[longest]) == time_text(min(lengths.values())):
            return ""
        return f"The longest is {self.titles[longest]}: {time_text(lengths[longest])}{self._because(longest)}"

    @property
    def odd(self) -> int | None:
        """The place of the longest step, if it is odd; the first, in which much is made ready, does not count."""
        lengths = {place: length for place, length in self._finished.items() if place}
        if len(lengths) < _FEWEST:
            return None
        longest = max(lengths, key=lambda place: lengths[place])
        return longest if lengths[longest] > ODD * median(lengths.values()) else None

    @property
    def finding(self) -> str:
        if not self.titles:
            return 'No steps: give them names, as in dlearn.span("step 3")'
        place = self.told
        if place is not None and place not in self._finished:
            return self._unfinished(place)
        return self.odd_sentence or self._usual

    @property
    def told(self) -> int | None:
        """The place of the one step that the finding is about, if it is about one."""
        if len(self.titles) == 1:
            return 0
        never = (place for place in range(len(self.titles)) if self.length_ns(place) is None)
        return next(never, self.odd)

    def _unfinished(self, place: int) -> str:
        stuck = [rank for rank, cell in self.cells[place].items() if cell.length_ns is None]
        late, never = self.late[place], f"{self._name(place)} was never finished"
        if late is None:
            return f"{never} by {self.labels.together(stuck)}"
        some = self.labels.together(stuck) if len(stuck) < 3 else f"{len(stuck)} ranks"
        return f"{never}: {some} {'waits' if len(stuck) == 1 else 'wait'} for {self.labels.together(late.ranks)}"

    @property
    def odd_sentence(self) -> str:
        """ "Step 17 took 206 ms, the median is 34.0 ms: rank 1 came late to bucket 0"; empty where none is odd."""
        odd = self.odd
        if odd is None:
            return ""
        middle = time_text(round(median(self.lengths_ns)))
        return f"{self._name(odd)} took {time_text(self._finished[odd])}, the median is {middle}{self._because(odd)}"

    @property
    def _usual(self) -> str:
        lengths = self.lengths_ns
        if len(lengths) == 1:
            return f"{self._name(0)} took {time_text(lengths[0])}{self._because(0) or self._most(0)}"
        steps, middle = count_text(len(lengths), "step"), time_text(round(median(lengths)))
        least, most = time_text(min(lengths)), time_text(max(lengths))
        return f"{steps} of {middle} each" if least == most else f"{steps} of {middle} (median), {least} to {most}"

    def _because(self, place: int) -> str:
        """Who came late to it, if others waited for a quarter of the step."""
        late = self.late[place]
        if late is None or late.waited_ns < self._finished[place] // 4:
            return ""
        where = "" if late.bucket is None else f" to bucket {late.bucket}"
        return f": {self.labels.together(late.ranks)} came late{where}"

    def _most(self, place: int) -> str:
        """For whom the longest wait was; where no wait was seen, who needed longest, if that differs."""
        late = self.late[place]
        if late is not None:
            return f"; the longest wait is {time_text(late.waited_ns)}, for {self.labels.together(late.ranks)}"
        lengths = {rank: cell.length_ns or 0 for rank, cell in self.cells[place].items()}
        longest, shortest = max(lengths, key=lambda rank: lengths[rank]), min(lengths.values())
        if time_text(shortest) == time_text(lengths[longest]):
            return " on every rank"
        return f" on {self.labels[longest]}, the longest; the shortest {time_text(shortest)}"

    def _name(self, place: int) -> str:
        return self.titles[place][:1].upper() + self.titles[place][1:]

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.titles:
            places = sorted(range(len(self.titles)), key=lambda place: -(self.length_ns(place) or 1 << 62))
            rows = [["step", "ms", "waits longest for", "ms"]]
            for place in places[:_ROWS_SHOWN]:
                length, late = self.length_ns(place), self.late[place]
                waited = "still" if length is None else ms(late.waited_ns) if late is not None else ""
                who = ["", ""] if late is None else [self.labels.together(late.ranks), waited]
                rows.append([self.titles[place], "never finished" if length is None else ms(length), *who])
            yield Table(rows, title="The longest first:")
        if self.note:
            yield self.note


def step_times(trace: Trace) -> RunSteps:
    """Measure each step on each rank; of a selection those of which it holds a part."""
    # To look for steps, all operations are made: not of a million sends that belong to none.
    found = training_steps(trace) if trace.whole.rows.has(Stretch) else ()
    steps = [list(of_ranks) for _, of_ranks in groupby(found, key=lambda step: step.number)]
    if steps:
        titles = [of_ranks[0].title for of_ranks in steps]
        cells = [{each.rank: _cell(each) for each in of_ranks} for of_ranks in steps]
        late = [_late([part for each in of_ranks for part in each.parts]) for of_ranks in steps]
    else:
        spans = _spans(trace)
        titles = list(spans)
        cells = [
            {each.rank: StepOnRank(each.start_ns, _length(each), None) for each in of_name}
            for of_name in spans.values()
        ]
        late = [None] * len(titles)
    over = {each.rank: each.stretches[-1].phase == "optimizer" for each in found}
    for hang in hangs(trace) if titles else ():
        _mark(hang, over, titles, cells, late)
    ranks = sorted({rank for of_step in cells for rank in of_step})
    return RunSteps(tuple(titles), tuple(cells), tuple(late), tuple(ranks), trace.labels, gate_note(trace))


def _cell(step: TrainingStep) -> StepOnRank:
    waited = [(part.start_ns, part.transfer_ns) for part in step.parts if part.transfer_ns is not None]
    known = len(waited) == len(step.parts)
    return StepOnRank(step.start_ns, step.end_ns - step.start_ns, length_ns(union(waited)) if known else None)


def _late(parts: list[BucketShare]) -> Late | None:
    """The rank that came last to the operation in which another waited longest."""
    waits = [(part.transfer_ns - part.start_ns, part.operation) for part in parts if part.transfer_ns is not None]
    waited, operation = max(waits, key=lambda each: each[0], default=(0, None))
    if operation is None or not waited:
        return None
    return Late(operation.last_ranks, waited, None if operation.bucket is None else operation.bucket.index)


def _mark(
    hang: Hang, over: Mapping[int, bool], titles: list[str], cells: list[dict[int, StepOnRank]], late: list[Late | None]
) -> None:
    """The step in which the ranks are stuck never ended there; it may be one of which nothing else was seen.

    `over` tells of each rank whether all of its last step was seen.
    """
    missing, bucket = hang.operation.missing, hang.operation.bucket
    for end in hang.operation.ends:
        began = [place for place, of_ranks in enumerate(cells) if end.rank in of_ranks]
        if end.rank not in hang.waiting or not began or cells[began[-1]][end.rank].start_ns > end.start_ns:
            continue
        place = began[-1] + over.get(end.rank, False)
        if place == len(cells):
            titles.append(f"training step {place}")
            cells.append({})
            late.append(None)
        start_ns = cells[place][end.rank].start_ns if end.rank in cells[place] else end.start_ns
        cells[place][end.rank] = StepOnRank(start_ns, None, None)
        if late[place] is None and missing:
            late[place] = Late(missing, 0, None if bucket is None else bucket.index)


def _length(span: Span) -> int | None:
    return None if span.end_ns is None else span.end_ns - span.start_ns


def _spans(trace: Trace) -> dict[str, list[Span]]:
    """The most usual kind of the user's spans, by name, in the order of their start."""
    kinds: dict[str, list[Span]] = defaultdict(list)
    for span in trace.of(Span):
        if _NUMBERED.match(span.name):
            kinds[_NUMBER.sub("#", span.name)].append(span)
    found: dict[str, list[Span]] = defaultdict(list)
    usual = max(kinds.values(), key=lambda spans: len(spans), default=[])
    for span in sorted(usual, key=lambda span: span.start_ns):
        found[span.name].append(span)
    return found
