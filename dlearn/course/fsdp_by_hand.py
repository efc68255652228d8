"""The exercise `fsdp_by_hand`: layers whose weights are sharded, gathered just before use, and freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import assert_traffic
from dlearn.course.attempt import Attempt, ResultError, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.course.exercises import AVERAGING

LAYERS, BATCH, MOST_HELD = 3, 5, 2


def _width(seed: int) -> int:
    """2, 3 and 4 divide it."""
    return 12 * (2 + seed % 3)


def _weights(seed: int, layer: int) -> torch.Tensor:
    """Of one layer, in one row."""
    return numbers(_width(seed) ** 2, seed, layer, 7) - 0.5


def _images(seed: int, rank: int) -> torch.Tensor:
    return numbers(BATCH * _width(seed), seed, rank, 8).view(BATCH, -1)


class Layer:
    """`tanh(x @ weights.T)` and its gradients; counts the whole weights and gradients that are held at each call."""

    def __init__(self) -> None:
        self.most_held = 0

    def forward(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._count(weights)
        return (x @ weights.view(x.shape[1], -1).T).tanh()

    def backward(
        self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of x, and of the weights in one row."""
        self._count(weights)
        inside = gradient * (1 - y.square())
        return inside @ weights.view(x.shape[1], -1), (inside.T @ x).flatten()

    def _count(self, weights: torch.Tensor) -> None:
        size = weights.numel() * weights.element_size()
        storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
        held = {storage.data_ptr() for storage in storages if storage.nbytes() == size}
        self.most_held = max(self.most_held, len(held))


def drive_fsdp(step: Callable[..., Any], seed: int) -> tuple[Any, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [_weights(seed, layer).chunk(n)[rank].clone() for layer in range(LAYERS)]
    layer = Layer()
    with submitted():
        gradients = step(shards, _images(seed, rank), layer.forward, layer.backward)
    return gradients, layer.most_held


def _traffic(tried: Attempt) -> None:
    share = (tried.ranks - 1) / tried.ranks * _width(tried.seed) ** 2 * 8
    assert_traffic(tried.trace, op=AVERAGING, bytes_per_rank=3 * LAYERS * share, pattern="ring")


def _held(tried: Attempt) -> None:
    for rank, (_, most) in sorted(tried.results.items()):
        if most > MOST_HELD:
            raise ResultError(
                f"rank {rank} holds {most} tensors of the size of a whole layer at once; {MOST_HELD} are enough"
            )


def _equal(tried: Attempt) -> None:
    width = _width(tried.seed)
    weights = [_weights(tried.seed, layer).view(width, width).requires_grad_() for layer in range(LAYERS)]
    losses = []
    for rank in range(tried.ranks):
        y = _images(tried.seed, rank)
        for each in weights:
            y = (y @ each.T).tanh()
        losses.append(y.square().sum() / 2)
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    for rank, (gradients, _) in sorted(tried.results.items()):
        if not isinstance(gradients, list | tuple) or len(gradients) != LAYERS:
            raise ResultError(f"rank {rank} returns no list of {LAYERS} gradients")
        for found, whole in zip(gradients, weights, strict=True):
            assert whole.grad is not None
            assert_one_device({rank: found}, whole.grad.flatten().chunk(tried.ranks)[rank])


FSDP = Exercise("fsdp_by_hand", drive_fsdp, {"traffic": _traffic, "held": _held, "result": _equal})
