"""The parameter server of `dlearn demo`: the model lives on one worker, two trainers call it."""

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.functional import cross_entropy

from dlearn.lessons import digits, models
from dlearn.recorder import span

STEPS = 5
BATCH_SIZE = 25  # Images in a batch of one trainer.


class Server(models.ConvNet):
    """The model, and references to its parameters for the trainers' optimizers."""

    def references(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def train(trainer: int) -> float:
    """Train on a trainer: send images, receive scores; return the last loss."""
    images, labels = digits.shard(trainer, 2)
    server = rpc.remote("ps", Server)
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().references(), lr=0.1)  # type: ignore[no-untyped-call]
    batches = zip(torch.split(images, BATCH_SIZE), torch.split(labels, BATCH_SIZE), strict=True)
    for step, (batch, answers) in zip(range(STEPS), batches, strict=False):
        with span(f"step {step}"), dist_autograd.context() as context:
            loss = cross_entropy(server.rpc_sync().forward(batch), answers)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            optimizer.step(context)  # type: ignore[no-untyped-call]
    return loss.item()
