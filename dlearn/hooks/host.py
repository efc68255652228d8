"""The recording for dlearn's own hooks: `Emit`, and the state that several of them share."""

from collections.abc import Callable
from typing import Protocol

from dlearn.events.event import RPC, Counters
from dlearn.events.options import Options
from dlearn.events.source import Emit
from dlearn.hooks.c10d.groups import Groups
from dlearn.hooks.cuda_times import CudaTimes
from dlearn.hooks.network.clock import ClockServer
from dlearn.hooks.network.sockets import Sockets
from dlearn.hooks.rpc.rpc_agent_log import AgentLog


class Host(Emit, Protocol):
    """One of each for the whole recording, and the counters of bytes on the wire."""

    last_ns: int  # When anything was last reported.
    waiting: dict[int, int]  # When operations without an end began, if `hang_after` is set.
    options: Options
    groups: Groups
    times: CudaTimes
    sockets: Sockets
    clocks: ClockServer
    log: AgentLog  # The RPC agent's own.
    meet: Callable[[], None] | None = None
    """Waits for all workers of a cluster, which opens RPC's connections before they use them."""

    @property
    def begun(self) -> bool:
        """Return whether there is a file yet: a lazy recording makes it when it has a line."""

    def open_span(self, name: str, *, of_profiler: bool = False) -> int:
        """Open a span of this thread, which may be a range `of_profiler`; return its number."""

    def close_span(self, number: int) -> None:
        """Report the end of a span."""

    def begin_step(self, number: int) -> None:
        """Note that the optimizer has made `number` steps: the next one begins."""

    def span_names(self) -> list[str]:
        """Return the program's spans that this thread is inside of, the outermost first."""

    def count(self) -> None:
        """Write down the counters of bytes on the wire."""
        if not self.sockets.connections:
            return
        try:
            still = self.sockets.settle() if self.options.measure == "phase" else None
            sent, received = self.sockets.sent_bytes(), self.sockets.received_bytes()
            self.event(Counters, sent_bytes=sent, received_bytes=received, still=still)
        except Exception as failure:
            self.failed("the counters of sockets", failure)

    def watch_rpc_sockets(self, *, opened: bool = False) -> None:
        """Take new connections for the agent's, if these are TCP. A cluster opens them first."""
        if (opened or self.meet is None) and self.sockets.watch(RPC):
            self.count()

    def disconnecting(self) -> None:
        """Read the counters of RPC's connections on all workers, before any worker closes them."""
        self.count()
        self.clocks.close()
        if self.meet is not None:
            self.meet()
