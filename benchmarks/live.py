"""What a gate costs a call: off, open, and closed with a condition that lets every call through; and what rows cost.

    python benchmarks/live.py [--calls 1000]

One rank, whose all-reduce of 4 bytes crosses no network. Shown is the median of 9 blocks of calls. Rows are made once a
second of a job of two ranks that does nothing but call: the processor time of that is a share of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlearn import Cluster
from dlearn.analysis import reconcile
from dlearn.cluster.run import Run
from dlearn.live.live_rows import LiveRows


def measure(calls: int) -> float:
    """Microseconds of an all-reduce."""
    tensor, took = torch.ones(1), []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        took.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(took)


def call_for(seconds: float) -> int:
    """So many all-reduces were made in that time."""
    tensor, end, count = torch.ones(1), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for _ in range(100):
            dist.all_reduce(tensor)
        count += 100
    return count


def share_of_rows(seconds: int = 8) -> tuple[float, float]:
    """What share of a core the rows take, as the median of all seconds, and how many calls a rank made in each."""
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run: list[Run] = []
        job = threading.Thread(target=lambda: run.append(Cluster(2).run(call_for, seconds)))
        job.start()
        rows: LiveRows | None = None
        while job.is_alive():
            time.sleep(1)
            trace = next(Path(".dlearn", "runs").glob("*/trace"), None)
            rows = rows or (LiveRows(trace) if trace is not None else None)
            if rows is not None:
                began = time.thread_time()
                rows.lines()
                shares.append(time.thread_time() - began)
        job.join()
    return statistics.median(shares), run[0].results[0] / seconds


def wire_bytes(*, watched: bool) -> int | None:
    """What the kernel counted on all connections of two ranks that make 200 all-reduces."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run: list[Run] = []
        job = threading.Thread(target=lambda: run.append(Cluster(2).run(call_times, 200)))
        job.start()
        while job.is_alive():
            time.sleep(0.05)
            trace = next(Path(".dlearn", "runs").glob("*/trace"), None)
            if watched and trace is not None:
                LiveRows(trace).lines()
        job.join()
        return reconcile(run[0].trace).whole.measured_bytes


def call_times(count: int) -> None:
    tensor = torch.ones(1000)
    for _ in range(count):
        dist.all_reduce(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    off = Cluster(1).run(measure, calls).results[0]
    freed = Cluster(1, hold=True).run(measure, calls).free().join().results[0]
    asked = Cluster(1, hold=lambda call: False).run(measure, calls).join().results[0]
    print(f"no gate: {off:.0f} us a call; open: {freed:.0f} us; closed, and a condition lets it pass: {asked:.0f} us")
    share, rate = share_of_rows()
    print(f"rows: {share:.2%} of a core, beside {rate:,.0f} all-reduces a second on each of 2 ranks")
    alone, watched = wire_bytes(watched=False), wire_bytes(watched=True)
    print(f"on the wire, by the kernel: {alone:,} B unwatched, {watched:,} B watched all the time")


if __name__ == "__main__":
    main()
