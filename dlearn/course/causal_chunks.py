"""An exercise with causal attention over a ring, in which the student chooses the chunks of each rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from dlearn.course.criteria import assert_one_device, fresh, only_sends, sends
from dlearn.course.exercise import Attempt, Exercise, ResultError, numbers, submit
from dlearn.course.split_layers import HEAD


def _chunk(seed: int, at: int) -> torch.Tensor:
    """Return q, k and v of a chunk, [3, size, HEAD], scaled so that the largest scores of chunks differ."""
    return (numbers(3 * (10 + seed % 5) * HEAD, seed, at) * (at % 5 + 1) - 0.5).view(3, -1, HEAD)


def drive_chunks(attention: Callable[..., object], seed: int) -> tuple[object, list[int], int]:
    taken, computed = [], []

    def take(number: int) -> tuple[torch.Tensor, ...]:
        taken.append(range(2 * dist.get_world_size())[number])
        return tuple(_chunk(seed, number))

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        computed.append(len(q) * len(k))
        return torch.div(q @ k.T, HEAD**0.5)

    return submit(attention, take, scores), list(dict.fromkeys(taken)), sum(computed)


def _chosen(tried: Attempt) -> None:
    chosen = [taken for _, (_, taken, _) in sorted(tried.results.items())]
    if {*map(len, chosen)} != {2} or len(set().union(*chosen)) != 2 * tried.ranks:
        raise ResultError(f"the ranks take chunks {chosen}, and not two each, each chunk once")


def _balanced(tried: Attempt) -> None:
    n, size = tried.ranks, _chunk(tried.seed, 0).shape[1]
    for rank, (_, _, count) in sorted(tried.results.items()):
        if count > (most := (2 * n + 1) * size**2):
            raise ResultError(f"rank {rank} computes {count:,} scores; (2n + 1) · chunk² are {most:,}")
    if sum(count for _, _, count in tried.results.values()) < n * size * (2 * n * size + 1):
        raise ResultError("`scores` computes fewer scores than the mask leaves", "uncounted")


def _causal_equal(tried: Attempt) -> None:
    q, k, v = torch.cat([_chunk(tried.seed, number) for number in range(2 * tried.ranks)], dim=1)
    size, at = len(q) // (2 * tried.ranks), torch.arange(len(q))
    masks = at <= at[:, None], at // size <= at[:, None] // size
    whole = torch.stack([scaled_dot_product_attention(q, k, v, mask) for mask in masks])
    for rank, (found, taken, _) in sorted(tried.results.items()):
        right, unmasked = whole.view(2, -1, size, HEAD)[:, taken].flatten(1, 2)
        assert_one_device({rank: found}, right, mistakes={"diagonal": {rank: unmasked}.__getitem__})


_blocks = sends(lambda tried: (tried.ranks - 1) * 2 * _chunk(tried.seed, 0)[1:].numel() * 8)
_ROUND = {"chosen": _chosen, "traffic": _blocks, "sends": only_sends, "fresh": fresh}
ZIG_ZAG = Exercise("zig_zag", drive_chunks, {**_ROUND, "balance": _balanced, "result": _causal_equal})
