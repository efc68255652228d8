"""Thirteen ways to communicate with torch, each with what it truly sends. `truth` is rank 0's count of 2 ranks."""

import datetime
import inspect
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from installed_torch import NEW_GLOO, all_gather_single, reduce_scatter_single
from programs import mlp, train_ddp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

truth: dict[Callable[[], object], dict[str, int]] = {}
LEFT_OUT = () if NEW_GLOO else ("lists_to_all",)

# The constructor: an all_gather of the number of parameters, broadcasts of their shapes and of the model. Before the
# second step, the ranks agree on the rebuilt buckets by two broadcasts.
DDP_CONSTRUCTOR = {"all_gather": 1, "broadcast": 2}
DDP_TWO_STEPS = {"all_gather": 1, "broadcast": 4, "all_reduce": 3}  # One bucket in step 0, two in step 1.


def sends(**counts: int) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def note(workload: Callable[[], object]) -> Callable[[], object]:
        truth[workload] = counts
        return workload

    return note


ONCE = "broadcast reduce all_gather all_gather_single reduce_scatter reduce_scatter_single"
ONCE += " all_to_all_single gather scatter all_reduce_coalesced barrier"


@sends(all_reduce=2, **dict.fromkeys(ONCE.split(), 1))
def collectives() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(8) * rank
    dist.all_reduce(tensor)
    dist.all_reduce(tensor.clone(), op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    parts = [torch.zeros(8) for _ in range(n)]
    dist.all_gather(parts, tensor)
    all_gather_single(torch.zeros(8 * n), tensor)
    reduce_scatter_single(torch.zeros(8), torch.ones(8 * n))
    dist.reduce_scatter(torch.zeros(8), [torch.ones(8) for _ in range(n)])
    dist.all_to_all_single(torch.zeros(4 * n), torch.ones(4 * n))
    dist.gather(tensor, parts if rank == 0 else None, 0)
    dist.scatter(torch.zeros(8), [torch.ones(8)] * n if rank == 0 else None, 0)
    dist.all_reduce_coalesced([torch.ones(3), torch.ones(5)])
    dist.barrier()


@sends(all_to_all=1)
def lists_to_all() -> None:
    n = dist.get_world_size()
    dist.all_to_all([torch.zeros(4) for _ in range(n)], [torch.ones(4) for _ in range(n)])


@sends(send=4, recv=1)
def point_to_point() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(torch.ones(16), 1, tag=3)
        dist.isend(torch.ones(16), 1).wait()
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(torch.zeros(16), 0, tag=3)
        dist.irecv(torch.zeros(16), 0).wait()
        assert dist.recv(torch.zeros(4)) == 0
    both = [
        dist.P2POp(dist.isend, torch.ones(32), (rank + 1) % n),
        dist.P2POp(dist.irecv, torch.zeros(32), (rank - 1) % n),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


@sends(**DDP_TWO_STEPS)
def ddp() -> list[torch.Tensor]:
    return train_ddp(2)


@sends(**DDP_CONSTRUCTOR, all_reduce=1)
def ddp_no_sync() -> None:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
    with model.no_sync():
        model(torch.randn(8, 64)).sum().backward()
    model(torch.randn(8, 64)).sum().backward()


def _two_steps(model: DistributedDataParallel, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(8, 64)).sum().backward()


@sends(**DDP_TWO_STEPS)
def ddp_fp16_hook() -> None:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _two_steps(model)


# Two plain steps, then twice: what is not compressed, P and Q. One bucket: with two, PowerSGD on gloo hangs by itself.
@sends(all_gather=1, broadcast=4, all_reduce=8)
def ddp_power_sgd() -> None:
    model = DistributedDataParallel(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with patch("torch.cuda.is_available", lambda: False):  # Else the hook waits for a GPU, of CPU tensors too.
        _two_steps(model, steps=4)


# Five sharded layers, two steps: each gathered forward and backward, its gradient scattered once.
@sends(all_gather_single=20, reduce_scatter_single=10)
def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()


@sends(scatter=2, all_reduce=2, all_gather_single_coalesced=2, reduce_scatter_single_coalesced=1, all_to_all_single=1)
def dtensor_and_functional() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a = distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)])
    b = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    (a @ b).redistribute(mesh, [Replicate()])
    a.full_tensor()
    for result in (
        functional.all_reduce(torch.ones(8), "sum", mesh),
        functional.all_gather_tensor(torch.ones(8), 0, mesh),
        functional.reduce_scatter_tensor(torch.ones(8), "sum", 0, mesh),
        functional.all_to_all_single(torch.ones(8), None, None, mesh),
    ):
        _ = result + 0  # Using the result waits for it.


# DDP's, and a broadcast of each of the ten updated parameters in each step.
@sends(all_gather=1, broadcast=24, all_reduce=3)
def zero_redundancy_optimizer() -> None:
    # Importing this compiles TorchScript and warns of it, so only the ranks that use it do.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()


# Each object travels as its size, then its bytes; gather_object gathers sizes, too.
IN_ONE_TENSOR = "all_gather_single(" in inspect.getsource(dist.all_gather_object)  # In a later torch.
ALL_GATHERS = {"all_gather": 1, "all_gather_single": 2} if IN_ONE_TENSOR else {"all_gather": 3}


@sends(**ALL_GATHERS, broadcast=3, gather=1, scatter=2, send=2)
def objects() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.all_gather_object([None] * n, {"rank": rank})
    dist.broadcast_object_list([{"a": 1}], 0)
    dist.gather_object(rank, [None] * n if rank == 0 else None, 0)
    dist.scatter_object_list([None], [1] * n if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list([1], 1)
    if rank == 1:
        dist.recv_object_list([None], 0)


@sends(monitored_barrier=1)
def monitored_barrier() -> None:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=10))


@sends(all_reduce=1, broadcast=1)
def new_groups() -> None:
    all_ranks = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(torch.ones(3), group=all_ranks)
    pair = dist.new_group([0, 1])
    if dist.get_rank() in (0, 1):
        dist.broadcast(torch.ones(3), 0, group=pair)


def every(*left_out: str) -> None:
    """Run each workload, in a span of its name: one run answers whatever is asked of them."""
    import dlearn

    for workload in truth:
        if workload.__name__ not in left_out:
            with dlearn.span(workload.__name__):
                workload()
