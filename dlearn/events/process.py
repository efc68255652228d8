"""One recorded process of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dlearn.events.clocks import SAME, Clock, DeviceSpan
from dlearn.events.event import Footer, GroupFact, Header, Socket, Worker
from dlearn.events.job_facts import Heartbeat, Imported, Reached, Switched
from dlearn.events.wiring import Wired


@dataclass
class Process:
    """One recorded process: its `rank` in this trace, and the `label` in pictures and words."""

    path: Path
    header: Header
    rank: int = -1
    label: str = ""
    clock: Clock = SAME
    """How its times were moved to the clock of the whole trace."""
    device_spans: dict[int, DeviceSpan] = field(default_factory=dict)
    """When a GPU did what was launched, by the event's number."""
    groups: dict[str, GroupFact] = field(default_factory=dict)
    sockets: dict[int, Socket] = field(default_factory=dict)
    worker: Worker | None = None
    """Of a process that uses RPC: its name and id there."""
    not_measured: str = ""
    """Why the bytes on the wire are not known; empty where they are."""
    heartbeat: Heartbeat | None = None
    """Where the program was when it had done nothing for a while."""
    exit_status: int | None = None
    """What the command that started it saw; below 0 the signal that killed it. None: not known."""
    stopped_ns: int | None = None
    """When, by its own clock, its cluster stopped it at work: a timeout, or another rank's fault."""
    network: Switched | None = None
    imported: Imported | None = None
    reached: dict[str, Reached] = field(default_factory=dict)
    """How far it had come in a group, where another tool says so."""
    wired: dict[str, Wired] = field(default_factory=dict)
    footer: Footer | None = None
    complete: bool = True
    """Whether every line that it wrote is here. If not, a call may have been made that is not here."""

    @property
    def closed(self) -> bool:
        """Return whether the recorder closed the file; if not, the process died, or still runs."""
        return self.footer is not None

    @property
    def own_rank(self) -> int | None:
        """Return the cluster's or launcher's rank, else the default group's, else the RPC id."""
        if self.header.rank is not None:
            return self.header.rank
        default = next((group.rank for group in self.groups.values() if group.default), None)
        return default if default is not None or self.worker is None else self.worker.id
