"""One recorded process of a job."""

from dataclasses import dataclass, field
from pathlib import Path

from dlearn.events.clocks import SAME, Clock, DeviceSpan
from dlearn.events.event import Footer, GroupFact, Header, Socket, Worker
from dlearn.events.job_facts import DdpModel, Heartbeat, Imported, OptimizerMade, Reached, Switched
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.wiring import Wired


@dataclass
class Process:
    """One recorded process: its `rank` in this trace, and the `label` in pictures and words."""

    path: Path
    header: Header
    rank: int = -1
    label: str = ""
    clock: Clock = SAME  # How its times were moved to the clock of the whole trace.
    device_spans: dict[int, DeviceSpan] = field(default_factory=dict)
    """When a GPU did what was launched, by the event's number."""
    groups: dict[str, GroupFact] = field(default_factory=dict)
    sockets: dict[int, Socket] = field(default_factory=dict)
    worker: Worker | None = None  # Of a process that uses RPC: its name and id there.
    rendezvous: list[Rendezvous] = field(default_factory=list)
    not_measured: str = ""  # Why the bytes on the wire are not known; empty where they are.
    heartbeat: Heartbeat | None = None
    exit_status: int | None = None
    stopped_ns: int | None = None
    """When, by its own clock, its cluster stopped it at work: a timeout, or another rank's fault."""
    network: Switched | None = None
    imported: Imported | None = None
    reached: dict[str, Reached] = field(default_factory=dict)
    """How far it had come in a group, where another tool says so."""
    wired: dict[str, Wired] = field(default_factory=dict)
    models: dict[int, DdpModel] = field(default_factory=dict)
    optimizers: dict[int, OptimizerMade] = field(default_factory=dict)
    footer: Footer | None = None
    complete: bool = True
    """Whether every line that it wrote is here. If not, a call may have been made that is not here."""

    @property
    def closed(self) -> bool:
        """Return whether the recorder closed the file; if not, the process died, or still runs."""
        return self.footer is not None

    @property
    def own_rank(self) -> int | None:
        """Return the launcher's rank, else the default group's, the RPC id, or that of a call."""
        known = [self.header.rank, *(group.rank for group in self.groups.values() if group.default)]
        known += [self.worker.id] if self.worker is not None else []
        known += [each.as_rank for each in self.rendezvous]
        return next((rank for rank in known if rank is not None), None)

    def dimensions(self, group: GroupFact) -> tuple[str, ...]:
        """Return what a mesh calls a group; an inner group has its outer one's dimensions."""
        return self.groups.get(group.within, group).dimensions
