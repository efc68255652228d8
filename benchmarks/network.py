"""How near is a chosen network to its law? Messages and all-reduces of real ranks, against latency + bytes / rate.

    python benchmarks/network.py [--quick]

A message should take latency + bytes / rate, and a latency more, because gloo asks before it sends; the ring all-reduce
of S bytes over n ranks 2 (n - 1) latency + 2 (n - 1) / n S / rate (`law`), or with gloo's first question a latency more
(`gloo`). All ranks begin at a moment that they agreed on, by the clock that all processes of this machine share
(CLOCK_MONOTONIC), and the last one's end counts. Medians of 3 to 5. Other work on the machine shows here: its load is
told. Then: what the switch carries at most, and what it takes of a core.
"""

import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from measuring import options, today

from dlearn import Cluster
from dlearn.network import Link, Network

RATES = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
LATENCIES = ("50 us", "1 ms", "20 ms")
BYTES = (4, 100_000, 1_000_000, 10_000_000, 25_000_000)
LONGEST_SECONDS = 1.3
"""Larger sizes are left out."""
LARGE, LARGE_SECONDS = 20, 0.05
"""What takes so many latencies, and so long, is made of bytes, and not of what a call itself takes."""


def measure(sizes: Sequence[tuple[int, int]], pause: float) -> dict[str, list[list[tuple[float, float]]]]:
    """On each rank, (agreed begin, own end) of every repetition of every size: of a message 0 -> 1, and of a sum."""

    def begin() -> float:
        dist.barrier()  # Else what is still on its way delays this.
        at = torch.tensor([time.monotonic() + pause], dtype=torch.float64)
        dist.broadcast(at, 0)
        time.sleep(max(0.0, at.item() - time.monotonic()))
        return at.item()

    found: dict[str, list[list[tuple[float, float]]]] = {"message": [], "all_reduce": []}
    for size, repetitions in sizes:
        numbers = torch.ones(size // 4)
        for kind, times in found.items():
            times.append([])
            for _ in range(repetitions):
                began = begin()
                if kind == "all_reduce":
                    dist.all_reduce(numbers)
                elif dist.get_rank() == 0:
                    dist.send(numbers, 1)
                elif dist.get_rank() == 1:
                    dist.recv(numbers, 0)
                times[-1].append((began, time.monotonic() if kind == "all_reduce" or dist.get_rank() == 1 else 0.0))
    return found


def fill(size: int, repetitions: int) -> float:
    """Bits per second of all-reduces one after the other, sent by one rank."""
    numbers = torch.ones(size // 4)
    dist.all_reduce(numbers)
    dist.barrier()
    began = time.monotonic()
    for _ in range(repetitions):
        dist.all_reduce(numbers)
    return repetitions * 8 * size * 2 * (1 - 1 / dist.get_world_size()) / (time.monotonic() - began)


def one_network(ranks: int, link: Link) -> tuple[list[float], list[float]]:
    """Print a row for each size; the deviations of what is made of bytes, of messages and of all-reduces."""
    steps = 2 * (ranks - 1)
    rate = link.rate or 0.0
    laws = {size: steps * link.latency + steps / ranks * size * 8 / rate for size in BYTES}
    sizes = [(size, 3 if laws[size] > 0.1 else 5) for size in BYTES if laws[size] < LONGEST_SECONDS]
    with Cluster(ranks, network=link, record=False) as cluster:
        run = cluster.run(measure, sizes, 0.02 + 4 * link.latency, timeout=100)
    messages, sums = [], []
    for place, (size, _) in enumerate(sizes):
        took = [
            [
                max(end for _, end in ends) - ends[0][0]
                for ends in zip(*(run.results[rank][kind][place] for rank in range(ranks)), strict=True)
            ]
            for kind in ("message", "all_reduce")
        ]
        message, total = map(statistics.median, took)
        one, law = 2 * link.latency + size * 8 / rate, laws[size]
        gloo = law + link.latency
        print(
            f"{ranks:>2}  {link!s:<20}{size:>11,} B{message * 1e3:>9.1f}{one * 1e3:>9.1f}{message / one - 1:>+8.0%}"
            f"{total * 1e3:>10.1f}{law * 1e3:>9.1f}{total / law - 1:>+8.0%}{total / gloo - 1:>+8.0%}",
            flush=True,
        )
        if law > max(LARGE * link.latency, LARGE_SECONDS):
            messages.append(message / one - 1)
            sums.append(total / law - 1)
    network = run.network
    print(
        f"    the switch took {network.processor:.0%} of a core; packets came {network.late * 1e6:.0f} us late (median)"
    )
    return messages, sums


def most(ranks: int) -> None:
    """What the switch carries where nothing is asked of it."""
    with Cluster(ranks, network=Network(), record=False) as cluster:
        run = cluster.run(fill, 25_000_000, 8, timeout=100)
    slowest = min(run.results.values())
    network = run.network
    print(
        f"{ranks} ranks without a limit: {slowest / 1e9:.2f} Gbit/s from each, {ranks * slowest / 1e9:.2f} in all;"
        f" the switch took {network.processor:.0%} of a core"
    )


def main() -> None:
    quick = options(__doc__, quick=False).quick
    began = time.monotonic()
    alone = Cluster(2, record=False).run(measure, [(4, 9)], 0.02).results
    took = [statistics.median(end - begin for begin, end in alone[1][kind][0]) for kind in ("message", "all_reduce")]
    print(f"{today()}, load {os.getloadavg()[0]:.1f} at the start")
    print(f"on loopback 4 B take {took[0] * 1e3:.1f} ms as a message, {took[1] * 1e3:.1f} ms as a sum")
    head = f"{'n':>2}  {'network':<20}{'size':>13}{'message':>9}{'law, ms':>9}{'':>8}"
    print(f"{head}{'sum':>10}{'law':>9}{'':>8}{'gloo':>8}")
    messages: list[float] = []
    sums: list[float] = []
    chosen = [(2, rate, latency) for rate in RATES for latency in LATENCIES]
    chosen += [(3, RATES[1], LATENCIES[1]), *((4, rate, LATENCIES[1]) for rate in RATES), (4, RATES[1], LATENCIES[2])]
    for ranks, rate, latency in [(2, RATES[1], LATENCIES[1])] if quick else chosen:
        found = one_network(ranks, Link(rate, latency))
        messages += found[0]
        sums += found[1]
    for name, deviations in (("messages", messages), ("all-reduces", sums)):
        worst = max(deviations, key=abs)
        what = f"{name} of more than {LARGE} latencies and {LARGE_SECONDS * 1e3:.0f} ms"
        print(f"{what}: median {statistics.median(deviations):+.1%}, worst {worst:+.1%}")
    for ranks in (2, 4):
        most(ranks)
    print(f"load {os.getloadavg()[0]:.1f} at the end; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
