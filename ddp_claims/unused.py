"""DD11: layers that a step leaves out: the map of used parameters, and what it costs (section 3.2.3 of the paper)."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_claims import seen
from ddp_claims.figures import table
from ddp_claims.training import backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, operations, span

RANKS = 2
DEPTH = 4
INT32 = 4
NOBODY, EVERYBODY, ONE = "no layer dropped", "layer {} dropped", "layer 1 dropped on rank 1"
SKIPPED = "layer 1 always dropped, and skipped"
LAYER_MB = 0.0158
"""So that each layer (16,640 B) has a bucket of its own."""
ERROR = "Expected to have finished reduction in the prior iteration"


class Tower(nn.Module):
    """Residual layers, any of which may be left out: 21,450 parameters in 12 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(DEPTH))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor, dropped: Sequence[int] = ()) -> Tensor:
        x = self.embed(images.flatten(1))
        for number, layer in enumerate(self.layers):
            if number not in dropped:
                x = x + layer(x).relu()
        logits: Tensor = self.head(x)
        return logits


def names() -> list[str]:
    """Return the names of the steps: none, each layer on all ranks, one on rank 1 alone."""
    return [NOBODY, *(EVERYBODY.format(number) for number in range(DEPTH)), ONE]


def dropped_in(name: str) -> tuple[int, ...]:
    """Return the layers that this rank drops."""
    if name == ONE:
        return (1,) if dist.get_rank() == 1 else ()
    return tuple(number for number in range(DEPTH) if name == EVERYBODY.format(number))


def train(*, find_unused: bool) -> dict[str, dict[str, Tensor]]:
    """Return the gradients after each step by parameter, without those that stayed None."""
    batch = first_digits(25)
    model = under_ddp(Tower, find_unused_parameters=find_unused)
    gradients: dict[str, dict[str, Tensor]] = {}
    for name in names():
        model.zero_grad()
        with span(name):
            backward(model, batch, dropped_in(name))
        found = {each: parameter.grad for each, parameter in model.module.named_parameters()}
        gradients[name] = {each: grad.clone() for each, grad in found.items() if grad is not None}
    return gradients


def train_and_skip() -> dict[str, dict[str, Tensor]]:
    """Train with `find_unused_parameters`; add a step of a model that never uses layer 1."""
    gradients = train(find_unused=True)
    batch = first_digits(25)
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    model = under_ddp(Tower, bucket_cap_mb=LAYER_MB, **skipping)
    with span(SKIPPED):
        backward(model, batch, (1,))
    return gradients


@paper_claim(
    "DD11",
    "layer dropping, unused parameters",
    paper="sections 3.2.3, 4.2 and 6.2.2",
    says="A backward pass that leaves parameters out hangs, unless DDP looks for them in the graph; an additional"
    " all-reduce of a bitmap then tells which parameters no rank has used.",
    runs=f"{DEPTH} residual layers, each dropped once on all of {RANKS} ranks, then one on rank 1 alone",
)
def unused() -> Result:
    """Test the same training with and without `find_unused_parameters`."""
    run = seen.run_quietly(Cluster(RANKS), train_and_skip)
    without = seen.run_quietly(Cluster(RANKS), partial(train, find_unused=False), check=False)
    steps = {name: run.trace.within(name) for name in names()}
    tower = Tower()
    count, size = len(list(tower.parameters())), seen.parameter_bytes(tower)
    maps = {name: seen.handed_bytes(seen.called(step, seen.USED_MAP)) for name, step in steps.items()}
    sizes = {name: seen.handed_bytes(seen.reductions(step)) for name, step in steps.items()}
    skipping = run.trace.within(SKIPPED)
    maps[SKIPPED] = seen.handed_bytes(seen.called(skipping, seen.USED_MAP))
    sizes[SKIPPED] = seen.handed_bytes(operations(skipping)) - maps[SKIPPED]
    layer = seen.parameter_bytes(tower.layers[1])
    first, second = (run.results[rank] for rank in range(RANKS))
    missing = {name: sorted({each for each, _ in tower.named_parameters()} - set(first[name])) for name in names()}
    layers = {EVERYBODY.format(number): [f"layers.{number}.bias", f"layers.{number}.weight"] for number in range(DEPTH)}
    came = {rank: len({*seen.ready_parameters(steps[ONE], rank)}) for rank in range(RANKS)}
    ready_text = ", ".join(f"rank {rank}: {number}" for rank, number in came.items())
    checks = (
        Check(
            f"with find_unused_parameters each backward pass sends a map of {count} int32, one for each parameter",
            f"{', '.join(str(maps[name]) for name in names())} B in the {len(steps)} steps",
            all(maps[name] == INT32 * count and len(seen.called(steps[name], seen.USED_MAP)) == 1 for name in names()),
        ),
        Check(
            f"the gradients of a dropped layer travel all the same, as zeros: always {size:,} B",
            "; ".join(f"{name}: {sizes[name]:,} B" for name in names()),
            all(sizes[name] == size for name in names()),
        ),
        Check(
            f"with skip_all_reduce_unused_params a layer that is never used, {layer:,} B in a bucket, is not sent",
            f"{sizes[SKIPPED]:,} B of gradients, {maps[SKIPPED]} B of map",
            (sizes[SKIPPED], maps[SKIPPED]) == (size - layer, INT32 * count),
        ),
        Check(
            "what all ranks dropped has no gradient afterwards",
            "; ".join(f"{name}: {', '.join(missing[name])}" for name in layers),
            all(missing[name] == expected for name, expected in layers.items()),
        ),
        Check(
            "what only one rank dropped has one on all, the same in every bit",
            f"{ONE}: gradients that came up: {ready_text}; after the step {len(first[ONE])} and {len(second[ONE])}",
            (came[0], came[1]) == (count, count - 2)
            and set(first[ONE]) == set(second[ONE]) == {name for name, _ in tower.named_parameters()}
            and all(torch.equal(first[ONE][name], second[ONE][name]) for name in first[ONE]),
        ),
        Check(
            "without it, the step after a dropped layer raises an error (where one rank alone drops it: DD5)",
            told(without.error.what if without.error is not None else ""),
            without.error is not None and ERROR in without.error.what and not without.results,
        ),
    )
    shown = [*names(), SKIPPED]
    head = ["a step and rank", "gradients", "map of used parameters"]
    picture = table(
        [head, *([name, f"{sizes[name]:,} B", f"{maps[name]} B"] for name in shown)],
        title=f"A dropped layer saves no byte; one that is never used can be skipped: {layer:,} B less",
    )
    return Result(checks, picture)


def told(error: str) -> str:
    """Return the decisive sentence of torch's long message."""
    line = next((line for line in error.splitlines() if ERROR in line), error or "no error")
    return line.split(". ")[0]
