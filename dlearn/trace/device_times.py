"""When GPUs did what was launched, on the clock of the process: what `hooks/cuda_times.py` noted in GPU time.

Each GPU's clock was read now and then, at moments that the host knows within a bound; between two readings the clocks
are taken to part evenly, before the first and after the last to run alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlearn.trace.clocks import SLEW
from dlearn.trace.job_facts import DeviceReading, DeviceTime

CUDA_EVENT = "cuda event"
CUDA_EVENT_IN_LINE = "cuda event on the caller's stream"
"""Who says such an end. In line, the stream that called it could do nothing else meanwhile."""


class DeviceSpan(NamedTuple):
    """From when to when, on the trace's clock, a GPU was at it; both may be wrong by `error_ns` against the host's."""

    start_ns: int
    end_ns: int
    error_ns: int
    ended_by: str = CUDA_EVENT


def device_spans(
    times: Sequence[DeviceTime], readings: Sequence[DeviceReading], to_reference: Callable[[int], int]
) -> dict[int, DeviceSpan]:
    """By the number of the event; nothing for those of a GPU whose clock was never read."""
    clocks: dict[str, list[DeviceReading]] = defaultdict(list)
    for reading in sorted(readings, key=lambda each: each.device_ns):
        clocks[reading.device].append(reading)
    found: dict[int, DeviceSpan] = {}
    for each in times:
        if clock := clocks.get(each.device):
            (start, one), (end, other) = _on_host(each.start_ns, clock), _on_host(each.end_ns, clock)
            by = CUDA_EVENT_IN_LINE if each.blocks else CUDA_EVENT
            found[each.event] = DeviceSpan(to_reference(start), to_reference(end), max(one, other), by)
    return found


def _on_host(device_ns: int, clock: Sequence[DeviceReading]) -> tuple[int, int]:
    """The host's time, and by how much that may be wrong: more, the further it is from all readings."""
    place = bisect_right(clock, device_ns, key=lambda each: each.device_ns)
    before, after = clock[max(place - 1, 0)], clock[min(place, len(clock) - 1)]
    apart = after.device_ns - before.device_ns
    rate = (after.at_ns - before.at_ns) / apart if apart else 1.0
    outside = max(clock[0].device_ns - device_ns, device_ns - clock[-1].device_ns, 0)
    error = max(before.error_ns, after.error_ns) + round(outside * SLEW)
    return before.at_ns + round((device_ns - before.device_ns) * rate), error
