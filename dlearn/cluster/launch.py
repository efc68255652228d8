"""Start rank processes, and leave none of them behind.

A rank is forked from a server process that has loaded torch and done nothing else: milliseconds,
against seconds for a fresh interpreter. (The notebook's kernel cannot be forked: its OpenMP threads
do not survive.) Where torch cannot be forked (macOS), the server is a bare Python.

Each rank leads a process group, and ends with it; descendants.py finds what has left the group. It
watches a pipe of this process: however this process ends, the rank ends itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dlearn.cluster import descendants
from dlearn.cluster.descriptors import send_descriptor
from dlearn.cluster.payload import is_installed
from dlearn.cluster.rank import STACK_SIGNAL, Call, Enter, stack_file
from dlearn.cluster.rank import main as rank_main
from dlearn.errors import SetupError
from dlearn.events.agent_log import widen

StartMethod = Literal["forkserver", "spawn"]

DEFAULT_START: StartMethod = "forkserver" if sys.platform == "linux" else "spawn"

_servers: dict[StartMethod, Any] = {"forkserver": forkserver.ForkServer(), "spawn": forkserver.ForkServer()}
"""Not the one of multiprocessing: what that has forked are the notebook's own processes."""
_servers["forkserver"].set_forkserver_preload(["dlearn.cluster.preload"])
_servers["spawn"].set_forkserver_preload(["dlearn.cluster.server_end"] if sys.platform == "linux" else [])
_forked: set[int] = set()
"""The ranks below it that have not been seen off. What else is there was left by ranks that are gone."""
_forking = threading.Lock()
FILES_TO_CONNECT = 8


def warm_up() -> None:
    """Start the fork server now, in the background; not in a rank of somebody else's job."""
    if DEFAULT_START == "forkserver" and "RANK" not in os.environ:
        _ensure_running("forkserver")


class StackLine(NamedTuple):
    """A line of a rank's stack, in the order of faulthandler: innermost first."""

    file: str
    line: int


_STACK_LINE = re.compile(r'File "(.+)", line (\d+) in ')
_STACK_IS_WHOLE = re.compile(r'cluster/rank\.py", line \d+ in serve\n|^  \.\.\.\n', re.MULTILINE)
"""faulthandler writes line by line, the innermost call first: the rank's own line, or dots after 100, are the end."""
STACK_SECONDS = 2.0
DEATH_SECONDS = 2.0
"""How long the system may take to report the death of a process whose connection is closed."""
LOOPBACK = "127.0.0.1"


def kernel_id(namespace: str) -> str:
    """Name the kernel's boot, and the namespace of pids ("pid") or addresses ("net")."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    return socket.gethostname()


def _check_route(address: str) -> None:
    """SetupError if nothing can be sent there: torch would try for minutes, and not say why it cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # Sends nothing.
        except OSError as error:
            raise SetupError(
                f"the ranks cannot reach each other at {address}: {error.strerror}. Bring the loopback interface up"
                " (ip link set lo up)."
            ) from None


def ask_for_stack(pid: int) -> None:
    # Sent to the process, any thread might take it if that was stopped just now (Linux, `wants_signal`),
    # and each thread writes its own stack.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # Linux, with glibc 2.30.
    if tgkill is not None:
        tgkill(pid, pid, int(STACK_SIGNAL))  # An error means that the rank has ended.
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)


@dataclass
class RankProcess:
    """One rank: its process, the connection to its main loop, and the pipe of what it prints."""

    process: BaseProcess
    control: Connection
    output: Connection
    alive: Connection
    beside_engine = aborted_mpi = False
    leaves_a_spare = True
    """Whether a fresh one is to be ready for the next run."""
    host: str = field(default_factory=socket.gethostname)
    gifts: list[socket.socket] = field(default_factory=list)
    """What the rank gets behind its next call, in this order."""

    @property
    def lost(self) -> str:
        """The fork server's end, in words: without it nobody knows how the rank ended, or whether it has."""
        if self.process.exitcode is None or not getattr(self.process._popen, "untold", False):  # type: ignore[attr-defined]
            return ""
        return "lost the process that had started it, the fork server, which has ended"

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    @property
    def exit_code(self) -> int | None:
        return None if self.lost else self.process.exitcode

    @property
    def lives(self) -> bool:
        return self.process.exitcode is None

    @property
    def halted(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # It has ended; or the system has no /proc.
            return False
        return state in ("T", "t")

    def wait(self, seconds: float) -> None:
        self.process.join(seconds)

    def listen(self, backlog: int, address: str = LOOPBACK) -> tuple[str, int]:
        """Open the socket on which this rank, with its next call, will serve the store; its address and port."""
        _check_route(address)
        listener = socket.create_server((address, 0), backlog=backlog)
        self.gifts.append(listener)
        return address, listener.getsockname()[1]

    def send(self, call: Call) -> None:
        """Blocks until the rank has taken it."""
        self.control.send(call)
        for gift in self.gifts:
            send_descriptor(self.control, gift.fileno())
        self._let_go_of_gifts()

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        """Return where the rank is in the user's code, innermost call first; () if it does not say."""
        file = stack_file(call.folder, call.rank)
        # Without its file it has not got as far as listening to the signal, which would end it.
        if self.process.pid is None or not file.exists():
            return ()
        ask_for_stack(self.process.pid)
        deadline = time.monotonic() + STACK_SECONDS
        while not _STACK_IS_WHOLE.search(text := file.read_text()):
            if time.monotonic() > deadline:
                return ()
            time.sleep(0.01)
        found = (StackLine(name, int(line)) for name, line in _STACK_LINE.findall(text))
        return tuple(line for line in found if line.file in call.surroundings.cells or not is_installed(line.file))

    def collect(self) -> None:
        """What it recorded is where it belongs: it wrote it there."""

    def pause(self) -> int:
        """Stop the rank where it is: what happens to the others now is none of its events."""
        self._signal(signal.SIGSTOP)
        return time.monotonic_ns()

    def kill(self) -> None:
        """End the rank and whatever it started. Only ever processes that we started, by the rank's pid."""
        if self.process.pid is not None and self.process.exitcode is None:
            descendants.end_children(self.process.pid)
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
        """After the process has ended: wait for it, end what it left behind, and let go of the pipes."""
        self.process.join()
        if self.process.pid in _forked:
            _forked.remove(self.process.pid)
            _end_strays()
        for connection in (self.control, self.output, self.alive):
            connection.close()
        self._let_go_of_gifts()

    def _let_go_of_gifts(self) -> None:
        while self.gifts:
            self.gifts.pop().close()


_owner = os.getpid()


def _ensure_running(start: StartMethod) -> None:
    """Start the fork server such that an interrupt, while it loads torch, is not its business."""
    if os.getpid() != _owner:
        raise SetupError(
            "this process was forked from one that has clusters, and cannot start ranks of its own."
            " Start it as a new process (subprocess, or multiprocessing's spawn)."
        )
    resource_tracker.ensure_running()
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # Lost by `%reset`.
    # It inherits the mask; by itself it ignores interrupts only once it has loaded everything.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _servers[start].ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_rank(start: StartMethod, enter: Enter | None = None) -> RankProcess:
    """Start one rank process; with `enter` it first goes into a network of its own."""
    context = mp.get_context()
    try:
        control, their_control = context.Pipe()
        their_alive, alive = context.Pipe(duplex=False)
        output, their_output = context.Pipe(duplex=False)
        widen(output.fileno())
        arguments = (their_control, their_alive, their_output)
        _ensure_running(start)
        process = _ForkedRank(target=rank_main, args=(*arguments, enter), name=start)
        process.start()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise SetupError(
            "this process may open no more files, and each rank needs five of them: use fewer ranks,"
            " or raise the limit (ulimit -n)."
        ) from None
    for theirs in arguments:
        theirs.close()
    return RankProcess(process, control, output, alive)


class _ForkedRank(ForkServerProcess):
    """A process of the fork server whose name it has. Functions travel by value: the user's script is not imported."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:
        return _PopenWithoutMain(process)


class _PopenWithoutMain(Popen):
    """multiprocessing's own, less what it tells the child of `__main__`; may run while the user's next cell does.

    `untold`: the fork server has ended, and so has not told the exit code. Then multiprocessing says 255.
    """

    untold = False

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
        _see_that_files_can_be_opened()
        with _forking:
            self._connect(_servers[process.name], data.getvalue())  # type: ignore[index]

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode, self.untold = 255, True
        return self.returncode

    def _connect(self, server: Any, data: bytes) -> None:
        self.sentinel, writer = _ask(server, self._fds)  # type: ignore[attr-defined]
        # The child takes the end of this pipe for our death.
        kept = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (kept, self.sentinel))  # type: ignore[attr-defined]
        with open(writer, "wb", closefd=True) as stream:
            stream.write(data)
        self.pid = forkserver.read_signed(self.sentinel)
        _forked.add(self.pid)


def _ask(server: Any, descriptors: list[int]) -> tuple[int, int]:
    """Have the fork server start a process: for a moment one that was killed refuses, then there is
    another."""
    deadline = time.monotonic() + DEATH_SECONDS
    while True:
        try:
            found: tuple[int, int] = server.connect_to_new_process(descriptors)
            return found
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _see_that_files_can_be_opened() -> None:
    """OSError if not. Found out later, while the fork server listens to us, that would be the end of it."""
    with contextlib.ExitStack() as opened:
        for _ in range(FILES_TO_CONNECT):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _end_strays() -> None:
    with _forking:  # Else a rank that is only being forked would look like that.
        for server in _servers.values():
            if server._forkserver_pid is not None and os.getpid() == _owner:
                descendants.end_children(server._forkserver_pid, but=_forked)
