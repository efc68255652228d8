"""The ring: everybody sends to the LEFT (rank r to rank r-1) and receives from the right, one chunk in each step.

It is the algorithm of gloo's all_reduce, with its chunks and its order of adding: the results are equal in every bit.
Most pictures show it turning in the other direction. (Gloo's own schedule, as predicted: join/gloo_schedules.py.)

    reduce-scatter, n-1 steps: a chunk travels from rank to rank and each adds its share; rank r ends with chunk r
    all-gather, n-1 steps: the complete chunks travel once round

Each rank sends 2 (n-1)/n of the data, however many ranks there are; but in 2 (n-1) steps, one after another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.collectives.exchange import Chunk, Exchange, all_reduce_by, check_sizes, in_place, reported
from dlearn.join.gloo_schedules import chunk_bounds


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
) -> None:
    """Rank r gets the sum of all ranks' block r; `input` has n blocks of `output`'s size."""
    with reported("reduce_scatter_single", group, [input, output]) as known:
        reduce_scatter_on(output, input, known, op)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Every rank gets all ranks' `input`, one behind the other; `output` has room for n of them."""
    with reported("all_gather_single", group, [input, output]) as known:
        all_gather_on(output, input, known)


# The steps ------------------------------------------------------------------------------------------------------------


def all_reduce_steps(x: Exchange) -> None:
    chunks = gloos_chunks(x)
    reduce_scatter_steps(x, chunks)
    all_gather_steps(x, chunks, first_step=x.size - 1)


def reduce_scatter_steps(x: Exchange, chunks: tuple[Chunk, ...]) -> None:
    """In step s, pass on the chunk that has come in step s-1, with the own share added; begin with the next rank's."""
    n, left, right = x.size, (x.rank - 1) % x.size, (x.rank + 1) % x.size
    for step in range(n - 1):
        passed_on, coming = chunks[(x.rank + 1 + step) % n], chunks[(x.rank + 2 + step) % n]
        x.trade(step, give=passed_on, to=left, take=coming, by=right, combine=True)
    x.finish(chunks[x.rank])


def all_gather_steps(x: Exchange, chunks: tuple[Chunk, ...], first_step: int = 0) -> None:
    """In step s, pass on the chunk that has come in step s-1; begin with the own one, which is complete."""
    n, left, right = x.size, (x.rank - 1) % x.size, (x.rank + 1) % x.size
    for step in range(n - 1):
        passed_on, coming = chunks[(x.rank + step) % n], chunks[(x.rank + 1 + step) % n]
        x.trade(first_step + step, give=passed_on, to=left, take=coming, by=right)


def gloos_chunks(x: Exchange) -> tuple[Chunk, ...]:
    """One chunk for each rank, cut where gloo cuts: which rank adds what last decides the last bits of a sum."""
    itemsize = x.flat.element_size()
    bounds = chunk_bounds(x.size, x.flat.numel() * itemsize, itemsize)
    return tuple(Chunk(offset // itemsize, (offset + length) // itemsize) for offset, length in bounds)


def reduce_scatter_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, op: object) -> None:
    check_sizes(input, output, group.size())
    # The input is the caller's: sums are made in a copy.
    flat = input.detach().reshape(-1).clone()
    x = Exchange("ring reduce_scatter", flat, group, op)
    blocks = x.blocks(x.size)
    reduce_scatter_steps(x, blocks)
    mine = blocks[x.rank]
    output.detach().copy_(flat[mine.start : mine.stop].view(output.shape))


def all_gather_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup) -> None:
    check_sizes(output, input, group.size())

    def steps(x: Exchange) -> None:
        blocks = x.blocks(x.size)
        mine = blocks[x.rank]
        x.flat[mine.start : mine.stop].copy_(input.detach().reshape(-1))
        all_gather_steps(x, blocks)

    in_place("ring all_gather", steps, output, group, None)


all_reduce = all_reduce_by("ring", all_reduce_steps)
