"""Rank processes: how they are started, and how it is made sure that none of them is ever left behind.

A rank is forked from a server process that has loaded torch and done nothing else: a few milliseconds, against seconds
for a fresh interpreter. (Forking the notebook's kernel itself is not safe: its OpenMP threads do not survive.) Where
the platform has no safe fork server (macOS, Windows), ranks are spawned, and kept for the next run.

Each rank leads a process group of its own, so its helpers (a DataLoader's workers) end with it, and it watches a pipe
whose other end this process holds: if this process dies, however it dies, the pipe closes and the rank ends itself.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, set_spawning_popen
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from dlearn.cluster.rank import main as rank_main
from dlearn.errors import SetupError
from dlearn.trace.agent_log import widen

StartMethod = Literal["forkserver", "spawn"]

DEFAULT_START: StartMethod = "forkserver" if sys.platform == "linux" else "spawn"

_PRELOAD = ["dlearn.cluster.preload"]


def _context(start: StartMethod) -> ForkServerContext | SpawnContext:
    if start == "spawn":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def warm_up() -> None:
    """Start the fork server now, in the background (a few milliseconds here, seconds there)."""
    # A rank of somebody else's job has no use for it: four ranks would start four servers.
    if DEFAULT_START == "forkserver" and "RANK" not in os.environ:
        _context("forkserver")
        _ensure_running()


@dataclass
class RankProcess:
    """One rank: its process, the connection to its main loop, and the pipe of what it prints."""

    process: BaseProcess
    control: Connection
    output: Connection
    alive: Connection

    def pause(self) -> None:
        """Stop the rank where it is: what happens to the others now is none of its events."""
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End the rank and whatever it started. Only ever processes that we started, by the rank's pid."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.process.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # Also when the rank itself is gone: its helpers keep its process group, and so its number, alive.
            os.killpg(pid, number)
            return
        if self.process.exitcode is None:
            # It has not made its own group yet: then it has no helpers either.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """After the process has ended: wait for it and let go of the pipes."""
        self.process.join()
        for connection in (self.control, self.output, self.alive):
            connection.close()


_owner = os.getpid()


def _ensure_running() -> None:
    """Start the fork server such that an interrupt, while it loads torch, is not its business."""
    if os.getpid() != _owner:
        raise SetupError(
            "this process was forked from one that has clusters, and cannot start ranks of its own."
            " Start it as a new process (subprocess, or multiprocessing's spawn)."
        )
    resource_tracker.ensure_running()
    # It inherits the mask; by itself it ignores interrupts only once it has loaded everything.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_rank(start: StartMethod) -> RankProcess:
    """Start one rank process; it waits for its first call."""
    context = _context(start)
    control, their_control = context.Pipe()
    their_alive, alive = context.Pipe(duplex=False)
    output, their_output = context.Pipe(duplex=False)
    widen(output.fileno())
    arguments = (their_control, their_alive, their_output)
    if start == "forkserver":
        _ensure_running()
        process: BaseProcess = _ForkedRank(target=rank_main, args=arguments)
        process.start()
    else:
        process = context.Process(target=rank_main, args=arguments)
        with _unmarked_main():
            process.start()
    for theirs in arguments:
        theirs.close()
    return RankProcess(process, control, output, alive)


class _ForkedRank(ForkServerProcess):
    """A process of the fork server's that does not import the user's script again. Functions travel by value."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:
        return _PopenWithoutMain(process)


class _PopenWithoutMain(Popen):
    """multiprocessing's own, less what it tells the child of `__main__`; may run while the user's next cell does."""

    def _launch(self, process: BaseProcess) -> None:
        told = spawn.get_preparation_data(process.name)
        told = {name: value for name, value in told.items() if not name.startswith("init_main")}
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(told, data)
            reduction.dump(process, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # The child takes the end of this pipe for our death.
        kept = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (kept, self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb", closefd=True) as stream:
            stream.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


@contextlib.contextmanager
def _unmarked_main() -> Iterator[None]:
    """Hide where `__main__` came from, while multiprocessing spawns.

    It would import the user's script again in every rank, and run what the script runs.
    """
    module = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: module.__dict__.pop(name) for name in ("__file__", "__spec__") if name in module.__dict__
    }
    module.__spec__ = None
    try:
        yield
    finally:
        module.__dict__.update(hidden)
