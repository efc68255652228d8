"""Eight ways in which a forward pass goes over three workers; each has its own distributed autograd graph."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.lin(x))

    def gradients(self, context):
        found = dist_autograd.get_gradients(context)
        return [found[each] for each in self.parameters() if each in found]


def run(stage, x):
    return stage.local_value()(x)


def run_fetched(stage, x):
    return stage.local_value()(x.to_here())


def run_both(first, second, x):
    return rpc.rpc_sync(second.owner(), run, (second, first.local_value()(x)))


def eight_cases():
    """The losses, and all gradients of each context."""
    w1, w2 = rpc.remote("w1", Stage, (8, 8)), rpc.remote("w2", Stage, (8, 4))
    torch.manual_seed(2)
    head, x = nn.Linear(8, 8), torch.randn(5, 8)
    needs_grad = x.clone().requires_grad_()

    def piped_by_the_driver():
        hidden = w1.remote().forward(head(x)).to_here()
        return w2.remote().forward(hidden).to_here().sum()

    def handed_on():
        hidden = w1.remote().forward(head(x))
        return rpc.remote("w2", run_fetched, (w2, hidden)).to_here().sum()

    def used_twice():
        out = w1.remote().forward(x).to_here()
        return (out * 2).sum() + (out * 3).sum()

    def fetched_twice():
        out = w1.remote().forward(x)
        return (out.to_here() * 2).sum() + (out.to_here() * 3).sum()

    def sent_twice():
        hidden = head(x)
        return rpc.rpc_sync("w1", run, (w1, hidden)).sum() + rpc.rpc_sync("w2", run, (w2, hidden)).sum()

    cases = [
        lambda: w1.rpc_sync().forward(x).sum(),
        lambda: w1.rpc_sync().forward(needs_grad).sum(),
        lambda: rpc.rpc_sync("w1", run_both, (w1, w2, head(x))).sum(),
        piped_by_the_driver,
        handed_on,
        used_twice,
        fetched_twice,
        sent_twice,
    ]
    found = []
    for case in cases:
        with dist_autograd.context() as context:
            loss = case()
            dist_autograd.backward(context, [loss])
            mine = dist_autograd.get_gradients(context)
            gradients = [mine[each] for each in (*head.parameters(), needs_grad) if each in mine]
            gradients += w1.rpc_sync().gradients(context) + w2.rpc_sync().gradients(context)
            found.append((loss.item(), [each.tolist() for each in gradients]))
    return found
