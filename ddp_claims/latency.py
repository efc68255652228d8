"""DD8: where the time of a training step goes (the paper's figure 6)."""

import torch

from ddp_claims.figures import dots
from ddp_claims.samples import Samples, ranks_on_cores
from ddp_claims.training import Build, backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster
from dlearn.analysis import Breakdown, breakdown
from dlearn.analysis.ddp.training_steps import Phase, TrainingStep
from dlearn.lessons import models

RANKS = 2
STEPS = 14
BATCH_SIZE = 64
TRAINED: tuple[Build, ...] = (models.ConvNet, models.MLP, models.Transformer)
MODELS = {build.__name__: build for build in TRAINED}
BACKWARD: tuple[Phase, ...] = ("backward", "transfer", "waiting")


def train(name: str) -> None:
    """Train a few steps of one model in ordinary PyTorch, on a rank."""
    batch = first_digits(BATCH_SIZE)
    model = under_ddp(MODELS[name], bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def is_whole(step: TrainingStep) -> bool:
    """Return True if the parts come in their order, make up the step, and only backward sends."""
    order = dict.fromkeys(row.work for row in step.rows if row.work != "between")
    sends = {row.work for row in step.rows if row.sent is not None and step.number >= 2}
    covered_ns = step.length_ns("forward", *BACKWARD, "optimizer", "between")
    return [*order] == ["forward", "backward", "optimizer"] and sends <= {"backward"} and covered_ns == step.total_ns


def backward_times(found: Breakdown) -> tuple[Samples, Samples]:
    """Return backward, with its communication, over the whole step and over the next longest part."""
    of_step, of_next = [], []
    for step in found.items:
        if step.number >= 2 and step.observed:
            backward_ns = step.length_ns(*BACKWARD)
            of_step.append(backward_ns / step.total_ns)
            next_ns = max(step.length_ns("forward"), step.length_ns("optimizer"))
            of_next.append(backward_ns / next_ns)
    return Samples(tuple(of_step)), Samples(tuple(of_next))


@paper_claim(
    "DD8",
    "latency breakdown",
    paper="section 5.1, figure 6",
    says="The backward pass takes longest, because the communication happens in it.",
    runs=f"{', '.join(MODELS)}, {BATCH_SIZE} digits a rank, Adam: forward, backward, communication, optimizer",
)
def breakdowns() -> Result:
    found = {name: breakdown(Cluster(RANKS).run(train, name).trace) for name in MODELS}
    shares = {name: backward_times(each)[0] for name, each in found.items()}
    against = {name: backward_times(each)[1] for name, each in found.items()}
    whole = [is_whole(step) for each in found.values() for step in each.items]
    covered = Check(
        "forward, backward and optimizer follow each other without a gap; with the final buckets only backward sends",
        f"{sum(whole)} of {len(whole)} steps",
        whole == [True] * len(MODELS) * STEPS * RANKS,
    )
    longest = tuple(
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
    return Result((covered, *longest), picture, f"{ranks_on_cores(RANKS)}, gloo, {STEPS - 2} steps on each rank")
