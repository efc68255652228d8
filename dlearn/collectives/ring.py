"""The ring: in each step, send a chunk to the LEFT neighbour (rank r-1) and receive one from the right.

    reduce-scatter, n-1 steps: each chunk travels once round and every rank adds its share; rank r ends with chunk r
    all-gather, n-1 steps: the complete chunks travel once round

Each rank sends 2 (n-1)/n of the data, which is the least that is possible (P. Patarasuk and X. Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009), but in 2 (n-1) steps, one after another.

Chunks, direction and order of adding are those of gloo's all_reduce, so the results are equal in every bit. Most
pictures show a ring that turns to the right. (Gloo's own schedule, as predicted: join/gloo_schedules.py.)
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from dlearn.backends.tensors import check_sizes
from dlearn.collectives.exchange import Chunk, Exchange, all_reduce_by, in_place, reported
from dlearn.join.gloo_schedules import chunk_bounds


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None, op: object = dist.ReduceOp.SUM
) -> None:
    """Give rank r the sum (or `op`) of all ranks' chunk r. `input` has n chunks of the size of `output`."""
    with reported("reduce_scatter_single", group, [input, output]) as known:
        reduce_scatter_on(output, input, known, op)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Give every rank the `input` of all ranks, in the order of ranks. `output` has n times its items."""
    with reported("all_gather_single", group, [input, output]) as known:
        all_gather_on(output, input, known)


# The steps --------------------------------------------------------------------------------------


def all_reduce_steps(x: Exchange) -> None:
    """Reduce-scatter, then all-gather: 2 (n-1) steps of 1/n of the tensor each."""
    chunks = gloos_chunks(x)
    reduce_scatter_steps(x, chunks)
    all_gather_steps(x, chunks, first_step=x.size - 1)


def reduce_scatter_steps(x: Exchange, chunks: tuple[Chunk, ...]) -> None:
    """Begin with chunk r+1; in each later step, forward the chunk that has just arrived and was added to."""
    n, left, right = x.size, (x.rank - 1) % x.size, (x.rank + 1) % x.size
    for step in range(n - 1):
        outgoing, incoming = chunks[(x.rank + 1 + step) % n], chunks[(x.rank + 2 + step) % n]
        x.sendrecv(step, outgoing, incoming, to=left, source=right, combine=True)
    x.finish(chunks[x.rank])


def all_gather_steps(x: Exchange, chunks: tuple[Chunk, ...], first_step: int = 0) -> None:
    """Begin with chunk r, which is complete; in each later step, forward the chunk that has just arrived."""
    n, left, right = x.size, (x.rank - 1) % x.size, (x.rank + 1) % x.size
    for step in range(n - 1):
        outgoing, incoming = chunks[(x.rank + step) % n], chunks[(x.rank + 1 + step) % n]
        x.sendrecv(first_step + step, outgoing, incoming, to=left, source=right)


def gloos_chunks(x: Exchange) -> tuple[Chunk, ...]:
    """Return one chunk for each rank, cut where gloo cuts: who adds last decides the last bits of a sum."""
    itemsize = x.flat.element_size()
    bounds = chunk_bounds(x.size, x.flat.nbytes, itemsize)
    return tuple(Chunk(offset // itemsize, (offset + length) // itemsize) for offset, length in bounds)


# On a process group -----------------------------------------------------------------------------


def reduce_scatter_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup, op: object) -> None:
    """Reduce-scatter over `group`; the sums are made in a copy of `input`."""
    check_sizes(input, output, group.size())
    x = Exchange("ring reduce_scatter", input.detach().reshape(-1).clone(), group, op)
    chunks = x.chunks(x.size)
    reduce_scatter_steps(x, chunks)
    output.detach().copy_(x.items(chunks[x.rank]).view(output.shape))


def all_gather_on(output: torch.Tensor, input: torch.Tensor, group: ProcessGroup) -> None:
    """All-gather over `group`; the own chunk is copied into `output` before the first step."""
    check_sizes(output, input, group.size())

    def steps(x: Exchange) -> None:
        chunks = x.chunks(x.size)
        x.items(chunks[x.rank]).copy_(input.detach().reshape(-1))
        all_gather_steps(x, chunks)

    in_place("ring all_gather", steps, output, group, None)


all_reduce = all_reduce_by("ring", all_reduce_steps)
