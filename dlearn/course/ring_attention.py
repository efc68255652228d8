"""The exercise `ring_attention`: attention over a sequence whose blocks are on different ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import assert_traffic
from dlearn.course.attempt import Attempt, assert_one_device, numbers, sends_are_fresh, submitted
from dlearn.course.exercise import Exercise

WIDTH = 16


def _block(seed: int) -> int:
    """Positions of the sequence on each rank."""
    return 20 + seed % 10


def _qkv(seed: int, rank: int) -> list[torch.Tensor]:
    """Scaled so that the largest scores of different blocks differ."""
    size = _block(seed)
    return [(numbers(size * WIDTH, seed, rank, part) * (rank + 1) - 0.5).view(size, WIDTH) for part in range(3)]


def drive_attention(attention: Callable[..., torch.Tensor], seed: int) -> torch.Tensor:
    mine = _qkv(seed, dist.get_rank())
    with submitted():
        return attention(*mine)


def _traffic(tried: Attempt) -> None:
    each = 2 * _block(tried.seed) * WIDTH * 8
    assert_traffic(tried.trace, op="send", bytes_per_rank=(tried.ranks - 1) * each, pattern="ring")


def _equal(tried: Attempt) -> None:
    every = [_qkv(tried.seed, rank) for rank in range(tried.ranks)]
    keys, values = (torch.cat([each[part] for each in every]) for part in (1, 2))
    for rank, found in sorted(tried.results.items()):
        expected = torch.softmax(every[rank][0] @ keys.T / WIDTH**0.5, dim=1) @ values
        assert_one_device({rank: found}, expected)


ATTENTION = Exercise(
    "ring_attention",
    drive_attention,
    {"traffic": _traffic, "fresh": sends_are_fresh, "result": _equal},
)
