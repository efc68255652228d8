"""Ring all-reduces written by hand: right ones in several styles, and those that go wrong. Each changes `tensor`.

At the end, what has to pass as well: gloo's own collectives and the glass boxes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

import dlearn

ITEMS = 1000
"""Of the tensor: 4,000 B. It has no even chunks for 3 and 6 ranks."""


def steps() -> Iterator[tuple[bool, int, int]]:
    """Of a ring to the right: whether this rank adds what comes, and the chunks that it sends and gets."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        yield True, (rank - step) % n, (rank - step - 1) % n
    for step in range(n - 1):
        yield False, (rank + 1 - step) % n, (rank - step) % n


def exchange(chunk: torch.Tensor, like: torch.Tensor, *, to: int = 1) -> torch.Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(like)
    sending = dist.isend(chunk, (rank + to) % n)
    dist.recv(came, (rank - to) % n)
    sending.wait()
    return came


def chunks_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(dist.get_world_size()))


def go_round(
    chunks: Sequence[torch.Tensor],
    *,
    sent: Sequence[torch.Tensor] = (),
    way: Iterable[tuple[bool, int, int]] = (),
    adding: bool = True,
) -> None:
    """Send one chunk, or one of those `sent`, in each step, and add what comes to another, or put it there."""
    for adds, give, get in way or steps():
        came = exchange((sent or chunks)[give], chunks[get])
        chunks[get].copy_(chunks[get] + came if adds and adding else came)


# Right ones -----------------------------------------------------------------------------------------------------------


def views(tensor: torch.Tensor) -> None:
    go_round(chunks_of(tensor))


def copies(tensor: torch.Tensor) -> None:
    chunks = [chunk.clone() for chunk in tensor.tensor_split(dist.get_world_size())]
    go_round(chunks)
    tensor.copy_(torch.cat(chunks))


def batched(tensor: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        came = torch.empty_like(chunks[get])
        send = dist.P2POp(dist.isend, chunks[give], (rank + 1) % n)
        recv = dist.P2POp(dist.irecv, came, (rank - 1) % n)
        for work in dist.batch_isend_irecv([recv, send]):
            work.wait()
        chunks[get].copy_(chunks[get] + came if adds else came)


def to_the_left(tensor: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        mine, other = (2 * rank - give) % n, (2 * rank - get) % n  # the same in a mirror
        came = exchange(chunks[mine], chunks[other], to=-1)
        chunks[other].copy_(chunks[other] + came if adds else came)


def in_segments(tensor: torch.Tensor) -> None:
    """Each chunk in three messages."""
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        for out, into in zip(chunks[give].tensor_split(3), chunks[get].tensor_split(3), strict=True):
            came = exchange(out, into)
            into.copy_(into + came if adds else came)


def filled_up(tensor: torch.Tensor) -> None:
    """Equal chunks: zeros make the tensor long enough."""
    n = dist.get_world_size()
    longer = torch.cat([tensor, tensor.new_zeros(-len(tensor) % n)])
    views(longer)
    tensor.copy_(longer[: len(tensor)])


# Wrong bytes ----------------------------------------------------------------------------------------------------------


def whole_tensors(tensor: torch.Tensor) -> None:
    """The sum is right, and the price 2 (n-1) S."""
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        del give
        came = exchange(tensor, tensor).chunk(dist.get_world_size())[get]
        chunks[get].copy_(chunks[get] + came if adds else came)


def passed_around(tensor: torch.Tensor) -> None:
    """As in a tutorial of torch's: each tensor goes once around, whole. The price is (n-1) S."""
    passing = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = exchange(passing, tensor)
        tensor += passing


def one_step_short(tensor: torch.Tensor) -> None:
    go_round(chunks_of(tensor), way=list(steps())[:-1])


def without_the_gather(tensor: torch.Tensor) -> None:
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        if adds:
            chunks[get].add_(exchange(chunks[give], chunks[get]))


def through_rank_0(tensor: torch.Tensor) -> None:
    others = range(1, dist.get_world_size())
    if dist.get_rank():
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for other in others:
        came = torch.empty_like(tensor)
        dist.recv(came, other)
        tensor += came
    for other in others:
        dist.send(tensor, other)


def all_in_one_chunk(tensor: torch.Tensor) -> None:
    """All ranks together send the right number of bytes, but one sends nearly nothing."""
    n = dist.get_world_size()
    go_round(tensor.split([len(tensor) - n + 1, *[1] * (n - 1)]))


# Wrong data: as many bytes as there should be, between the right ranks ------------------------------------------------


def zeros(tensor: torch.Tensor) -> None:
    go_round(chunks_of(tensor), sent=chunks_of(torch.zeros_like(tensor)))


def same_chunk_again(tensor: torch.Tensor) -> None:
    """Forgets to move on to the next chunk (cut, or filled up, to the length that the receiver expects)."""
    chunks = chunks_of(tensor)
    first = torch.cat([chunks[dist.get_rank()], tensor[:8]])
    go_round(chunks, sent=[first[: len(chunk)] for chunk in chunks])


def sends_the_copy(tensor: torch.Tensor) -> None:
    """Adds into `tensor`, and goes on sending what was in it at first."""
    go_round(chunks_of(tensor), sent=chunks_of(tensor.clone()))


def never_adds(tensor: torch.Tensor) -> None:
    go_round(chunks_of(tensor), adding=False)


def forgets_to_keep(tensor: torch.Tensor) -> None:
    """In the second half it keeps its own partial sum, and sends it on, instead of the sum that has come."""
    chunks = chunks_of(tensor)
    for adds, give, get in steps():
        came = exchange(chunks[give], chunks[get])
        if adds:
            chunks[get].add_(came)


def rank_1_never_adds(tensor: torch.Tensor) -> None:
    go_round(chunks_of(tensor), adding=dist.get_rank() != 1)


def last_one_is_not_added(tensor: torch.Tensor) -> None:
    last = dist.get_world_size() - 2
    go_round(chunks_of(tensor), way=[(step < last, give, get) for step, (_, give, get) in enumerate(steps())])


RIGHT = (views, copies, batched, to_the_left, in_segments, filled_up)
WRONG_BYTES = (whole_tensors, passed_around, one_step_short, without_the_gather, through_rank_0, all_in_one_chunk)
WRONG_DATA = (
    zeros,
    same_chunk_again,
    sends_the_copy,
    never_adds,
    forgets_to_keep,
    rank_1_never_adds,
    last_one_is_not_added,
)


def run_all() -> dict[str, bool]:
    """Every ring on its own random data, in a span of its name; whether its sum was right on this rank."""
    right = {}
    n = dist.get_world_size()
    for number, ring in enumerate((*RIGHT, *WRONG_BYTES, *WRONG_DATA)):
        tensors = [torch.rand(ITEMS, generator=torch.Generator().manual_seed(100 * number + rank)) for rank in range(n)]
        mine = tensors[dist.get_rank()].clone()
        with dlearn.span(ring.__name__):
            ring(mine)
        right[ring.__name__] = torch.allclose(mine, sum(tensors))
    return right


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
