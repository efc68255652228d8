"""Exercise `fsdp_by_hand`: three right steps, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def gathered(shard):
    whole = torch.empty(len(shard) * dist.get_world_size(), dtype=shard.dtype)
    dist.all_gather_single(whole, shard)
    return whole


def scattered(gradient):
    n = dist.get_world_size()
    mine = torch.empty(len(gradient) // n, dtype=gradient.dtype)
    dist.reduce_scatter_single(mine, gradient)
    return mine / n


def layer_by_layer(shards, x, forward, backward, scatter=scattered):
    inputs = [x]
    for shard in shards:
        inputs.append(forward(gathered(shard), inputs[-1]))
    gradient, found = inputs[-1], []
    for layer in reversed(range(len(shards))):
        gradient, of_weights = backward(gathered(shards[layer]), inputs[layer], inputs[layer + 1], gradient)
        found.insert(0, scatter(of_weights))
        del of_weights
    return found


def next_one_ahead(shards, x, forward, backward):
    """Gathers the next layer before the one at hand is used, as FSDP's prefetching does; lists of shards."""
    inputs, ahead = [x], with_lists(shards[0])
    for layer in range(len(shards)):
        weights = ahead
        ahead = with_lists(shards[layer + 1]) if layer + 1 < len(shards) else None
        inputs.append(forward(weights, inputs[-1]))
        del weights
    gradient, found = inputs[-1], [None] * len(shards)
    for layer in range(len(shards) - 1, -1, -1):
        gradient, whole = backward(with_lists(shards[layer]), inputs[layer], inputs[layer + 1], gradient)
        mine = torch.empty_like(shards[layer])
        dist.reduce_scatter(mine, list((whole / dist.get_world_size()).chunk(dist.get_world_size())))
        found[layer] = mine
        del whole
    return found


class Sharded(torch.autograd.Function):
    """A layer that keeps its shard for the backward pass, and gathers it again."""

    @staticmethod
    def forward(context, shard, x, forward, backward):
        y = forward(gathered(shard), x)
        context.save_for_backward(shard, x, y)
        context.gradients = backward
        return y

    @staticmethod
    def backward(context, gradient):
        shard, x, y = context.saved_tensors
        of_x, of_weights = context.gradients(gathered(shard), x, y, gradient)
        return scattered(of_weights), of_x, None, None


def by_autograd(shards, x, forward, backward):
    leaves, y = [shard.clone().requires_grad_() for shard in shards], x
    for leaf in leaves:
        y = Sharded.apply(leaf, y, forward, backward)
    y.backward(y.detach())
    return [leaf.grad for leaf in leaves]


def with_lists(shard):
    blocks = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(blocks, shard)
    return torch.cat(blocks)


def gathers_once_and_keeps(shards, x, forward, backward, once_more=False):
    inputs, whole = [x], [gathered(shard) for shard in shards]
    for weights in whole:
        inputs.append(forward(weights, inputs[-1]))
    gradient, found, whole = inputs[-1], [], [gathered(shard) for shard in shards] if once_more else whole
    for layer in reversed(range(len(shards))):
        gradient, of_weights = backward(whole[layer], inputs[layer], inputs[layer + 1], gradient)
        found.insert(0, scattered(of_weights))
    return found


def gathers_all_at_once(*given):
    return gathers_once_and_keeps(*given, once_more=True)


def own(gradient):
    return gradient.chunk(dist.get_world_size())[dist.get_rank()].clone()


def scattered_by_all_reduce(gradient):
    dist.all_reduce(gradient)
    return own(gradient) / dist.get_world_size()


def all_reduces_gradients(*given):
    return layer_by_layer(*given, scattered_by_all_reduce)


def takes_the_sum(*given):
    return [each * dist.get_world_size() for each in layer_by_layer(*given)]


def last_layer_first(*given):
    return list(reversed(layer_by_layer(*given)))


def never_scatters(*given):
    return layer_by_layer(*given, own)


RIGHT = (layer_by_layer, next_one_ahead, by_autograd)
WRONG = (
    (gathers_all_at_once, "tensors of the size of a whole layer at once; 2 are enough"),
    (gathers_once_and_keeps, "each rank sends 13,824 B instead of 20,736 B"),
    (all_reduces_gradients, "each rank sends 27,648 B instead of 20,736 B"),
    (takes_the_sum, "(2 times that)", "Is the sum or the mean asked for?"),
    (last_layer_first, "away from what one device computes"),
    (never_scatters, "each rank sends 13,824 B instead of 20,736 B"),
)
