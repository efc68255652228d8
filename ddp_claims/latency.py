"""DD8: where the time of a training step goes (the paper's figure 6)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.conditions import ranks_on_cores
from ddp_claims.figures import dots
from ddp_claims.samples import Samples
from ddp_claims.verdicts import Check, Claim, Result
from dlearn.analysis.ddp.breakdown import Breakdown, breakdown
from dlearn.cluster import Cluster
from dlearn.lessons import digits, models

RANKS = 2
STEPS = 14
BATCH_SIZE = 64
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ConvNet": models.ConvNet,
    "MLP": models.MLP,
    "Transformer": models.Transformer,
}


def train(name: str) -> None:
    """Train a few steps of one model in ordinary PyTorch, on a rank."""
    images, labels = (part[:BATCH_SIZE] for part in digits.shard(dist.get_rank(), dist.get_world_size()))
    torch.manual_seed(0)
    model = DistributedDataParallel(MODELS[name](), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def backward_share(found: Breakdown) -> Samples:
    """Return the share of backward with communication in each step, after the first ones."""
    shares: list[float] = []
    for step in found.items:
        if step.number >= 2 and step.observed:
            backward = step.length_ns("backward", "transfer", "waiting")
            shares.append(backward / step.total_ns)
    return Samples(tuple(shares))


def largest(found: Breakdown) -> Samples:
    """Return the backward pass with communication over the largest other part, by step."""
    shares: list[float] = []
    for step in found.items:
        if step.number >= 2 and step.observed:
            other_ns = max(step.length_ns("forward"), step.length_ns("optimizer"))
            shares.append(step.length_ns("backward", "transfer", "waiting") / other_ns)
    return Samples(tuple(shares))


def breakdowns() -> Result:
    found = {name: breakdown(Cluster(RANKS).run(train, name).trace) for name in MODELS}
    shares = {name: backward_share(each) for name, each in found.items()}
    against = {name: largest(each) for name, each in found.items()}
    checks = tuple(
        Check(
            f"{name}: backward, with its communication, is the longest part",
            f"{shares[name].text('% of the step', scale=100, digits=0)};"
            f" {against[name].median:.1f} times the next longest",
            against[name].interval[0] > 1,
        )
        for name in MODELS
    )
    low, high = (pick(each.median for each in shares.values()) for pick in (min, max))
    columns: dict[str, list[float]] = {}
    for name in MODELS:
        backward = shares[name].values
        columns[f"{name}\nbackward"] = [100 * share for share in backward]
        columns[f"{name}\nnext longest part"] = [
            100 * share / times for share, times in zip(backward, against[name].values, strict=True)
        ]
    picture = dots(
        columns,
        title=f"The backward pass, with its communication, takes {low:.0%} to {high:.0%} of a step",
        y="% of a step",
        between=[f"{each.with_interval} times" for each in against.values()],
        notes=["The next longest part is the forward pass or the optimizer. Percentages in the title: medians."],
    )
    return Result(checks, picture, f"{ranks_on_cores(RANKS)}, gloo, {STEPS - 2} steps on each rank")


DD8 = Claim(
    id="DD8",
    title="latency breakdown",
    paper="section 5.1, figure 6",
    says="The backward pass takes longest, because the communication happens in it.",
    runs=f"{', '.join(MODELS)}, {BATCH_SIZE} digits a rank, Adam: forward, backward, communication, optimizer",
    test=breakdowns,
)
