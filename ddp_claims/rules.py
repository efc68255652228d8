"""DD17: the paper's three rules of thumb (its sections 5 and 6.1)."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median, mode

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.nn.parallel import DistributedDataParallel

from ddp_claims import seen
from ddp_claims.samples import CONFIDENCE, Samples, no_network, ranks_on_cores
from ddp_claims.training import Step, linear_layers, seconds_in_turn, sgd_step, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster
from dlearn.lessons import charts
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

Seconds = dict[int, dict[int, list[float]]]
"""Of each step, by width and layers in a bucket."""


def all_reduces(device: str = "cpu") -> list[float]:
    """Return the seconds of each all-reduce of 1 MiB, on a rank."""
    data = torch.ones(REDUCED_BYTES // 4, device=device)

    def all_reduce() -> None:
        dist.all_reduce(data)
        if data.is_cuda:
            torch.cuda.synchronize()

    return seconds_in_turn({device: all_reduce}, rounds=ROUNDS)[device]


def bucket_sizes() -> Seconds:
    """Train on a rank with each width and bucket size."""
    return {width: of_buckets(width) for width in WIDTHS}


def of_buckets(width: int) -> dict[int, list[float]]:
    examples = torch.randn(BATCH_SIZE, width)
    made: dict[int, DistributedDataParallel] = {}
    for count in LAYERS_IN_BUCKET:
        # A bucket is closed when it reaches its cap, so that a byte less is enough.
        cap = (count * layer_bytes(width) - 1) / 2**20
        made[count] = under_ddp(partial(linear_layers, LAYERS, width), bucket_cap_mb=cap)

    def step_of(model: DistributedDataParallel) -> Step:
        return sgd_step(model, lambda: model(examples).square().mean().backward(), lr=0.01)

    steps = {count: step_of(model) for count, model in made.items()}
    return seconds_in_turn(steps, rounds=ROUNDS)


def layer_bytes(width: int) -> int:
    """Return the bytes of the gradients of a layer: weight and bias, 4 B each."""
    return (width * width + width) * 4


def model_bytes(width: int) -> int:
    return LAYERS * layer_bytes(width)


def best(width: int, seconds: Mapping[int, Sequence[float]]) -> list[int]:
    """Return the bucket size in bytes of the shortest median step, in each resample.

    The bootstrap (Efron, 1979): rounds are drawn with replacement, and how often a size wins says how sure it is.
    """
    draw = random.Random(0)
    found: list[int] = []
    for _ in range(RESAMPLES):
        rounds = draw.choices(range(ROUNDS), k=ROUNDS)
        fastest = min(seconds, key=lambda count: median(map(seconds[count].__getitem__, rounds)))
        found.append(fastest * layer_bytes(width))
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


def all_gradients() -> Check:
    """Count the buckets of a recorded run, without the first step's, which has others."""
    trace = Cluster(RANKS).run(bucket_sizes).trace
    sent = Counter(each.bytes for each in seen.buckets(trace) if each.built == "rebuilt")
    return Check(
        f"with each bucket size a step sends all of a model's {LAYERS} layers",
        "; ".join(f"{count // (ROUNDS + 1)} of {size_text(size)}" for size, count in sorted(sent.items())),
        sent == {n * layer_bytes(width): (ROUNDS + 1) * LAYERS // n for width in WIDTHS for n in LAYERS_IN_BUCKET},
    )


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


@paper_claim(
    "DD17",
    "three rules",
    paper="sections 5.3 and 6.1",
    says="NCCL beats gloo; the best bucket grows slower than the model; keep a group within one machine.",
    runs=f"bucket sizes for models of {', '.join(size_text(model_bytes(width)) for width in WIDTHS)};"
    f" 1 MiB all-reduced within a machine and over {SLOW}",
)
def three_rules() -> Result:
    """Test the rules; without a chosen network, try the buckets on the loopback interface."""
    where = "on the loopback interface" if no_network() else f"over {NETWORK}"
    found = Cluster(RANKS, record=False, network=None if no_network() else NETWORK).run(bucket_sizes).results[0]
    good = {width: best(width, seconds) for width, seconds in found.items()}
    picture = bucket_picture(good, found, where)
    checks = (all_gradients(), nccl_beats_gloo(), buckets_grow_slower(good, where), within_a_machine())
    return Result(checks, picture, f"{ranks_on_cores(RANKS)}, gloo, {ROUNDS} rounds of all sizes in turn")


def bucket_picture(good: Mapping[int, list[int]], found: Seconds, where: str) -> Axes:
    """Draw for each model a step over the bucket size, relative to the fastest."""
    series = {}
    for width, seconds in found.items():
        taken = [Samples(tuple(each)) for each in seconds.values()]
        fastest = min(each.median for each in taken)
        halves = [each.middle_half for each in taken]
        spreads = [(low / fastest, high / fastest) for low, high in halves]
        name = f"model {size_text(model_bytes(width))}: best {size_text(mode(good[width]))}"
        sizes = [count * layer_bytes(width) for count in LAYERS_IN_BUCKET]
        series[name] = charts.Series(sizes, [each.median / fastest for each in taken], spreads)
    model, bucket = (of(WIDTHS[-1]) / of(WIDTHS[0]) for of in (model_bytes, lambda width: mode(good[width])))
    return charts.lines(
        series,
        title=f"The model grows {model:.1f} times, its best bucket {bucket:.1f} times",
        x="bytes of a bucket",
        y="a step, times the fastest",
        ticks=[(size, size_text(round(size))) for line in series.values() for size in line.x],
        log="x",
        notes=[f"{where[0].upper()}{where[1:]}. Vertical lines: the middle half of {ROUNDS} steps."],
    )
