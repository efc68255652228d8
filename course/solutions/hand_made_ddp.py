"""Exercise `ddp_by_hand`: two right ways to average one flat gradient, and wrong answers with what the grade says."""

import torch
import torch.distributed as dist
from gathered_layers import gathered, scattered
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


def averaged(gradient):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def flat(model, batches, loss, optimizer, average=averaged, start=from_rank_0):
    start(model)
    for batch in batches:
        step(model, average(flat_gradient(model, batch, loss)), optimizer)


def scattered_and_gathered(*given):
    def average(gradient):
        dist.all_gather_single(gradient, scattered(gradient))
        return gradient

    flat(*given, average)


def sums(*given):
    flat(*given, lambda gradient: averaged(gradient) * dist.get_world_size())


def averages_twice(*given):
    flat(*given, lambda gradient: averaged(gradient) / dist.get_world_size())


def averages_parameters(model, batches, loss, optimizer):
    """As one device would with plain SGD, and not with Adam."""
    from_rank_0(model)
    for batch in batches:
        step(model, flat_gradient(model, batch, loss), optimizer)
        weights = averaged(parameters_to_vector(model.parameters()).detach())
        vector_to_parameters(weights, model.parameters())


def forgets_zero_grad(model, batches, loss, optimizer):
    from_rank_0(model)
    total = 0
    for batch in batches:
        total = total + flat_gradient(model, batch, loss)
        step(model, averaged(total.clone()), optimizer)


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


def gathers_all_gradients(*given):
    flat(*given, lambda gradient: gathered(gradient).view(-1, len(gradient)).mean(0))


def sends_nothing(*given):
    flat(*given, lambda gradient: gradient, start=lambda model: None)


def leaves_it_to_torch(model, batches, loss, optimizer):
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for batch in batches:
        ddp.zero_grad()
        loss(ddp, batch).backward()
        optimizer.step()


RIGHT = (flat, scattered_and_gathered)
WRONG = (
    (averages_parameters, "away from what one device computes", "Each rank has taken a step of its own"),
    (forgets_zero_grad, "away from what one device computes", "that is there already"),
    (sums, "away from what one device computes", "Is the sum or the mean asked for? And is"),
    (averages_twice, "away from what one device computes", "how often do you divide"),
    (begins_with_its_own, "are left with different parameters"),
    (one_call_a_parameter, "12 collective calls average the gradients of 3 steps"),
    (gathers_all_gradients, "each rank sends 10,944 B instead of 7,296 B"),
    (sends_nothing, "no rank has sent anything"),
    (leaves_it_to_torch, "torch's own DistributedDataParallel averages"),
)
