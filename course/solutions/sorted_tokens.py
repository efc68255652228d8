"""Exercise `expert_dispatch`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def counts_of(expert_of):
    """How many tokens go to each rank, and how many come from each."""
    going = torch.bincount(expert_of, minlength=dist.get_world_size())
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going)
    return going.tolist(), coming.tolist()


def by_all_to_all(tokens, expert_of, expert):
    order = expert_of.argsort(stable=True)
    going, coming = counts_of(expert_of)
    came = torch.empty(sum(coming), tokens.shape[1], dtype=tokens.dtype)
    dist.all_to_all_single(came, tokens[order], coming, going)
    back = torch.empty_like(tokens)
    dist.all_to_all_single(back, expert(came), going, coming)
    result = torch.empty_like(tokens)
    result[order] = back
    return result


def by_sends(tokens, expert_of, expert):
    """Counts by an all-gather, tokens by sends to one rank after the other."""
    rank, n = dist.get_rank(), dist.get_world_size()
    result = torch.empty_like(tokens)
    own = expert_of == rank
    result[own] = expert(tokens[own])
    for step in range(1, n):
        dst, src = (rank + step) % n, (rank - step) % n
        there = expert_of == dst
        count = swapped(there.sum()[None], 1, dst, src)
        came = swapped(tokens[there], int(count), dst, src)
        result[there] = swapped(expert(came), int(there.sum()), src, dst)
    return result


def swapped(tensor, count, dst, src):
    came = torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype)
    sending = dist.isend(tensor.contiguous(), dst) if len(tensor) else None
    if count:
        dist.recv(came, src)
    if sending:
        sending.wait()
    return came


def by_functional_calls(tokens, expert_of, expert):
    """The counts by an all-gather; each row goes back to its place by the inverse order."""
    n, rank = dist.get_world_size(), dist.get_rank()
    counts = torch.empty(n, n, dtype=torch.int64)
    dist.all_gather_single(counts.view(-1), expert_of.bincount(minlength=n))
    going, coming = counts[rank].tolist(), counts[:, rank].tolist()
    order = expert_of.argsort(stable=True)
    came = functional.all_to_all_single(tokens[order], coming, going, dist.group.WORLD)
    back = functional.all_to_all_single(expert(came + 0), going, coming, dist.group.WORLD)
    return (back + 0)[order.argsort()]


def pads_to_the_maximum(tokens, expert_of, expert):
    """Each pair of ranks exchanges as many tokens as the busiest one."""
    n = dist.get_world_size()
    most = torch.bincount(expert_of, minlength=n).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = torch.zeros(n, int(most), tokens.shape[1], dtype=tokens.dtype)
    for dst in range(n):
        mine = tokens[expert_of == dst]
        padded[dst, : len(mine)] = mine
    came, back = torch.empty_like(padded), torch.empty_like(padded)
    dist.all_to_all_single(came, padded)
    dist.all_to_all_single(back, expert(came.flatten(0, 1)).view_as(came))
    result = torch.empty_like(tokens)
    for dst in range(n):
        result[expert_of == dst] = back[dst, : int((expert_of == dst).sum())]
    return result


def another_order(tokens, expert_of, expert):
    """Returns the tokens sorted by expert, as they travelled."""
    order = expert_of.argsort(stable=True)
    return by_all_to_all(tokens, expert_of, expert)[order]


def to_every_expert(tokens, expert_of, expert):
    """Every rank gets all tokens, and sends all back."""
    n = dist.get_world_size()
    going = counts_of(torch.arange(n).repeat_interleave(len(tokens)))
    came = torch.empty(sum(going[1]), tokens.shape[1], dtype=tokens.dtype)
    dist.all_to_all_single(came, tokens.repeat(n, 1), going[1], going[0])
    back = torch.empty(n * len(tokens), tokens.shape[1], dtype=tokens.dtype)
    dist.all_to_all_single(back, expert(came), going[0], going[1])
    return back.view(n, *tokens.shape)[expert_of, torch.arange(len(tokens))]


def only_its_own_expert(tokens, expert_of, expert):
    dist.barrier()
    return expert(tokens)


RIGHT = (by_all_to_all, by_sends, by_functional_calls)
WRONG = (
    (pads_to_the_maximum, "tokens of 192 B go there and back"),
    (another_order, "away from what one device computes", "in another order"),
    (to_every_expert, "tokens of 192 B go there and back"),
    (only_its_own_expert, "rank 0 sends 0 B to rank 1"),
)
