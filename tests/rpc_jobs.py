"""RPC jobs that run on the ranks of tests: a server with its trainers, and a worker that asks a bit of everything."""

import warnings
from contextlib import suppress

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


def serve_and_train():
    return train() if rpc.get_worker_info().name.startswith("trainer") else None


def same(*tensors):
    return tensors


def shapes():
    """How many bytes the shape of a tensor takes differs, and how much of its storage goes with it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch 2.11 warns those who ask for them, too.
        sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (10,), check_invariants=True)
    return {
        "no dimension": [torch.ones(())],
        "expanded": [torch.ones(1).expand(100)],
        "a small part": [torch.ones(10_000)[:10]],
        "half": [torch.ones(10_000)[:5_000]],
        "transposed": [torch.ones(5, 300).t()],
        "empty": [torch.empty(0, 4)],
        "two types": [torch.ones(4), torch.arange(128)],
        "sparse": [sparse],
        "parameter": [nn.Parameter(torch.ones(3))],
    }


def builtins(to):
    """Results, fetched values, errors and gradients that no Python ever packs."""
    x, y, z = torch.ones(100_000), torch.ones(10_000), torch.ones(10_000, requires_grad=True)
    with span("a large result"):
        rpc.rpc_sync(to, torch.add, (x, 1))
    with span("a value fetched"):
        rpc.remote(to, torch.neg, (torch.ones(3_000),)).to_here()
    with span("an error"), suppress(RuntimeError):
        rpc.rpc_sync(to, torch.mm, (y, y))
    with dist_autograd.context() as context:
        with span("in a context"):
            loss = rpc.rpc_sync(to, torch.mul, (z, y)).sum()
        with span("a gradient"):
            dist_autograd.backward(context, [loss])


def relay(x):
    """On the first worker: asks the second."""
    return rpc.rpc_sync("c", torch.neg, (x,))


def span_a_context():
    with dist_autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        with span("there"):
            y = rpc.rpc_sync("b", relay, (x,))
        with span("back"):
            dist_autograd.backward(context, [y.sum()])
        with span("after"):
            rpc.rpc_sync("b", torch.add, (torch.ones(2), 1))


def ask_everything():
    """A bit of everything, "a" asks: each question is a span."""
    if rpc.get_worker_info().name != "a":
        return
    rpc.rpc_sync("b", same)
    for name, tensors in shapes().items():
        with span(name):
            rpc.rpc_sync("b", same, tuple(tensors))
    builtins("b")
    span_a_context()
    with span("own loss"), dist_autograd.context() as context:
        x = torch.ones(5, 8, requires_grad=True)
        rpc.RRef(rpc.rpc_sync("b", torch.mul, (x, 2)).sum()).backward(context)


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
    """A forward pass over three workers in eight ways: the losses, and all gradients of each."""
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
