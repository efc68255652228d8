"""DD13: optimizer steps after every n-th iteration only (`no_sync`), and what that does to the loss (figure 11).

As in the paper the gradients of n iterations are *summed*, one all-reduce follows, then one step of the optimizer. So
the step is about n times as long; it is not divided by n, and the learning rate is not lowered. Is the long step what
hurts? The control takes steps as long after every iteration: n = 1 with n times the learning rate.

The model is `MLP`, and the verdict is about it. In a trial with `ConvNet`, n = 8 ended higher in the small setting too,
by more than its seeds differed: its loss still falls steeply at the end of these runs, so small changes count.
"""

from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from ddp_claims import seen
from ddp_claims.convergence import SEEDS, differences, hurts, keeps, seeds_text, spread, training_loss
from ddp_claims.figures import label_ends, panels
from ddp_claims.training import backward, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster
from dlearn.draw import canvas
from dlearn.draw.palette import SERIES
from dlearn.lessons import digits, models

RANKS = 2
EVERY = (1, 2, 4, 8)
"""n: an all-reduce and a step of the optimizer after so many iterations."""
POINTS = 10
"""Of each loss curve."""


class Setting(NamedTuple):
    """Images in a rank's batch, learning rate of SGD, and iterations (passes over a batch), the same for every n."""

    batch: int
    learning_rate: float
    iterations: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, lr {self.learning_rate}"


SMALL, LARGE = Setting(8, 0.02, 800), Setting(256, 0.06, 240)
"""The paper's two; every n divides the iterations between two points of the curve."""


def train(setting: Setting, n: int, seed: int) -> list[float]:
    """Return the loss over all training images at the start and at `POINTS` later moments."""
    rank = dist.get_rank()
    images, labels = digits.shard(rank, dist.get_world_size())
    model = under_ddp(models.MLP, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    drawn = torch.Generator().manual_seed(10 * seed + rank)
    losses = [training_loss(model.module)]
    for iteration in range(1, setting.iterations + 1):
        batch = torch.randint(len(images), (setting.batch,), generator=drawn)
        synchronised = iteration % n == 0
        with nullcontext() if synchronised else model.no_sync():
            backward(model, (images[batch], labels[batch]))
        if synchronised:
            optimizer.step()
            optimizer.zero_grad()
        if iteration % (setting.iterations // POINTS) == 0:
            losses.append(training_loss(model.module))
    return losses


Curves = dict[int, list[list[float]]]
"""For each n, the loss curve of each seed."""

CONTROL = LARGE._replace(learning_rate=EVERY[-1] * LARGE.learning_rate)
"""Steps as long as with the largest n, and after every iteration."""


def train_all() -> dict[Setting, Curves]:
    """Train both settings with every n from every seed, and the control with n = 1."""
    curves = {setting: {n: [train(setting, n, seed) for seed in SEEDS] for n in EVERY} for setting in (SMALL, LARGE)}
    return {**curves, CONTROL: {1: [train(CONTROL, 1, seed) for seed in SEEDS]}}


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
    curves: dict[Setting, Curves] = Cluster(RANKS, record=False).run(train_all).results[0]
    ends = {setting: {n: [run[-1] for run in runs] for n, runs in each.items()} for setting, each in curves.items()}
    most, control = EVERY[-1], ends[CONTROL][1]
    few = SMALL._replace(iterations=POINTS * most)
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
    return Result(checks, picture(curves, ends), conditions)


def ends_text(ends: dict[int, list[float]]) -> str:
    """Return where each n ends, and the difference that decides."""
    told = "; ".join(f"n = {n}: {seeds_text(values)}" for n, values in ends.items())
    higher = differences(ends[EVERY[-1]], ends[1])
    return (
        f"{told}. With n = {EVERY[-1]} higher by {min(higher):.3f} to {max(higher):.3f};"
        f" the seeds differ by {spread(ends[1]):.3f}"
    )


def picture(curves: dict[Setting, Curves], ends: dict[Setting, dict[int, list[float]]]) -> Axes:
    """Draw a panel for each setting with a curve for each n."""
    most = EVERY[-1]
    times = {each: median(ends[each][most]) / median(ends[each][1]) for each in (LARGE, SMALL)}
    ax, inside = panels([each.name for each in times], x="iterations, in % of the run", y="loss", right=0.75)
    for setting, panel in zip(times, inside, strict=True):
        lines = {}
        for n, color in zip(EVERY, SERIES, strict=False):
            at = list(zip(*curves[setting][n], strict=True))
            share = [100 * point / POINTS for point in range(POINTS + 1)]
            panel.plot(share, [median(each) for each in at], color=color, linewidth=1.6)
            panel.vlines(share, [min(each) for each in at], [max(each) for each in at], colors=color, linewidth=1)
            lines[f"n = {n}: {median(ends[setting][n]):.2f}"] = (100.0, median(at[-1]), color)
        panel.set_ylim(bottom=0)
        label_ends(panel, lines, canvas.points(ax, 0.9, along="y"))
    return canvas.frame(
        ax,
        title=f"A step after {most} iterations ends with {times[LARGE]:.2f} times the loss for batches of"
        f" {LARGE.batch}, {times[SMALL]:.2f} for {SMALL.batch}",
        notes=["Medians of three seeds; vertical lines: from the best to the worst. The same images for every n."],
        below_in=0.5,
    )
