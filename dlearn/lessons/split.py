"""One small model, trained in two ways: whole on each of two ranks (DDP), or cut in two (RPC). For comparing bytes."""

from typing import NamedTuple

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn.recorder import span

STEPS = 2
"""Of each run. DDP makes its buckets anew in the second, and sends a few bytes more for it."""


class Size(NamedTuple):
    """A batch of B images with H x W pixels, of which the first half makes C channels."""

    B: int = 8
    C: int = 8
    H: int = 16
    W: int = 16


class First(nn.Module):
    """A convolution: [B, 3, H, W] -> [B, C, H, W]; 28·C parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, kernel_size=3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.conv(images))


class Second(nn.Module):
    """The rest: pooled to 4x4, then two linear layers; 16·C·256 + 256 + 256·10 + 10 parameters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.fc1 = nn.Linear(channels * 16, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(torch.relu(self.fc1(self.pool(x).flatten(1))))
        return logits

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self(x), labels)


def batch(size: Size) -> tuple[Tensor, Tensor]:
    return torch.ones(size.B, 3, size.H, size.W), torch.zeros(size.B, dtype=torch.int64)


def data_parallel(size: Size) -> None:
    """Train the whole model on every rank, each with a batch of its own."""
    model = DistributedDataParallel(nn.Sequential(First(size.C), Second(size.C)))
    images, labels = batch(size)
    for step in range(STEPS + 1):
        with span(f"step {step}"):
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]


def model_parallel(size: Size) -> None:
    """Train the first half on this rank, the second on "stage1"."""
    first, second = First(size.C), rpc.remote("stage1", Second, (size.C,))
    images, labels = batch(size)
    for step in range(STEPS):
        with span(f"step {step}"), dist_autograd.context() as context:
            loss = second.rpc_sync().loss(first(images), labels)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]


def parameter_bytes(size: Size) -> int:
    """Return P, the bytes of both halves: 4 for each parameter."""
    return 4 * (28 * size.C + 16 * size.C * 256 + 256 + 256 * 10 + 10)


def boundary_bytes(size: Size) -> int:
    """Return the bytes of one example where the model is cut: 4·C·H·W."""
    return 4 * size.C * size.H * size.W


def predicted(size: Size) -> tuple[int, int]:
    """Return the bytes of a step on two ranks, both directions: (DDP, model parallel).

    DDP sends 2·P, model parallel 2·B·4·C·H·W. Control messages are left out.
    """
    return 2 * parameter_bytes(size), 2 * size.B * boundary_bytes(size)


def break_even(size: Size) -> float:
    """Return the batch size at which both send as much: P / (4·C·H·W)."""
    return parameter_bytes(size) / boundary_bytes(size)
