"""MPI from a cell against gloo; and what a rank that waits for a late one takes from it, by either way to wait.

    python benchmarks/mpi.py [--rounds 7]

Three ranks, gloo and MPI in alternating rounds; median with the spread. "waiting": rank 2 computes for 50 ms of its
own processor time, and the others wait for it, as the group waits (short sleeps) and inside MPI's blocking call.
"""

import statistics
import time
from collections import defaultdict
from functools import partial

import torch
import torch.distributed as dist
from measuring import median_text, rounds_asked, seconds_of, today

from dlearn import Cluster

SIZES = {"all-reduce of 4 kB": 1000, "all-reduce of 4 MB": 1_000_000}
WORK_SECONDS = 0.05


def once() -> None:
    dist.all_reduce(torch.ones(1))


def all_reduces() -> dict[str, float]:
    """Milliseconds on rank 0: median of ten."""
    took = {}
    for name, size in SIZES.items():
        tensor, times = torch.ones(size), []
        for _ in range(10):
            dist.barrier()
            times.append(1e3 * seconds_of(partial(dist.all_reduce, tensor)))
        took[name] = statistics.median(times)
    return took


def waiting() -> dict[str, tuple[float, float]]:
    """(milliseconds until all are through, those of processor time on this rank) for each way to wait."""
    from mpi4py import MPI

    tensor = torch.ones(1000)
    ways = {
        "waiting, the group's way": lambda: dist.all_reduce(tensor),
        "waiting, MPI's blocking call": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy()),
    }
    took = {}
    for name, way in ways.items():
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        if dist.get_rank() == 2:
            end = time.thread_time() + WORK_SECONDS
            while time.thread_time() < end:
                sum(range(1000))
        way()
        took[name] = ((time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3)
    return took


def main() -> None:
    rounds = rounds_asked(__doc__, 7)
    clusters = {name: Cluster(3, backend=name, record=False) for name in ("gloo", "mpi")}
    for cluster in clusters.values():
        cluster.run(once)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, cluster in clusters.items():
            time.sleep(1.0)  # Until the ranks of the next call are there.
            took["cell", name].append(1e3 * seconds_of(partial(cluster.run, once)))
            for what, milliseconds in cluster.run(all_reduces).results[0].items():
                took[what, name].append(milliseconds)
        for what, (until, used) in clusters["mpi"].run(waiting).results[0].items():
            took[what, "until all are through"].append(until)
            took[what, "processor time of rank 0"].append(used)
    print(f"{today()}, 3 ranks; median (min-max) of {rounds} rounds")
    for (what, name), times in sorted(took.items()):
        print(f"  {what:<30}{name:<26}{median_text(times):>24} ms")


if __name__ == "__main__":
    main()
