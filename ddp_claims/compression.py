"""DD12: gradients in fewer bytes (the paper's outlook, section 6.2.3): what is saved, and what happens to the loss.

fp16 and bf16 send 2 bytes for each number. PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727) sends, for a
gradient of n rows and m columns, two thin matrices P (n x rank) and Q (m x rank) whose product is near it.

The verdict on the loss is about `MLP` and this learning rate. In a trial with `ConvNet` and a rate of 0.05, where the
loss jumps from epoch to epoch, one seed of fp16 and of bf16 ended higher by more than the seeds differed.
"""

from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.comm_hooks import bf16
from ddp_claims.convergence import SEEDS, differences, keeps, seeds_text, spread, training_loss
from ddp_claims.samples import no_network, ratios
from ddp_claims.training import backward, first_digits, seconds_in_turn, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, operations, span
from dlearn.draw.palette import SERIES
from dlearn.lessons import charts, digits, models
from dlearn.lessons.training import accuracy

RANKS = 2
POWERSGD_RANKS = (1, 2, 4)
HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16}
METHODS = ("plain", *HOOKS, *(f"PowerSGD {rank}" for rank in POWERSGD_RANKS))
PLAIN_STEPS = 2
"""PowerSGD leaves the first steps alone: in them, DDP still makes its buckets."""
EPOCHS, BATCH, LEARNING_RATE, MOMENTUM = 8, 25, 0.02, 0.9
TIMED_STEPS = 14
NETWORK = "10 Mbit/s, 1 ms"
"""Slow enough that bytes cost more than what packs them."""
MOST_POINTS = 1.0
"""Percentage points of held-out accuracy that are "a tiny amount": 3 of 297 images."""


def compressed(method: str, seed: int) -> DistributedDataParallel:
    """Return the model under DDP with this hook; all of it is one bucket of 25 MB.

    For PowerSGD on gloo one bucket is a must: with two, its callbacks launch all-reduces from gloo's threads, in
    another order on each rank, and it hangs or aborts (the museum of hangs shows it).
    """
    model = under_ddp(models.MLP, seed=seed)
    if method in HOOKS:
        model.register_comm_hook(None, HOOKS[method])
    elif method != "plain":
        rank = int(method.removeprefix("PowerSGD "))
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_STEPS)
        model.register_comm_hook(state, powerSGD_hook)
    return model


def recorded_steps() -> None:
    """Train a few steps with each method on a rank; record the last in a span of its name."""
    batch = first_digits(BATCH)
    for method in METHODS:
        model = compressed(method, seed=0)
        for step in range(PLAIN_STEPS + 2):
            with span(method if step == PLAIN_STEPS + 1 else f"{method}: before"):
                backward(model, batch)


def timed_steps() -> dict[str, list[float]]:
    """Return the seconds of each step with each method, in turn, on a rank."""
    batch = first_digits(BATCH)
    steps = {method: partial(backward, compressed(method, seed=0), batch) for method in METHODS}
    return seconds_in_turn(steps, rounds=TIMED_STEPS, warm_up=PLAIN_STEPS)


def sent(trace: Trace, method: str) -> tuple[int, ...]:
    """Return the bytes that a rank hands to each all-reduce of the recorded step, in order."""
    asked = operations(trace.within(method).where(op="all_reduce"))
    return tuple(each.given_bytes for each in asked)


def powersgd_sizes(model: nn.Module, rank: int) -> tuple[int, int, int]:
    """Return the bytes by the formula: uncompressed tensors, then all P, then all Q, float32.

    A matrix is compressed if that saves more than half of it (`min_compression_rate`); vectors never are.
    """
    whole = p = q = 0
    for parameter in model.parameters():
        n = len(parameter)
        m = parameter.numel() // n
        r = min(n, m, rank)
        if 2 * (n + m) * r < n * m:
            p, q = p + n * r, q + m * r
        else:
            whole += n * m
    return 4 * whole, 4 * p, 4 * q


class Training(NamedTuple):
    """The loss over all training images before the first epoch and after each, and the held-out accuracy at the end."""

    losses: list[float]
    accuracy: float


def train(method: str, seed: int) -> Training:
    """Train on digits with SGD, on a rank."""
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    model = compressed(method, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    order = torch.Generator().manual_seed(seed)
    losses = [training_loss(model.module)]
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), generator=order).split(BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            backward(model, (images[batch], labels[batch]))
            optimizer.step()
        losses.append(training_loss(model.module))
    return Training(losses, accuracy(model.module))


def train_all() -> dict[str, list[Training]]:
    """Train with every method from every seed."""
    return {method: [train(method, seed) for seed in SEEDS] for method in METHODS}


@paper_claim(
    "DD12",
    "gradient compression",
    paper="section 6.2.3",
    says="Gradients need not be float32: compressed, they are fewer bytes, for a tiny amount of accuracy.",
    runs=f"{EPOCHS} epochs of digits with {', '.join(METHODS)} (its rank); all in one bucket, as PowerSGD must on gloo",
)
def compression() -> Result:
    """Test the bytes of one recorded step, and whether the loss is kept."""
    trace = Cluster(RANKS).run(recorded_steps).trace
    sizes = {method: sent(trace, method) for method in METHODS}
    trained: dict[str, list[Training]] = Cluster(RANKS, record=False).run(train_all).results[0]
    ends = {method: [run.losses[-1] for run in runs] for method, runs in trained.items()}
    accuracies = {method: [run.accuracy for run in runs] for method, runs in trained.items()}
    checks = (
        halved(sizes),
        *(by_formula(sizes, rank) for rank in POWERSGD_RANKS),
        kept(ends, "fp16", "bf16"),
        *(kept(ends, f"PowerSGD {rank}") for rank in POWERSGD_RANKS),
        as_accurate(accuracies),
        *faster(),
    )
    return Result(checks, picture(sizes, ends), f"{RANKS} ranks, gloo, {len(SEEDS)} seeds; the bytes are exact")


def halved(sizes: dict[str, tuple[int, ...]]) -> Check:
    plain = sizes["plain"]
    return Check(
        "fp16 and bf16 send half the bytes, in as many all-reduces",
        "; ".join(f"{name}: {sum(sizes[name]):,} B in {len(sizes[name])}" for name in ("plain", "fp16", "bf16")),
        all(
            2 * sum(sizes[name]) == sum(plain) and len(sizes[name]) == len(plain) and plain for name in ("fp16", "bf16")
        ),
    )


def by_formula(sizes: dict[str, tuple[int, ...]], rank: int) -> Check:
    seen, plain = sizes[f"PowerSGD {rank}"], sum(sizes["plain"])
    expected = powersgd_sizes(models.MLP(), rank)
    return Check(
        f"PowerSGD of rank {rank}, in one bucket, sends P, Q and what is not worth compressing: {sum(expected):,} B",
        f"{' + '.join(f'{size:,}' for size in seen)} = {sum(seen):,} B, {sum(seen) / plain:.0%} of {plain:,} B",
        seen == expected and len(sizes["plain"]) == 1,
    )


def kept(ends: dict[str, list[float]], *methods: str) -> Check:
    plain = ends["plain"]
    worst = {name: max(differences(ends[name], plain)) for name in methods}
    return Check(
        f"the loss with {' and '.join(methods)}: from every seed it ends higher by less than the seeds differ without",
        f"without: {seeds_text(plain)}, so by less than {spread(plain):.4f}; seen, at worst: "
        + ", ".join(f"{name} {more:+.4f}" for name, more in worst.items()),
        all(keeps(ends[name], plain) for name in methods),
    )


def as_accurate(accuracies: dict[str, list[float]]) -> Check:
    lost = {
        name: 100 * max(-each for each in differences(values, accuracies["plain"]))
        for name, values in accuracies.items()
        if name != "plain"
    }
    return Check(
        f"the held-out accuracy falls by no more than {MOST_POINTS:.0f} percentage point from any seed",
        f"without: {100 * median(accuracies['plain']):.1f} %; most lost: "
        + ", ".join(f"{name} {max(0.0, points):.1f}" for name, points in lost.items()),
        all(points <= MOST_POINTS for points in lost.values()),
    )


def faster() -> list[Check]:
    """Test whether fewer bytes take less time over a slow network."""
    says = f"over {NETWORK}, a step with {{method}} is faster"
    if no_network():
        return [Check(says.format(method="fp16"), no_network(), None)]
    seconds: dict[str, list[float]] = Cluster(RANKS, record=False, network=NETWORK).run(timed_steps).results[0]
    found = {method: ratios(seconds["plain"], seconds[method]) for method in ("fp16", "PowerSGD 1")}
    return [
        Check(says.format(method=method), f"without it takes {each.text('times')} as long", each.interval[0] > 1)
        for method, each in found.items()
    ]


def picture(sizes: dict[str, tuple[int, ...]], ends: dict[str, list[float]]) -> Axes:
    """Draw bytes a step against the loss at the end, a dot for each seed."""
    plain, fewest = sum(sizes["plain"]), min(METHODS, key=lambda method: sum(sizes[method]))
    told = [
        f"{name}: {sum(sizes[name]) / plain:.0%} of the bytes, {median(ends[name]) / median(ends['plain']):.2f} times"
        for name in (fewest, "fp16")
    ]
    ax = charts.lines(
        {name: charts.Series([sum(sizes[name])] * len(SEEDS), ends[name], between="") for name in METHODS},
        title=f"{'; '.join(told)} the loss",
        x="bytes that a rank sends in a step (log scale)",
        y="loss at the end",
        ticks=[(sum(sizes[name]), f"{sum(sizes[name]):,} B") for name in METHODS],
        log="x",
        notes=["A dot for each of three seeds. Tinted: between the best and the worst seed without compression."],
    )
    every = [loss for losses in ends.values() for loss in losses]
    ax.set_ylim(0.95 * min(every), 1.05 * max(every))
    ax.axhspan(min(ends["plain"]), max(ends["plain"]), color=SERIES[0], alpha=0.12, linewidth=0)
    return ax
