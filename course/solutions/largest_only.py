"""Exercise `top_k_hook`: two right hooks, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def done(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def exchange(values, places, length, *, type=torch.int64):
    """The sum over all ranks of what each has at its places."""
    n = dist.get_world_size()
    all_values = torch.empty(n * len(values), dtype=values.dtype)
    all_places = torch.empty(n * len(places), dtype=type)
    dist.all_gather_single(all_values, values)
    dist.all_gather_single(all_places, places.to(type))
    return torch.zeros(length, dtype=values.dtype).index_add_(0, all_places.to(torch.int64), all_values)


def with_feedback(state, bucket, size_of=torch.abs, forgets=True):
    waiting = bucket.buffer() + state.get("waiting", 0)
    places = size_of(waiting).topk(state["k"]).indices
    values = waiting[places]
    if forgets:
        waiting[places] = 0
    state["waiting"] = waiting
    return done(exchange(values, places, len(waiting)) / dist.get_world_size())


def with_small_places(state, bucket):
    """Places in 4 bytes, lists of tensors, and the mean before the sum."""
    n = dist.get_world_size()
    waiting = state.setdefault("waiting", torch.zeros_like(bucket.buffer()))
    waiting += bucket.buffer()
    places = waiting.abs().argsort(descending=True)[: state["k"]]
    values = [torch.empty(len(places), dtype=waiting.dtype) for _ in range(n)]
    where = [torch.empty(len(places), dtype=torch.int32) for _ in range(n)]
    dist.all_gather(values, waiting[places] / n)
    dist.all_gather(where, places.int())
    waiting[places] = 0
    result = torch.zeros_like(waiting)
    for each, at in zip(values, where, strict=True):
        result[at.long()] += each
    return done(result)


def forgets_the_size(state, bucket):
    """The largest, and not the largest by their size: no negative one is ever sent."""
    return with_feedback(state, bucket, size_of=torch.clone)


def drops_the_rest(state, bucket):
    return with_feedback({"k": state["k"]}, bucket)


def keeps_what_it_has_sent(state, bucket):
    """The largest wait for ever, and are sent again and again."""
    return with_feedback(state, bucket, forgets=False)


def takes_the_sum(state, bucket):
    n = dist.get_world_size()
    return done(with_feedback(state, bucket).wait() * n)


def sends_all(state, bucket):
    gradient = bucket.buffer() / dist.get_world_size()
    dist.all_reduce(gradient)
    dist.all_reduce(gradient.clone())
    dist.all_reduce(gradient.clone())
    return done(gradient)


def places_of_rank_0(state, bucket):
    """All ranks send at the places that rank 0 chose."""
    waiting = bucket.buffer() + state.get("waiting", 0)
    places = waiting.abs().topk(state["k"]).indices
    dist.broadcast(places, 0)
    values = waiting[places] / dist.get_world_size()
    dist.all_reduce(values)
    waiting[places] = 0
    state["waiting"] = waiting
    return done(torch.zeros_like(waiting).index_copy_(0, places, values))


RIGHT = (with_feedback, with_small_places)
WRONG = (
    (forgets_the_size, "applies the largest numbers, and not the largest by their size", "is -3 larger than 2"),
    (drops_the_rest, "were applied in none of 8 steps"),
    (keeps_what_it_has_sent, "were applied in none of 8 steps"),
    (takes_the_sum, "(2 times that)"),
    (sends_all, "more than 7,680 B: 60 numbers and their places"),
    (places_of_rank_0, "away from what one device computes"),
)
