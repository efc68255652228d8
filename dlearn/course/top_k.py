"""The exercise `top_k_hook`: a communication hook that sends the largest numbers only, and forgets none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn.analysis import traffic
from dlearn.course.attempt import Attempt, ResultError, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.errors import TrafficError

ITEMS, K, STEPS = 240, 60, 8


class _Weighted(nn.Module):
    """One parameter; its gradient is what the module is called with, the same in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ITEMS, dtype=torch.float64))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _gradient(seed: int, rank: int) -> torch.Tensor:
    return numbers(ITEMS, seed, rank) + 0.5


def drive_top_k(hook: Callable[..., Any], seed: int) -> torch.Tensor:
    gradient = _gradient(seed, dist.get_rank())
    model = DistributedDataParallel(_Weighted())
    model.register_comm_hook({"k": K}, hook)
    applied = torch.zeros(ITEMS, dtype=torch.float64)
    with submitted():
        for _ in range(STEPS):
            model.zero_grad()
            model(gradient).backward()
            applied += model.module.weight.grad
    return applied


def _bytes(tried: Attempt) -> None:
    most = STEPS * (tried.ranks - 1) * K * (8 + 8)
    sent = traffic(tried.trace)
    for rank in range(tried.ranks):
        if sent.bytes_from(rank=rank) > most + 64:  # DDP's own, when it builds its bucket anew
            raise TrafficError(
                f"rank {rank} sends {sent.bytes_from(rank=rank):,} B in {STEPS} steps, more than {most:,} B: {K}"
                f" numbers and their places, to each other rank\n\n{sent}"
            )


def _all_sent(tried: Attempt) -> None:
    for rank, applied in sorted(tried.results.items()):
        never = int((applied == 0).sum())
        if never:
            raise ResultError(f"rank {rank}: {never} of {ITEMS} gradients were applied in none of {STEPS} steps")


def _equal(tried: Attempt) -> None:
    """Each rank's largest sums of what it has not sent yet, averaged over the ranks."""
    applied = torch.zeros(ITEMS, dtype=torch.float64)
    for rank in range(tried.ranks):
        waiting = torch.zeros_like(applied)
        for _ in range(STEPS):
            waiting += _gradient(tried.seed, rank)
            chosen = waiting.abs().topk(K).indices
            applied[chosen] += waiting[chosen] / tried.ranks
            waiting[chosen] = 0
    assert_one_device(tried.results, applied)


TOP_K = Exercise("top_k_hook", drive_top_k, {"traffic": _bytes, "all_sent": _all_sent, "result": _equal})
