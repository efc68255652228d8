"""Exercise `sharded_optimizer`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
from gathered_layers import scattered, scattered_by_all_reduce
from torch.distributed import _functional_collectives as functional


def zero_1(parameters, gradient_of, steps, rate, momentum, scatter=scattered, gathers=True):
    mine = parameters.chunk(dist.get_world_size())[dist.get_rank()]
    state = torch.zeros_like(mine)
    for step in range(steps):
        state.mul_(momentum).add_(scatter(gradient_of(parameters, step)))
        mine -= rate * state
        if gathers:
            dist.all_gather_single(parameters, mine.clone())
    return state


def with_lists(parameters, gradient_of, steps, rate, momentum):
    rank, n = dist.get_rank(), dist.get_world_size()
    blocks = list(parameters.chunk(n))
    state = torch.zeros_like(blocks[rank])
    for step in range(steps):
        gradient = torch.empty_like(state)
        dist.reduce_scatter(gradient, list(gradient_of(parameters, step).chunk(n)))
        state = momentum * state + gradient / n
        dist.all_gather(blocks, blocks[rank] - rate * state)
    return state


def with_torchs_sgd(parameters, gradient_of, steps, rate, momentum):
    """SGD of torch on this rank's part; functional collectives."""
    mine, world = parameters.chunk(dist.get_world_size())[dist.get_rank()].clone(), dist.group.WORLD
    sgd = torch.optim.SGD([mine], lr=rate, momentum=momentum)
    for step in range(steps):
        gradient = functional.reduce_scatter_single(gradient_of(parameters, step), "avg", 0, world)
        mine.grad = functional.wait_tensor(gradient)
        sgd.step()
        parameters.copy_(functional.all_gather_single(mine, 0, world))
    return sgd.state[mine]["momentum_buffer"]


def all_reduces_and_gathers(*given):
    return zero_1(*given, scatter=scattered_by_all_reduce)


def keeps_all_of_it(parameters, gradient_of, steps, rate, momentum):
    n = dist.get_world_size()
    state = torch.zeros_like(parameters)
    for step in range(steps):
        gradient = gradient_of(parameters, step)
        dist.all_reduce(gradient)
        state = momentum * state + gradient / n
        parameters -= rate * state
    return state


def takes_the_sum(parameters, gradient_of, steps, rate, momentum):
    n = dist.get_world_size()
    return zero_1(parameters, lambda *given: n * gradient_of(*given), steps, rate, momentum)


def dampens(parameters, gradient_of, steps, rate, momentum):
    return zero_1(parameters, lambda *given: (1 - momentum) * gradient_of(*given), steps, rate, momentum)


def never_gathers(*given):
    return zero_1(*given, gathers=False)


def returns_nothing(*given):
    zero_1(*given)


RIGHT = (zero_1, with_lists, with_torchs_sgd)
WRONG = (
    (all_reduces_and_gathers, "each rank sends 43,200 B instead of 28,800 B"),
    (keeps_all_of_it, "rank 0 keeps 9,600 B of momentum instead of 4,800 B"),
    (takes_the_sum, "away from what one device computes", "Is the sum or the mean"),
    (dampens, "away from what one device computes", "By what else do you multiply?"),
    (never_gathers, "each rank sends 14,400 B instead of 28,800 B"),
    (returns_nothing, "rank 0 returns no tensor"),
)
