"""DD15: what a program must change for DDP, and where DDP steps in."""

import difflib
import inspect
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, draw, operations
from dlearn.events.event import Collective, Gradient
from dlearn.join.ends import End
from dlearn.lessons import charts, digits, models

RANKS = 2
STEPS = 3
BATCH_SIZE = 16
"""Of one rank. Alone, the program takes the batches of all ranks at once."""
CLOSE = 1e-5
"""Sums in another order round otherwise: float32 has 7 digits."""


def train(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    torch.manual_seed(0)
    model = models.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_with_ddp(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def of_this_rank() -> Tensor:
    """Return this rank's part of each batch."""
    return train_with_ddp([batch(step, rank) for step in range(STEPS) for rank in (dist.get_rank(),)])


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    images, labels = digits.shard(rank, RANKS)
    part = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
    return images[part], labels[part]


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the parts of all ranks."""
    parts = [batch(step, rank) for rank in range(RANKS)]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def is_of_ddp(end: End) -> bool:
    """Return True if DDP made this call, and not the program."""
    return isinstance(end, Collective) and (end.launcher == "reducer" or end.role.startswith("DDP"))


@paper_claim(
    "DD15",
    "non-intrusive and interceptive",
    paper="section 3.1",
    says="A local training script needs hardly a change, and DDP intercepts what it must know of: construction, forward"
    " pass, gradients.",
    runs=f"a training function of {len(inspect.getsource(train).splitlines())} lines, alone and on {RANKS} ranks",
)
def interception() -> Result:
    """Compare both functions and their results; list what DDP did by itself."""
    run = Cluster(RANKS).run(of_this_rank)
    alone = train([whole_batch(step) for step in range(STEPS)])
    torch.manual_seed(0)
    moved = (alone - nn.utils.parameters_to_vector(models.ConvNet().parameters())).abs().max().item()
    furthest = max((run.results[rank] - alone).abs().max().item() for rank in range(RANKS))
    # Names aside:
    source, with_ddp = (inspect.getsource(each).splitlines()[1:] for each in (train, train_with_ddp))
    changed = [line for line in difflib.ndiff(source, with_ddp) if line[:2] in ("- ", "+ ")]
    asked = operations(run.trace)
    by_ddp = [each for each in asked if all(is_of_ddp(end) for end in each.ends)]
    places = Counter(each.ends[0].phase for each in asked)
    gradients = Counter(event.rank for event in run.trace.events if isinstance(event, Gradient))
    parameters = len(list(models.ConvNet().parameters()))
    told = ", ".join(f"{where} {places[phase]}" for phase, where in PLACES.items())
    checks = (
        Check(
            "non-intrusive: one line of the training function is another",
            "; ".join(" ".join(line.split()) for line in changed)
            + ". (Beside it: starting the ranks, and a part of the data for each.)",
            [line[0] for line in changed] == ["-", "+"],
        ),
        Check(
            "and it learns the same as alone, with the batches of all ranks in one",
            f"after {STEPS} steps no parameter differs by more than {furthest:.1e} (limit {CLOSE:g}); one moved by"
            f" {moved:.1e}",
            furthest <= CLOSE < moved,
        ),
        Check(
            "interceptive: every collective of the job is DDP's own, none stands in the program",
            f"{len(by_ddp)} of {len(asked)}",
            len(asked) == len(by_ddp) > 0,
        ),
        Check(
            "it steps in in the constructor, in the forward pass, and in the backward pass, where a hook tells it of"
            " every gradient",
            f"{told}; {', '.join(str(gradients[rank]) for rank in range(RANKS))} gradients on the {RANKS} ranks:"
            f" {STEPS} passes of {parameters} parameters",
            set(places) == set(PLACES) and all(gradients[rank] == STEPS * parameters for rank in range(RANKS)),
        ),
    )
    picture = charts.retitle(
        draw.timeline(run.trace), f"{len(by_ddp)} of {len(asked)} collectives are DDP's own: {told}"
    )
    return Result(checks, picture)


PLACES = {"setup": "constructor", "forward": "forward", "backward": "backward"}
