"""Exercise `top_two`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def there_and_back(rows, rank_of, expert):
    """Each row travels to the rank that it names; its result comes back to its place."""
    order = rank_of.argsort(stable=True)
    going = rank_of.bincount(minlength=dist.get_world_size())
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going)
    going, coming = going.tolist(), coming.tolist()
    came = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(came, rows[order], coming, going)
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, expert(came), going, coming)
    result = torch.empty_like(rows)
    result[order] = back
    return result


def all_at_once(tokens, experts_of, weights, expert):
    copies = tokens.repeat_interleave(2, dim=0)
    results = there_and_back(copies, experts_of.flatten(), expert)
    return (results.view(len(tokens), 2, -1) * weights[:, :, None]).sum(1)


def one_after_the_other(tokens, experts_of, weights, expert):
    first, second = (there_and_back(tokens, experts_of[:, which], expert) for which in (0, 1))
    return weights[:, :1] * first + weights[:, 1:] * second


def by_sends(tokens, experts_of, weights, expert):
    """To one rank after the other, with the counts before; adds each result where it belongs."""
    rank, n = dist.get_rank(), dist.get_world_size()
    result = torch.zeros_like(tokens)
    for step in range(n):
        dst, src = (rank + step) % n, (rank - step) % n
        token, which = (experts_of == dst).nonzero(as_tuple=True)
        mine, count = tokens[token], torch.tensor([len(token)])
        came, their_count = mine, torch.empty_like(count)
        if step:
            exchange(count, dst, their_count, src)
            came = tokens.new_empty(int(their_count), tokens.shape[1])
            exchange(mine, dst, came, src)
        treated = expert(came)
        back = torch.empty_like(mine) if step else treated
        if step:
            exchange(treated, src, back, dst)
        result.index_add_(0, token, weights[token, which][:, None] * back)
    return result


def exchange(outgoing, dst, incoming, src):
    sending = dist.isend(outgoing.contiguous(), dst)
    dist.recv(incoming, src)
    sending.wait()


def only_the_first(tokens, experts_of, weights, expert):
    return there_and_back(tokens, experts_of[:, 0], expert)


def without_weights(tokens, experts_of, weights, expert):
    return one_after_the_other(tokens, experts_of, torch.ones_like(weights), expert)


def weights_of_the_other(tokens, experts_of, weights, expert):
    return one_after_the_other(tokens, experts_of, weights.flip(1), expert)


def weights_before_sorting(tokens, experts_of, weights, expert):
    """Multiplies rows that are sorted by expert with weights that are not."""
    order = experts_of.flatten().argsort(stable=True)
    results = there_and_back(tokens.repeat_interleave(2, dim=0), experts_of.flatten(), expert)
    weighted = torch.empty_like(results)
    weighted[order] = results[order] * weights.flatten()[:, None]
    return weighted.view(len(tokens), 2, -1).sum(1)


def twice_as_many(tokens, experts_of, weights, expert):
    """Both copies of a token go to both experts."""
    copies = tokens.repeat_interleave(4, dim=0)
    results = there_and_back(copies, experts_of.repeat_interleave(2, dim=0).flatten(), expert)
    return (results.view(len(tokens), 2, 2, -1)[:, 0] * weights[:, :, None]).sum(1)


RIGHT = (all_at_once, one_after_the_other, by_sends)
WRONG = (
    (only_the_first, "tokens of 192 B go there and back"),
    (without_weights, "away from what one device computes", "multiplied by its weight"),
    (weights_of_the_other, "away from what one device computes", "the weight of the other expert"),
    (weights_before_sorting, "away from what one device computes", "In which rows"),
    (twice_as_many, "tokens of 192 B go there and back"),
)
