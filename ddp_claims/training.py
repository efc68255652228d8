"""What the claims' training functions share: a batch, a model under DDP, a step, steps timed in turn."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn.lessons import digits

Key = TypeVar("Key", bound=Hashable)
Build = Callable[[], nn.Module]
Step = Callable[[], object]


def first_digits(count: int) -> tuple[Tensor, Tensor]:
    """Return the first training images of this rank, and their labels."""
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    return images[:count], labels[:count]


def linear_layers(count: int, width: int) -> nn.Module:
    """Make so many square linear layers, each with a ReLU."""
    layers = [each for _ in range(count) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def under_ddp(build: Build, *, seed: int = 0, **options: Any) -> DistributedDataParallel:
    """Return a model of this seed under DDP with these options."""
    torch.manual_seed(seed)
    return DistributedDataParallel(build(), **options)


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Run a forward and a backward pass on images and labels."""
    images, labels = batch
    cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]


def sgd_step(model: nn.Module, backward_pass: Step, *, lr: float) -> Step:
    """Return a function that makes one step of training with SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        backward_pass()
        optimizer.step()

    return step


def seconds_in_turn(steps: Mapping[Key, Step], *, rounds: int, warm_up: int = 2) -> dict[Key, list[float]]:
    """Return the seconds of each step, one of each in a round: what slows one slows all of them.

    The warm-up opens connections; step 0 of DDP has one bucket, and step 1 builds the others.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    for number in range(warm_up + rounds):
        for key, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= warm_up:
                seconds[key].append(time.perf_counter() - start)
    return seconds
