"""Tracks for Perfetto: each rank is a process, and its slices stand on tracks on which none cuts another in two.

A call has its place on a track for itself: at any moment one call at most is there, so that an arrow cannot land on
another one that began inside it. Spans and stretches may stand inside each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dlearn.join.joining import operations
from dlearn.trace.event import Bucket, Event, Gradient, Span, Stretch
from dlearn.trace.message import End, Operation
from dlearn.trace.trace import Trace

PROGRAM, CALLS, GRADIENTS = "spans and phases", "calls", "gradients"
_ORDER = (PROGRAM, CALLS, GRADIENTS)


class OnTrack(NamedTuple):
    """Where something of a rank stands: the `lane`-th track of this kind."""

    rank: int
    kind: str
    lane: int


class Tracks:
    """`ids` numbers all tracks, from 1, in the order in which they should be shown."""

    def __init__(self, trace: Trace) -> None:
        self.start_ns, self.end_ns = _window(trace)
        self._lanes: dict[tuple[int, int], int] = {}  # Of the calls and spans that are on no first track.
        found = {OnTrack(rank, kind, 0) for rank in trace.ranks for kind in (PROGRAM, CALLS)}
        for rank, calls in _by_rank(calls_of(trace)).items():
            found |= {OnTrack(rank, CALLS, lane) for lane in self._place(calls, nested=False)}
        for rank, spans in _by_rank(program_of(trace)).items():
            found |= {OnTrack(rank, PROGRAM, lane) for lane in self._place(spans, nested=True)}
        found |= {OnTrack(event.rank, GRADIENTS, 0) for event in trace.of(Gradient, Bucket)}
        ordered = sorted(found, key=lambda place: (place.rank, _ORDER.index(place.kind), place.lane))
        self.ids = {place: number for number, place in enumerate(ordered, 1)}

    def of(self, event: Event, kind: str) -> int:
        """The number of its track."""
        return self.ids[OnTrack(event.rank, kind, self._lanes.get((event.rank, event.number), 0))]

    def interval(self, event: Event) -> tuple[int, int]:
        """From when to when its slice goes, in ns of the trace's clock.

        What nobody came out of goes on until the end of the trace; where the end was not observed, or is the start, it
        takes 1 ns, because an arrow needs a slice that lasts.
        """
        end_ns = self.end_ns if event.pending else event.end_ns
        return event.start_ns, max(event.start_ns + 1, end_ns or 0)

    def outer_first(self, event: Event) -> tuple[int, int]:
        """A key to sort by: of what begins at the same moment the longer one is around the other, so it comes first."""
        start_ns, end_ns = self.interval(event)
        return start_ns, -end_ns

    def _place(self, events: Sequence[Event], *, nested: bool) -> set[int]:
        """Give each the first lane where it cuts nothing; returns the lanes that are used."""
        lanes: list[list[int]] = []  # On each, the ends of what is open: the innermost last.
        for event in sorted(events, key=self.outer_first):
            start, end = self.interval(event)
            lane = next((lane for lane, ends in enumerate(lanes) if _fits(ends, start, end, nested=nested)), len(lanes))
            if lane == len(lanes):
                lanes.append([])
            lanes[lane].append(end)
            if lane:
                self._lanes[event.rank, event.number] = lane
        return set(range(len(lanes)))


def _fits(ends: list[int], start: int, end: int, *, nested: bool) -> bool:
    while ends and ends[-1] <= start:
        ends.pop()
    return not ends or (nested and end <= ends[-1])


def parts_of(trace: Trace) -> Iterator[Operation]:
    """Every operation; of a glass-box collective, then its steps."""
    for operation in operations(trace):
        yield operation
        yield from operation.steps


def calls_of(trace: Trace) -> Iterator[End]:
    """Each rank's end of every operation and step."""
    return (end for part in parts_of(trace) for end in part.ends)


def program_of(trace: Trace) -> list[Span | Stretch]:
    """What says where the program was."""
    return trace.of(Span, Stretch)


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.rank].append(event)
    return found


def _window(trace: Trace) -> tuple[int, int]:
    """The first and the last moment that was seen."""
    first, last = [], []
    for events in (calls_of(trace), trace.of(Span, Stretch, Gradient, Bucket)):
        for event in events:
            first.append(event.start_ns)
            last.append(max(event.start_ns + 1, event.end_ns or 0))
    return min(first, default=0), max(last, default=1)
