"""DD14: DDP averages the gradients, and what its constructor sends before any step."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_claims import seen
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, draw, operations, span
from dlearn.analysis import traffic
from dlearn.lessons import charts, models

RANKS = 2
INT64 = 8


class Built(NamedTuple):
    """What a rank has seen: a number's gradient by itself and under DDP, and its model's before and after DDP."""

    own: float
    under_ddp: float
    before: Tensor
    after: Tensor


def build() -> Built:
    """Wrap a ConvNet that differs on each rank; then one number with gradient rank + 1."""
    torch.manual_seed(dist.get_rank())
    net = models.ConvNet()
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    with span("the constructor"):
        model = DistributedDataParallel(net)
    after = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    own, under_ddp = (gradient(number) for number in (one_number(), DistributedDataParallel(one_number())))
    return Built(own, under_ddp, before, after)


def one_number() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


def gradient(model: nn.Module) -> float:
    """Return the gradient of weight · x, which is x."""
    model(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return weight.grad.item()


@paper_claim(
    "DD14",
    "averages, and what the constructor sends",
    paper="sections 2.1 and 3.1",
    says="All replicas start from the same parameters, and each step has the average of their gradients.",
    runs=f"a ConvNet that differs between {RANKS} ranks goes into DDP, and a number with gradients 1 and 2",
)
def construct() -> Result:
    """Test each collective of the constructor by its bytes, and the gradients of two ranks."""
    run = Cluster(RANKS).run(build)
    ranks: list[Built] = [run.results[rank] for rank in range(RANKS)]
    trace = run.trace.within("the constructor")
    net = models.ConvNet()
    parameters = list(net.parameters())
    asked = operations(trace)
    sizes = [each.given_bytes for each in asked]
    named = list(zip([f"{each.op}: {each.what}" for each in asked], sizes, strict=True))
    expected = [INT64, 2 * INT64 * sum(each.dim() for each in parameters), seen.parameter_bytes(net)]
    sent = traffic(trace).payload_bytes
    own, mean = [each.own for each in ranks], sum(each.own for each in ranks) / RANKS
    before = sum(torch.equal(each.before, ranks[0].before) for each in ranks)
    after = sum(torch.equal(each.after, ranks[0].before) for each in ranks)
    checks = (
        Check(
            "DDP's gradient is the mean of the ranks' own",
            f"own: {', '.join(f'{each:g}' for each in own)}; under DDP: {', '.join(f'{r.under_ddp:g}' for r in ranks)}",
            own == [rank + 1.0 for rank in range(RANKS)] and all(each.under_ddp == mean for each in ranks),
        ),
        Check(
            "before any step, the constructor compares the number of parameters (an all_gather of one int64), then"
            " their shapes (a broadcast of size and stride of each dimension), and broadcasts rank 0's model",
            "; ".join(f"{name}: {size:,} B" for name, size in named),
            sizes == expected and [each.op for each in asked] == ["all_gather", "broadcast", "broadcast"],
        ),
        Check(
            f"of this rank 1 sends the {INT64} B of its number, and rank 0 all of it",
            "; ".join(f"{src} to {dst}: {size:,} B" for (src, dst), size in sorted(sent.items())),
            sent == {(0, 1): sum(expected), (1, 0): INT64},
        ),
        Check(
            "after it, every rank has rank 0's model, in every bit",
            f"ranks with rank 0's model: before {before}, after {after}, of {RANKS}",
            (before, after) == (1, RANKS),
        ),
    )
    title = f"Before any step, the constructor compares the ranks' models ({sum(sizes[:-1])} B), then sends rank 0's"
    return Result(checks, charts.retitle(draw.sequence(trace), title))
