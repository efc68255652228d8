"""What the tests of torch's collectives over MPI let real ranks do. Light to import: every rank does."""

import installed_torch
import torch
import torch.distributed as dist

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
BITS = [getattr(dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")]
WHOLE, REAL = (torch.int64, torch.uint8), (torch.float64, torch.float16, torch.bfloat16)


def data(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small numbers, another row on each rank; their sums are exact in every type, in whatever order."""
    return ((torch.arange(size) * 7 + dist.get_rank() * 3) % 5 + 1).to(dtype)


def turned() -> torch.Tensor:
    """Not in one row of memory."""
    return data(12).view(3, 4).t()


def reductions() -> list[torch.Tensor]:
    given = [(data(11, dtype), op) for op in (SUM, MIN, MAX, PRODUCT) for dtype in WHOLE + REAL]
    given += [(data(11, dtype), AVG) for dtype in REAL]
    given += [(data(11, torch.int32), op) for op in BITS]
    given += [(torch.full(shape, dist.get_rank() + 1.0), SUM) for shape in ((), (0,), (1,))]
    given.append((turned(), SUM))
    works = [dist.all_reduce(tensor, op=op, async_op=True) for tensor, op in given]
    for work in reversed(works):
        work.wait()
    then = dist.all_reduce(data(5), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    found = [*(tensor for tensor, _ in given), then.wait()]
    for root in range(dist.get_world_size()):
        dist.reduce(tensor := data(9), root)
        found += [tensor] if dist.get_rank() == root else []  # Of the others torch promises nothing.
    parts = [data(4) * (rank + 1) for rank in range(dist.get_world_size())]
    for op in (SUM, MAX) if installed_torch.NEW_GLOO else (SUM,):
        dist.reduce_scatter(mine := torch.zeros(4), parts, op=op)
        found.append(mine)
    installed_torch.reduce_scatter_single(mine := torch.zeros(4), data(dist.get_world_size() * 4))
    return [*found, mine]


def moves() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for root in range(size):
        tensors = [data(9), data(3, torch.bfloat16), data(4) > 2, turned()]
        if installed_torch.NEW_GLOO:  # Else it is no measure.
            tensors.append(torch.complex(data(2), data(2)))
        for tensor in tensors:
            dist.broadcast(tensor, root)
        found += tensors
    into = [torch.zeros(3, 4).t() for _ in range(size)]
    dist.all_gather(into, turned())
    installed_torch.all_gather_single(in_one := torch.zeros(size * 4), data(4))
    gathered = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    dist.gather(data(3), gathered, dst=1)
    dist.scatter(mine := torch.zeros(2), [data(2) * each for each in range(size)] if rank == 2 else None, 2)
    # Rank r sends s+1 rows to rank s: so it gets r+1 rows from each.
    given = data(2 * sum(range(1, size + 1))).view(-1, 2)
    uneven = torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(uneven, given, [rank + 1] * size, list(range(1, size + 1)))
    return [*found, *into, in_one, *(gathered or ()), mine, uneven]


def messages() -> object:
    """A view of a larger tensor to the right, all at once; to the left; then from anybody."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    large = torch.zeros(200_000)
    works = [dist.isend(data(300_000)[50_000:250_000], right, tag=3), dist.irecv(large, left, tag=3)]
    for work in works:
        work.wait()
    batch = [dist.P2POp(dist.isend, data(4), left), dist.P2POp(dist.irecv, small := torch.zeros(4), right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    sources = []
    if rank == 0:
        for _ in range(size - 1):
            who = dist.recv(tensor := torch.zeros(1, dtype=torch.int64), tag=5)
            sources.append((who, int(tensor)))
    else:
        dist.send(torch.tensor([rank * 10]), 0, tag=5)
    return large.sum(), small, sorted(sources)


def part_of_the_ranks() -> object:
    group = dist.new_group([0, 2])
    tensor = torch.full((5,), dist.get_rank() + 1.0)
    if dist.get_rank() != 1:
        dist.all_reduce(tensor, group=group)
    who = None
    if dist.get_rank() == 0:
        dist.send(tensor, 2, group=group)  # Rank 2 of all is rank 1 of the group.
    if dist.get_rank() == 2:
        who = dist.recv(tensor, group=group)
    dist.barrier()
    return tensor, who


def every_job() -> dict[str, object]:
    return {job.__name__: job() for job in (reductions, moves, messages, part_of_the_ranks)}
