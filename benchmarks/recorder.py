"""What recording costs: microseconds added to each operation, and bytes written for it.

    python benchmarks/recorder.py [--blocks 15]

One rank, so that no network hides the cost: an all_reduce of 8 B over gloo, bare and recorded in alternating blocks of
one run, against torch.profiler and CommDebugMode in the same blocks. Shown is the median over blocks, with the spread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import dlearn

CALLS = 500


def block(around: AbstractContextManager[object]) -> float:
    """Microseconds per all_reduce, below the context manager; entering and leaving it is not counted."""
    tensor = torch.ones(2)
    with around:
        for _ in range(20):
            dist.all_reduce(tensor)
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        return (time.perf_counter_ns() - start) / CALLS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="blocks of each kind (default 15)")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        numbers = iter(range(blocks + 1))
        ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "bare": contextlib.nullcontext,
            "dlearn.record": lambda: dlearn.record(Path(folder, str(next(numbers)))),
            "torch.profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
            "CommDebugMode": CommDebugMode,
        }
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(blocks):
            for way, context in ways.items():
                took[way].append(block(context()))
        (file,) = Path(folder, "0").iterdir()
        bytes_per_call = file.stat().st_size / (CALLS + 20)
        dist.destroy_process_group()
    report(took, bytes_per_call)


def report(took: dict[str, list[float]], bytes_per_call: float) -> None:
    print(f"{date.today()}, {os.cpu_count()} cores, one rank, all_reduce of 8 B over gloo")
    bare = statistics.median(took["bare"])
    for way, times in took.items():
        median = statistics.median(times)
        print(f"{way:<16}{median:>8.1f} us ({min(times):.1f}-{max(times):.1f}), {median - bare:+.1f} us")
    print(f"dlearn's file: {bytes_per_call:.0f} B for each call")


if __name__ == "__main__":
    main()
