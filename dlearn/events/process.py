"""One recorded process of a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlearn.events.clocks import SAME, Clock, DeviceSpan
from dlearn.events.store import Recorded


@dataclass(kw_only=True)
class Process(Recorded):
    """One recorded process. `rank` is its number in this trace, `label` what pictures and words call it."""

    rank: int
    label: str
    clock: Clock = SAME
    """How its times were moved to the clock of the whole trace."""
    device_spans: dict[int, DeviceSpan] = field(default_factory=dict)
    """When a GPU did what was launched, by the event's number."""
