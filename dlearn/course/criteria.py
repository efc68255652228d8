"""Criteria of exercises: what each rank is left with, and how it got there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from dlearn.analysis import assert_fresh, assert_traffic
from dlearn.analysis.checks.grading import Pattern
from dlearn.course.exercise import Attempt, Criterion, ResultError
from dlearn.errors import TrafficError
from dlearn.join.message_evidence import messages
from dlearn.trace import Trace

TOLERANCE = 1e-9  # Largest difference, in float64, that a different order of adding may make.
AVERAGING = ("all_reduce", "reduce_scatter_single", "reduce_scatter", "all_gather_single", "all_gather")
"""Collectives that can average gradients: an all-reduce is a reduce-scatter and an all-gather."""


def ring_bytes(ranks: int, items: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of so many float64."""
    return 2 * (ranks - 1) / ranks * items * 8


def sends(
    bytes_of: Callable[[Attempt], float | Mapping[int, float]], *,
    op: str | tuple[str, ...] = "send", pattern: Pattern | None = "ring",
) -> Criterion:  # fmt: skip
    """Return the criterion that each rank sends these bytes in calls of `op`, to the ranks of `pattern`."""

    def criterion(tried: Attempt) -> None:
        assert_traffic(tried.trace, op=op, bytes_per_rank=bytes_of(tried), pattern=pattern)

    return criterion


def averages(times: int, items: int) -> Criterion:
    """Return the criterion that each rank sends the bytes of `times` ring all-reduces of `items` float64."""
    return sends(lambda tried: times * ring_bytes(tried.ranks, items), op=AVERAGING)


def fresh(tried: Attempt) -> None:
    """Raise TrafficError if a send brings its receiver nothing new."""
    assert_fresh(tried.trace, op="send")


def only_sends(tried: Attempt) -> None:
    """Raise TrafficError if a collective carried data."""
    for each in messages(tried.trace):
        if each.op != "send":
            raise TrafficError(f"rank {each.src} sends data to rank {each.dst} in {each.op}, which is a collective")


Mistakes = Mapping[str, Callable[[int], torch.Tensor]]  # Finding -> wrong result of a rank.


def assert_one_device(
    results: Mapping[int, Any], expected: torch.Tensor, *,
    tolerance: float = TOLERANCE, ranks: int = 0,
    called: str = "what one device computes", mistakes: Mistakes = MappingProxyType({}),
) -> None:  # fmt: skip
    """Raise ResultError unless each rank's tensor is, up to `tolerance`, what one device computes from all the data.

    The error names a known mistake, and a result that is n times too large or too small. n is `ranks`, or the number
    of results.
    """
    for rank, found in sorted(results.items()):
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ResultError(f"rank {rank} has {what}, and not a tensor of shape {tuple(expected.shape)}")
        apart = (found - expected).abs().max().item()
        if math.isnan(apart) or apart > tolerance:
            times, factor = _factor(found, expected, ranks or len(results))
            known = [name for name, of in mistakes.items() if torch.allclose(found.double(), of(rank).double())]
            raise ResultError(
                f"rank {rank} is up to {apart:.3g} away from {called}{times}:"
                f" it begins with {_first(found)} instead of {_first(expected)}",
                finding=known[0] if known else factor,
            )


def _factor(found: torch.Tensor, expected: torch.Tensor, ranks: int) -> tuple[str, str]:
    """Return in words, and as a finding, that the numbers are n times too large or too small, else ("", "")."""
    ratio = (found / expected).median().item()
    if ranks > 1 and math.isclose(ratio, ranks, rel_tol=1e-6):
        return f" ({ranks} times that)", "too_large"
    if ranks > 1 and math.isclose(ratio, 1 / ranks, rel_tol=1e-6):
        return f" (1/{ranks} of that)", "too_small"
    return "", ""


def _first(tensor: torch.Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())


def assert_rounds(trace: Trace, *, root: int, most: int) -> None:
    """Raise TrafficError unless a broadcast by sends takes at most `most` rounds; a rank sends once a round."""
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
