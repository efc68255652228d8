"""Recursive halving and doubling: few steps, and as few bytes as a ring (Thakur, Rabenseifner and Gropp, 2005).

    halving, log2(n) steps: two partners cut what they have in half; each keeps one half, and adds the other's share
    doubling, log2(n) steps, backwards: the same partners give each other what is complete; what each has doubles

The partners of rank r are r xor n/2, ..., r xor 2, r xor 1. That needs a power of two. Of other numbers of ranks, the
first ones join in pairs: the even one folds its data into the odd one's before, and gets the result afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.collectives.exchange import Chunk, Exchange, in_place, reported


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM) -> None:
    """The sum (or `op`) of all ranks' tensors, on every rank, in place."""
    group, outer = reported("all_reduce", group, [tensor])
    with outer:
        in_place("halving-doubling all_reduce", all_reduce_steps, tensor, group, op)


# The steps ------------------------------------------------------------------------------------------------------------


def all_reduce_steps(x: Exchange) -> None:
    core = 1 << (x.size.bit_length() - 1)  # the largest power of two that is not above n: so many halve and double
    folded = x.size - core
    halvings = core.bit_length() - 1
    if x.rank < 2 * folded and x.rank % 2 == 0:
        x.trade(0, give=x.whole, to=x.rank + 1)
        x.trade(2 * halvings + 1, take=x.whole, by=x.rank + 1)
        return
    first = 0
    if folded:
        first = 1
        if x.rank < 2 * folded:
            x.trade(0, take=x.whole, by=x.rank - 1, combine=True)
    me = x.rank // 2 if x.rank < 2 * folded else x.rank - folded

    def rank_of(number: int) -> int:
        return 2 * number + 1 if number < folded else number + folded

    blocks = x.blocks(core)
    halving_steps(x, blocks, me=me, rank_of=rank_of, first_step=first)
    doubling_steps(x, blocks, me=me, rank_of=rank_of, first_step=first + halvings)
    if x.rank < 2 * folded:
        x.trade(2 * halvings + 1, give=x.whole, to=x.rank - 1)


def halving_steps(
    x: Exchange, blocks: tuple[Chunk, ...], *, me: int, rank_of: Callable[[int], int], first_step: int
) -> None:
    """After the last step, number `me` has block `me` complete."""
    distance, step = len(blocks) // 2, first_step
    while distance:
        partner = me ^ distance
        x.trade(
            step,
            give=span_of(blocks, partner, distance),
            to=rank_of(partner),
            take=span_of(blocks, me, distance),
            by=rank_of(partner),
            combine=True,
        )
        distance, step = distance // 2, step + 1
    x.finish(blocks[me])


def doubling_steps(
    x: Exchange, blocks: tuple[Chunk, ...], *, me: int, rank_of: Callable[[int], int], first_step: int
) -> None:
    """Before the first step, number `me` has block `me` complete."""
    distance, step = 1, first_step
    while distance < len(blocks):
        partner = me ^ distance
        x.trade(
            step,
            give=span_of(blocks, me, distance),
            to=rank_of(partner),
            take=span_of(blocks, partner, distance),
            by=rank_of(partner),
        )
        distance, step = distance * 2, step + 1


def span_of(blocks: tuple[Chunk, ...], number: int, distance: int) -> Chunk:
    """The `distance` blocks, side by side, that `number` shares with those closer to it than that."""
    first = number // distance * distance
    return Chunk(blocks[first].start, blocks[first + distance - 1].stop)
