"""Ranks of a real MPI job: mpiexec starts a stub for each, and the rank takes its seat.

Under mpiexec itself each rank would load torch, seconds for each. So what mpiexec starts are stubs of a few
milliseconds (mpi_stub.py); a rank that the fork server holds ready gets the stub's environment and its connection to
mpiexec with its first call, and joins MPI's job with them (mpi_seat.py). The stub ends as the rank has ended, so
mpiexec sees what we see. Whoever is gone first, nobody is left: a stub ends when our connection to it closes, mpiexec
ends with its stubs, and a rank whose stub or mpiexec is gone is ended by its crew.

MPICH brings two mpiexec. Used is `mpiexec.gforker`, which starts processes on this machine only, and opens no port; the
usual one (hydra) listens on every interface while a job runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from dlearn.cluster import spares
from dlearn.cluster.crew import Crew, start_here
from dlearn.cluster.descriptors import send_descriptor
from dlearn.cluster.launch import RankProcess, StackLine, StartMethod
from dlearn.cluster.mpi_seat import LEFT, Seat
from dlearn.cluster.rank import Call
from dlearn.errors import SetupError, not_installed

MPIEXEC = "mpiexec.gforker"
START_SECONDS = 30.0
"""How long mpiexec may take to start the stubs; it takes a tenth of a second."""
OWN_END_SECONDS = 0.2
"""Once a stub is gone: how long mpiexec may take to end, and say why, and a rank to end by itself."""
END_SECONDS, STUB_END_SECONDS = 0.1, 2.0
"""How long mpiexec may take to end after its last stub (it sometimes spins for two seconds there: it is ended)."""

_STUB = Path(__file__).with_name("mpi_stub.py")
_SHARED = Path("/dev/shm")


def find_mpiexec(folder: str | None = None) -> Path:
    """The mpiexec that belongs to this Python's MPI, by its full path. SetupError if MPI is not installed."""
    if importlib.util.find_spec("mpi4py") is None:
        raise not_installed("mpi4py", needed_by="backend='mpi'")
    scripts = Path(folder or sysconfig.get_path("scripts"))
    if os.access(scripts / MPIEXEC, os.X_OK):
        return scripts / MPIEXEC
    raise SetupError(f"backend='mpi' needs MPICH, and there is no {MPIEXEC} in {scripts}: pip install mpich")


def crew_under_mpiexec(tags: Sequence[str], start: StartMethod) -> Crew:
    """A crew whose ranks are the processes of one MPI job, in the order of MPI's ranks."""
    _tell_of_cores(len(tags))
    job = _Job(find_mpiexec(), len(tags))
    start_one, stubs = start_here(start), iter(job.stubs)

    def start_rank() -> MpiRank:
        return MpiRank(start_one(), next(stubs), job)

    try:
        return Crew(tags, start_rank, spares.turn_over if start == "forkserver" else _see_off)
    except BaseException:
        job.end()
        raise


def _see_off(ranks: Sequence[MpiRank]) -> None:
    for rank in ranks:
        rank.wait(1.0)
        rank.kill()
        rank.close()


@dataclass
class _Stub:
    """Our connection to what mpiexec has started for one rank, and that rank's seat in the MPI job.

    `descriptor` is the seat's own connection to mpiexec, until the rank has it.
    """

    connection: socket.socket
    seat: Seat
    descriptor: int | None

    def hand_over(self, control: Connection) -> None:
        """Give the rank its connection to mpiexec, if it has not got it yet."""
        if self.descriptor is not None:
            send_descriptor(control, self.descriptor)
            self._let_go()

    def end(self, status: int | None = None) -> None:
        """It ends, with this status or as one that nobody told."""
        self._let_go()
        with suppress(OSError):
            if status is not None:
                self.connection.send(str(status).encode())
                self.connection.settimeout(STUB_END_SECONDS)
                self.connection.recv(1)  # Nothing: it has ended. One after the other, so that mpiexec notes each.
        self.connection.close()

    def _let_go(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class _Job:
    """mpiexec and its stubs. `ended` becomes readable when mpiexec is gone; `lost_at` is when that was noticed."""

    def __init__(self, mpiexec: Path, size: int) -> None:
        self.mpiexec = mpiexec
        self.lost_at: float | None = None
        self.stubs: list[_Stub] = []
        self._seated = size
        self._over = False
        here, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
        with here, theirs, tempfile.TemporaryFile() as said:
            stub = [sys.executable, "-I", "-S", str(_STUB), str(theirs.fileno()), f"dlearn-mpi-{os.getpid()}-"]
            # A session of its own: the interrupt of a notebook is for the notebook.
            self._process = subprocess.Popen(
                [str(mpiexec), "-n", str(size), *stub],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
            self._forget_memory()  # No rank has begun: what is there was left by a job of the same number.
            self.ended, self._alive = os.pipe()
            threading.Thread(target=self._watch, name="dlearn-mpiexec", daemon=True).start()
            try:
                while len(self.stubs) < size:
                    self.stubs.append(self._admit(here))
            except BaseException as error:
                self.end()
                if isinstance(error, _NotStarted):
                    said.seek(0)
                    lines = said.read().decode(errors="replace").split("\n")
                    last = next((line.strip() for line in reversed(lines) if line.strip()), str(error))
                    raise SetupError(f"{mpiexec} did not start {size} MPI ranks: {last[:300]}") from None
                raise
        self.stubs.sort(key=lambda stub: stub.seat.rank)

    def _admit(self, door: socket.socket) -> _Stub:
        with selectors.DefaultSelector() as waiting:
            waiting.register(door, selectors.EVENT_READ)
            waiting.register(self.ended, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in waiting.select(START_SECONDS)]
        if door not in ready:
            how = "it ended without a word" if ready else f"it took longer than {START_SECONDS:g} s"
            raise _NotStarted(how)
        data, descriptors, _, _ = socket.recv_fds(door, 1 << 16, 2)
        for each in descriptors:
            os.set_inheritable(each, False)  # No business of what this process starts meanwhile.
        if len(descriptors) < 2:
            raise _NotStarted("this process can open no more files")
        return _Stub(socket.socket(fileno=descriptors[1]), Seat(json.loads(data)), descriptors[0])

    def _watch(self) -> None:
        self._process.wait()
        os.close(self._alive)

    @property
    def status(self) -> int | None:
        """mpiexec's exit status; None while it runs."""
        return self._process.returncode

    @property
    def why_lost(self) -> str:
        if self.status is None:
            return f"what {self.mpiexec.name} had started for it was ended"
        if self.status < 0:
            return f"{self.mpiexec.name} was killed by {signal.Signals(-self.status).name}"
        return f"{self.mpiexec.name} ended it with status {self.status}, as after MPI's Abort"

    def leave(self) -> None:
        """A rank is gone, and its stub told so; with the last one mpiexec ends."""
        self._seated -= 1
        if self._seated == 0:
            self.end()

    def end(self) -> None:
        """See that nothing of it is left. Once is enough."""
        if self._over:
            return
        self._over = True
        for stub in self.stubs:
            stub.end()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.ended, selectors.EVENT_READ)
            if self._seated or not waiting.select(END_SECONDS):
                self._process.kill()
                waiting.select(STUB_END_SECONDS)
        self._forget_memory()
        os.close(self.ended)

    def _forget_memory(self) -> None:
        """Take away the memory that the ranks share: a rank that is killed while MPI begins leaves it there.

        gforker's jobs have nothing but its pid for a name. When that comes again, MPI takes what it finds for the new
        job's, and fails or hangs.
        """
        for path in _SHARED.glob(f"mpich_shm_{memory_name(self._process.pid)}_*"):
            path.unlink(missing_ok=True)


def memory_name(pid: int) -> str:
    """As MPICH 5 names the memory of a job of gforker's: by the 32-bit FNV-1a of the name of its key-value space."""
    number = 0x811C9DC5
    for byte in f"kvs_{pid}_0".encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    return f"{number:x}"


class _NotStarted(Exception):
    """mpiexec, or one of its stubs, is gone before all were there. Never leaves this file."""


class MpiRank:
    """A rank of this machine in the seat of a stub, for its crew the same as a `RankProcess`."""

    beside_engine = False

    def __init__(self, process: RankProcess, stub: _Stub, job: _Job) -> None:
        self._rank, self._stub, self._job = process, stub, job
        self.control, self.output, self.host = process.control, process.output, process.host
        self.lost = ""
        self._signs = selectors.DefaultSelector()
        """Of an end: the rank's, its stub's, mpiexec's."""
        for sign in (process.sentinel, stub.connection, job.ended):
            self._signs.register(sign, selectors.EVENT_READ)

    @property
    def pid(self) -> int | None:
        return self._rank.pid

    @property
    def sentinel(self) -> int:
        """Readable when the rank has ended, or has lost its place in the MPI job."""
        return self._signs.fileno()

    @property
    def exit_code(self) -> int | None:
        return None if self.lost else self._rank.exit_code

    @property
    def lives(self) -> bool:
        return self._rank.lives and not self._signs.select(0)

    @property
    def halted(self) -> bool:
        return self._rank.halted

    def wait(self, seconds: float) -> None:
        """Until the rank has ended, or is lost."""
        if not self._signs.select(seconds) or not self._rank.lives:
            return
        if self._job.lost_at is None:
            self._job.lost_at = time.monotonic()
        self._rank.wait(max(0.0, self._job.lost_at + OWN_END_SECONDS - time.monotonic()))
        if self._rank.lives:
            self.lost = f"lost its place in the MPI job: {self._job.why_lost}"

    def listen(self, backlog: int) -> tuple[str, int]:
        return self._rank.listen(backlog)

    def send(self, call: Call) -> None:
        """With the first call the rank gets its seat."""
        self._rank.send(replace(call, seat=self._stub.seat))
        self._stub.hand_over(self.control)

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        return self._rank.stack(call)

    def collect(self) -> None:
        self._rank.collect()

    def pause(self) -> int:
        return self._rank.pause()

    def kill(self) -> None:
        self._rank.kill()

    def close(self) -> None:
        """After the process has ended: its stub ends with the same status, and the last one ends mpiexec."""
        status = self._status()
        self._rank.close()
        self._signs.close()
        self._stub.end(status)
        self._job.leave()

    def _status(self) -> int:
        """As a shell tells it: 128 and the signal's number. A rank that has left MPI in order ends by a signal, too."""
        with suppress(EOFError, OSError):
            while self.control.poll(0):
                if self.control.recv() == LEFT:
                    return 0
        self._rank.wait(1.0)
        code = self._rank.exit_code
        return 1 if code is None else code if code >= 0 else 128 - code


_told = False


def _tell_of_cores(ranks: int) -> None:
    """Once: more ranks than cores are slow for another reason than elsewhere."""
    global _told
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks > cores and not _told:
        _told = True
        print(
            f"dlearn: {ranks} MPI ranks on {cores} cores. MPICH waits by asking again and again: inside calls of mpi4py"
            " a rank that waits takes time from those that work.",
            file=sys.stderr,
        )
