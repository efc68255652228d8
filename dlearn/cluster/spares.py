"""Ranks that wait for the next run. A spare has run nothing.

A process takes longer to start and to end than most cells (10 ms and 5 ms for each rank, seconds
where it is spawned). So a thread does both, after `run` has returned.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from dlearn.cluster.launch import RankProcess, StartMethod, start_rank
from dlearn.errors import SetupError

T = TypeVar("T")
MOST_SPARES = 8
"""Each holds some 20 MB of its own; one that was spawned, all of torch."""

_spares: dict[StartMethod, list[RankProcess]] = {"forkserver": [], "spawn": []}
_worker: threading.Thread | None = None
_closing = threading.Event()
_turning = threading.Lock()


def take(count: int, start: StartMethod) -> list[RankProcess]:
    """Fresh ranks: spare ones, or ones that are started now."""
    return started(repeat(partial(_take_one, start), count))


def started(starts: Iterable[Callable[[], T]]) -> list[T]:
    """Return a rank from each of `starts`. If one cannot be, none is left."""
    ranks: list[T] = []
    try:
        for start in starts:
            ranks.append(start())
    except BaseException:
        end(ranks)
        raise
    return ranks


def _take_one(start: StartMethod) -> RankProcess:
    try:
        return _spare_or_new(start)
    except SetupError:
        if _worker is None:
            raise
        _worker.join()  # It may hold the files that we lack: when it is done, they are free, or spares are there.
        return _spare_or_new(start)


def _spare_or_new(start: StartMethod) -> RankProcess:
    while True:
        try:
            rank = _spares[start].pop()
        except IndexError:
            return start_rank(start)
        if rank.lives:
            return rank
        rank.close()


def turn_over(see_off: Callable[[], None], fresh: int, start: StartMethod) -> None:
    global _worker
    with _turning:
        if _worker is not None:
            _worker.join()
        _worker = threading.Thread(target=_turn_over, args=(see_off, fresh, start), name="dlearn-spares", daemon=True)
        _worker.start()


def _turn_over(see_off: Callable[[], None], fresh: int, start: StartMethod) -> None:
    see_off()
    with suppress(OSError, SetupError):  # Nobody has asked for them: whoever needs a rank is told.
        while len(_spares[start]) < min(fresh, MOST_SPARES) and not _closing.is_set():
            _spares[start].append(start_rank(start))


def _leave_to_parent() -> None:
    """In a forked copy of this process: the spares are not its own."""
    global _worker
    for spares in _spares.values():
        spares.clear()
    _worker = None


os.register_at_fork(after_in_child=_leave_to_parent)


def end(ranks: list[Any]) -> None:
    while ranks:
        rank = ranks.pop()
        rank.kill()
        rank.close()


@atexit.register
def close() -> None:
    _closing.set()
    if _worker is not None:
        _worker.join()
    for spares in _spares.values():
        end(spares)
    _closing.clear()
