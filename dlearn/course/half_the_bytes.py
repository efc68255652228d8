"""The exercise `bfloat16_sum`: an all-reduce that sends bfloat16, and rounds each sum only once."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.exercise import ITEMS, Attempt, Exercise, ResultError, left_in, numbers
from dlearn.errors import TrafficError

HALF_STEP = 2**-8  # Rounding to 8 significant bits moves a number by at most this part of it.
SLACK = 1e-5  # Sums in float32 depend on their order.


def _own(seed: int, rank: int) -> torch.Tensor:
    return numbers(ITEMS, seed, rank).float()


def drive_sum(all_reduce: Callable[[torch.Tensor], None], seed: int) -> torch.Tensor:
    return left_in(_own(seed, dist.get_rank()), all_reduce)


def _half(tried: Attempt) -> None:
    """Raise TrafficError unless each rank sends the bytes of a ring all-reduce of 2 B a number."""
    sent = traffic(tried.trace)
    wanted = 2 * (tried.ranks - 1) * ITEMS // tried.ranks * 2
    for rank in range(tried.ranks):
        if (size := sent.bytes_from(rank=rank)) != wanted:
            raise TrafficError(f"rank {rank} sends {size:,} B, and not {wanted:,} B\n\n{sent}")


def _all_alike(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        if not torch.equal(found, tried.results[0]):
            raise ResultError(f"rank {rank} has other numbers than rank 0")


def _rounded_once(tried: Attempt) -> None:
    """Raise ResultError if a number is further from the sum than one rounding moves it."""
    given = [_own(tried.seed, rank) for rank in range(tried.ranks)]
    exact = sum((each.bfloat16().double() for each in given), torch.zeros(()))
    for rank, found in sorted(tried.results.items()):
        if torch.equal(found, given[rank]):
            raise ResultError(f"rank {rank} has what it began with", "in_place")
        apart = ((found.double() - exact).abs() / exact).max().item()
        if not apart <= HALF_STEP + SLACK:
            off = f"{apart:.2%} away from the sum of what was sent"
            one = f"one rounding moves it {HALF_STEP:.2%}"
            raise ResultError(f"rank {rank} is up to {off}, and {one}")


_CRITERIA = {"traffic": _half, "result": _rounded_once, "alike": _all_alike}
BFLOAT16_SUM = Exercise("bfloat16_sum", drive_sum, _CRITERIA)
