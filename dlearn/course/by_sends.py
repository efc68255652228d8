"""Exercises by sends: a token that goes round, a ring all-reduce, a broadcast along a tree, and two machines.

Each `drive_...` runs on every rank and returns what the criteria compare; all data are float64 and come from the seed.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import ceil, log2
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import assert_reduces, traffic
from dlearn.course.criteria import assert_one_device, assert_rounds, fresh, only_sends, ring_bytes, sends
from dlearn.course.exercise import ITEMS, Attempt, Exercise, left_in, numbers
from dlearn.errors import TrafficError

# A token that goes round ----------------------------------------------------------------------------------------------


def _token_length(seed: int) -> int:
    return 1_200 + seed % 800


def drive_token(pass_on: Callable[[torch.Tensor], None], seed: int) -> torch.Tensor:
    return left_in(numbers(_token_length(seed), seed, dist.get_rank()), pass_on)


def _blocking(tried: Attempt) -> None:
    """Raise TrafficError if a call begins before the one before it has ended, as after `isend`."""
    for rank in range(tried.ranks):
        for before, event in pairwise(tried.trace.where(kind="p2p", rank=rank).events):
            if before.end_ns is None or event.start_ns < before.end_ns:
                calls = f"rank {rank} calls a send or a receive"
                raise TrafficError(f"{calls} before the last one is over, at {event.site}")


def _token_sum(tried: Attempt) -> None:
    _assert_sum(tried, {0: tried.results[0]}, items=_token_length(tried.seed))


def _assert_sum(tried: Attempt, results: Mapping[int, Any], *, items: int) -> None:
    tensors = torch.stack([numbers(items, tried.seed, rank) for rank in range(tried.ranks)])
    words: Any = {"called": "the sum of all tensors", "ranks": tried.ranks}
    words["mistakes"] = {
        "in_place": tensors.__getitem__,
        "own_machine": lambda rank: tensors[rank // LOCAL * LOCAL :][:LOCAL].sum(0),
    }
    assert_one_device(results, tensors.sum(0), **words)


_once_round = sends(lambda tried: _token_length(tried.seed) * 8)
_TOKEN = {"traffic": _once_round, "sends": only_sends, "blocking": _blocking, "result": _token_sum}
TOKEN = Exercise("token", drive_token, _TOKEN)

# A ring all-reduce ----------------------------------------------------------------------------------------------------


def drive_ring(all_reduce: Callable[[torch.Tensor], None], seed: int) -> torch.Tensor:
    return left_in(numbers(ITEMS, seed, dist.get_rank()), all_reduce)


def _every_sum(tried: Attempt) -> None:
    _assert_sum(tried, tried.results, items=ITEMS)


_RING = {
    "traffic": sends(lambda tried: ring_bytes(tried.ranks, ITEMS)),
    "sends": only_sends,
    "fresh": fresh,
    "reduces": lambda tried: assert_reduces(tried.trace, op="send"),
    "result": _every_sum,
}
RING = Exercise("ring", drive_ring, _RING)

# A broadcast along a tree ---------------------------------------------------------------------------------------------


def _root(ranks: int, seed: int) -> int:
    return (seed + 1) % ranks


def drive_tree(broadcast: Callable[[torch.Tensor, int], None], seed: int) -> torch.Tensor:
    root = _root(dist.get_world_size(), seed)
    return left_in(numbers(ITEMS, seed, dist.get_rank()), broadcast, root)


def _tree_rounds(tried: Attempt) -> None:
    assert_rounds(tried.trace, root=_root(tried.ranks, tried.seed), most=ceil(log2(tried.ranks)))


def _tree_result(tried: Attempt) -> None:
    expected = numbers(ITEMS, tried.seed, _root(tried.ranks, tried.seed))
    begun = {"in_place": lambda rank: numbers(ITEMS, tried.seed, rank)}
    assert_one_device(tried.results, expected, tolerance=0, mistakes=begun)


_TREE = {"sends": only_sends, "rounds": _tree_rounds, "result": _tree_result}
TREE = Exercise("tree_broadcast", drive_tree, _TREE, ranks=(2, 3, 4, 5))

# An all-reduce over two machines of two ranks, with a slow link between them ------------------------------------------

LOCAL = 2  # Ranks of a machine: 0 and 1 are on the first, 2 and 3 on the second.


def drive_hierarchical(all_reduce: Callable[[torch.Tensor, int], None], seed: int) -> torch.Tensor:
    return left_in(numbers(ITEMS, seed, dist.get_rank()), all_reduce, LOCAL)


def _link_traffic(tried: Attempt) -> None:
    """Raise TrafficError if a machine sends more than an all-reduce of two: the tensor, once."""
    sent = traffic(tried.trace)
    sizes = sent.payload_bytes.items()
    for machine in range(tried.ranks // LOCAL):
        over = sum(size for (src, dst), size in sizes if src // LOCAL == machine != dst // LOCAL)
        if over > ITEMS * 8:
            enough = f"where {ITEMS * 8:,} B are enough: the size of the tensor"
            raise TrafficError(f"machine {machine} sends {over:,} B over the link, {enough}\n\n{sent}")


_HIERARCHICAL = {"traffic": _link_traffic, "result": _every_sum}
HIERARCHICAL = Exercise("hierarchical", drive_hierarchical, _HIERARCHICAL, ranks=(4,))
