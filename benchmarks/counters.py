"""What the counters of bytes on the wire cost: one sample, and a span with and without the samples at its ends.

    python benchmarks/counters.py [--blocks 9]

Real ranks, so that there are connections: one to each peer. Recorded with and without counters in alternating blocks
of one run. Shown is rank 0's median over blocks, with the spread.
"""

import tempfile
from pathlib import Path

import torch.distributed as dist
from measuring import median_text, options, seconds_of, today

import dlearn
from dlearn import Cluster, recorder

SPANS = 500


def empty_span() -> None:
    with dlearn.span("step"):
        pass


def measure(blocks: int) -> dict[str, list[float]]:
    """Microseconds, on one rank of a cluster."""
    took: dict[str, list[float]] = {"span, not measured": [], "span, two samples": [], "reading alone": []}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks):
            for way, mode in (("span, not measured", None), ("span, two samples", "span")):
                with dlearn.record(Path(folder, f"{block} {mode}"), measure=mode):
                    took[way].append(1e6 * seconds_of(empty_span, SPANS))
                    if mode is not None:
                        reading = recorder._active.sockets.sent_bytes
                        took["reading alone"].append(1e6 * seconds_of(reading, SPANS))
    dist.barrier()
    return took


def main() -> None:
    blocks = options(__doc__, blocks=9).blocks
    print(f"{today()}; microseconds, median (min-max)")
    for ranks in (2, 3, 4):
        took = Cluster(ranks, record=False).run(measure, blocks, timeout=None).results[0]
        print(f"{ranks} ranks, {ranks - 1} connections")
        for way, times in took.items():
            print(f"  {way:<20}{median_text(times, 1):>22}")


if __name__ == "__main__":
    main()
