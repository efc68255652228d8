"""An MPI job of ranks of this machine: the cluster is its process manager, as mpiexec elsewhere.

A process of MPICH's asks its manager through an open descriptor (PMI_FD) what its job is called,
and when all have come (PMI 1: wiki.mpich.org, "PMI v1 Wire Protocol"). Here ranks get it with their
first call (rank.py). No port is opened.
"""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dlearn.cluster import warm_pool
from dlearn.cluster.rank_process import RankGroup, RankProcess
from dlearn.events.this_host import cores
from dlearn.notices import notice

LINE_BYTES = 4096
_SHARED = Path("/dev/shm")
_ALWAYS = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "appnum appnum=0",
    "finalize": "finalize_ack",
}


def start_mpi(count: int) -> list[RankProcess]:
    """Start the ranks of one MPI job, which they join with their first call."""
    _warn_of_cores(count)
    ranks = warm_pool.take(count)
    PmiServer(ranks)
    return ranks


class PmiServer(RankGroup):
    """The process manager of one MPI job. Ranks that call Abort are ended here."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        # MPICH names what the ranks share by it: no other job may be called the same.
        self.name = f"dlearn_{os.getpid()}_{secrets.token_hex(8)}"
        self.aborted = set()
        self._ends: list[socket.socket] = []
        self._pids = [rank.pid for rank in ranks]
        self._left = set(self._pids)
        self._at_barrier: list[int] = []
        self._answers = _ALWAYS | {"get_universe_size": f"universe_size size={len(ranks)}"}
        self._answers["get_my_kvsname"] = f"my_kvsname kvsname={self.name}"
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{len(ranks)}))"}
        for rank in ranks:
            ours, theirs = socket.socketpair()
            self._ends.append(ours)
            rank.passed_sockets.append(theirs)
            rank.group = self
        threading.Thread(target=self._serve, name="dlearn-mpi", daemon=True).start()

    def closed(self, rank: RankProcess) -> None:
        """Remove, after the last rank, the memory that they shared: a rank that was killed leaves it."""
        self._left.discard(rank.pid)
        if not self._left:
            for path in _SHARED.glob(f"mpich_shm_{memory_name(self.name)}_*"):
                path.unlink(missing_ok=True)

    def _serve(self) -> None:
        rank_of = {end: rank for rank, end in enumerate(self._ends)}
        while rank_of:
            ready: list[Any] = wait(list(rank_of))
            for end in ready:
                lines = b""
                with suppress(ConnectionResetError):
                    lines = end.recv(LINE_BYTES)
                for line in lines.decode().splitlines():
                    fields = dict(word.partition("=")[::2] for word in line.split())
                    self._answer(rank_of[end], fields)
                if not lines:  # The rank has ended.
                    del rank_of[end]
                    end.close()

    def _answer(self, rank: int, asked: dict[str, str]) -> None:
        match asked.get("cmd", ""):
            case command if command in self._answers:
                answer = self._answers[command]
            case "put":
                self._values[asked["key"]] = asked["value"]
                answer = "put_result rc=0 msg=success"
            case "get" if asked["key"] in self._values:
                answer = f"get_result rc=0 msg=success value={self._values[asked['key']]}"
            case "get":
                answer = "get_result rc=-1 msg=not_found value=unknown"
            case "barrier_in":
                self._at_barrier.append(rank)
                if len(self._at_barrier) == len(self._ends):
                    while self._at_barrier:
                        self._send(self._at_barrier.pop(), "barrier_out")
                return
            case "abort":
                self.aborted.add(self._pids[rank])
                if self._pids[rank] in self._left:
                    os.killpg(self._pids[rank], signal.SIGKILL)
                return
            case other:
                answer = f"{other}_result rc=-1 msg=not_supported"
        self._send(rank, answer)

    def _send(self, rank: int, answer: str) -> None:
        with suppress(OSError):  # The rank has ended.
            self._ends[rank].sendall(f"cmd={answer}\n".encode())


def memory_name(job: str) -> str:
    """Return MPICH 5's name of a job's memory: the 32-bit FNV-1a of the name of its key-value space."""
    number = 0x811C9DC5
    for byte in job.encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    return f"{number:x}"


@cache
def _warn_of_cores(ranks: int) -> None:
    """Say once that more ranks than cores are slow here for another reason than elsewhere."""
    if ranks > cores():
        notice(
            f"{ranks} MPI ranks on {cores()} cores. MPICH waits by asking again and again:"
            " inside calls of mpi4py a rank that waits takes time from those that work."
        )
