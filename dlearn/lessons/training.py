"""What each rank of `dlearn demo` does: data-parallel training on handwritten digits, in ordinary PyTorch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn.lessons import digits, models
from dlearn.recorder import span

EPOCHS = 4
BATCH_SIZE = 25  # Images in a batch of one rank.


def train() -> tuple[float, float, int]:
    """Train, each step in a span; returns the accuracy on held-out digits before and after, and the number of steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = digits.shard(rank, world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before, step = accuracy(model.module), 0
    for epoch in range(1, EPOCHS + 1):
        for batch, answers in zip(torch.split(images, BATCH_SIZE), torch.split(labels, BATCH_SIZE), strict=True):
            with span(f"step {step}"):
                optimizer.zero_grad()
                loss = cross_entropy(model(batch), answers)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            step += 1
        if rank == 0:
            print(f"epoch {epoch} of {EPOCHS}: loss {loss.item():.2f}")
    return before, accuracy(model.module), step


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of held-out digits that the model classifies correctly."""
    images, labels = digits.held_out()
    return float((model(images).argmax(dim=1) == labels).float().mean())
