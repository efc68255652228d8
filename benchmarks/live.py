"""What a gate costs a call: off, open, and closed with a condition that lets every call through; and what rows cost.

    python benchmarks/live.py [--calls 1000]

One rank, whose all-reduce of 4 bytes crosses no network. Shown is the median of 9 blocks of calls. Rows are made once a
second of a job of two ranks that does nothing but call: the processor time of that is a share of a second.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import options, seconds_of

from dlearn import Cluster
from dlearn.analysis import reconcile
from dlearn.cluster.run import Run
from dlearn.live.live_rows import LiveRows


def measure(calls: int) -> float:
    """Microseconds of an all-reduce."""
    all_reduce = partial(dist.all_reduce, torch.ones(1))
    return statistics.median(1e6 * seconds_of(all_reduce, calls) for _ in range(9))


def call_for(seconds: float) -> int:
    """So many all-reduces were made in that time, or until another rank's was over."""
    tensor, end, count = torch.ones(1), time.monotonic() + seconds, 0
    while tensor:
        tensor.fill_(time.monotonic() < end)
        for _ in range(100):
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        count += 100
    return count


Watch = Callable[[Path], object]
"""Called with the folder of a running job's trace."""


@contextlib.contextmanager
def watched(job: Callable[[int], object], number: int, watch: Watch, *, pause: float) -> Iterator[Run]:
    """Run a job on two ranks, and `watch` its trace again and again; its files stay for the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(Cluster(2).run, job, number)
            while not run.done():
                time.sleep(pause)
                trace = next(Path(".dlearn", "runs").glob("*/trace"), None)
                if trace is not None:
                    watch(trace)
        yield run.result()


def share_of_rows(seconds: int = 8) -> tuple[float, float]:
    """Return the share of a core that the rows take, its median, and a rank's calls in a second."""
    shares: list[float] = []
    rows_of = cache(LiveRows)

    def make_rows(trace: Path) -> None:
        rows = rows_of(trace)
        began = time.thread_time()
        made = rows.rows()
        if made and all(row.rate for row in made):  # All have begun to call.
            shares.append(time.thread_time() - began)

    with watched(call_for, seconds, make_rows, pause=1) as run:
        return statistics.median(shares), run.results[0] / seconds


def wire_bytes(watch: Watch) -> int | None:
    """Return what the kernel counted on all connections of two ranks that make 200 all-reduces."""
    with watched(call_times, 200, watch, pause=0.05) as run:
        return reconcile(run.trace).whole.measured_bytes


def call_times(count: int) -> None:
    tensor = torch.ones(1000)
    for _ in range(count):
        dist.all_reduce(tensor)


def main() -> None:
    calls = options(__doc__, calls=1000).calls
    off = Cluster(1).run(measure, calls).results[0]
    freed = Cluster(1, hold=True).run(measure, calls).free().join().results[0]
    asked = Cluster(1, hold=lambda call: False).run(measure, calls).join().results[0]
    print(f"no gate: {off:.0f} us a call; open: {freed:.0f} us; closed, and a condition lets it pass: {asked:.0f} us")
    share, rate = share_of_rows()
    print(f"rows: {share:.2%} of a core, beside {rate:,.0f} all-reduces a second on each of 2 ranks")
    alone = wire_bytes(lambda trace: None)
    watched = wire_bytes(lambda trace: LiveRows(trace).lines())
    print(f"on the wire, by the kernel: {alone:,} B unwatched, {watched:,} B watched all the time")


if __name__ == "__main__":
    main()
