"""What it costs to read the counters of bytes on the wire once, at the begin or the end of a span.

    python benchmarks/counters.py [--blocks 9]

Real ranks, so that there are connections: one to each peer. Shown is rank 0's median over blocks, with the spread.
"""

import tempfile

import torch.distributed as dist
from measuring import median_text, options, seconds_of, today

import dlearn
from dlearn import Cluster, recorder

READINGS = 500


def measure(blocks: int) -> list[float]:
    """Microseconds of a reading, on one rank of a cluster."""
    with tempfile.TemporaryDirectory() as folder, dlearn.record(folder):
        reading = recorder._active.sockets.sent_bytes
        took = [1e6 * seconds_of(reading, READINGS) for _ in range(blocks)]
    dist.barrier()
    return took


def main() -> None:
    blocks = options(__doc__, blocks=9).blocks
    print(f"{today()}; microseconds, median (min-max)")
    for ranks in (2, 3, 4):
        took = Cluster(ranks, record=False).run(measure, blocks, timeout=None).results[0]
        print(f"{ranks} ranks, {ranks - 1} connections: {median_text(took, 1)}")


if __name__ == "__main__":
    main()
