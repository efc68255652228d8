"""DD13: optimizer steps after every n-th iteration only (`no_sync`), and what that does to the loss (figure 11).

As in the paper the gradients of n iterations are *summed*, one all-reduce follows, then one step of the optimizer. So
the step is about n times as long; it is not divided by n, and the learning rate is not lowered. Is the long step what
hurts? The control takes steps as long after every iteration: n = 1 with n times the learning rate.

Training from another seed ends with another loss. That spread is no difference between settings, so it is the
yardstick: a change *keeps* the loss if from every seed it ends closer to the unchanged run of that seed than the
unchanged runs of the seeds are to each other.

The model is `MLP`, and the verdict is about it. In a trial with `ConvNet`, n = 8 ended higher in the small setting too,
by more than its seeds differed: its loss still falls steeply at the end of these runs, so small changes count.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_claims import seen
from ddp_claims.training import backward, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster
from dlearn.lessons import charts, digits, models

RANKS = 2
SEEDS = (0, 1, 2)
"""Of the parameters, and of the order of the images."""
EVERY = (1, 2, 4, 8)
"""n: an all-reduce and a step of the optimizer after so many iterations."""


class Setting(NamedTuple):
    """Images in a rank's batch, learning rate of SGD, and iterations (passes over a batch), the same for every n."""

    batch: int
    learning_rate: float
    iterations: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, lr {self.learning_rate}"


SMALL, LARGE = Setting(8, 0.02, 800), Setting(256, 0.06, 240)
"""The paper's two; every n divides the iterations."""


def train(setting: Setting, n: int, seed: int) -> float:
    """Return the loss over all training images at the end."""
    rank = dist.get_rank()
    images, labels = digits.shard(rank, dist.get_world_size())
    model = under_ddp(models.MLP, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    drawn = torch.Generator().manual_seed(10 * seed + rank)
    for iteration in range(1, setting.iterations + 1):
        batch = torch.randint(len(images), (setting.batch,), generator=drawn)
        synchronised = iteration % n == 0
        with nullcontext() if synchronised else model.no_sync():
            backward(model, (images[batch], labels[batch]))
        if synchronised:
            optimizer.step()
            optimizer.zero_grad()
    return training_loss(model.module)


Ends = dict[int, list[float]]
"""For each n, the loss that each seed ends with."""

CONTROL = LARGE._replace(learning_rate=EVERY[-1] * LARGE.learning_rate)
"""Steps as long as with the largest n, and after every iteration."""


def train_all() -> dict[Setting, Ends]:
    """Train both settings with every n from every seed, and the control with n = 1."""
    ends = {setting: {n: [train(setting, n, seed) for seed in SEEDS] for n in EVERY} for setting in (SMALL, LARGE)}
    return {**ends, CONTROL: {1: [train(CONTROL, 1, seed) for seed in SEEDS]}}


@paper_claim(
    "DD13",
    "skipping synchronisation",
    paper="section 5.3, figure 11",
    says="Skipping synchronisation hardly hurts convergence with a small batch and learning rate; with large ones it"
    " does, because more gradients add up before a step.",
    runs=f"digits with n = {', '.join(map(str, EVERY))}, gradients summed in between; {SMALL.iterations} iterations of"
    f" {SMALL.name}, {LARGE.iterations} of {LARGE.name}; a control with long steps and n = 1",
)
def skipping() -> Result:
    """Test whether the largest n hurts in either setting."""
    ends: dict[Setting, Ends] = Cluster(RANKS, record=False).run(train_all).results[0]
    most, control = EVERY[-1], ends[CONTROL][1]
    few = SMALL._replace(iterations=10 * most)
    traces = {n: Cluster(RANKS).run(train, few, n, seed=0).trace for n in EVERY}
    sent = {n: len(seen.reductions(each)) for n, each in traces.items()}
    steps = {n: len(each.where(phase="optimizer", rank=0).events) for n, each in traces.items()}
    checks = (
        Check(
            f"of {few.iterations} iterations every n-th sends the gradients and steps",
            "; ".join(f"n = {n}: {sent[n]} all-reduces, {steps[n]} steps" for n in EVERY),
            sent == steps == {n: few.iterations // n for n in EVERY},
        ),
        Check(
            f"{LARGE.name}: n = {most} hurts: every seed ends higher, by more than the seeds differ with n = 1",
            ends_text(ends[LARGE]),
            hurts(ends[LARGE][most], ends[LARGE][1]),
        ),
        Check(
            f"{SMALL.name}: n = {most} hardly hurts: every seed ends higher by less than the seeds differ with n = 1",
            ends_text(ends[SMALL]),
            keeps(ends[SMALL][most], ends[SMALL][1]),
        ),
        Check(
            f"the long step is the reason: n = 1 with {most} times the learning rate hurts in {LARGE.name}, too",
            f"the control, {CONTROL.name}, ends at {seeds_text(control)}, after {LARGE.iterations} steps instead of"
            f" {LARGE.iterations // most}; n = 1 without it at {seeds_text(ends[LARGE][1])}",
            hurts(control, ends[LARGE][1]),
        ),
    )
    conditions = f"{RANKS} ranks, gloo, {len(SEEDS)} seeds; no times are measured"
    return Result(checks, picture(ends), conditions)


def ends_text(ends: Ends) -> str:
    """Return where each n ends, and the difference that decides."""
    told = "; ".join(f"n = {n}: {seeds_text(values)}" for n, values in ends.items())
    higher = differences(ends[EVERY[-1]], ends[1])
    return (
        f"{told}. With n = {EVERY[-1]} higher by {min(higher):.3f} to {max(higher):.3f};"
        f" the seeds differ by {spread(ends[1]):.3f}"
    )


def picture(ends: dict[Setting, Ends]) -> Axes:
    """Draw the loss at the end over n, a line for each setting."""
    most = EVERY[-1]
    times = {each: median(ends[each][most]) / median(ends[each][1]) for each in (LARGE, SMALL)}
    series = {}
    for setting in times:
        losses = [ends[setting][n] for n in EVERY]
        spreads = [(min(each), max(each)) for each in losses]
        series[setting.name] = charts.Series(EVERY, [median(each) for each in losses], spreads)
    return charts.lines(
        series,
        title=f"A step after {most} iterations ends with {times[LARGE]:.2f} times the loss for batches of"
        f" {LARGE.batch}, {times[SMALL]:.2f} for {SMALL.batch}",
        x="n: a step after so many iterations",
        y="loss at the end",
        ticks=[(n, str(n)) for n in EVERY],
        log="x",
        notes=["Medians of three seeds; vertical lines: from the best to the worst. The same images for every n."],
    )


@torch.no_grad()
def training_loss(model: nn.Module) -> float:
    """Return the cross entropy over all 1,500 training images of all ranks."""
    images, labels = _loaded()
    return float(cross_entropy(model(images), labels))


@cache
def _loaded() -> tuple[Tensor, Tensor]:
    images, labels = digits.load()
    return images[: digits.TRAINING_IMAGES], labels[: digits.TRAINING_IMAGES]


def spread(losses: Sequence[float]) -> float:
    """Return the difference between the best and the worst seed."""
    return max(losses) - min(losses)


def differences(changed: Sequence[float], unchanged: Sequence[float]) -> list[float]:
    """Return how much higher each seed ends than without the change."""
    return [a - b for a, b in zip(changed, unchanged, strict=True)]


def keeps(changed: Sequence[float], unchanged: Sequence[float]) -> bool:
    """Return True if no seed ends higher than without the change by the seeds' own spread."""
    return max(differences(changed, unchanged)) < spread(unchanged)


def hurts(changed: Sequence[float], unchanged: Sequence[float]) -> bool:
    """Return True if every seed ends higher than without the change, by more than the spread."""
    return min(differences(changed, unchanged)) > spread(unchanged)


def seeds_text(values: Sequence[float]) -> str:
    """Return "0.124 (seeds 0.122 to 0.133)": the median and the range."""
    return f"{median(values):.3f} (seeds {min(values):.3f} to {max(values):.3f})"
