"""Fresh ranks that wait for the next run. They have run nothing.

A process takes longer to start and to end than most cells (10 ms and 5 ms for each rank, seconds
where it is spawned). So a thread does both, after `run` has returned.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dlearn.cluster.fork_server import SERVERS, StartMethod
from dlearn.cluster.rank_process import RankProcess, start_rank
from dlearn.errors import SetupError

MOST_RANKS_READY = 8
"""Each holds some 20 MB of its own; one that was spawned, all of torch."""

_ready: dict[StartMethod, list[RankProcess]] = {"forkserver": [], "spawn": []}
_worker: threading.Thread | None = None
_closing = threading.Event()
_recycling = threading.Lock()


@contextmanager
def ended_on_error() -> Iterator[list[Any]]:
    """Collect the ranks that are started in the block in a list. If one cannot be, end them all."""
    ranks: list[Any] = []
    try:
        yield ranks
    except BaseException:
        end(ranks)
        raise


def take(count: int, method: StartMethod) -> list[RankProcess]:
    """Return fresh ranks: those that are ready, or ones that are started now."""
    with ended_on_error() as ranks:
        while len(ranks) < count:
            try:
                ranks.append(_take_one(method))
            except SetupError:
                if _worker is None:
                    raise
                _worker.join()  # It may hold the files that are lacking, or have started ranks.
                ranks.append(_take_one(method))
        return ranks


def _take_one(method: StartMethod) -> RankProcess:
    while True:
        try:
            rank = _ready[method].pop()
        except IndexError:
            return start_rank(method)
        if rank.lives:
            return rank
        rank.close()


def recycle(retire: Callable[[], None], count: int, method: StartMethod) -> None:
    """Retire used ranks on a thread, and after that start `count` fresh ones for the next run."""
    global _worker
    with _recycling:
        if _worker is not None:
            _worker.join()
        arguments = (retire, count, method)
        _worker = threading.Thread(target=_recycle, args=arguments, name="dlearn-warm-pool", daemon=True)
        _worker.start()


def _recycle(retire: Callable[[], None], count: int, method: StartMethod) -> None:
    retire()
    with suppress(OSError, SetupError):  # A run that needs a rank will report it.
        while len(_ready[method]) < min(count, MOST_RANKS_READY) and not _closing.is_set():
            _ready[method].append(start_rank(method))


def kill_all(ranks: Iterable[Any]) -> None:
    """Kill these ranks; return at once."""
    for rank in ranks:
        rank.kill()


def end(ranks: list[Any]) -> None:
    """Kill these ranks; return when they are gone, with all that they have started."""
    kill_all(ranks)
    while ranks:
        ranks.pop().close()


@atexit.register
def close() -> None:
    """End all ranks that are ready; the last act of this process."""
    _closing.set()
    if _worker is not None:
        _worker.join()
    for ranks in _ready.values():
        end(ranks)
    _closing.clear()


def _leave_to_parent() -> None:
    """Forget all ranks and servers, in a forked copy of the process that has them."""
    global _worker
    for ranks in _ready.values():
        ranks.clear()
    for server in SERVERS.values():
        server.forget()
    _worker = None


os.register_at_fork(after_in_child=_leave_to_parent)
