"""Six exercises, from a ring to a sharded optimizer: what each asks, the data that it runs on, and what has to hold.

Each `drive_...` runs on every rank and returns what the criteria compare; all data are float64 and come from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, log2
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn.analysis import assert_reduces, assert_traffic
from dlearn.analysis.checks.grading import units
from dlearn.course.attempt import (
    Attempt,
    ResultError,
    assert_one_device,
    assert_rounds,
    numbers,
    sends_are_fresh,
    submitted,
)
from dlearn.course.exercise import Exercise
from dlearn.errors import TrafficError

ITEMS = 1_200
"""Of a tensor; 2, 3 and 4 divide it. 8 B each."""
STEPS, RATE, MOMENTUM = 3, 0.1, 0.9
AVERAGING = ("all_reduce", "reduce_scatter_single", "reduce_scatter", "all_gather_single", "all_gather")
"""What gradients can be averaged with: an all-reduce is a reduce-scatter and an all-gather."""


def _here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def ring_bytes(ranks: int, items: int) -> float:
    """What each rank sends in an all-reduce of so many float64."""
    return 2 * (ranks - 1) / ranks * items * 8


# A ring all-reduce ----------------------------------------------------------------------------------------------------


def drive_ring(all_reduce: Callable[[torch.Tensor], None], seed: int) -> torch.Tensor:
    mine = numbers(ITEMS, seed, dist.get_rank())
    with submitted():
        all_reduce(mine)
    return mine


def holds_the_sum(tried: Attempt) -> None:
    assert_one_device(tried.results, sum_of_all(tried))


def sum_of_all(tried: Attempt) -> torch.Tensor:
    return torch.stack([numbers(ITEMS, tried.seed, rank) for rank in range(tried.ranks)]).sum(0)


def _ring_traffic(tried: Attempt) -> None:
    assert_traffic(tried.trace, op="send", bytes_per_rank=ring_bytes(tried.ranks, ITEMS), pattern="ring")


def _ring_reduces(tried: Attempt) -> None:
    assert_reduces(tried.trace, op="send")


RING = Exercise(
    "ring",
    drive_ring,
    {
        "traffic": _ring_traffic,
        "fresh": sends_are_fresh,
        "reduces": _ring_reduces,
        "result": holds_the_sum,
    },
)

# A broadcast along a tree ---------------------------------------------------------------------------------------------


def _root(ranks: int, seed: int) -> int:
    return (seed + 1) % ranks


def drive_tree(broadcast: Callable[[torch.Tensor, int], None], seed: int) -> torch.Tensor:
    rank, n = _here()
    mine = numbers(ITEMS, seed, rank)
    with submitted():
        broadcast(mine, _root(n, seed))
    return mine


def _tree_rounds(tried: Attempt) -> None:
    assert_rounds(tried.trace, root=_root(tried.ranks, tried.seed), most=ceil(log2(tried.ranks)))


def _tree_result(tried: Attempt) -> None:
    assert_one_device(tried.results, numbers(ITEMS, tried.seed, _root(tried.ranks, tried.seed)), tolerance=0)


TREE = Exercise(
    "tree_broadcast",
    drive_tree,
    {"rounds": _tree_rounds, "result": _tree_result},
    ranks=(2, 3, 4, 5),
)

# DDP by hand ----------------------------------------------------------------------------------------------------------

MODEL = (5, 12, 12)
"""Inputs, hidden units and outputs: 228 numbers in four parameters, and 2, 3 and 4 divide that."""
MODEL_ITEMS = (5 + 1) * 12 + (12 + 1) * 12
BATCH = 4


def _model(*seed: int) -> nn.Module:
    inputs, hidden, outputs = MODEL
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    nn.utils.vector_to_parameters(numbers(MODEL_ITEMS, *seed) - 0.5, model.parameters())
    return model


def _batches(seed: int, rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, _, outputs = MODEL
    return [
        (
            numbers(BATCH * inputs, seed, rank, step, 1).view(BATCH, inputs),
            numbers(BATCH * outputs, seed, rank, step, 2).view(BATCH, outputs),
        )
        for step in range(count)
    ]


def _flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of one batch: what students get as `loss`."""
    outputs: torch.Tensor = model(batch[0])
    return (outputs - batch[1]).square().mean()


def _one_device(tried: Attempt, groups: Iterator[range]) -> torch.Tensor:
    """Rank 0's model after one step for each group of micro-batches, all ranks' images taken as one batch."""
    model = _model(tried.seed, 0)
    data = [_batches(tried.seed, rank, MICRO_BATCHES) for rank in range(tried.ranks)]
    for group in groups:
        losses = [loss_of(model, mine[step]) for mine in data for step in group]
        model.zero_grad()
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
    return _flat(model)


def drive_ddp(train: Callable[..., None], seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    model = _model(seed, rank)  # another one on each rank
    with submitted():
        train(model, _batches(seed, rank, STEPS), loss_of, RATE)
    return _flat(model)


def _ddp_equal(tried: Attempt) -> None:
    _same_everywhere(tried)
    assert_one_device(tried.results, _one_device(tried, (range(step, step + 1) for step in range(STEPS))))


def _same_everywhere(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        if not torch.equal(found, tried.results[0]):
            apart = (found - tried.results[0]).abs().max().item()
            raise ResultError(f"ranks 0 and {rank} are left with different parameters, up to {apart:.3g} apart")


def _ddp_traffic(tried: Attempt) -> None:
    assert_traffic(
        tried.trace, op=AVERAGING, bytes_per_rank=STEPS * ring_bytes(tried.ranks, MODEL_ITEMS), pattern="ring"
    )


def _few_calls(tried: Attempt) -> None:
    (unit,) = units(tried.trace, AVERAGING)
    calls, most = len(unit.operations), 2 * STEPS  # a reduce-scatter and an all-gather are two
    if calls > most:
        raise TrafficError(
            f"{calls} collective calls average the gradients of {STEPS} steps; at most {most} are needed"
        )


DDP = Exercise("ddp_by_hand", drive_ddp, {"traffic": _ddp_traffic, "calls": _few_calls, "result": _ddp_equal})

# Gradient accumulation ------------------------------------------------------------------------------------------------

MICRO_BATCHES, EVERY = 5, 2
"""Groups of 2, 2 and 1."""


def _groups() -> Iterator[range]:
    for begin in range(0, MICRO_BATCHES, EVERY):
        yield range(begin, min(begin + EVERY, MICRO_BATCHES))


def drive_accumulation(train: Callable[..., None], seed: int) -> torch.Tensor:
    model = _model(seed, 0)
    ddp = DistributedDataParallel(model)
    with submitted():
        train(ddp, _batches(seed, dist.get_rank(), MICRO_BATCHES), loss_of, EVERY, RATE)
    return _flat(model)


def _accumulation_traffic(tried: Attempt) -> None:
    groups = len(list(_groups()))
    assert_traffic(
        tried.trace, op=AVERAGING, bytes_per_rank=groups * ring_bytes(tried.ranks, MODEL_ITEMS), pattern="ring"
    )


def _accumulation_equal(tried: Attempt) -> None:
    _same_everywhere(tried)
    assert_one_device(tried.results, _one_device(tried, _groups()))


ACCUMULATION = Exercise(
    "accumulation",
    drive_accumulation,
    {"traffic": _accumulation_traffic, "result": _accumulation_equal},
)

# A parameter server ---------------------------------------------------------------------------------------------------


def _target(seed: int, worker: int) -> torch.Tensor:
    return numbers(ITEMS, seed, worker, 3)


def drive_server(train: Callable[..., None], seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    parameters = numbers(ITEMS, seed, 0) if rank == 0 else torch.zeros(ITEMS, dtype=torch.float64)
    target = _target(seed, rank)

    def gradient_of(parameters: torch.Tensor, step: int) -> torch.Tensor:
        return (parameters - target) * (1 + target * step)

    with submitted():
        train(parameters, gradient_of, STEPS, RATE)
    return parameters


def _server_traffic(tried: Attempt) -> None:
    size = STEPS * ITEMS * 8
    wanted = {rank: size if rank else (tried.ranks - 1) * size for rank in range(tried.ranks)}
    assert_traffic(tried.trace, op="send", bytes_per_rank=wanted, pattern="star")


def _server_equal(tried: Attempt) -> None:
    parameters = numbers(ITEMS, tried.seed, 0)
    targets = [_target(tried.seed, worker) for worker in range(1, tried.ranks)]
    for step in range(STEPS):
        gradients = [(parameters - target) * (1 + target * step) for target in targets]
        parameters = parameters - RATE * torch.stack(gradients).mean(0)
    assert_one_device({0: tried.results[0]}, parameters)


SERVER = Exercise(
    "parameter_server",
    drive_server,
    {"traffic": _server_traffic, "fresh": sends_are_fresh, "result": _server_equal},
    ranks=(3, 4),
)

# A sharded optimizer --------------------------------------------------------------------------------------------------


def drive_sharded(train: Callable[..., Any], seed: int) -> tuple[torch.Tensor, int]:
    rank = dist.get_rank()
    parameters, target = numbers(ITEMS, seed, 0), _target(seed, rank)

    def gradient_of(parameters: torch.Tensor, step: int) -> torch.Tensor:
        return (parameters - target) * (1 + target * step)

    with submitted():
        state = train(parameters, gradient_of, STEPS, RATE, MOMENTUM)
    kept = state.numel() * state.element_size() if isinstance(state, torch.Tensor) else -1
    return parameters, kept


def _sharded_traffic(tried: Attempt) -> None:
    assert_traffic(tried.trace, op=AVERAGING, bytes_per_rank=STEPS * ring_bytes(tried.ranks, ITEMS), pattern="ring")


def _sharded_state(tried: Attempt) -> None:
    share = ITEMS // tried.ranks * 8
    for rank, (_, kept) in sorted(tried.results.items()):
        if kept < 0:
            raise ResultError(f"rank {rank} returns no tensor: return the momentum that it keeps")
        if kept != share:
            raise ResultError(f"rank {rank} keeps {kept:,} B of momentum instead of {share:,} B, 1/{tried.ranks} of it")


def _sharded_equal(tried: Attempt) -> None:
    parameters, momentum = numbers(ITEMS, tried.seed, 0), torch.zeros(ITEMS, dtype=torch.float64)
    targets = [_target(tried.seed, rank) for rank in range(tried.ranks)]
    for step in range(STEPS):
        gradients = [(parameters - target) * (1 + target * step) for target in targets]
        momentum = MOMENTUM * momentum + torch.stack(gradients).mean(0)
        parameters = parameters - RATE * momentum
    assert_one_device({rank: found for rank, (found, _) in tried.results.items()}, parameters)


SHARDED = Exercise(
    "sharded_optimizer",
    drive_sharded,
    {"traffic": _sharded_traffic, "state": _sharded_state, "result": _sharded_equal},
)
