"""Fresh ranks that wait for the next run. They have run nothing.

A process takes longer to start and to end than most cells (10 ms and 5 ms for each rank, seconds
where it is spawned). So a thread does both, after `run` has returned.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from dlearn.cluster.fork_server import SERVER
from dlearn.cluster.rank_process import RankProcess, start_rank
from dlearn.errors import SetupError

MOST_RANKS_READY = 8  # Each holds some 20 MB of its own; one that was spawned, all of torch.

_ready: list[RankProcess] = []
_worker: threading.Thread | None = None
_closing = threading.Event()
_recycling = threading.Lock()


@contextmanager
def ended_on_error() -> Iterator[list[RankProcess]]:
    """Collect the ranks that are started in the block in a list. If one cannot be, end them all."""
    ranks: list[RankProcess] = []
    try:
        yield ranks
    except BaseException:
        end(ranks)
        raise


def take(count: int) -> list[RankProcess]:
    """Return fresh ranks: those that are ready, or ones that are started now."""
    with ended_on_error() as ranks:
        while len(ranks) < count:
            try:
                ranks.append(_take_one())
            except SetupError:
                if _worker is None:
                    raise
                _worker.join()  # It may hold the files that are lacking, or have started ranks.
                ranks.append(_take_one())
        return ranks


def _take_one() -> RankProcess:
    while True:
        try:
            rank = _ready.pop()
        except IndexError:
            return start_rank()
        if rank.lives:
            return rank
        rank.close()


def recycle(retire: Callable[[], None], count: int) -> None:
    """Retire used ranks on a thread, and after that start `count` fresh ones for the next run."""
    global _worker
    with _recycling:
        if _worker is not None:
            _worker.join()
        _worker = threading.Thread(target=_recycle, args=(retire, count), daemon=True)
        _worker.start()


def _recycle(retire: Callable[[], None], count: int) -> None:
    retire()
    with suppress(OSError, SetupError):  # A run that needs a rank will report it.
        while len(_ready) < min(count, MOST_RANKS_READY) and not _closing.is_set():
            _ready.append(start_rank())


def kill_all(ranks: Iterable[RankProcess]) -> None:
    """Kill these ranks; return at once."""
    for rank in ranks:
        rank.kill()


def end(ranks: list[RankProcess]) -> None:
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
    end(_ready)
    _closing.clear()


def _leave_to_parent() -> None:
    """Forget all ranks and the server, in a forked copy of the process that has them."""
    global _worker
    _ready.clear()
    SERVER.forget()
    _worker = None


os.register_at_fork(after_in_child=_leave_to_parent)
