"""DD6: gradient accumulation: DDP sends in every n-th backward pass only (`no_sync`)."""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy

from ddp_claims import seen
from ddp_claims.training import backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, span
from dlearn.lessons import charts, models

RANKS = 2
EVERY = (1, 2, 4, 8)
"""Send in each pass, in each second one, ..."""
ITERATIONS = 16
"""Forward and backward passes; a multiple of all of `EVERY`."""
WARM_UP = 2
"""Steps until the buckets are rebuilt."""
FORWARD_ONLY, BACKWARD_ONLY = "no_sync around the forward pass", "no_sync around the backward pass"


def train() -> None:
    """Train in each of the ways, then with only one of the two passes inside `no_sync`."""
    images, labels = batch = first_digits(25)
    model = under_ddp(models.ConvNet, bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARM_UP):
        backward(model, batch)
    for every in EVERY:
        with span(f"every {every}"):
            for number in range(1, ITERATIONS + 1):
                sends = number % every == 0
                with nullcontext() if sends else model.no_sync():
                    backward(model, batch)
                if sends:
                    optimizer.step()
                    optimizer.zero_grad()
    with span(FORWARD_ONLY):
        with model.no_sync():
            loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
    with span(BACKWARD_ONLY):
        loss = cross_entropy(model(images), labels)
        with model.no_sync():
            loss.backward()  # type: ignore[no-untyped-call]


@paper_claim(
    "DD6",
    "gradient accumulation",
    paper="section 3.2.4, figure 10",
    says="With no_sync an application sends the gradients of n iterations at once, and so less often.",
    runs=f"ConvNet, {ITERATIONS} iterations for each n, on {RANKS} ranks",
)
def accumulate() -> Result:
    """Measure the bytes of one iteration, and find the pass that decides."""
    trace = Cluster(RANKS).run(train).trace
    size = seen.parameter_bytes(models.ConvNet())
    sent = {every: seen.sent_bytes(trace.within(f"every {every}"), RANKS) for every in EVERY}
    per_iteration = {every: found[0] / ITERATIONS for every, found in sent.items()}
    forward, backward = (seen.sent_bytes(trace.within(name), RANKS) for name in (FORWARD_ONLY, BACKWARD_ONLY))
    checks = (
        Check(
            f"with n of {', '.join(map(str, EVERY))} each rank sends {size:,} B / n an iteration, to the byte",
            "; ".join(f"n = {every}: {per_iteration[every]:,.0f} B" for every in EVERY),
            all(found == [size * ITERATIONS // every] * RANKS for every, found in sent.items()),
        ),
        Check(
            "the forward pass decides: inside no_sync, nothing is sent, wherever the backward pass is",
            f"{FORWARD_ONLY}: {forward[0]:,} B; {BACKWARD_ONLY}: {backward[0]:,} B",
            forward == [0] * RANKS and backward == [size] * RANKS,
        ),
    )
    least = EVERY[-1]
    picture = charts.bars(
        [f"n = {every}" for every in EVERY],
        [charts.Part("bytes", [per_iteration[every] for every in EVERY])],
        title=f"Sending in every {least}th pass only, a rank sends {per_iteration[least]:,.0f} instead of"
        f" {per_iteration[1]:,.0f} B an iteration: 1/{per_iteration[1] / per_iteration[least]:g}",
        y="sent by each rank, an iteration",
        text=lambda size: f"{size:,.0f} B",
        notes=[f"{ITERATIONS} iterations each; all but every n-th in no_sync."],
    )
    picture.set_yticks([])
    return Result(checks, picture)
