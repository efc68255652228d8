"""One clock for the processes of several hosts, and for what their GPUs did.

Two readings of another clock (`ClockReading`) give a line: an offset and a drift. All processes
with the same clock are moved by the same line, so nothing is reordered within a host; a GPU's time
by the line through the two readings around it, outside of them as if it ran like the host's.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlearn.events.job_facts import ClockReading, DeviceReading, DeviceTime

SLEW = 500e-6
"""The assumed drift of two clocks of which one reading is known: Linux's limit (adjtimex(2))."""
APART_NS = 1_000_000_000
"""Two readings nearer than that tell no drift: their own errors would be most of it."""
NEARLY = 2  # A reading is nearly as good as the best one up to so many times its error.
FURTHEST_NS, FASTEST = 2**61, 1 / 8
"""No clock is 73 years away, or gains an eighth: readings that say so are damaged. Within both, a
time in the range of `Nanoseconds` stays within 64 bits when it is moved."""
ALL_WAIT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Names of collectives begin with one of these if they end on no rank before all ranks began."""
CUDA_EVENT = "cuda event"
CUDA_EVENT_IN_LINE = "cuda event on the caller's stream"
"""`ended_by` on a GPU. In line, the calling stream could do nothing else meanwhile."""


@dataclass(frozen=True)
class Clock:
    """A line that moves a clock: at `at_ns` by `offset_ns`, changing by `drift` per nanosecond.

    `error_ns` bounds the error from reading `first_ns` to `last_ns` (equal: no drift is known);
    None: the clock was never compared, or by readings that none can give.
    """

    name: str = ""
    at_ns: int = 0
    offset_ns: int = 0
    drift: float = 0.0
    error_ns: int | None = 0
    first_ns: int = 0
    last_ns: int = 0

    def to_reference(self, at_ns: int) -> int:
        return at_ns + self.offset_ns + round(self.drift * (at_ns - self.at_ns))

    @property
    def drift_error(self) -> float | None:
        """Return the bound of the drift's error; None without a second reading."""
        apart = self.last_ns - self.first_ns
        return 2 * (self.error_ns or 0) / apart if apart else None

    def error_at(self, at_ns: int) -> int:
        """Return the bound of the error at `at_ns`, which grows with the distance to a reading."""
        outside = max(self.first_ns - at_ns, at_ns - self.last_ns, 0)
        if not outside or not self.error_ns:
            return self.error_ns or 0
        return self.error_ns + round(outside * (self.drift_error or SLEW))


SAME = Clock()  # The reference itself.


def line_through(name: str, readings: Sequence[ClockReading]) -> Clock:
    """Draw a line through the best reading and the furthest of those that are nearly as good."""
    if not readings:
        return Clock(name, error_ns=None)
    best = min(readings, key=lambda each: (each.error_ns, each.at_ns))
    good = [each for each in readings if each.error_ns <= NEARLY * best.error_ns]
    other = max(good, key=lambda each: (abs(each.at_ns - best.at_ns), -each.at_ns))
    if abs(other.at_ns - best.at_ns) < APART_NS:
        other = best
    line = _through(name, *((each.at_ns, each.offset_ns, each.error_ns) for each in (best, other)))
    if abs(line.offset_ns) > FURTHEST_NS or abs(line.drift) > FASTEST:
        return Clock(name, error_ns=None)
    # A reading that this line contradicts: the clock did not drift evenly.
    error_ns = line.error_ns or 0
    for each in readings:
        off_ns = abs(line.to_reference(each.at_ns) - each.at_ns - each.offset_ns)
        error_ns = max(error_ns, off_ns - each.error_ns)
    return replace(line, error_ns=error_ns)


def _through(name: str, one: tuple[int, int, int], other: tuple[int, int, int]) -> Clock:
    """Draw the line through two readings (at_ns, offset_ns, error_ns), which may be one."""
    at_ns, offset_ns, error_ns = one
    apart = other[0] - at_ns
    drift = (other[1] - offset_ns) / apart if apart else 0.0
    first_ns, last_ns = sorted((at_ns, other[0]))
    return Clock(name, at_ns, offset_ns, drift, max(error_ns, other[2]), first_ns, last_ns)


class DeviceSpan(NamedTuple):
    """When a GPU did what an event launched, on the trace's clock; both give or take `error_ns`."""

    start_ns: int
    end_ns: int
    error_ns: int
    ended_by: str = CUDA_EVENT


def device_spans(
    times: Sequence[DeviceTime], readings: Sequence[DeviceReading], host: Clock
) -> dict[int, DeviceSpan]:  # fmt: skip
    """Return the span of each event by its number, if the clock of its GPU was read."""
    clocks: dict[str, list[DeviceReading]] = defaultdict(list)
    for reading in sorted(readings, key=lambda reading: reading.device_ns):
        clocks[reading.device].append(reading)
    spans: dict[int, DeviceSpan] = {}
    for time in times:
        if of_device := clocks.get(time.device):
            first, last = _around(time.start_ns, of_device), _around(time.end_ns, of_device)
            spans[time.event] = DeviceSpan(
                host.to_reference(first.to_reference(time.start_ns)),
                host.to_reference(last.to_reference(time.end_ns)),
                max(first.error_at(time.start_ns), last.error_at(time.end_ns)),
                CUDA_EVENT_IN_LINE if time.blocks else CUDA_EVENT,
            )
    return spans


def _around(at_ns: int, readings: Sequence[DeviceReading]) -> Clock:
    after = bisect_right(readings, at_ns, key=lambda reading: reading.device_ns)
    around = readings[max(after - 1, 0)], readings[min(after, len(readings) - 1)]
    return _through("", *((each.device_ns, each.at_ns - each.device_ns, each.error_ns) for each in around))
