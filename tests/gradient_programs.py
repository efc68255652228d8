"""Trainings on real ranks, right and wrong: who reduces their gradients. Light to import: every rank does."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def made(**options: object) -> tuple[DistributedDataParallel, torch.optim.SGD]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.01)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 16)).square().mean()


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(ddp).backward()
        optimizer.step()


def accumulate(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: int) -> None:
    """Make one step of so many batches, of which DDP reduces the last."""
    for left in reversed(range(batches)):
        with ddp.no_sync() if left else nullcontext():
            loss(ddp).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_beside_a_local_model_with_evaluations() -> None:
    ddp, optimizer = made()
    local = nn.Linear(16, 16)
    of_local = torch.optim.Adam(local.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (loss(ddp) + loss(local)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        train(local, of_local, steps=1)
        with torch.no_grad():
            dist.all_reduce(loss(ddp.module))


def accumulation_with_a_remainder() -> None:
    ddp, optimizer = made()
    for batches in (3, 3, 1):
        accumulate(ddp, optimizer, batches)


def unused_parameters_are_looked_for() -> None:
    ddp, optimizer = made(find_unused_parameters=True)
    for step in range(3):
        ddp.module.forward = ddp.module[1] if step == 1 else ddp.module[0]
        train(ddp, optimizer, steps=1)


def static_graph() -> None:
    train(*made(static_graph=True))


def communication_hook() -> None:
    ddp, optimizer = made()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp, optimizer)


def uneven_inputs_are_joined() -> None:
    ddp, optimizer = made()
    with Join([ddp]):
        train(ddp, optimizer, steps=2 + dist.get_rank())


def averaged_by_hand() -> None:
    ddp, optimizer = made()
    for flat in (False, True, False):
        loss(ddp.module).backward()
        gradients = [parameter.grad for parameter in ddp.parameters()]
        for gradient in [torch.cat([each.flatten() for each in gradients])] if flat else gradients:
            dist.all_reduce(gradient)
        optimizer.step()


def local_sgd() -> None:
    ddp, optimizer = made()
    for _ in range(2):
        train(ddp.module, optimizer, steps=2)
        with ddp.no_sync():
            train(ddp, optimizer, steps=2)
        for parameter in ddp.parameters():
            dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
            parameter.data /= dist.get_world_size()


def gan_of_one_line() -> None:
    """Each backward pass is called from the line in `update`; the generator's goes through the discriminator, too."""
    (generator, of_generator), (critic, of_critic) = made(), made()

    def update(value: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        value.backward()
        optimizer.step()
        for each in (of_generator, of_critic):
            each.zero_grad()

    for _ in range(3):
        update(critic(generator(torch.randn(4, 16)).detach()).mean(), of_critic)
        update(critic(generator(torch.randn(4, 16))).mean(), of_generator)


def two_losses_of_one_step() -> None:
    ddp, optimizer = made()
    for _ in range(2):
        optimizer.zero_grad()
        loss(ddp).backward()
        loss(ddp).neg().backward()
        optimizer.step()


def closure() -> None:
    ddp, _ = made()
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(ddp)
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(evaluate)


def groups_of_one_rank() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    ddp, optimizer = made(process_group=groups[dist.get_rank()])
    train(ddp.module, optimizer)


def fsdp2_reduces_the_last_batch_only() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        for batch in range(3):
            model.set_requires_gradient_sync(batch == 2)
            loss(model).backward()
        optimizer.step()


def local_models() -> None:
    local = nn.Linear(16, 16)
    train(local, torch.optim.SGD(local.parameters(), 0.01))
    dist.barrier()


RIGHT = [
    clipped_beside_a_local_model_with_evaluations, accumulation_with_a_remainder,
    unused_parameters_are_looked_for, static_graph, communication_hook, uneven_inputs_are_joined,
    averaged_by_hand, local_sgd, gan_of_one_line, two_losses_of_one_step, closure,
    groups_of_one_rank, fsdp2_reduces_the_last_batch_only, local_models,
]  # fmt: skip


# Wrong, or for nothing ------------------------------------------------------------------------------------------------


def past_ddp_in_step_2() -> None:
    ddp, optimizer = made()
    train(ddp, optimizer, steps=1)
    train(ddp.module, optimizer, steps=1)
    train(ddp, optimizer, steps=1)
    dist.all_reduce(torch.ones(1))


def never_synchronised() -> None:
    ddp, optimizer = made()
    with ddp.no_sync():
        train(ddp, optimizer, steps=2)


def accumulation_for_nothing() -> None:
    ddp, optimizer = made()
    for _ in range(2):
        for _ in range(3):
            loss(ddp).backward()
        optimizer.step()


def layer_left_out() -> None:
    ddp, _ = made()
    loss(ddp).backward()
    ddp.module.forward = ddp.module[1].forward
    for _ in range(2):
        loss(ddp).backward()


# Hangs ----------------------------------------------------------------------------------------------------------------


def extra_pass_on_rank_1() -> None:
    ddp, optimizer = made()
    train(ddp, optimizer, steps=1)
    if dist.get_rank() == 1:
        loss(ddp).backward()
    train(ddp, optimizer, steps=2)


def no_sync_on_rank_1(steps: int) -> None:
    ddp, optimizer = made()
    for step in range(steps):
        with ddp.no_sync() if (step, dist.get_rank()) == (1, 1) else nullcontext():
            train(ddp, optimizer, steps=1)


def step_skipped_on_rank_0() -> None:
    ddp, optimizer = made()
    for step in range(4):
        value = loss(ddp)
        if (step, dist.get_rank()) != (2, 0):
            value.backward()
            optimizer.step()


def uneven_batches(*steps: int) -> None:
    """Rank 0 accumulates two batches for each of rank 1's. After fewer steps rank 1 dies: that is why rank 0 waits."""
    ddp, optimizer = made()
    for _ in range(steps[dist.get_rank()]):
        accumulate(ddp, optimizer, batches=2 - dist.get_rank())
    if dist.get_rank() == 1 and steps[1] < steps[0]:
        raise LookupError
