"""The exercise `token`: a tensor that goes once round all ranks, by blocking sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import assert_traffic
from dlearn.course.attempt import Attempt, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.errors import TrafficError


def _length(seed: int) -> int:
    return 1_200 + seed % 800


def drive_token(pass_on: Callable[[torch.Tensor], None], seed: int) -> torch.Tensor:
    mine = numbers(_length(seed), seed, dist.get_rank())
    with submitted():
        pass_on(mine)
    return mine


def _once_round(tried: Attempt) -> None:
    assert_traffic(tried.trace, op="send", bytes_per_rank=_length(tried.seed) * 8, pattern="ring")


def _one_call_at_a_time(tried: Attempt) -> None:
    """A send that blocks has ended when the next call begins: `isend` shows by the call that began before its end."""
    for rank in range(tried.ranks):
        before = None
        for event in tried.trace.where(kind="p2p", rank=rank).events:
            if before is not None and (before.end_ns is None or event.start_ns < before.end_ns):
                raise TrafficError(
                    f"rank {rank} calls a send or a receive before the last one is over, at {event.site}"
                )
            before = event


def _sum(tried: Attempt) -> None:
    every = [numbers(_length(tried.seed), tried.seed, rank) for rank in range(tried.ranks)]
    assert_one_device({0: tried.results[0]}, torch.stack(every).sum(0))


TOKEN = Exercise("token", drive_token, {"traffic": _once_round, "blocking": _one_call_at_a_time, "result": _sum})
