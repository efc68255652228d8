"""One submission on n real ranks: what each rank was left with, and what crossed the wire."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlearn.analysis import assert_fresh
from dlearn.cluster import Cluster
from dlearn.errors import DlearnError, TrafficError
from dlearn.join.confirming import messages
from dlearn.recorder import span
from dlearn.trace.trace import Trace

SPAN = "exercise"
"""What a submission does is recorded in a span of this name; what the grader does is not in it."""

TOLERANCE = 1e-9
"""Largest difference, in float64, that another order of adding may make."""


class ResultError(DlearnError, AssertionError):
    """What a rank is left with is wrong: the text says on which rank, and how far off. A failed test for pytest."""


@dataclass(frozen=True)
class Attempt:
    """`results` is what the grader's function returned on each rank; `trace` holds the submission's span only."""

    ranks: int
    seed: int
    results: Mapping[int, Any]
    trace: Trace


Drive = Callable[[Any, int], Any]
"""Runs on every rank: calls the submission on data made from the seed, inside `SPAN`."""


def attempt(drive: Drive, submission: Any, *, ranks: int, seed: int, seconds: float) -> Attempt:
    """Run a submission on the glass-box ring. Raises RankError, with the reason, if it fails or hangs."""
    cluster = Cluster(ranks, backend="dlearn_ring", checksums=True)
    run = cluster.run(drive, submission, seed, timeout=seconds)
    return Attempt(ranks, seed, run.results, run.trace.within(SPAN))


def submitted() -> Any:
    """The span around a submission."""
    return span(SPAN)


def numbers(count: int, *seed: int) -> torch.Tensor:
    """Random float64 numbers from 0 to 1, the same wherever they are asked for."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(hash(seed) % 2**31))


def sends_are_fresh(tried: Attempt) -> None:
    assert_fresh(tried.trace, op="send")


def assert_one_device(results: Mapping[int, Any], expected: torch.Tensor, *, tolerance: float = TOLERANCE) -> None:
    """Raise ResultError unless each rank's tensor is, up to `tolerance`, what one device computes from all the data.

    A rank whose tensor is the expected one times n, or divided by n, is told so.
    """
    for rank, found in sorted(results.items()):
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ResultError(f"rank {rank} has {what}, and not a tensor of shape {tuple(expected.shape)}")
        apart = (found - expected).abs().max().item()
        if math.isnan(apart) or apart > tolerance:
            ratio = (found / expected).median().item()
            times = next((f" ({text} one device's)" for text, of in _ratios(len(results)) if _near(ratio, of)), "")
            raise ResultError(
                f"rank {rank} is up to {apart:.3g} away from what one device computes{times}:"
                f" it begins with {_first(found)} instead of {_first(expected)}"
            )


def _ratios(ranks: int) -> list[tuple[str, float]]:
    return [(f"{ranks} times", float(ranks)), (f"1/{ranks} of", 1 / ranks)]


def _near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) < 1e-6


def _first(tensor: torch.Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())


def assert_rounds(trace: Trace, *, root: int, most: int) -> None:
    """Raise TrafficError unless a broadcast by sends is done after `most` rounds; a rank sends once in a round."""
    round_of = {root: 0}
    sent: dict[int, int] = defaultdict(int)
    for each in sorted(messages(trace), key=lambda message: message.sent_ns or 0):
        if each.src not in round_of:
            raise TrafficError(f"rank {each.src} sends to rank {each.dst} before it has received anything itself")
        if each.src == each.dst or each.dst in round_of:
            raise TrafficError(f"rank {each.src} sends to rank {each.dst}, which has the data already")
        sent[each.src] = max(sent[each.src], round_of[each.src]) + 1
        round_of[each.dst] = sent[each.src]
    last = max(round_of, key=lambda rank: round_of[rank])
    if round_of[last] > most:
        way = ", ".join(f"rank {rank} in round {at}" for rank, at in sorted(round_of.items()) if at)
        raise TrafficError(f"rank {last} has the data after round {round_of[last]}, and not after {most}: {way}")
