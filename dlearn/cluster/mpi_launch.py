"""An MPI job of ranks of this machine: the cluster is its process manager, as mpiexec elsewhere.

A process of MPICH's asks its manager, through an open descriptor (PMI_FD), what its job is called,
and when all have come (PMI 1: wiki.mpich.org, "PMI v1 Wire Protocol"). Here ranks of the fork server
get such a descriptor with their first call (mpi_seat.py), and load no torch anew. No port is opened.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dlearn.cluster.launch import RankProcess
from dlearn.errors import not_installed

LINE_BYTES = 4096
_SHARED = Path("/dev/shm")
_ALWAYS = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "appnum appnum=0",
    "finalize": "finalize_ack",
}


def find_mpi() -> None:
    """SetupError if mpi4py is not installed. Whether it finds its MPI is known when a rank has loaded it."""
    if importlib.util.find_spec("mpi4py") is None:
        raise not_installed("mpi4py", needed_by="backend='mpi'")


def seated(processes: Sequence[RankProcess]) -> list[MpiRank]:
    _tell_of_cores(len(processes))
    pairs = [socket.socketpair() for _ in processes]
    job = Job([ours for ours, _ in pairs])
    return [MpiRank(process, job, rank, pairs[rank][1]) for rank, process in enumerate(processes)]


class Job:
    """The manager of one MPI job. `aborted` are the ranks that have called Abort, and are ended here."""

    def __init__(self, ends: Sequence[socket.socket]) -> None:
        # MPICH names what the ranks share by it: no other job may be called the same.
        self.name = f"dlearn_{os.getpid()}_{secrets.token_hex(8)}"
        self.pids: dict[int, int | None] = {}
        self.aborted: set[int] = set()
        self._ends = ends
        self._here: list[int] = []
        self._told = {"PMI_process_mapping": f"(vector,(0,1,{len(ends)}))"}
        threading.Thread(target=self._serve, name="dlearn-mpi", daemon=True).start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for rank, end in enumerate(self._ends):
                waiting.register(end, selectors.EVENT_READ, rank)
            while waiting.get_map():
                for key, _ in waiting.select():
                    end, lines = self._ends[key.data], b""
                    with suppress(ConnectionResetError):
                        lines = end.recv(LINE_BYTES)
                    for line in lines.decode().splitlines():
                        self._answer(key.data, dict(word.partition("=")[::2] for word in line.split()))
                    if not lines:  # The rank has ended.
                        waiting.unregister(end)
                        end.close()

    def _answer(self, rank: int, asked: dict[str, str]) -> None:
        match asked.get("cmd", ""):
            case command if command in _ALWAYS:
                answer = _ALWAYS[command]
            case "get_universe_size":
                answer = f"universe_size size={len(self._ends)}"
            case "get_my_kvsname":
                answer = f"my_kvsname kvsname={self.name}"
            case "put":
                self._told[asked["key"]] = asked["value"]
                answer = "put_result rc=0 msg=success"
            case "get" if asked["key"] in self._told:
                answer = f"get_result rc=0 msg=success value={self._told[asked['key']]}"
            case "get":
                answer = "get_result rc=-1 msg=not_found value=unknown"
            case "barrier_in":
                self._here.append(rank)
                if len(self._here) == len(self._ends):
                    while self._here:
                        self._tell(self._here.pop(), "barrier_out")
                return
            case "abort":
                self.aborted.add(rank)
                pid = self.pids.get(rank)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                return
            case other:
                answer = f"{other}_result rc=-1 msg=not_supported"
        self._tell(rank, answer)

    def _tell(self, rank: int, answer: str) -> None:
        with suppress(OSError):  # The rank has ended.
            self._ends[rank].sendall(f"cmd={answer}\n".encode())

    def leave(self, rank: int) -> None:
        """A rank is gone. With the last one goes the memory that they shared, which one that was killed leaves."""
        del self.pids[rank]
        if not self.pids:
            for path in _SHARED.glob(f"mpich_shm_{memory_name(self.name)}_*"):
                path.unlink(missing_ok=True)


def memory_name(job: str) -> str:
    """As MPICH 5 names the memory of a job: by the 32-bit FNV-1a of the name of its key-value space."""
    number = 0x811C9DC5
    for byte in job.encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    return f"{number:x}"


class MpiRank(RankProcess):
    """A rank of this machine with a seat in an MPI job, which it gets with its first call."""

    def __init__(self, process: RankProcess, job: Job, rank: int, seat: socket.socket) -> None:
        vars(self).update(vars(process))
        self.job, self._rank = job, rank
        self.gifts.append(seat)
        job.pids[rank] = process.pid

    @property
    def lost(self) -> str:
        return "ended the MPI job" if self.aborted_mpi else super().lost

    @property
    def aborted_mpi(self) -> bool:  # type: ignore[override]
        return self._rank in self.job.aborted

    def close(self) -> None:
        super().close()
        self.job.leave(self._rank)


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
