"""Exercise `sequence_parallel`: right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def gathered(part):
    whole = part.new_empty(len(part) * dist.get_world_size(), *part.shape[1:])
    dist.all_gather_single(whole, part.contiguous())
    return whole


def scattered(share):
    parts = [part.contiguous() for part in share.chunk(dist.get_world_size())]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts)
    return mine


def own(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def both_ways(there, back):
    """Return the differentiable form of `there`, whose gradient is `back` of the output's."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return there(x)

        @staticmethod
        def backward(context, gradient):
            return back(gradient)

    return Both.apply


def layers_with(enter, leave):
    return lambda x, norm, columns, rows: leave(torch.relu(enter(norm(x)) @ columns.T) @ rows.T)


gather, scatter = both_ways(gathered, scattered), both_ways(scattered, gathered)


def functional(x, norm, columns, rows):
    """With torch's functional collectives."""
    tokens = funcol.all_gather_single_autograd(norm(x), 0, dist.group.WORLD)
    share = torch.relu(tokens @ columns.T) @ rows.T
    return funcol.reduce_scatter_single_autograd(share, "sum", 0, dist.group.WORLD)


def with_dtensors(x, norm, columns, rows):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = DTensor.from_local(norm(x), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    share = torch.relu(tokens.to_local(grad_placements=[Partial()]) @ columns.T) @ rows.T
    return DTensor.from_local(share, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def all_reduced(share):
    total = share.clone()
    dist.all_reduce(total)
    return own(total)


def norm_of_all(x, norm, columns, rows):
    return scatter(torch.relu(norm(gather(x)) @ columns.T) @ rows.T)


gathers_twice = both_ways(scattered, lambda part: gathered(part / 2) + gathered(part / 2))
shifts = both_ways(lambda share: scattered(share.roll(share.shape[0] // dist.get_world_size(), 0)), gathered)

RIGHT = (layers_with(gather, scatter), functional, with_dtensors)
WRONG = (
    (layers_with(both_ways(gathered, own), scatter), "each rank sends 2,880 B instead of 3,840 B", "One of the four"),
    (layers_with(gather, gathers_twice), "each rank sends 4,800 B instead of 3,840 B", "More travels"),
    (layers_with(gather, both_ways(all_reduced, gathered)), "in all_reduce: no all-gather"),
    (layers_with(gather, shifts), "away from the output of one device", "the tokens of another"),
    (norm_of_all, "rank 0 gives `norm` 12 tokens at once, and has 6 of its own", "When do you gather"),
)
