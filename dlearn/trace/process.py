"""One recorded process of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dlearn.trace.clocks import SAME, Clock
from dlearn.trace.device_times import DeviceSpan
from dlearn.trace.event import Footer, GroupFact, Header, Socket, Worker
from dlearn.trace.job_facts import Place


@dataclass(frozen=True)
class Process:
    """One recorded process. `rank` is its number in this trace, `label` what pictures and words call it."""

    rank: int
    label: str
    header: Header
    groups: dict[str, GroupFact]
    footer: Footer | None
    path: Path
    complete: bool = True
    """Whether every line that it wrote is here."""
    sockets: dict[int, Socket] = field(default_factory=dict)
    worker: Worker | None = None
    """Of a process that uses RPC: its name and id there."""
    not_measured: str = ""
    """Why the bytes on the wire are not known; empty where they are."""
    clock: Clock = SAME
    """How its times were moved to the clock of the whole trace."""
    place: Place | None = None
    """Where the program was when it had done nothing for a while."""
    exit_status: int | None = None
    """As the command that started it saw it; below 0 the signal that killed it. None where nobody knows."""
    stopped_ns: int | None = None
    """When its cluster stopped it, still at work, on its own clock: at the timeout, or after another rank's fault."""
    device_spans: dict[int, DeviceSpan] = field(default_factory=dict)
    """When a GPU did what was launched, by the event's number."""

    @property
    def closed(self) -> bool:
        """Whether the recorder closed the file; if not, the process died, or still runs."""
        return self.footer is not None
