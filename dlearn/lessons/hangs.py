"""A museum of hangs: small jobs that real people wrote, and that hang, die or are silently wrong.

Each is a function for `Cluster(...).run`. All ranks run the same function, as in real life; what goes wrong is what one
of them does differently. `lessons.museum` says what each is, runs it, and holds it against bare torch.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class TwoBranches(nn.Module):
    """Three layers a, b and c; the caller says whether b takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, *, use_b: bool = True) -> Tensor:
        h = self.a(x).relu()
        h = self.b(h) if use_b else h
        out: Tensor = self.c(h)
        return out


def two_branches() -> DistributedDataParallel:
    """Wrap in DDP, with a bucket for each layer (16,640 B) once the buckets are rebuilt."""
    torch.manual_seed(0)
    return DistributedDataParallel(TwoBranches(), bucket_cap_mb=0.0158)


def unused_parameter() -> None:
    model = two_branches()
    for step in range(3):
        skips = dist.get_rank() == 1 and step == 2
        loss = model(torch.randn(8, 64), use_b=not skips).sum()
        loss.backward()


def uneven_batches() -> None:
    model = two_branches()
    batches = 3 if dist.get_rank() == 0 else 2
    for _ in range(batches):
        loss = model(torch.randn(8, 64)).sum()
        loss.backward()


def module_called() -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        inputs = torch.full((4, 8), dist.get_rank() + 1.0)
        model.module(inputs).sum().backward()  # model(inputs) would sum the gradients
        sgd.step()
    return float(model.module.weight.sum())


def one_rank_ahead() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    for step in range(4):
        loss = model(torch.randn(4, 8)).sum()
        if dist.get_rank() == 1 and step == 1:
            continue  # its loss was not finite
        loss.backward()


def skipped_all_reduce() -> None:
    loss = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(loss)
    if dist.get_rank() == 0:  # only rank 0 logs
        dist.all_reduce(loss)  # in the log: the mean of all ranks


def all_reduce_against_broadcast() -> None:
    weights = torch.ones(1000)
    if dist.get_rank() == 0:
        dist.broadcast(weights, src=0)
    else:
        dist.all_reduce(weights)


def swapped_of_equal_shape() -> tuple[float, float]:
    loss, accuracy = torch.tensor([1.0]), torch.tensor([10.0])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # first
        dist.all_reduce(accuracy)
    else:
        dist.all_reduce(accuracy)  # first
        dist.all_reduce(loss)
    return loss.item(), accuracy.item()  # 2 and 20, if it were right


def swapped_of_different_shape() -> None:
    loss, gradient = torch.ones(1), torch.ones(1024)
    if dist.get_rank() == 0:
        dist.all_reduce(loss)  # first
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)  # first
        dist.all_reduce(loss)


def different_dtype() -> list[float]:
    counts = torch.tensor([1, 2, 3, 4], dtype=torch.float32 if dist.get_rank() == 0 else torch.int32)
    dist.all_reduce(counts)
    return [float(count) for count in counts]  # 2, 4, 6 and 8, if it were right


def double_all_reduce() -> float:
    gradient = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(gradient)
    dist.all_reduce(gradient)  # a library had done it already
    return gradient.item()  # 1 + 2 + 3 = 6, if it were right


def recv_without_send() -> None:
    number = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(number, src=0)


def send_send_cycle() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.tensor([float(rank)]), torch.zeros(1)
    dist.send(mine, dst=(rank + 1) % ranks)
    dist.recv(theirs, src=(rank - 1) % ranks)


def other_tags() -> None:
    number = torch.ones(1)
    if dist.get_rank() == 0:
        dist.send(number, dst=1, tag=1)
    else:
        dist.recv(number, src=0, tag=2)


def two_threads() -> tuple[float, float]:
    """Add up weights on a thread of their own, and the loss on the program's: on rank 1 the thread is first."""
    loss, weights = torch.tensor([1.0]), torch.tensor([10.0])

    def save() -> None:
        dist.all_reduce(weights)

    saver = threading.Thread(target=save)
    if dist.get_rank() == 1:
        saver.start()
        saver.join()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        saver.start()
        saver.join()
    return loss.item(), weights.item()  # 2 and 20, if it were right


def group_of_one_rank() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1])  # all ranks have to call it


def wrong_group() -> None:
    pair = dist.new_group([0, 1])
    number = torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(number, group=pair)
    elif dist.get_rank() == 1:
        dist.all_reduce(number)


def dead_rank() -> None:
    number = torch.ones(1)
    dist.all_reduce(number)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
    dist.all_reduce(number)  # the others wait here


def rank_asleep() -> None:
    number = torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(600)  # a download, a lock, a debugger
    dist.all_reduce(number)


def powersgd_with_two_buckets() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)], nn.Linear(128, 10, bias=False))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=1)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(200):
        ddp(torch.randn(8, 128)).sum().backward()


def ping_pong(left: int) -> int:
    """Call the other worker, which calls this one, and so on: each call holds a thread until its answer is there."""
    import torch.distributed.rpc as rpc

    if left == 0:
        return 0
    other = 1 - rpc.get_worker_info().id
    return 1 + int(rpc.rpc_sync(other, ping_pong, args=(left - 1,)))


def rpc_cycle() -> int:
    return ping_pong(50)
