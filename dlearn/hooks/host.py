"""The recording for dlearn's own hooks: `Emit`, and the state that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from dlearn.events.options import Options
from dlearn.events.source import Emit
from dlearn.hooks.c10d.groups import Groups
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.network.clock import ClockServer
from dlearn.hooks.network.sockets import Sockets
from dlearn.hooks.rpc.rpc_agent_log import AgentLog


class Host(Emit, Protocol):
    """One of each for the whole recording."""

    last_ns: int
    """When anything was last reported."""
    waiting: dict[int, int]
    """When the operations that have not ended began, if a hang is watched for."""
    options: Options
    groups: Groups
    times: CudaTimes
    sockets: Sockets
    clocks: ClockServer
    log: AgentLog  # The RPC agent's own.

    @property
    def path(self) -> Path:
        """Return the file of this process."""

    @property
    def begun(self) -> bool:
        """Return whether that file has a line yet."""

    def count(self) -> None:
        """Write down the counters of bytes on the wire."""

    def count_phase(self) -> None:
        """Do so with `measure="phase"`, as a phase of an iteration over RPC begins or ends."""

    def watch_rpc_sockets(self) -> None:
        """Take the connections that are new for the RPC agent's."""

    def disconnecting(self) -> None:
        """Read the counters of the agent's connections before they are closed."""

    def begin_step(self, number: int) -> None:
        """Note that the optimizer has made `number` steps: the next one begins."""

    def span_names(self) -> list[str]:
        """Name the program's spans that this thread is inside of, the outermost first."""
