"""What a gate costs a call: off, open, and closed with a condition that lets every call through.

    python benchmarks/live.py [--calls 1000]

One rank, whose all-reduce of 8 bytes crosses no network. Shown is the median of 9 blocks of calls.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from dlearn import Cluster


def measure(calls: int) -> float:
    """Microseconds of an all-reduce."""
    tensor, took = torch.ones(1), []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        took.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    off = Cluster(1).run(measure, calls).results[0]
    freed = Cluster(1, hold=True).run(measure, calls).free().join().results[0]
    asked = Cluster(1, hold=lambda call: False).run(measure, calls).join().results[0]
    print(f"no gate: {off:.0f} us a call; open: {freed:.0f} us; closed, and a condition lets it pass: {asked:.0f} us")


if __name__ == "__main__":
    main()
