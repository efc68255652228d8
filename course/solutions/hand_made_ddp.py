"""Exercise `ddp_by_hand`: two right ways to average one flat gradient, and wrong answers with what the grade says."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def from_rank_0(model):
    weights = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(weights, 0)
    vector_to_parameters(weights, model.parameters())


def flat_gradient(model, batch, loss):
    model.zero_grad()
    loss(model, batch).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def step(model, gradient, optimizer):
    place = 0
    for parameter in model.parameters():
        parameter.grad = gradient[place : place + parameter.numel()].view_as(parameter)
        place += parameter.numel()
    optimizer.step()


def flat(model, batches, loss, optimizer, factor=1, start=from_rank_0):
    start(model)
    for batch in batches:
        gradient = flat_gradient(model, batch, loss)
        dist.all_reduce(gradient)
        step(model, factor * gradient / dist.get_world_size(), optimizer)


def scattered_and_gathered(model, batches, loss, optimizer):
    n = dist.get_world_size()
    from_rank_0(model)
    for batch in batches:
        gradient = flat_gradient(model, batch, loss) / n
        mine = torch.empty(len(gradient) // n, dtype=gradient.dtype)
        dist.reduce_scatter_single(mine, gradient)
        dist.all_gather_single(gradient, mine)
        step(model, gradient, optimizer)


def sums(model, batches, loss, optimizer):
    flat(model, batches, loss, optimizer, factor=dist.get_world_size())


def averages_twice(model, batches, loss, optimizer):
    flat(model, batches, loss, optimizer, factor=1 / dist.get_world_size())


def averages_parameters(model, batches, loss, optimizer):
    """As one device would with plain SGD, and not with Adam."""
    from_rank_0(model)
    for batch in batches:
        step(model, flat_gradient(model, batch, loss), optimizer)
        weights = parameters_to_vector(model.parameters()).detach()
        dist.all_reduce(weights)
        vector_to_parameters(weights / dist.get_world_size(), model.parameters())


def forgets_zero_grad(model, batches, loss, optimizer):
    from_rank_0(model)
    total = 0
    for batch in batches:
        total = total + flat_gradient(model, batch, loss)
        gradient = total.clone()
        dist.all_reduce(gradient)
        step(model, gradient / dist.get_world_size(), optimizer)


def begins_with_its_own(*given):
    """Equal seeds would hide it."""
    flat(*given, start=lambda model: None)


def one_call_a_parameter(model, batches, loss, optimizer):
    n = dist.get_world_size()
    from_rank_0(model)
    for batch in batches:
        flat_gradient(model, batch, loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        step(model, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / n, optimizer)


def gathers_all_gradients(model, batches, loss, optimizer):
    n = dist.get_world_size()
    from_rank_0(model)
    for batch in batches:
        gradient = flat_gradient(model, batch, loss)
        everybodys = torch.empty(n * len(gradient), dtype=gradient.dtype)
        dist.all_gather_single(everybodys, gradient)
        step(model, everybodys.view(n, -1).mean(0), optimizer)


def sends_nothing(model, batches, loss, optimizer):
    for batch in batches:
        step(model, flat_gradient(model, batch, loss), optimizer)


RIGHT = (flat, scattered_and_gathered)
WRONG = (
    (averages_parameters, "away from what one device computes", "Each rank has taken a step of its own"),
    (forgets_zero_grad, "away from what one device computes", "that is there already"),
    (sums, "away from what one device computes"),
    (averages_twice, "away from what one device computes"),
    (begins_with_its_own, "are left with different parameters"),
    (one_call_a_parameter, "12 collective calls average the gradients of 3 steps"),
    (gathers_all_gradients, "each rank sends 10,944 B instead of 7,296 B"),
    (sends_nothing, "there is no all_reduce or"),
)
