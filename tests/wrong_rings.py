"""Ring all-reduces written by hand: a right one, and some that send wrong data. Each changes `tensor`.

More of them: course/solutions/own_ring.py. At the end, what has to pass as well: gloo's own collectives, glass boxes.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

import dlearn

ITEMS = 1000
"""Of the tensor: 4,000 B. It has no even chunks for 3 ranks."""


def ring(tensor: torch.Tensor, *, sends: Any = torch.clone, adds: bool = True, keeps: bool = True) -> None:
    """Go round to the right: what comes is added in the first n - 1 steps, and kept in the others."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    for step in range(2 * (n - 1)):
        get = chunks[(rank - step - 1) % n]
        came = torch.empty_like(get)
        sending = dist.isend(sends(chunks[(rank - step) % n]), (rank + 1) % n)
        dist.recv(came, (rank - 1) % n)
        sending.wait()
        if step < n - 1 or keeps:
            get.copy_(get + came if adds and step < n - 1 else came)


def right(tensor: torch.Tensor) -> None:
    ring(tensor)


def zeros(tensor: torch.Tensor) -> None:
    ring(tensor, sends=torch.zeros_like)


def forgets_to_keep(tensor: torch.Tensor) -> None:
    """In the second half it sends its own partial sum on, instead of the sum that has come."""
    ring(tensor, keeps=False)


def rank_1_never_adds(tensor: torch.Tensor) -> None:
    ring(tensor, adds=dist.get_rank() != 1)


WRONG_DATA = (zeros, forgets_to_keep, rank_1_never_adds)


def everything() -> None:
    """Every ring on its own random data, in a span of its name; then gloo, and the glass boxes."""
    n = dist.get_world_size()
    for number, each in enumerate((right, *WRONG_DATA)):
        tensors = [torch.rand(ITEMS, generator=torch.Generator().manual_seed(100 * number + rank)) for rank in range(n)]
        mine = tensors[dist.get_rank()].clone()
        with dlearn.span(each.__name__):
            each(mine)
        assert each is not right or torch.allclose(mine, sum(tensors))
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
