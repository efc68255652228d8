"""Exercise `ring_attention`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
from own_ring import swap


def swapped(tensor):
    return swap(tensor, tensor, 1)


def attended(q, keys, values):
    return torch.softmax(q @ torch.cat(keys).T / q.shape[1] ** 0.5, 1) @ torch.cat(values)


def block_by_block(q, k, v):
    """Keeps the largest score, the sum and the output so far, and rescales them with each block."""
    largest = torch.full((len(q), 1), -torch.inf, dtype=q.dtype)
    total, output = torch.zeros_like(largest), torch.zeros_like(q)
    blocks = torch.cat([k, v])
    n = dist.get_world_size()
    for hop in range(n):
        k, v = blocks.chunk(2)
        scores = q @ k.T / q.shape[1] ** 0.5
        higher = torch.maximum(largest, scores.max(1, keepdim=True).values)
        weights, shrink = (scores - higher).exp(), (largest - higher).exp()
        total, output = total * shrink + weights.sum(1, keepdim=True), output * shrink + weights @ v
        largest = higher
        if hop < n - 1:
            blocks = swapped(blocks)
    return output / total


def collected(block, more=0):
    """Its own block, and what comes in each of n-1 hops, or more."""
    blocks = [block]
    for _ in range(dist.get_world_size() - 1 + more):
        blocks.append(swapped(blocks[-1]))
    return blocks


def collected_first(q, k, v):
    """All blocks are kept; any order is right for a softmax."""
    return attended(q, collected(k), collected(v))


def weighed_by_logsumexp(q, k, v):
    """As torch merges; k and v travel to the left while they are used, by batch_isend_irecv."""
    rank, n = dist.get_rank(), dist.get_world_size()
    output, total = torch.zeros_like(q), torch.full((len(q), 1), -torch.inf, dtype=q.dtype)
    for hop in range(n):
        came = [torch.empty_like(k), torch.empty_like(v)]
        sends = [dist.P2POp(dist.isend, each, (rank - 1) % n) for each in (k, v)]
        receives = [dist.P2POp(dist.irecv, each, (rank + 1) % n) for each in came]
        works = dist.batch_isend_irecv(sends + receives) if hop < n - 1 else []
        scores = q @ k.T / q.shape[1] ** 0.5
        both = torch.logaddexp(total, scores.logsumexp(1, keepdim=True))
        output, total = output * (total - both).exp() + (scores - both).exp() @ v, both
        for work in works:
            work.wait()
        k, v = came
    return output


def sends_q_too(q, k, v):
    _, keys, values = zip(*collected(torch.stack([q, k, v])), strict=True)
    return attended(q, keys, values)


def mean_of_softmaxes(q, k, v):
    """A softmax for each block by itself, without rescaling."""
    blocks = zip(collected(k), collected(v), strict=True)
    return torch.stack([attended(q, [keys], [values]) for keys, values in blocks]).mean(0)


def n_hops(q, k, v):
    return attended(q, collected(k, more=1)[1:], collected(v, more=1)[1:])


def passes_on_its_own(q, k, v):
    """Right on two ranks only."""
    hops = range(dist.get_world_size() - 1)
    return attended(q, [k, *(swapped(k) for _ in hops)], [v, *(swapped(v) for _ in hops)])


def without_the_root(q, k, v):
    return collected_first(q * q.shape[1] ** 0.5, k, v)


RIGHT = (block_by_block, collected_first, weighed_by_logsumexp)
WRONG = (
    (sends_q_too, "each rank sends 7,680 B instead of 5,120 B"),
    (mean_of_softmaxes, "away from what one device computes", "the mean of the blocks' own softmaxes"),
    (n_hops, "each rank sends 10,240 B instead of 5,120 B"),
    (passes_on_its_own, "stale data"),
    (without_the_root, "away from what one device computes", "too large by one factor"),
)
