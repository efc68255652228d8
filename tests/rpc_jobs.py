"""RPC jobs that run on the ranks of tests."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from dlearn import span


class Net(nn.Module):
    """A convolution: B x 3 x 16 x 16 in, B x 4 x 16 x 16 out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def train(batch=8, steps=3):
    """A trainer whose convolution lives on "ps"."""
    from torch.distributed.optim import DistributedOptimizer

    net = rpc.remote("ps", Net)
    optimizer = DistributedOptimizer(torch.optim.SGD, net.rpc_sync().parameter_rrefs(), lr=0.1)
    torch.manual_seed(1)
    head = nn.Linear(4, 10)
    losses = []
    for step in range(steps):
        with span(f"step {step}"), dist_autograd.context() as context:
            x, y = torch.randn(batch, 3, 16, 16), torch.randint(0, 10, (batch,))
            with span("forward"):
                out = net.rpc_sync().forward(x)
            loss = nn.functional.cross_entropy(head(out.mean((2, 3))), y)
            with span("backward"):
                dist_autograd.backward(context, [loss])
            with span("update"):
                optimizer.step(context)
            losses.append(loss.item())
    return losses


def run_conv(batch=8, *, needs_grad=False, loss="square"):
    """One forward and backward pass through a convolution on "ps"; `loss` is "square" or "sum"."""
    net = rpc.remote("ps", Net)
    x = torch.ones(batch, 3, 16, 16, requires_grad=needs_grad)
    with dist_autograd.context() as context:
        y = net.rpc_sync().forward(x)
        dist_autograd.backward(context, [y.square().mean() if loss == "square" else y.sum()])
        return [each.shape for each in dist_autograd.get_gradients(context).values()]


def in_a_group_of_trainers():
    trainers = torch.distributed.new_group([1, 2], use_local_synchronization=True)
    torch.distributed.barrier(trainers)
