"""Exercises with experts: each token travels to the rank of its expert, or to two of them, and back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.criteria import assert_one_device
from dlearn.course.exercise import Attempt, Criterion, Exercise, numbers, submit
from dlearn.errors import TrafficError

WIDTH = 24  # Of a token.


def _tokens(seed: int, rank: int) -> torch.Tensor:
    count = 20 + (seed + rank) % 5
    return numbers(count * WIDTH, seed, rank).view(count, WIDTH)


def _routes(seed: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the expert of each token; low numbers are chosen more often."""
    chosen = numbers(len(_tokens(seed, rank)), seed, rank, 4)
    return (chosen.square() * ranks).long()


def _two_routes(seed: int, rank: int, ranks: int) -> torch.Tensor:
    """Return two different experts of each token, [count, 2]."""
    first = _routes(seed, rank, ranks)
    further = (numbers(len(first), seed, rank, 5) * (ranks - 1)).long() + 1
    return torch.stack([first, (first + further) % ranks], dim=1)


def _expert(rank: int, tokens: torch.Tensor) -> torch.Tensor:
    return tokens * (rank + 2) + tokens.sum(1, keepdim=True)


def _treated(tokens: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """Apply to each token the expert of its route, on one device."""
    return torch.cat([_expert(int(expert), token[None]) for token, expert in zip(tokens, routes, strict=True)])


def _matrix(routes: Callable[[int, int, int], torch.Tensor], tried: Attempt) -> None:
    """Raise TrafficError unless each expert gets a rank's tokens, and the rank the treated ones."""
    n = tried.ranks
    routed = [torch.bincount(routes(tried.seed, rank, n).flatten(), minlength=n) for rank in range(n)]
    sent = traffic(tried.trace)
    counts_bytes = n * n * 8  # Enough for an all-gather of all counts, and less than a token.
    for src in range(n):
        for dst in range(n):
            tokens = int(routed[src][dst] + routed[dst][src])
            size = sent.payload_bytes.get((src, dst), 0)
            if src != dst and not 0 <= size - tokens * WIDTH * 8 <= counts_bytes:
                there = f"where {tokens} tokens of {WIDTH * 8} B go there and back"
                how_many = f"(and up to {counts_bytes} B that say how many)"
                sends_it = f"rank {src} sends {size:,} B to rank {dst}"
                raise TrafficError(f"{sends_it}, {there} {how_many}\n\n{sent}")


# One expert for each token --------------------------------------------------------------------------------------------


def drive_experts(layer: Callable[..., torch.Tensor], seed: int) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    return submit(layer, _tokens(seed, rank), _routes(seed, rank, n), partial(_expert, rank))


def _experts_equal(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        tokens, routes = _tokens(tried.seed, rank), _routes(tried.seed, rank, tried.ranks)
        expected = _treated(tokens, routes)
        by_expert = {rank: expected[torch.argsort(routes, stable=True)]}
        assert_one_device({rank: found}, expected, mistakes={"order": by_expert.__getitem__})


_ONE: dict[str, Criterion] = {"traffic": partial(_matrix, _routes), "result": _experts_equal}
EXPERTS = Exercise("expert_dispatch", drive_experts, _ONE)

# Two experts for each token -------------------------------------------------------------------------------------------


def _weights(seed: int, rank: int) -> torch.Tensor:
    """Return the weights of each token's two experts, [count, 2]; they sum to 1."""
    first = numbers(len(_tokens(seed, rank)), seed, rank, 6)
    return torch.stack([first, 1 - first], dim=1)


def drive_top_two(layer: Callable[..., torch.Tensor], seed: int) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    routes, weights = _two_routes(seed, rank, n), _weights(seed, rank)
    return submit(layer, _tokens(seed, rank), routes, weights, partial(_expert, rank))


def _top_two_equal(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        tokens, routes = _tokens(tried.seed, rank), _two_routes(tried.seed, rank, tried.ranks)
        weights = _weights(tried.seed, rank)
        both = torch.stack([_treated(tokens, routes[:, which]) for which in range(2)], dim=1)
        weighted, other = weights[:, :, None] * both, weights.flip(1)[:, :, None] * both
        wrong = {"unweighted": {rank: both.sum(1)}, "swapped": {rank: other.sum(1)}}
        mistakes = {name: of_rank.__getitem__ for name, of_rank in wrong.items()}
        assert_one_device({rank: found}, weighted.sum(1), mistakes=mistakes)


_TWO: dict[str, Criterion] = {"traffic": partial(_matrix, _two_routes), "result": _top_two_equal}
TOP_TWO = Exercise("top_two", drive_top_two, _TWO)
