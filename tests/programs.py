"""What the tests let real ranks do. Light to import: every rank does."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mlp() -> nn.Sequential:
    """17,290 parameters, 69,160 B; DDP with bucket_cap_mb=0.02 makes two buckets of them."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def train_ddp(steps: int, **options: object) -> list[torch.Tensor]:
    """Train on seeded noise; the gradients of the last step."""
    import dlearn

    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(dist.get_rank() + 1)
    for step in range(steps):
        with dlearn.span(f"step {step}"):
            optimizer.zero_grad()
            ddp(torch.randn(8, 64)).sum().backward()
            optimizer.step()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def say(text: str) -> int:
    print(text, dist.get_rank())
    return dist.get_rank()


def talk_everywhere() -> None:
    """From Python, from a file descriptor as C++ does, from a child process, and without a line's end."""
    print("python")
    os.write(2, b"descriptor\n")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    print("no end", end="")


def all_reduce_then(fault: str) -> None:
    """One good all_reduce; then rank 1 meets its fault while the others wait in the second."""
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        meet(fault)
    dist.all_reduce(torch.ones(4))


def meet(fault: str) -> None:
    match fault:
        case "exception":
            raise ValueError("a wrong value")
        case "exit":
            os._exit(3)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            print("asleep")
            time.sleep(600)
        case "skip":
            return time.sleep(600)


def swap_sizes() -> None:
    """Two all-reduces of different sizes in a different order: gloo ends the process from C++ (std::terminate)."""
    small, large = torch.ones(4), torch.ones(4096)
    order = (small, large) if dist.get_rank() == 0 else (large, small)
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in order]:
        work.wait()


def sum_of_different_sizes() -> None:
    """Rank 0 has half as much as the others: gloo ends the process whose buffer is too small."""
    dist.all_reduce(torch.ones(100 if dist.get_rank() else 50))


def with_helper(pid_file: str) -> None:
    """Give the rank a child process of its own, in a session of its own; the pids of both go to a file."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(pid_file + str(dist.get_rank()), "w") as file:
        file.write(f"{os.getpid()} {child.pid}")


def wait_for(file: str) -> None:
    """Until this file is there."""
    while not os.path.exists(file):
        time.sleep(0.01)


def listening_addresses() -> list[str]:
    """The local addresses on which this process's own sockets listen (IPv4 and IPv6)."""
    import psutil

    found = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


counter = 0


def count() -> int:
    """Calls of this function in this process."""
    global counter
    counter += 1
    return counter
