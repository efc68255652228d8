"""The binomial tree: in step i, each rank that has the data sends all of it to the rank 2^i further on.

    broadcast, ceil(log2 n) steps: 0 -> 1; 0 -> 2, 1 -> 3; 0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7
    reduce: the same steps backwards; each receiver adds its share
    all_reduce: reduce to rank 0, then broadcast

Few steps, but every message is the whole tensor: good for small tensors. (R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. Gloo broadcasts like this.)
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.backends.tensors import check_root
from dlearn.collectives.exchange import Exchange, all_reduce_by, in_place, reported


def reduce(
    tensor: torch.Tensor, root: int = 0, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
) -> None:
    """Put the sum (or `op`) into the tensor of `root`, a rank of the group; overwrite others'."""
    with reported("reduce", group, [tensor]) as known:
        check_root(root, known.size())
        in_place("tree reduce", lambda x: reduce_steps(x, root), tensor, known, op, about=root)


def broadcast(tensor: torch.Tensor, root: int = 0, group: ProcessGroup | None = None) -> None:
    """Copy the root's tensor to every rank, in place; `root` is a rank of the group."""
    with reported("broadcast", group, [tensor]) as known:
        check_root(root, known.size())
        in_place("tree broadcast", lambda x: broadcast_steps(x, root), tensor, known, None, about=root)


# The steps: `relative` is a rank's number counted from the root ---------------------------------


def all_reduce_steps(x: Exchange) -> None:
    """Reduce to rank 0, then broadcast from it: 2 ceil(log2 n) steps."""
    reduce_steps(x, root=0)
    broadcast_steps(x, root=0, first_step=depth(x.size))


def broadcast_steps(x: Exchange, root: int, first_step: int = 0) -> None:
    """Double the number of ranks that have the data in each step."""
    relative = (x.rank - root) % x.size
    for step in range(depth(x.size)):
        distance = 1 << step
        if relative < distance and relative + distance < x.size:
            x.send(first_step + step, x.whole, to=(x.rank + distance) % x.size)
        elif distance <= relative < 2 * distance:
            x.receive(first_step + step, x.whole, source=(x.rank - distance) % x.size)


def reduce_steps(x: Exchange, root: int) -> None:
    """Halve the number of ranks that hold partial sums in each step, until the root has the sum."""
    relative = (x.rank - root) % x.size
    for step in range(depth(x.size)):
        distance = 1 << (depth(x.size) - 1 - step)
        if relative < distance and relative + distance < x.size:
            x.receive(step, x.whole, source=(x.rank + distance) % x.size, combine=True)
        elif distance <= relative < 2 * distance:
            x.send(step, x.whole, to=(x.rank - distance) % x.size)
    if relative == 0:
        x.finish(x.whole)


def depth(ranks: int) -> int:
    """Return ceil(log2 n): the steps in which one rank reaches all."""
    return (ranks - 1).bit_length()


all_reduce = all_reduce_by("tree", all_reduce_steps)
