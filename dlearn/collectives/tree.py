"""The binomial tree: in step i, each rank that has the data sends all of it 2^i ranks further.

    broadcast, ceil(log2 n) steps: 0 -> 1; 0 -> 2, 1 -> 3; 0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7
    reduce: the same backwards, with each rank's share added on the way
    all_reduce: reduce to rank 0, then broadcast

Few steps, but every message carries everything: for small tensors. It is the algorithm of gloo's broadcast.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.collectives.exchange import Exchange, all_reduce_by, check_root, in_place, reported


def reduce(
    tensor: torch.Tensor, root: int = 0, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
) -> None:
    """The sum (or `op`) of all ranks' tensors, at the root (a group rank), in place; the others' are overwritten."""
    with reported("reduce", group, [tensor]) as known:
        check_root(root, known.size())
        in_place("tree reduce", lambda x: reduce_steps(x, root), tensor, known, op, about=root)


def broadcast(tensor: torch.Tensor, root: int = 0, group: ProcessGroup | None = None) -> None:
    """The root's tensor (a group rank's), on every rank, in place."""
    with reported("broadcast", group, [tensor]) as known:
        check_root(root, known.size())
        in_place("tree broadcast", lambda x: broadcast_steps(x, root), tensor, known, None, about=root)


# The steps ------------------------------------------------------------------------------------------------------------


def all_reduce_steps(x: Exchange) -> None:
    reduce_steps(x, root=0)
    broadcast_steps(x, root=0, first_step=depth(x.size))


def broadcast_steps(x: Exchange, root: int, first_step: int = 0) -> None:
    place = (x.rank - root) % x.size
    for step in range(depth(x.size)):
        reach = 1 << step
        if place < reach and place + reach < x.size:
            x.trade(first_step + step, give=x.whole, to=(x.rank + reach) % x.size)
        elif reach <= place < 2 * reach:
            x.trade(first_step + step, take=x.whole, by=(x.rank - reach) % x.size)


def reduce_steps(x: Exchange, root: int) -> None:
    place = (x.rank - root) % x.size
    for step in range(depth(x.size)):
        reach = 1 << (depth(x.size) - 1 - step)
        if place < reach and place + reach < x.size:
            x.trade(step, take=x.whole, by=(x.rank + reach) % x.size, combine=True)
        elif reach <= place < 2 * reach:
            x.trade(step, give=x.whole, to=(x.rank - reach) % x.size)
    if place == 0:
        x.finish()


def depth(ranks: int) -> int:
    """ceil(log2 n): the steps in which one rank reaches all."""
    return (ranks - 1).bit_length()


all_reduce = all_reduce_by("tree", all_reduce_steps)
