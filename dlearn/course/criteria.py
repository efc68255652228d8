"""Criteria of exercises: what each rank is left with, and how it got there."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from dlearn.analysis import assert_fresh, assert_traffic, traffic
from dlearn.analysis.checks.grading import Pattern
from dlearn.course.exercise import Attempt, Criterion, KnownTraffic, ResultError
from dlearn.errors import TrafficError
from dlearn.events.event import PointToPoint
from dlearn.join.message_evidence import messages
from dlearn.trace import Trace

TOLERANCE = 1e-9  # Largest difference, in float64, that a different order of adding may make.
_COALESCED = ("reduce_scatter_single_coalesced", "all_gather_single_coalesced")  # What torch's functional ones call.
AVERAGING = ("all_reduce", "reduce_scatter_single", "reduce_scatter", "all_gather_single", "all_gather", *_COALESCED)
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
        wanted = bytes_of(tried)
        try:
            assert_traffic(tried.trace, op=op, bytes_per_rank=wanted, pattern=pattern)
        except TrafficError as error:
            in_all = sum(wanted.values()) if isinstance(wanted, Mapping) else wanted * tried.ranks
            raise KnownTraffic(str(error), _known(tried, op, pattern, in_all)) from None

    return criterion


def _known(
    tried: Attempt, op: str | tuple[str, ...], pattern: Pattern | None, wanted: float
) -> str:  # fmt: skip
    """Return the key of the mistake that wrong traffic shows."""
    found = {each.op for each in messages(tried.trace)}
    if found.isdisjoint((op,) if isinstance(op, str) else op):
        return "sends" if op == "send" else "other_collectives"
    sent = {pair: size for pair, size in traffic(tried.trace).payload_bytes.items() if size}
    if op == "send":
        if pattern == "ring" and tried.ranks > 2 and set.intersection(*map(set, sent)):
            return "star"
        tensors = chain.from_iterable(event.tensors for event in tried.trace.of(PointToPoint))
        if any(each.dtype != "float64" for each in tensors):
            return "dtype"
    total = sum(sent.values())
    return "too_much" if total > wanted else "too_little" if total < wanted else ""


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
            pair = f"rank {each.src} sends data to rank {each.dst}"
            raise TrafficError(f"{pair} in {each.op}, which is a collective")


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
            key = "shape" if isinstance(found, torch.Tensor) else "no_tensor"
            shape = f"a tensor of shape {tuple(expected.shape)}"
            raise ResultError(f"rank {rank} has {what}, and not {shape}", key)
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
        pair = f"rank {each.src} sends to rank {each.dst}"
        if each.src not in round_of:
            raise KnownTraffic(f"{pair} before it has received anything itself", "too_early")
        if each.src == each.dst or each.dst in round_of:
            raise KnownTraffic(f"{pair}, which has the data already", "twice")
        sent[each.src] = max(sent[each.src], round_of[each.src]) + 1
        round_of[each.dst] = sent[each.src]
    last = max(round_of, key=lambda rank: round_of[rank])
    if round_of[last] > most:
        way = ", ".join(f"rank {rank} in round {at}" for rank, at in sorted(round_of.items()) if at)
        raise TrafficError(f"rank {last} has the data after round {round_of[last]}, and not after {most}: {way}")
