"""One clock for the processes of several hosts.

Each host counts its own nanoseconds, from its own start. What a process has read of the job's reference clock
(`ClockReading`) gives a straight line: an offset, and a drift. All processes with the same clock are moved by the same
line, so that nothing is reordered within a host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from dlearn.events.event_table import NONE
from dlearn.events.job_facts import ClockReading
from dlearn.events.store import ProcessFile

SLEW = 500e-6
"""Assumed, not measured: how fast two clocks may part where nobody looked twice. Linux corrects a clock's frequency by
at most 500 ppm (adjtimex(2))."""
APART_NS = 1_000_000_000
"""Two readings nearer than that tell no drift: their own errors would be most of it."""
NEARLY = 2
"""A reading is nearly as good as the best one up to so many times its error."""
FURTHEST_NS, FASTEST = 2**61, 1 / 8
"""No clock is 73 years away, or gains an eighth: readings that say so are damaged. Within both, a time in the range of
`Nanoseconds` stays within 64 bits when it is moved."""
ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""What the names of collectives begin with that end on no rank before they have begun on all."""


@dataclass(frozen=True)
class Clock:
    """How one clock is moved to the reference: at `at_ns` by `offset_ns`, changing by `drift` per nanosecond.

    `error_ns` is the bound of the error between the readings; None where the clock was never compared, or only by
    readings that no clock can give.
    """

    name: str = ""
    at_ns: int = 0
    offset_ns: int = 0
    drift: float = 0.0
    error_ns: int | None = 0
    first_ns: int = 0
    last_ns: int = 0
    """The first and the last reading that count; the same where no drift is known."""

    def to_reference(self, at_ns: int) -> int:
        """The reference clock's time when this clock shows `at_ns`."""
        return at_ns + self.offset_ns + round(self.drift * (at_ns - self.at_ns))

    @property
    def drift_error(self) -> float | None:
        """By how much the drift may be wrong; None where nobody looked twice."""
        apart = self.last_ns - self.first_ns
        return 2 * (self.error_ns or 0) / apart if apart else None

    def error_at(self, at_ns: int) -> int:
        """By how much that may be wrong: more, the further it is from the nearest reading."""
        outside = max(self.first_ns - at_ns, at_ns - self.last_ns, 0)
        if not outside or not self.error_ns:
            return self.error_ns or 0
        return self.error_ns + round(outside * (self.drift_error or SLEW))


SAME = Clock()
"""The reference itself."""


def align(files: Sequence[ProcessFile]) -> dict[str, Clock]:
    """Every clock of the trace and how it is moved to the reference; the events of all files are moved by it."""
    readings: dict[str, list[ClockReading]] = defaultdict(list)
    for file in files:
        readings[clock_name(file)] += file.clocks
    references = [reading.reference for each in readings.values() for reading in each]
    # Without readings the clock of the lowest rank.
    senior = min(files, key=lambda file: (2**53 if file.header.rank is None else file.header.rank, file.path.name))
    reference = references[0] if references else clock_name(senior)
    clocks: dict[str, Clock] = {}
    for file in files:
        name = clock_name(file)
        if name not in clocks:
            usable = [reading for reading in readings[name] if reading.reference == reference]
            clocks[name] = SAME if name == reference else _line(name, usable)
        _move(file, clocks[name])
    return clocks


def clock_name(file: ProcessFile) -> str:
    """Which clock the file's times are of; where it does not say, each host has its own."""
    return file.header.clock or f"host {file.header.host}"


def _line(name: str, readings: Sequence[ClockReading]) -> Clock:
    """Through the best reading, and the one furthest from it among those nearly as good."""
    if not readings:
        return Clock(name, error_ns=None)
    ordered = sorted(readings, key=lambda reading: reading.at_ns)
    best = min(ordered, key=lambda each: each.error_ns)
    good = [each for each in ordered if each.error_ns <= NEARLY * best.error_ns]
    other = max(good, key=lambda each: abs(each.at_ns - best.at_ns))
    if abs(other.at_ns - best.at_ns) < APART_NS:
        other = best
    early, late = sorted((best, other), key=lambda each: each.at_ns)
    apart = late.at_ns - early.at_ns
    drift = (late.offset_ns - early.offset_ns) / apart if apart else 0.0
    if abs(best.offset_ns) > FURTHEST_NS or abs(drift) > FASTEST:
        return Clock(name, error_ns=None)
    error_ns = max(early.error_ns, late.error_ns)
    line = Clock(name, best.at_ns, best.offset_ns, drift, error_ns, early.at_ns, late.at_ns)
    # A reading in between that this line contradicts: the clock did not drift evenly, so the line is less exact.
    beside = [abs(line.to_reference(each.at_ns) - each.at_ns - each.offset_ns) - each.error_ns for each in ordered]
    return replace(line, error_ns=max(error_ns, *beside))


_MOMENTS = ("start_ns", "end_ns", "handed_ns", "arrived_ns", "returned_ns")
"""Of an event; the last three are an RPC's."""


def _move(file: ProcessFile, clock: Clock) -> None:
    """Events are frozen for everybody else; while they are being loaded, they are still being made."""
    if not clock.offset_ns and not clock.drift:
        return
    own = [column for name, column in file.short.own.items() if name.endswith("_ns")]
    for times in (file.short.start_ns, file.short.end_ns, *own):
        known = times != NONE
        times[known] = [clock.to_reference(at_ns) for at_ns in times[known].tolist()]
    for event in file.events.values():
        for name in _MOMENTS:
            at_ns = getattr(event, name, None)
            if at_ns is not None:
                msgspec.structs.force_setattr(event, name, clock.to_reference(at_ns))
