"""The exercise `expert_dispatch`: tokens travel to the rank of their expert, and come back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.attempt import Attempt, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.errors import TrafficError

WIDTH, COUNT_BYTES = 24, 16
"""Numbers of a token; what two ranks may tell each other of how many tokens come."""


def _tokens(seed: int, rank: int) -> torch.Tensor:
    count = 20 + (seed + rank) % 5
    return numbers(count * WIDTH, seed, rank).view(count, WIDTH)


def _routes(seed: int, rank: int, ranks: int) -> torch.Tensor:
    """The expert of each token; low numbers are chosen more often."""
    chosen = numbers(len(_tokens(seed, rank)), seed, rank, 4)
    return (chosen.square() * ranks).long()


def _expert(rank: int, tokens: torch.Tensor) -> torch.Tensor:
    return tokens * (rank + 2) + tokens.sum(1, keepdim=True)


def drive_experts(layer: Callable[..., torch.Tensor], seed: int) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    with submitted():
        return layer(_tokens(seed, rank), _routes(seed, rank, n), lambda tokens: _expert(rank, tokens))


def _matrix(tried: Attempt) -> None:
    """There and back: what a rank sends to another are its own tokens for that expert, and that rank's, treated."""
    routed = [
        torch.bincount(_routes(tried.seed, rank, tried.ranks), minlength=tried.ranks) for rank in range(tried.ranks)
    ]
    sent = traffic(tried.trace)
    for src in range(tried.ranks):
        for dst in range(tried.ranks):
            tokens = int(routed[src][dst] + routed[dst][src])
            found = sent.payload_bytes.get((src, dst), 0)
            if src != dst and not 0 <= found - tokens * WIDTH * 8 <= COUNT_BYTES:
                raise TrafficError(
                    f"rank {src} sends {found:,} B to rank {dst}, where {tokens} tokens of {WIDTH * 8} B go there and"
                    f" back (and up to {COUNT_BYTES} B that say how many)\n\n{sent}"
                )


def _equal(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        tokens, routes = _tokens(tried.seed, rank), _routes(tried.seed, rank, tried.ranks)
        treated = [_expert(int(expert), token[None])[0] for token, expert in zip(tokens, routes, strict=True)]
        assert_one_device({rank: found}, torch.stack(treated))


EXPERTS = Exercise("expert_dispatch", drive_experts, {"traffic": _matrix, "result": _equal})
