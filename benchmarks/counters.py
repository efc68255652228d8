"""What the counters of bytes on the wire cost: one sample, and a span with and without the samples at its ends.

    python benchmarks/counters.py [--blocks 9]

Real ranks, so that there are connections: one to each peer. Recorded with and without counters in alternating blocks of
one run. Shown is rank 0's median over blocks, with the spread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch.distributed as dist

import dlearn
from dlearn import Cluster, recorder

SPANS = 500


def measure(blocks: int) -> dict[str, list[float]]:
    """Microseconds, on one rank of a cluster."""
    took: dict[str, list[float]] = {"span, not measured": [], "span, two samples": [], "reading alone": []}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks):
            for way, mode in (("span, not measured", None), ("span, two samples", "span")):
                with dlearn.record(Path(folder, f"{block} {mode}"), measure=mode):
                    start = time.perf_counter_ns()
                    for _ in range(SPANS):
                        with dlearn.span("step"):
                            pass
                    took[way].append((time.perf_counter_ns() - start) / SPANS / 1000)
                    if mode is not None:
                        sockets = recorder._active.sockets
                        start = time.perf_counter_ns()
                        for _ in range(SPANS):
                            sockets.sent_bytes()
                        took["reading alone"].append((time.perf_counter_ns() - start) / SPANS / 1000)
    dist.barrier()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each kind (default 9)")
    blocks = parser.parse_args().blocks
    print(f"{date.today()}, {os.cpu_count()} cores; microseconds, median (min-max)")
    for ranks in (2, 3, 4):
        took = Cluster(ranks, record=False).run(measure, blocks, timeout=None).results[0]
        print(f"{ranks} ranks, {ranks - 1} connections")
        for way, times in took.items():
            print(f"  {way:<20}{statistics.median(times):>7.1f} ({min(times):.1f}-{max(times):.1f})")


if __name__ == "__main__":
    main()
