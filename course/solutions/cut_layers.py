"""Exercise `column_row`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def summed(tensor):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return summed(x)

    @staticmethod
    def backward(context, gradient):
        return gradient


class SummedBothWays(Summed):
    """As torch.distributed.nn's all_reduce: its gradient is summed, too."""

    @staticmethod
    def backward(context, gradient):
        return summed(gradient)


def two_functions(x, columns, rows, bias):
    return Summed.apply(torch.relu(Copied.apply(x) @ columns.T) @ rows.T) + bias


def by_hand(x, columns, rows, bias):
    """The input's gradient is summed by a hook, the output by adding what the others have as a constant."""
    x = x.view_as(x)
    x.register_hook(summed)
    mine = torch.relu(x @ columns.T) @ rows.T
    return mine + (summed(mine.detach()) - mine.detach()) + bias


def with_dtensors(x, columns, rows, bias):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    copied = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    share = DTensor.from_local(torch.relu(copied @ columns.T) @ rows.T, mesh, [Partial()])
    return share.redistribute(placements=[Replicate()]).to_local() + bias


def forgets_the_backward(x, columns, rows, bias):
    return Summed.apply(torch.relu(x @ columns.T) @ rows.T) + bias


def forgets_the_forward(x, columns, rows, bias):
    return torch.relu(Copied.apply(x) @ columns.T) @ rows.T + bias


def sums_the_outputs_gradient(x, columns, rows, bias):
    return SummedBothWays.apply(torch.relu(x @ columns.T) @ rows.T) + bias


def gathers_the_weights(x, columns, rows, bias):
    n = dist.get_world_size()
    first = torch.empty(n * len(columns), columns.shape[1], dtype=columns.dtype)
    second = torch.empty(n * len(columns), len(rows), dtype=rows.dtype)
    dist.all_gather_single(first, columns.detach())
    dist.all_gather_single(second, rows.detach().T.contiguous())
    return torch.relu(x @ first.T) @ second + bias


def sums_before_the_relu(x, columns, rows, bias):
    """Adds hidden units of different ranks."""
    return Summed.apply(torch.relu(Summed.apply(Copied.apply(x) @ columns.T)) @ rows.T) + bias


def every_rank_adds_the_bias(x, columns, rows, bias):
    return Summed.apply(torch.relu(Copied.apply(x) @ columns.T) @ rows.T + bias)


RIGHT = (two_functions, by_hand, with_dtensors)
WRONG = (
    (every_rank_adds_the_bias, "away from the output of one device", "Which rank adds it"),
    (forgets_the_backward, "each rank sends 1,920 B instead of 3,840 B"),
    (forgets_the_forward, "each rank sends 1,920 B instead of 3,840 B"),
    (sums_the_outputs_gradient, "away from the gradient of x of one device", "passes gradients through"),
    (gathers_the_weights, "each rank sends 5,760 B instead of 3,840 B"),
    (sums_before_the_relu, "each rank sends 5,568 B instead of 3,840 B"),
)
