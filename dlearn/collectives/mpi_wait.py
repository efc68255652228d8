"""How a rank waits for MPI without taking its core away from the ranks that work.

MPICH waits by asking again and again, as fast as it can. Here a wait asks a few times, then sleeps a little between two
questions, never longer than a fifth of a millisecond. (Waiting 50 ms for a late rank, three ranks on two cores: the
waiting ones use 3 ms of processor time; inside a blocking call up to 57, which they take from the late one.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Work

from dlearn import recorder
from dlearn.errors import PeerError

QUESTIONS = 20
"""Before the first sleep: what is there at once is taken at once."""
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 200e-6

_abandoned: list[object] = []
"""Requests that nobody waits for any more, with their memory: MPI may still write there."""


def wait_for(
    request: MPI.Request,
    name: str,
    patience: Callable[[], float],
    status: MPI.Status | None = None,
    keep: object = None,
) -> None:
    """Until MPI has carried it out. PeerError after `patience()` seconds, which is asked again and again."""
    for _ in range(QUESTIONS):
        if request.Test(status):
            return
        os.sched_yield()
    since, pause = time.monotonic(), FIRST_SLEEP_SECONDS
    while not request.Test(status):
        if time.monotonic() - since > patience():
            _abandoned.append((request, keep))
            raise PeerError(
                f"mpi4py {name}: Timed out waiting {time.monotonic() - since:.1f} s for another rank. It is gone, or"
                " never called this."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_SLEEP_SECONDS)


class MpiWork(Work):
    """A send or a receive under way; it is there when somebody waits for it, or asks."""

    def __init__(
        self,
        request: MPI.Request,
        held: ExitStack,
        row: torch.Tensor,
        seen: recorder.Posted,
        name: str,
        patience: Callable[[], float],
    ) -> None:
        super().__init__()
        self._request, self._held, self._row, self._seen = request, held, row, seen
        self._name, self._patience = name, patience
        self._status = MPI.Status()
        self._done = False
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._lock:
            if not self._done:
                own = timeout.total_seconds() if timeout else 0.0
                patience = (lambda: min(own, self._patience())) if own else self._patience
                try:
                    wait_for(self._request, self._name, patience, self._status, self)
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
        """Who sent it: known once it is there."""
        return self._status.Get_source()

    source_rank = _source_rank

    def _finish(self) -> None:
        self._done = True
        self._held.close()
        source = self._status.Get_source()
        self._seen.ended(peer=source if source >= 0 else None)
