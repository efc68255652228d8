"""The glass-box collectives against gloo: one all-reduce by each algorithm and backend, and the ratio to gloo's.

    python benchmarks/collectives.py [--rounds 15]

Real ranks, not recorded. In each round every way carries out the same all-reduce, one after the other, each after a
barrier; its time is the slowest rank's. Shown is the median over rounds with the spread, and the median of the ratios
to gloo in the same round. More ranks than cores wait for a core, too: those lines say so.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measuring import median_text, options, seconds_of, today

from dlearn import Cluster
from dlearn.collectives import halving_doubling, ring, star, tree

SIZES = {"4 KB": 4_000, "1 MB": 1_000_000, "25 MB": 25_000_000}
CALLS = {"4 KB": 20, "1 MB": 5, "25 MB": 1}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each all-reduce on this rank, by size and way."""
    ring_group = dist.new_group(backend="dlearn_ring")
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": dist.all_reduce,
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "tree": tree.all_reduce,
        "star": star.all_reduce,
        "dlearn_ring": lambda tensor: dist.all_reduce(tensor, group=ring_group),
    }
    took: dict[str, dict[str, list[float]]] = {size: {way: [] for way in ways} for size in SIZES}
    for size, size_bytes in SIZES.items():
        tensor = torch.ones(size_bytes // 4)
        for number in range(rounds + 1):
            for way, all_reduce in ways.items():
                tensor.fill_(1)
                dist.barrier()
                seconds = seconds_of(partial(all_reduce, tensor), CALLS[size])
                if number:  # The first round warms up.
                    took[size][way].append(seconds * 1000)
    return took


def main() -> None:
    rounds = options(__doc__, rounds=15).rounds
    cores = os.cpu_count() or 1
    print(f"{today()}; milliseconds of one all-reduce, median (min-max), ratio to gloo")
    for ranks in (2, 3, 4):
        results = Cluster(ranks, record=False).run(measure, rounds, timeout=None).results
        for size in SIZES:
            print(f"{ranks} ranks{' on ' + str(cores) + ' cores' if ranks > cores else ''}, {size}")
            took = {
                way: [max(times) for times in zip(*(results[rank][size][way] for rank in results), strict=True)]
                for way in results[0][size]
            }
            for way, times in took.items():
                ratio = statistics.median(mine / gloo for mine, gloo in zip(times, took["gloo"], strict=True))
                print(f"  {way:<17}{median_text(times):>26}{ratio:>8.2f} x gloo", flush=True)


if __name__ == "__main__":
    main()
