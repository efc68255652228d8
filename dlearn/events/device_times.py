"""When GPUs did what was launched, on the clock of the process: what `hooks/cuda_times.py` noted.

Between two readings of a GPU's clock it is taken to run evenly, outside of them like the host's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlearn.events.clocks import SLEW
from dlearn.events.job_facts import DeviceReading, DeviceTime

CUDA_EVENT = "cuda event"
CUDA_EVENT_IN_LINE = "cuda event on the caller's stream"
"""What reports such an end. In line, the stream that called it could do nothing else meanwhile."""


class DeviceSpan(NamedTuple):
    """When a GPU was at it, on the trace's clock; both may be wrong by `error_ns` against the host."""

    start_ns: int
    end_ns: int
    error_ns: int
    ended_by: str = CUDA_EVENT


def device_spans(
    times: Sequence[DeviceTime], readings: Sequence[DeviceReading], to_reference: Callable[[int], int]
) -> dict[int, DeviceSpan]:
    """Return the span of each event by its number, but not of a GPU whose clock was never read."""
    clocks: dict[str, list[DeviceReading]] = defaultdict(list)
    for reading in sorted(readings, key=lambda reading: reading.device_ns):
        clocks[reading.device].append(reading)
    spans: dict[int, DeviceSpan] = {}
    for time in times:
        if clock := clocks.get(time.device):
            start, error = _on_host(time.start_ns, clock)
            end, other = _on_host(time.end_ns, clock)
            by = CUDA_EVENT_IN_LINE if time.blocks else CUDA_EVENT
            spans[time.event] = DeviceSpan(to_reference(start), to_reference(end), max(error, other), by)
    return spans


def _on_host(device_ns: int, clock: Sequence[DeviceReading]) -> tuple[int, int]:
    """Return the host's time and its error, which grows outside of the readings."""
    place = bisect_right(clock, device_ns, key=lambda reading: reading.device_ns)
    before, after = clock[max(place - 1, 0)], clock[min(place, len(clock) - 1)]
    apart = after.device_ns - before.device_ns
    rate = (after.at_ns - before.at_ns) / apart if apart else 1.0
    outside = max(clock[0].device_ns - device_ns, device_ns - clock[-1].device_ns, 0)
    error = max(before.error_ns, after.error_ns) + round(outside * SLEW)
    return before.at_ns + round((device_ns - before.device_ns) * rate), error
