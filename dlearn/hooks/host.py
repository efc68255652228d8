"""The recording as dlearn's own hooks see it: `Emit`, and what several of them share."""

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
    """When the operations that have not ended began, where somebody watches for a hang."""
    options: Options
    groups: Groups
    times: CudaTimes
    sockets: Sockets
    desk: ClockServer | None  # None where all ranks are known to be on this host.
    log: AgentLog  # The RPC agent's own.

    @property
    def path(self) -> Path:
        """The file of this process."""

    @property
    def begun(self) -> bool:
        """Whether that file has a line yet."""

    def count(self) -> None:
        """Write down the counters of bytes on the wire."""

    def count_phase(self) -> None:
        """Do so where each phase of an iteration over RPC is measured, as one begins or ends."""

    def watch_rpc_sockets(self) -> None:
        """Take the connections that have come for the RPC agent's."""

    def disconnecting(self) -> None:
        """Read the counters of the agent's connections, which are about to be closed."""

    def begin_step(self, number: int) -> None:
        """Note that the optimizer has made `number` steps: the next one begins."""

    def span_names(self) -> list[str]:
        """Name the program's spans that this thread is inside of, the outermost first."""
