"""DD17: the paper's three rules of thumb (its sections 5 and 6.1)."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median, mode

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.conditions import no_network, ranks_on_cores
from ddp_claims.figures import panels
from ddp_claims.samples import CONFIDENCE, Samples
from ddp_claims.verdicts import Check, Claim, Result
from dlearn.cluster import Cluster
from dlearn.draw import canvas
from dlearn.draw.palette import FAINT, SERIES
from dlearn.shown import size_text

RANKS = 2
ROUNDS = 32
RESAMPLES = 1000
WIDTHS = (64, 192, 512)
"""Of eight linear layers: 133 kB, 1.2 MB and 8.4 MB of gradients; computing and bytes both grow with the square."""
LAYERS = 8
BATCH_SIZE = 256
LAYERS_IN_BUCKET = (1, 2, 4, 8)
NETWORK = "400 Mbit/s"
"""Under the buckets: the gradients take longer than the backward pass, which they can hide behind."""
SLOW = "100 Mbit/s"
REDUCED_BYTES = 1 << 20


def all_reduces(device: str = "cpu") -> list[float]:
    """Return the seconds of each all-reduce of 1 MiB, on a rank."""
    data = torch.ones(REDUCED_BYTES // 4, device=device)
    seconds: list[float] = []
    for number in range(ROUNDS + 2):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        if data.is_cuda:
            torch.cuda.synchronize()
        if number >= 2:  # The first ones open connections.
            seconds.append(time.perf_counter() - start)
    return seconds


def bucket_sizes() -> list[list[list[float]]]:
    """Return the seconds of each step for each width and layers in a bucket, on a rank."""
    return [of_buckets(width) for width in WIDTHS]


def of_buckets(width: int) -> list[list[float]]:
    trained: list[tuple[DistributedDataParallel, torch.optim.Optimizer]] = []
    for count in LAYERS_IN_BUCKET:
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(width, width), nn.ReLU())]
        # A bucket is closed when it reaches its cap, so that a byte less is enough.
        cap = (count * layer_bytes(width) - 1) / 2**20
        model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap)
        trained.append((model, torch.optim.SGD(model.parameters(), lr=0.01)))
    examples = torch.randn(BATCH_SIZE, width)
    seconds: list[list[float]] = [[] for _ in trained]
    for number in range(ROUNDS + 2):
        for (model, optimizer), of_count in zip(trained, seconds, strict=True):
            optimizer.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model(examples).square().mean().backward()
            optimizer.step()
            if number >= 2:  # Step 0 has one bucket, and step 1 builds the others.
                of_count.append(time.perf_counter() - start)
    for (model, _), count in zip(trained, LAYERS_IN_BUCKET, strict=True):
        buckets = model.reducer._get_zeros_like_grad_buckets()
        assert [each.buffer().nbytes for each in buckets] == [count * layer_bytes(width)] * (LAYERS // count)
    return seconds


def layer_bytes(width: int) -> int:
    """Return the bytes of the gradients of a layer: weight and bias, 4 B each."""
    return (width * width + width) * 4


def model_bytes(width: int) -> int:
    return LAYERS * layer_bytes(width)


def best(width: int, seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the bucket size in bytes of the shortest median step, in each resample.

    The bootstrap (Efron, 1979): rounds are drawn with replacement, and how often a size wins says how sure it is.
    """
    draw = random.Random(0)
    found: list[int] = []
    for _ in range(RESAMPLES):
        rounds = draw.choices(range(ROUNDS), k=ROUNDS)
        medians = [median(each[number] for number in rounds) for each in seconds]
        found.append(LAYERS_IN_BUCKET[medians.index(min(medians))] * layer_bytes(width))
    return found


def nccl_beats_gloo() -> Check:
    says = "NCCL's all-reduce is faster than gloo's"
    count = torch.cuda.device_count()
    if count < 2:
        return Check(says, f"needs two GPUs, here {'is one' if count else 'is none'}", None)
    taken = {
        backend: Samples(tuple(Cluster(2, backend=backend, record=False).run(all_reduces, device).results[0]))  # type: ignore[arg-type]
        for backend, device in (("nccl", "cuda"), ("gloo", "cpu"))
    }
    seen = ", ".join(f"{backend} {each.text('ms', scale=1e3)}" for backend, each in taken.items())
    return Check(says, f"{seen} for 1 MiB", taken["nccl"].interval[1] < taken["gloo"].interval[0])


def buckets_grow_slower(good: Mapping[int, list[int]], where: str) -> Check:
    """Compare the best bucket sizes of each width; `good` has one for each resample."""
    growth = model_bytes(WIDTHS[-1]) / model_bytes(WIDTHS[0])
    grown = [large / small for small, large in zip(good[WIDTHS[0]], good[WIDTHS[-1]], strict=True)]
    slower = sum(each < growth for each in grown) / RESAMPLES
    told = [f"model {size_text(model_bytes(width))}, bucket {_sizes(good[width])}" for width in WIDTHS]
    return Check(
        f"the model grows {growth:.1f} times, its best bucket less, {where}",
        f"{'; '.join(told)}: it grows {median(grown):.1f} times, less than the model in {slower:.0%} of resamples",
        slower >= CONFIDENCE,
    )


def _sizes(found: Sequence[int]) -> str:
    """Return "296 kB (81%) or 593 kB (19%)": sizes that win more than one time in twenty."""
    shares = [(size, found.count(size) / len(found)) for size in sorted(set(found))]
    return " or ".join(f"{size_text(size)} ({share:.0%})" for size, share in shares if share > 1 - CONFIDENCE)


def within_a_machine() -> Check:
    says = f"an all-reduce of 1 MiB takes longer over {SLOW} than within a machine"
    if no_network():
        return Check(says, no_network(), None)
    near = Samples(tuple(Cluster(RANKS, record=False).run(all_reduces).results[0]))
    far = Samples(tuple(Cluster(RANKS, record=False, network=SLOW).run(all_reduces).results[0]))
    seen = f"{far.text('ms', scale=1e3)} against {near.text('ms', scale=1e3)}"
    return Check(says, seen, far.interval[0] > near.interval[1])


def three_rules() -> Result:
    """Test the rules; without a chosen network, try the buckets on the loopback interface."""
    where = "on the loopback interface" if no_network() else f"over {NETWORK}"
    found = Cluster(RANKS, record=False, network=None if no_network() else NETWORK).run(bucket_sizes).results[0]
    good = {width: best(width, seconds) for width, seconds in zip(WIDTHS, found, strict=True)}
    picture = bucket_panels(good, found, where)
    buckets = buckets_grow_slower(good, where)
    checks = (nccl_beats_gloo(), buckets, within_a_machine())
    return Result(checks, picture, f"{ranks_on_cores(RANKS)}, gloo, {ROUNDS} rounds of all sizes in turn")


def bucket_panels(good: Mapping[int, list[int]], found: Sequence[Sequence[Sequence[float]]], where: str) -> Axes:
    """Draw for each model a step over the bucket size, relative to the fastest."""
    names = [f"model {size_text(model_bytes(width))}: best {size_text(mode(good[width]))}" for width in WIDTHS]
    picture, inside = panels(names, x="bytes of a bucket", y="a step, times the fastest")
    for width, seconds, panel, color in zip(WIDTHS, found, inside, SERIES, strict=False):
        taken = [Samples(tuple(each)) for each in seconds]
        fastest = min(each.median for each in taken)
        sizes = [count * layer_bytes(width) for count in LAYERS_IN_BUCKET]
        for size, each in zip(sizes, taken, strict=True):
            low, high = each.middle_half
            panel.vlines(size, low / fastest, high / fastest, colors=color)
        panel.plot(sizes, [each.median / fastest for each in taken], "o-", color=color, markersize=5)
        panel.axvline(mode(good[width]), color=FAINT, linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xticks(sizes[::2], [size_text(size) for size in sizes[::2]])
        panel.minorticks_off()
    model, bucket = (of(WIDTHS[-1]) / of(WIDTHS[0]) for of in (model_bytes, lambda width: mode(good[width])))
    canvas.frame(
        picture,
        title=f"The model grows {model:.1f} times, its best bucket {bucket:.1f} times",
        notes=[f"{where[0].upper()}{where[1:]}. Vertical: the middle half of {ROUNDS} steps; grey: the best bucket."],
        below_in=0.5,
    )
    return picture


DD17 = Claim(
    id="DD17",
    title="three rules",
    paper="sections 5.3 and 6.1",
    says="NCCL beats gloo; the best bucket grows slower than the model; keep a group within one machine.",
    runs=f"bucket sizes for models of {', '.join(size_text(model_bytes(width)) for width in WIDTHS)};"
    f" 1 MiB all-reduced within a machine and over {SLOW}",
    test=three_rules,
)
