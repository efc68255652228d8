"""What a gate costs a call: off, open, and closed with a condition that lets every call through; and what rows cost.

    python benchmarks/live.py [--calls 1000]

One rank, whose all-reduce of 4 bytes crosses no network. Shown is the median of 9 blocks of calls. Rows are made once a
second of a job of two ranks that does nothing but call: the processor time of that is a share of a second.
"""

import contextlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import options, seconds_of

from dlearn import Cluster
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


def share_of_rows(seconds: int = 8) -> tuple[float, float]:
    """Return the share of a core that the rows take, its median, and a rank's calls in a second."""
    shares, rows_of = list[float](), cache(LiveRows)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), ThreadPoolExecutor(1) as pool:
        run = pool.submit(Cluster(2).run, call_for, seconds)
        while not run.done():
            time.sleep(1)
            for trace in Path(".dlearn", "runs").glob("*/trace"):
                rows, began = rows_of(trace), time.thread_time()
                if (made := rows.rows()) and all(row.rate for row in made):  # All have begun.
                    shares.append(time.thread_time() - began)
        return statistics.median(shares), run.result().results[0] / seconds


def main() -> None:
    calls = options(__doc__, calls=1000).calls
    off = Cluster(1).run(measure, calls).results[0]
    freed = Cluster(1, hold=True).run(measure, calls).free().join().results[0]
    asked = Cluster(1, hold=lambda call: False).run(measure, calls).join().results[0]
    print(f"no gate: {off:.0f} us a call; open: {freed:.0f} us; closed, and a condition lets it pass: {asked:.0f} us")
    share, rate = share_of_rows()
    print(f"rows: {share:.2%} of a core, beside {rate:,.0f} all-reduces a second on each of 2 ranks")


if __name__ == "__main__":
    main()
