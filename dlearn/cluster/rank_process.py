"""One rank, as the process that has started it sees it: its pid, its connections, and how it ended."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing as mp
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

from dlearn.cluster import rank_protocol
from dlearn.cluster.fork_server import SERVER
from dlearn.cluster.payload import is_installed
from dlearn.cluster.rank_protocol import LOOPBACK, STACK_SIGNAL, Call, Enter, Listen
from dlearn.errors import SetupError
from dlearn.events.agent_log import widen
from dlearn.events.this_host import is_stopped


class StackLine(NamedTuple):
    """A line of a rank's stack, in the order of faulthandler: innermost first."""

    file: str
    line: int


_STACK_LINE = re.compile(r'File "(.+)", line (\d+) in ')
_STACK_IS_WHOLE = re.compile(r'cluster/rank\.py", line \d+ in serve\n|^  \.\.\.\n', re.MULTILINE)
"""faulthandler writes line by line, innermost first. The rank's own line, or dots after 100, is the last."""
STACK_SECONDS = 2.0
DEATH_SECONDS = 2.0  # For the report of a process's end, once its connection is closed.
ENTER_SECONDS = 60.0  # How long a rank may take to answer: one that is spawned loads torch before.


class RankGroup:
    """What the ranks of one pool share: here nothing but this machine's loopback."""

    aborted: set[int] = set()  # noqa: RUF012 (no rank of this group is ever in it)
    """The pids of ranks that have called MPI's Abort."""

    @property
    def loss(self) -> str:
        """Return how the group has lost its ranks; "" if it has not."""
        return ""

    def stop_slowing(self) -> None:
        """Let all ranks run at full speed: they are about to be ended."""

    def closed(self, rank: RankProcess) -> None:
        """Note that a rank is gone; after the last, end what they shared."""


@dataclass
class RankProcess:
    """A rank: its pid, the connection to its main loop, what it prints, and the report of its end."""

    pid: int
    control: Connection
    output: Connection
    death: Connection  # Becomes readable when the rank has ended.
    own_address: str = ""  # Where rank 0 opens the store's socket, if not on loopback.
    group: RankGroup = field(default_factory=RankGroup)
    exit_code: int | None = None
    """Negative: the number of a signal. None while it lives, and if the report of its end is lost."""
    passed_sockets: list[socket.socket] = field(default_factory=list)
    """What the rank gets behind its next call, in this order."""
    beside_engine = False
    _ended = _report_lost = False
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, seconds: float | None) -> bool:
        """Wait for its end, at most so long (None: without limit). Return whether it has ended."""
        if not self._ended and self.death.poll(seconds):
            with self._reading:
                if not self._ended:
                    try:
                        self.exit_code = self.death.recv()
                    except EOFError:
                        self._report_lost = True
                    self._ended = True
        return self._ended

    @property
    def lives(self) -> bool:
        return not self.wait(0)

    @property
    def lost(self) -> str:
        """Return in words how it was lost, and did not end by itself; "" if it was not."""
        if self.has_aborted:
            return "ended the MPI job"
        self.wait(0)
        if self._report_lost and not self.group.loss:
            return "lost the process that had started it, the fork server, which has ended"
        return self.group.loss

    @property
    def has_aborted(self) -> bool:
        return self.pid in self.group.aborted

    @property
    def halted(self) -> bool:
        return is_stopped(self.pid)

    def listen(self, backlog: int) -> tuple[str, int]:
        """Have the rank open the socket on which it will serve the store; return its address."""
        address = self.own_address or LOOPBACK
        with suppress(OSError, EOFError):  # It has ended, which following it will show.
            self.control.send(Listen(address, backlog))
            if self.control.poll(ENTER_SECONDS):
                reached: tuple[str, int] = self.control.recv()
                return reached
        return address, 0

    def refusal(self) -> str:
        """Return why a rank that was started with `enter` did not enter its network; "" if it did."""
        with suppress(EOFError, ConnectionResetError):
            if self.control.poll(ENTER_SECONDS):
                answer: str = self.control.recv()
                return answer
        return "a rank did not come into its network"

    def send(self, call: Call) -> None:
        """Send a call; returns when the rank has taken it."""
        self.control.send(call)
        for passed in self.passed_sockets:
            rank_protocol.send_descriptor(self.control, passed.fileno())
        self._close_passed_sockets()

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        """Return where the rank is in the user's code, innermost call first; () if it does not say."""
        self.group.stop_slowing()
        file = rank_protocol.stack_file(call.folder, call.rank)
        # Without its file it does not listen to the signal yet, which would end it.
        if not file.exists():
            return ()
        _signal_main_thread(self.pid)
        deadline = time.monotonic() + STACK_SECONDS
        while not _STACK_IS_WHOLE.search(text := file.read_text()):
            if time.monotonic() > deadline:
                return ()
            time.sleep(0.01)
        lines = [StackLine(name, int(line)) for name, line in _STACK_LINE.findall(text)]
        cells = call.environment.cells
        return tuple(line for line in lines if line.file in cells or not is_installed(line.file))

    def pause(self) -> int | None:
        """Stop the rank where it is, so that the end of others is no event of its own. Return when, in ns."""
        self.group.stop_slowing()  # Else the switch would let it go on.
        self._signal(signal.SIGSTOP)
        return time.monotonic_ns()

    def kill(self) -> None:
        """Kill the rank. What it has started ends with it, before the report of its end."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, whose children may be there when the rank is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def collect(self) -> None:
        """Bring what it has recorded into the run's folder, if that is on another host."""

    def close(self) -> None:
        self.wait(None)
        for connection in (self.control, self.output, self.death):
            connection.close()
        self._close_passed_sockets()
        self.group.closed(self)

    def _close_passed_sockets(self) -> None:
        while self.passed_sockets:
            self.passed_sockets.pop().close()


def start_rank(enter: Enter | None = None, own_address: str = "") -> RankProcess:
    """Start one rank, which may `enter` a network first. SetupError if too many files are open."""
    with ExitStack() as ours:
        try:
            control, their_control = mp.Pipe()
            ours.enter_context(control)
            output, their_output = mp.Pipe(duplex=False)
            ours.enter_context(output)
            widen(output.fileno())
            with their_control, their_output:
                pid, death = SERVER.fork((their_control, their_output), enter)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise SetupError(
                "this process may open no more files, and each rank needs three of them (of an MPI job, four):"
                " use fewer ranks, or raise the limit (ulimit -n)."
            ) from None
        ours.pop_all()
    return RankProcess(pid, control, output, death, own_address)


def _signal_main_thread(pid: int) -> None:
    """Ask the main thread for its stack: any other might take the signal (Linux, `wants_signal`)."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # Linux, with glibc 2.30.
    if tgkill is not None:
        tgkill(pid, pid, int(STACK_SIGNAL))  # An error means that the rank has ended.
        return
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
