"""The exercise `hierarchical`: an all-reduce over two machines of two ranks, with a slow cable between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.attempt import Attempt, assert_one_device, numbers, submitted
from dlearn.course.exercise import Criterion, Exercise
from dlearn.course.exercises import ITEMS, sum_of_all
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
    "`f(tensor, local)` leaves the sum of all ranks' tensors in each. Ranks 0 and 1 are on one machine, 2 and 3 on"
    " another (`local` is 2): between the machines go no more bytes than the tensor has, each way.",
    drive_hierarchical,
    (
        Criterion(_over_the_cable, "What does the other machine need to know: four tensors, or one?"),
        Criterion(
            lambda tried: assert_one_device(tried.results, sum_of_all(tried)),
            "Three parts: within a machine, between machines, within a machine. Who has the sum after each?",
        ),
    ),
    ranks=(4,),
)
