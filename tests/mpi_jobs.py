"""What the tests of MPI let real ranks do. Light to import: every rank does."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import installed_torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

SUM, AVG, MIN, MAX, PRODUCT = (getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"))
BITS = [getattr(dist.ReduceOp, name) for name in ("BAND", "BOR", "BXOR")]


def data(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small numbers, another row on each rank; their sums are exact in every type, in whatever order."""
    return ((torch.arange(size) * 7 + dist.get_rank() * 3) % 5 + 1).to(dtype)


def turned() -> torch.Tensor:
    """Not in one row of memory."""
    return data(12).view(3, 4).t()


JOBS: dict[str, Callable[[], object]] = {}


def job(function: Callable[[], object]) -> Callable[[], object]:
    JOBS[function.__name__] = function
    return function


@job
def all_reduce() -> object:
    found = []
    for op in (SUM, AVG, MIN, MAX, PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            dist.all_reduce(tensor := data(11, dtype), op=op)
            found.append(tensor)
    for op in (SUM, MIN, MAX, PRODUCT):
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8):
            dist.all_reduce(tensor := data(11, dtype), op=op)
            found.append(tensor)
    for op in BITS:
        dist.all_reduce(tensor := data(11, torch.int32), op=op)
        found.append(tensor)
    for shape in ((), (0,), (1,)):
        dist.all_reduce(tensor := torch.full(shape, dist.get_rank() + 1.0))
        found.append(tensor)
    dist.all_reduce(tensor := turned())
    return [*found, tensor]


@job
def all_reduce_coalesced() -> object:
    tensors = [data(5), data(7)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors)
    return tensors


@job
def broadcast() -> object:
    found = []
    for root in range(dist.get_world_size()):
        for tensor in (data(9), data(3, torch.bfloat16), data(4) > 2, turned(), torch.complex(data(2), data(2))):
            dist.broadcast(tensor, root)
            found.append(tensor)
    return found


@job
def reduce() -> object:
    found = []
    for root in range(dist.get_world_size()):
        dist.reduce(tensor := data(9), root)
        found.append(tensor if dist.get_rank() == root else None)  # Of the others torch promises nothing.
    return found


@job
def all_gather() -> object:
    into = [torch.zeros(2, 3, dtype=torch.bfloat16) for _ in range(dist.get_world_size())]
    dist.all_gather(into, data(6, torch.bfloat16).view(2, 3))
    turned_into = [torch.zeros(3, 4).t() for _ in range(dist.get_world_size())]
    dist.all_gather(turned_into, turned())
    return [*into, *turned_into]


@job
def all_gather_single() -> object:
    installed_torch.all_gather_single(into := torch.zeros(dist.get_world_size() * 4), data(4))
    return into


@job
def reduce_scatter() -> object:
    parts = [data(4) * (rank + 1) for rank in range(dist.get_world_size())]
    found = []
    for op in (SUM, MAX):
        dist.reduce_scatter(mine := torch.zeros(4), parts, op=op)
        found.append(mine)
    return found


@job
def reduce_scatter_single() -> object:
    installed_torch.reduce_scatter_single(mine := torch.zeros(4), data(dist.get_world_size() * 4))
    return mine


@job
def gather_and_scatter() -> object:
    rank, size = dist.get_rank(), dist.get_world_size()
    into = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    dist.gather(data(3), into, dst=1)
    parts = [data(4).view(2, 2) * each for each in range(size)]
    dist.scatter(mine := torch.zeros(2, 2), parts if rank == 2 else None, 2)
    return into, mine


@job
def all_to_all() -> object:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_to_all_single(even := torch.zeros(size, 2), data(size * 2).view(size, 2))
    # Rank r sends s+1 rows to rank s: so it gets r+1 rows from each.
    given = data(2 * sum(range(1, size + 1))).view(-1, 2)
    uneven = torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(uneven, given, [rank + 1] * size, list(range(1, size + 1)))
    return even, uneven


@job
def objects() -> object:
    rank, size = dist.get_rank(), dist.get_world_size()
    into: list[object] = [None] * size
    dist.all_gather_object(into, {"rank": rank, "text": "x" * rank})
    told = [("from", rank)]
    dist.broadcast_object_list(told, src=2)
    gathered: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(size)] if rank == 0 else None)
    return into, told, gathered, mine


@job
def messages() -> object:
    """To the right, all at once, then from anybody."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    large = torch.zeros(200_000)
    works = [dist.isend(data(200_000), right, tag=3), dist.irecv(large, left, tag=3)]
    for work in works:
        work.wait()
    batch = [dist.P2POp(dist.isend, data(4), left), dist.P2POp(dist.irecv, small := torch.zeros(4), right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    sources = set()
    if rank == 0:
        for _ in range(size - 1):
            who = dist.recv(tensor := torch.zeros(1, dtype=torch.int64), tag=5)
            sources.add((who, int(tensor)))
    else:
        dist.send(torch.tensor([rank * 10]), 0, tag=5)
    return large.sum(), small, sources


@job
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


@job
def asynchronous() -> object:
    works = [dist.all_reduce(data(5), async_op=True) for _ in range(3)]
    found = [works[1].get_future().wait()[0], works[0].wait(), works[2].wait() and works[2].is_completed()]
    then = dist.all_reduce(data(5), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    return [*found, then.wait()]


def train(steps: int = 2) -> list[torch.Tensor]:
    """DDP on seeded noise, several buckets; the gradients of the last step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(64, 10)), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def zero() -> list[torch.Tensor]:
    """Each rank keeps a share of Adam's state; the parameters after two steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def power_sgd() -> list[torch.Tensor]:
    """A communication hook whose callbacks call collectives."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    hook = powerSGD_hook
    ddp.register_comm_hook(
        hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), hook.powerSGD_hook
    )
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(3):
        ddp(torch.randn(8, 64)).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def sharded() -> list[torch.Tensor]:
    """FSDP2: all-gathers of parameters, reduce-scatters of gradients."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(12, 6), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank() + 1)
    model(torch.randn(8, 12)).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def point_to_point() -> None:
    """A view of a larger tensor to the right, and a message from anybody."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(100)
    works = [dist.isend(whole[10:20], (rank + 1) % size, tag=4), dist.irecv(torch.zeros(10), (rank - 1) % size, tag=4)]
    for work in works:
        work.wait()
    if rank == 0:
        dist.recv(torch.zeros(2), tag=6)
    elif rank == 2:
        dist.send(torch.zeros(2), 0, tag=6)


def nobody_waits() -> None:
    """Rank 0's send ends by itself; its receive never does, and it waits for neither."""
    if dist.get_rank() == 0:
        dist.isend(torch.zeros(2), 1)
        dist.irecv(torch.zeros(2), 1, tag=9)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(2), 0)


def not_in_one_row() -> list[list[float]]:
    """Sent and received where gloo refuses to."""
    if dist.get_rank() == 0:
        dist.send(turned(), 1)
    into = torch.zeros(3, 4).t()
    if dist.get_rank() == 1:
        dist.recv(into, 0)
    return into.tolist()


def refused() -> dict[str, str]:
    """What a collective over MPI says of what it cannot carry; nothing is sent."""
    tensors = {
        "sparse": (torch.zeros(2, 2).to_sparse(), SUM),
        "mean of integers": (torch.zeros(2, dtype=torch.int64), AVG),
        "bits of floats": (torch.zeros(2), BITS[0]),
        "premultiplied": (torch.zeros(2), dist._make_nccl_premul_sum(2.0)),
    }
    said = {}
    for name, (tensor, op) in tensors.items():
        try:
            dist.all_reduce(tensor, op=op)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def wait_in_vain() -> str:
    """Its own words, after the time that its group gives it."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        try:
            dist.barrier(group)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def types() -> list[object]:
    """Types that numpy does not know, moved and summed."""
    eighth = torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn)
    dist.all_reduce(eighth)
    truth = torch.tensor([True, False, dist.get_rank() == 1])
    dist.all_reduce(truth)
    both = truth.clone()
    dist.all_reduce(both, op=dist.ReduceOp.PRODUCT)
    half = torch.full((1,), 1.0 + dist.get_rank() * 2**-10, dtype=torch.float16)
    dist.all_reduce(half)
    unsigned = torch.tensor([2**63], dtype=torch.uint64)
    dist.all_reduce(unsigned, op=MAX)
    return [eighth.float().tolist(), truth.tolist(), both.tolist(), half.item(), unsigned.numpy().item()]


def groups_again() -> list[str]:
    """Three process groups, one after the other; the threads that are left of them."""
    import dlearn.collectives  # noqa: F401

    for _ in range(3):
        dist.init_process_group("mpi4py")
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
    return [thread.name for thread in threading.enumerate() if "mpi4py" in thread.name]
