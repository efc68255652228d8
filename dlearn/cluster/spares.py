"""Ranks that wait for the next run, so that it need not wait for them.

Starting and ending a process takes longer than most cells: some 10 ms and 5 ms for each rank. So both happen after
`run` has returned, on a thread: used ranks are seen off, and as many fresh ones started. A spare has run nothing.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dlearn.cluster.launch import RankProcess, start_rank
from dlearn.errors import SetupError

if TYPE_CHECKING:
    from dlearn.cluster.crew import Rank

MOST_SPARES = 8
"""Each holds some 20 MB of its own."""

_spares: list[RankProcess] = []
_worker: threading.Thread | None = None
_closing = threading.Event()
_turning = threading.Lock()


def take() -> RankProcess:
    """A fresh rank: a spare one, or one that is started now."""
    while True:
        try:
            rank = _spares.pop()
        except IndexError:
            return start_rank("forkserver")
        if rank.process.exitcode is None:
            return rank
        rank.close()


def turn_over(used: Sequence[Rank]) -> None:
    """See the used ranks off, and start as many fresh ones, while the user goes on."""
    global _worker
    with _turning:
        if _worker is not None:
            _worker.join()
        _worker = threading.Thread(target=_turn_over, args=(list(used),), name="dlearn-spares", daemon=True)
        _worker.start()


def _turn_over(used: list[Rank]) -> None:
    for rank in used:
        rank.wait(1.0)
        rank.kill()
        rank.close()
    with suppress(OSError, SetupError):  # Nobody has asked for them: whoever needs a rank is told.
        while len(_spares) < min(len(used), MOST_SPARES) and not _closing.is_set():
            _spares.append(start_rank("forkserver"))


def _leave_to_parent() -> None:
    """In a forked copy of this process: the spares are not its own."""
    global _worker
    _spares.clear()
    _worker = None


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def close() -> None:
    """End the spares."""
    _closing.set()
    if _worker is not None:
        _worker.join()
    while _spares:
        rank = _spares.pop()
        rank.kill()
        rank.close()
    _closing.clear()
