"""The exercise `one_f_one_b`: the stages of a pipeline, each with its forward and backward works in 1F1B order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import assert_traffic
from dlearn.course.attempt import Attempt, ResultError, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise

MICRO_BATCHES = 6


def _length(seed: int) -> int:
    return 600 + seed % 200


def _weight(seed: int, stage: int) -> torch.Tensor:
    return numbers(_length(seed), seed, stage, 5) + 0.5


def _input(seed: int, number: int) -> torch.Tensor:
    return numbers(_length(seed), seed, number, 6)


class LoggedStage:
    """`tanh(x * weight)`; the last stage's loss is half the sum of squares. Notes the order of its works."""

    def __init__(self, rank: int, stages: int, seed: int) -> None:
        self.first, self.last, self.seed = rank == 0, rank == stages - 1, seed
        self.weight = _weight(seed, rank).requires_grad_()
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.most_kept = 0

    def forward(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        given = _input(self.seed, number) if self.first or x is None else x
        leaf = given.clone().requires_grad_()
        y = (leaf * self.weight).tanh()
        self.kept[number] = leaf, y
        self.most_kept = max(self.most_kept, len(self.kept))
        return y.detach()

    def backward(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
        leaf, y = self.kept.pop(number)
        y.backward(y.detach() if self.last or gradient is None else gradient)  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad


def drive_stages(pipeline: Callable[..., None], seed: int) -> tuple[torch.Tensor | None, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = LoggedStage(rank, n, seed)
    with submitted():
        pipeline(stage.forward, stage.backward, _length(seed), MICRO_BATCHES)
    return stage.weight.grad, stage.most_kept


def _traffic(tried: Attempt) -> None:
    once = MICRO_BATCHES * _length(tried.seed) * 8
    ends = (0, tried.ranks - 1)
    wanted = {rank: once if rank in ends else 2 * once for rank in range(tried.ranks)}
    assert_traffic(tried.trace, op="send", bytes_per_rank=wanted)


def _kept(tried: Attempt) -> None:
    for rank, (_, most) in sorted(tried.results.items()):
        wanted = min(tried.ranks - rank, MICRO_BATCHES)
        if most != wanted:
            raise ResultError(
                f"stage {rank} of {tried.ranks} keeps up to {most} micro-batches between forward and backward, and"
                f" 1F1B keeps {wanted}"
            )


def _equal(tried: Attempt) -> None:
    weights = [_weight(tried.seed, stage).requires_grad_() for stage in range(tried.ranks)]
    for number in range(MICRO_BATCHES):
        y = _input(tried.seed, number)
        for weight in weights:
            y = (y * weight).tanh()
        (y.square().sum() / 2).backward()  # type: ignore[no-untyped-call]
    for rank, (found, _) in sorted(tried.results.items()):
        gradient = weights[rank].grad
        assert gradient is not None
        assert_one_device({rank: found}, gradient)


ONE_F_ONE_B = Exercise("one_f_one_b", drive_stages, {"traffic": _traffic, "kept": _kept, "result": _equal})
