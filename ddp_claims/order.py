"""DD5: what happens if ranks reduce in different orders, or one of them leaves a gradient out (figure 3a and b)."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_claims import seen
from ddp_claims.training import gradients_of, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, draw, span
from dlearn.analysis import hangs
from dlearn.lessons import museum

RANKS = 2
STEPS = 2
SMALL = 0.0158
"""In MB: a bucket for each layer of 64 x 64."""
ORDERED, SWAPPED = "all in one order", "rank 1 in the other"
SUMS = {"swapped": (11.0, 11.0), "right": (2.0, 20.0)}
"""Of (1, 10) on each of two ranks, reduced in different orders and in the same."""
HANG_SECONDS = 4.0


class Branches(nn.Module):
    """Two branches that are added: who computes them in another order has the same result."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, swapped: bool) -> Tensor:
        if swapped:
            right, left = self.right(x), self.left(x)
        else:
            left, right = self.left(x), self.right(x)
        total: Tensor = left + right
        return total


def train_branches() -> dict[str, Tensor]:
    """Return the gradients of the last step, with branches in the same order and in another."""
    gradients: dict[str, Tensor] = {}
    for name in (ORDERED, SWAPPED):
        model = under_ddp(Branches, bucket_cap_mb=SMALL)
        x = torch.randn(8, 64) * (dist.get_rank() + 1)
        for step in range(STEPS):
            model.zero_grad()
            with span(f"{name}, step {step}"):
                loss = model(x, name == SWAPPED and dist.get_rank() == 1).square().mean()
                loss.backward()
        gradients[name] = gradients_of(model)
    return gradients


@paper_claim(
    "DD5",
    "order of reduction, and skipped gradients",
    paper="section 3.2.3, figures 3a and 3b",
    says="If processes reduce in different orders, the result is wrong or the program crashes; if a gradient is skipped"
    " in one of them, the backward pass hangs.",
    runs=f"a model whose branches are swapped on rank 1, and three jobs of the museum of hangs, on {RANKS} ranks",
)
def order() -> Result:
    """Test four jobs: swapped ready order, swapped launches (two shapes), a left-out gradient."""
    branches = Cluster(RANKS).run(train_branches)
    wrong = museum.visit(museum.exhibit("swapped_of_equal_shape"))
    aborted = museum.visit(museum.exhibit("swapped_of_different_shape"))
    hung = museum.visit(museum.exhibit("unused_parameter"), timeout=HANG_SECONDS)
    after = Cluster(RANKS, record=False).run(dist.get_rank)
    stuck = hangs(hung.run.trace)
    bucket = stuck[0].operation.bucket if stuck else None
    checks = (
        harmless(
            branches.trace, [branches.results[rank][name] for rank in range(RANKS) for name in (ORDERED, SWAPPED)]
        ),
        Check(
            "two all-reduces of equal shape, launched in another order on rank 1, give a wrong result and no error",
            f"{wrong.run.results.get(0)} on rank 0, {SUMS['right']} were right; {wrong.sentence}",
            wrong.run.error is None
            and all(wrong.run.results.get(rank) == SUMS["swapped"] != SUMS["right"] for rank in range(RANKS)),
        ),
        Check(
            "with different shapes the job ends with an error",
            f"{len(aborted.run.results)} of {RANKS} ranks returned; {aborted.sentence}",
            aborted.run.error is not None and len(aborted.run.results) < RANKS,
        ),
        Check(
            "a gradient that rank 1 leaves out makes rank 0 wait for ever; rank, bucket and parameters are named",
            hung.sentence,
            bucket is not None
            and stuck[0].waiting == (0,)
            and hung.exhibit.expects(hung.sentence)
            and hung.sentence in hung.error
            and all(word in hung.sentence for word in ("rank 1", f"bucket {bucket.index}", *bucket.parameters)),
        ),
        Check(
            "the next job runs as if nothing had happened",
            f"results {after.results}",
            after.error is None and after.results == {rank: rank for rank in range(RANKS)},
        ),
    )
    return Result(checks, draw.buckets(hung.run.trace))


def harmless(trace: Trace, gradients: list[Tensor]) -> Check:
    """Test that the order of ready gradients does not matter: buckets start by number."""
    last = trace.within(f"{SWAPPED}, step {STEPS - 1}")
    came = [seen.ready_parameters(last, rank) for rank in range(RANKS)]
    sent = [bucket.index for bucket in seen.buckets(last)]
    return Check(
        "a swapped READY order is harmless in today's DDP: buckets go by number, gradients are equal in every bit",
        f"ready on rank 0: {', '.join(came[0])}; on rank 1: {', '.join(came[1])}; buckets sent:"
        f" {', '.join(str(index) for index in sent)}; {len(gradients)} results compared",
        came[0] != came[1] and sent == sorted(sent) and all(torch.equal(gradients[0], each) for each in gradients),
    )
