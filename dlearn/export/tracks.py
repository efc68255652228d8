"""Tracks for Perfetto: each rank is a process, and its slices stand on tracks on which none cuts another in two.

A call has its place on a track for itself: at any moment one call at most is there, so that an arrow cannot land on
another one that began inside it. Spans and stretches may stand inside each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dlearn.join.joining import operations
from dlearn.trace.event import Bucket, Event, Gradient, Span, Stretch
from dlearn.trace.message import Operation
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
        kinds: dict[str, list[Event]] = {
            PROGRAM: [*trace.of(Span, Stretch)],
            CALLS: [end for part in parts_of(trace) for end in part.ends],
            GRADIENTS: [*trace.of(Gradient, Bucket)],
        }
        seen = [event for events in kinds.values() for event in events]
        self.start_ns = min((event.start_ns for event in seen), default=0)
        self.end_ns = max((max(event.start_ns + 1, event.end_ns or 0) for event in seen), default=1)
        self._place: dict[tuple[int, int], OnTrack] = {}
        for kind, events in kinds.items():
            self._stack(events, kind)
        used = {*self._place.values(), *(OnTrack(rank, kind, 0) for rank in trace.ranks for kind in (PROGRAM, CALLS))}
        ordered = sorted(used, key=lambda place: (place.rank, _ORDER.index(place.kind), place.lane))
        self.ids = {place: number for number, place in enumerate(ordered, 1)}

    def at(self, event: Event, at_ns: int) -> dict[str, Any]:
        """A moment on the track of an event, as Perfetto names it, in us."""
        tid = self.ids[self._place[event.rank, event.number]]
        return {"pid": event.rank + 1, "tid": tid, "ts": (at_ns - self.start_ns) / 1000}

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

    def _stack(self, events: Sequence[Event], kind: str) -> None:
        """Give each the first lane of its rank where it cuts nothing; calls do not stand inside each other either."""
        lanes: dict[int, list[list[int]]] = defaultdict(list)  # On each, the ends of what is open: the innermost last.
        for event in sorted(events, key=self.outer_first):
            start, end = self.interval(event)
            mine = lanes[event.rank]
            for ends in mine:
                while ends and ends[-1] <= start:
                    ends.pop()
            free = (at for at, ends in enumerate(mine) if not ends or (kind != CALLS and end <= ends[-1]))
            lane = next(free, len(mine))
            if lane == len(mine):
                mine.append([])
            mine[lane].append(end)
            self._place[event.rank, event.number] = OnTrack(event.rank, kind, lane)


def parts_of(trace: Trace) -> Iterator[Operation]:
    """Every operation; of a glass-box collective, then its steps."""
    for operation in operations(trace):
        yield operation
        yield from operation.steps
