"""The exercise `hierarchical`: an all-reduce over two machines of two ranks, with a slow cable between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.attempt import Attempt, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.course.exercises import ITEMS, holds_the_sum
from dlearn.errors import TrafficError

LOCAL = 2
"""Ranks of a machine: 0 and 1 are on the first, 2 and 3 on the second."""


def drive_hierarchical(all_reduce: Callable[[torch.Tensor, int], None], seed: int) -> torch.Tensor:
    mine = numbers(ITEMS, seed, dist.get_rank())
    with submitted():
        all_reduce(mine, LOCAL)
    return mine


def _over_the_cable(tried: Attempt) -> None:
    """Two machines need as much as an all-reduce of two ranks: the tensor, once each way."""
    sent = traffic(tried.trace)
    for machine in range(tried.ranks // LOCAL):
        over = sum(
            size
            for (src, dst), size in sent.payload_bytes.items()
            if src // LOCAL == machine and dst // LOCAL != machine
        )
        if over > ITEMS * 8:
            raise TrafficError(
                f"machine {machine} sends {over:,} B over the cable, where {ITEMS * 8:,} B are enough: the size of the"
                f" tensor\n\n{sent}"
            )


HIERARCHICAL = Exercise(
    "hierarchical",
    drive_hierarchical,
    {"traffic": _over_the_cable, "result": holds_the_sum},
    ranks=(4,),
)
