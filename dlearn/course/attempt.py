"""One submission on n real ranks: what each rank was left with, and what crossed the wire."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlearn.cluster import Cluster
from dlearn.errors import DlearnError
from dlearn.recorder import span
from dlearn.trace import Trace

SPAN = "exercise"
"""What a submission does is recorded in a span of this name; what the grader does is not in it."""
ITEMS = 1_200
"""Of a tensor; 2, 3 and 4 divide it. 8 B each."""


class ResultError(DlearnError, AssertionError):
    """A wrong result: the text says on which rank, and how far off. A failed test for pytest.

    `finding` is the key of the hint in tasks.toml's `findings`, where the mistake is a known one.
    """

    def __init__(self, text: str, finding: str = "") -> None:
        super().__init__(text)
        self.finding = finding


@dataclass(frozen=True)
class Attempt:
    """One run of a submission: what `drive` returned on each rank, and the trace of the submission's span."""

    ranks: int
    seed: int
    results: Mapping[int, Any]
    trace: Trace


Drive = Callable[[Any, int], Any]
"""Runs on every rank: calls the submission on data made from the seed, inside `SPAN`."""


def attempt(drive: Drive, submission: Any, *, ranks: int, seed: int, seconds: float) -> Attempt:
    """Run a submission on the glass-box ring. Raises RankError, with the reason, if it fails or hangs."""
    cluster = Cluster(ranks, backend="dlearn_ring", checksums=True)
    run = cluster.run(_run_on_rank, drive, submission, seed, timeout=seconds)
    return Attempt(ranks, seed, run.results, run.trace.within(SPAN))


def _run_on_rank(drive: Drive, submission: Any, seed: int) -> Any:
    if dist.get_rank():  # One rank is enough to say which of torch's names are deprecated.
        warnings.simplefilter("ignore", FutureWarning)
    return drive(submission, seed)


def submitted() -> Any:
    """Return the span around a submission."""
    return span(SPAN)


def numbers(count: int, *seed: int) -> torch.Tensor:
    """Return random float64 numbers from 0 to 1, [count]: the same on every rank for one seed."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(hash(seed) % 2**31))
