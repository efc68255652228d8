"""Ring all-reduces written by hand: a right one, and some that send wrong data. Each changes `tensor`.

More of them: course/solutions/own_ring.py. At the end, what has to pass as well: gloo's own collectives, glass boxes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

import dlearn

ITEMS = 1000
"""Of the tensor: 4,000 B. It has no even chunks for 3 ranks."""


def steps() -> Iterator[tuple[bool, int, int]]:
    """Of a ring to the right: whether this rank adds what comes, and the chunks that it sends and gets."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        yield True, (rank - step) % n, (rank - step - 1) % n
    for step in range(n - 1):
        yield False, (rank + 1 - step) % n, (rank - step) % n


def exchange(chunk: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(like)
    sending = dist.isend(chunk, (rank + 1) % n)
    dist.recv(came, (rank - 1) % n)
    sending.wait()
    return came


def go_round(chunks: Sequence[torch.Tensor], *, sent: Sequence[torch.Tensor] = (), adding: bool = True) -> None:
    """Send one chunk, or one of those `sent`, in each step, and add what comes to another, or put it there."""
    for adds, give, get in steps():
        came = exchange((sent or chunks)[give], chunks[get])
        chunks[get].copy_(chunks[get] + came if adds and adding else came)


def right(tensor: torch.Tensor) -> None:
    go_round(tensor.chunk(dist.get_world_size()))


# Wrong data: as many bytes as there should be, between the right ranks ------------------------------------------------


def zeros(tensor: torch.Tensor) -> None:
    go_round(tensor.chunk(dist.get_world_size()), sent=torch.zeros_like(tensor).chunk(dist.get_world_size()))


def forgets_to_keep(tensor: torch.Tensor) -> None:
    """In the second half it keeps its own partial sum, and sends it on, instead of the sum that has come."""
    chunks = tensor.chunk(dist.get_world_size())
    for adds, give, get in steps():
        came = exchange(chunks[give], chunks[get])
        if adds:
            chunks[get].add_(came)


def rank_1_never_adds(tensor: torch.Tensor) -> None:
    go_round(tensor.chunk(dist.get_world_size()), adding=dist.get_rank() != 1)


WRONG_DATA = (zeros, forgets_to_keep, rank_1_never_adds)


def everything() -> None:
    """Every ring on its own random data, in a span of its name; then gloo, and the glass boxes."""
    n = dist.get_world_size()
    for number, ring in enumerate((right, *WRONG_DATA)):
        tensors = [torch.rand(ITEMS, generator=torch.Generator().manual_seed(100 * number + rank)) for rank in range(n)]
        mine = tensors[dist.get_rank()].clone()
        with dlearn.span(ring.__name__):
            ring(mine)
        assert ring is not right or torch.allclose(mine, sum(tensors)), ring
    with dlearn.span("gloo"):
        gloo()
    glass_boxes()


def gloo() -> None:
    """Gloo's own collectives, 1,001 items each: no even chunks for any number of ranks up to 6."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.rand(1001)
    blocks = [torch.rand(1001) for _ in range(n)]
    warnings.simplefilter("ignore")  # torch's own, of deprecations
    dist.all_reduce(mine.clone())
    dist.broadcast(mine, 1)
    dist.all_gather(blocks, mine)
    dist.gather(mine, blocks if rank == 1 else None, dst=1)
    dist.scatter(mine, blocks if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty(n * 10), torch.rand(n * 10))
    dist.barrier()


def glass_boxes() -> None:
    """Every glass-box collective that so many ranks can do, on 1,001 items or 100 for each rank; a span for each."""
    from dlearn import collectives

    n = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for name in collectives.__all__:
        box = getattr(collectives, name)
        for op in ("all_reduce", "reduce", "broadcast"):
            if hasattr(box, op):
                with dlearn.span(f"{name} {op}"):
                    getattr(box, op)(torch.rand(1001, generator=generator))
        if hasattr(box, "all_gather"):
            with dlearn.span(f"{name} reduce_scatter"):
                box.reduce_scatter(torch.empty(100), torch.rand(100 * n, generator=generator))
            with dlearn.span(f"{name} all_gather"):
                box.all_gather(torch.empty(100 * n), torch.rand(100, generator=generator))
