"""The star: everybody sends to rank 0, which adds, and sends the result back. A parameter server does the same.

The simplest algorithm, and the slowest: 2 (n-1) whole tensors go through one rank's connections, one after another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.collectives.exchange import Exchange, Part, check_root, check_sizes, in_place, reported

CENTRE = 0


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM) -> None:
    """The sum (or `op`) of all ranks' tensors, on every rank, in place; added in the order of ranks."""
    group, outer = reported("all_reduce", group, [tensor])
    with outer:
        in_place("star all_reduce", all_reduce_steps, tensor, group, op)


def broadcast(tensor: torch.Tensor, root: int = 0, group: ProcessGroup | None = None) -> None:
    """The root's tensor (a group rank's), on every rank, in place."""
    group, outer = reported("broadcast", group, [tensor])
    check_root(root, group.size())
    with outer:
        in_place("star broadcast", lambda x: spread_steps(x, root), tensor, group, None, about=root)


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
) -> None:
    """Rank r gets the sum of all ranks' block r; `input` has n blocks of `output`'s size."""
    group, outer = reported("reduce_scatter_single", group, [input, output])
    check_sizes(input, output, group.size())
    with outer:
        reduce_scatter_on(output, input, group, op)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Every rank gets all ranks' `input`, one behind the other; `output` has room for n of them."""
    group, outer = reported("all_gather_single", group, [input, output])
    check_sizes(output, input, group.size())
    with outer:
        all_gather_on(output, input, group)


# The steps ------------------------------------------------------------------------------------------------------------


def all_reduce_steps(x: Exchange) -> None:
    collect_steps(x)
    spread_steps(x, CENTRE, first_step=x.size - 1)


def collect_steps(x: Exchange) -> None:
    """The centre takes one rank's tensor after the other, and adds it to its own."""
    for step, rank in enumerate(others(x, CENTRE)):
        if x.rank == CENTRE:
            x.trade(step, take=x.whole, by=rank, combine=True)
        elif x.rank == rank:
            x.trade(step, give=x.whole, to=CENTRE)
    if x.rank == CENTRE:
        x.finish()


def spread_steps(x: Exchange, root: int, first_step: int = 0) -> None:
    """The root sends everybody all it has."""
    for step, rank in enumerate(others(x, root), start=first_step):
        if x.rank == root:
            x.trade(step, give=x.whole, to=rank)
        elif x.rank == rank:
            x.trade(step, take=x.whole, by=root)


def reduce_scatter_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, op: object) -> None:
    flat = input.detach().reshape(-1).clone()  # The input is the caller's: sums are made in a copy.
    x = Exchange("star reduce_scatter", flat, group, op)
    blocks = x.blocks(x.size)
    collect_steps(x)
    for step, rank in enumerate(others(x, CENTRE), start=x.size - 1):
        if x.rank == CENTRE:
            x.trade(step, give=blocks[rank], to=rank)
        elif x.rank == rank:
            x.trade(step, take=blocks[rank], by=CENTRE)
    mine = blocks[x.rank]
    output.detach().copy_(flat[mine.start : mine.stop].view(output.shape))


def all_gather_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup) -> None:
    def steps(x: Exchange) -> None:
        blocks: tuple[Part, ...] = x.blocks(x.size)
        mine = blocks[x.rank]
        x.flat[mine.start : mine.stop].copy_(input.detach().reshape(-1))
        for step, rank in enumerate(others(x, CENTRE)):
            if x.rank == CENTRE:
                x.trade(step, take=blocks[rank], by=rank)
            elif x.rank == rank:
                x.trade(step, give=blocks[rank], to=CENTRE)
        spread_steps(x, CENTRE, first_step=x.size - 1)

    in_place("star all_gather", steps, output, group, None)


def others(x: Exchange, root: int) -> list[int]:
    return [rank for rank in range(x.size) if rank != root]
