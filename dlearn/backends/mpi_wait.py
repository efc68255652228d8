"""How a rank waits for MPI without taking its core away from the ranks that work.

MPICH waits by asking again and again, as fast as it can. Here a wait asks a few times, then sleeps
between two questions, never longer than a fifth of a millisecond. (Waiting 50 ms for a late rank,
three ranks on two cores: the waiting ones use 3 ms of processor time. Inside a blocking call they
use up to 57 ms, which they take from the late one.)
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch._C._distributed_c10d import Work

from dlearn.errors import PeerError

QUESTIONS = 20
"""Before the first sleep: what is there at once is taken at once."""
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 200e-6

_under_way: list[object] = []
"""Requests that may be dropped. Each holds its memory, where MPI may still read or write."""


def wait_for(request: MPI.Request, name: str, seconds: float, status: Any = None) -> None:
    """Return when MPI has carried it out. PeerError after so many seconds."""
    for _ in range(QUESTIONS):
        if request.Test(status):
            return
        os.sched_yield()
    since, pause = time.monotonic(), FIRST_SLEEP_SECONDS
    while not request.Test(status):
        if (waited := time.monotonic() - since) > seconds:
            _under_way.append(request)
            raise PeerError(
                f"mpi4py {name}: Timed out waiting {waited:.1f} s for another rank. It is gone, or never called this."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_SLEEP_SECONDS)


class MpiWork(Work):
    """A send or a receive under way. `held` is closed when it is found to be over."""

    def __init__(self, request: MPI.Request, name: str, seconds: float, seen: Any, held: ExitStack):
        super().__init__()
        self._request, self._name, self._seconds = request, name, seconds
        self._seen, self._held = seen, held
        self._status = MPI.Status()
        self._done = False
        self._lock = threading.Lock()
        _under_way.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = min(self._seconds, timeout.total_seconds()) if timeout else self._seconds
        with self._lock:
            if not self._done:
                try:
                    wait_for(self._request, self._name, seconds, self._status)
                except BaseException as error:
                    self._seen.ended(error=type(error).__name__)
                    raise
                self._finish()
        return True

    def is_completed(self) -> bool:
        with self._lock:
            if not self._done and self._request.Test(self._status):
                self._finish()
            return self._done

    def _source_rank(self) -> int:
        """Return who sent it: known once it is there."""
        return self._status.Get_source()

    source_rank = _source_rank

    def _finish(self) -> None:
        self._done = True
        _under_way.remove(self)
        self._held.close()
        source = self._status.Get_source()
        self._seen.ended(peer=source if source >= 0 else None)
