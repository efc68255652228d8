"""Exercise `zig_zag`: three right answers, and wrong ones with what the grade says of them."""

from functools import partial

import torch
import torch.distributed as dist
from own_ring import swap


def zig_zag(rank, n):
    return [rank, 2 * n - 1 - rank]


def one_by_one(pairs, like, way):
    return torch.stack([swap(each, each, way) for each in pairs.transpose(0, 1).contiguous()], dim=1)


def visible(take, chosen=zig_zag, exchange=swap, way=1, turns=1, later=False, stale=False):
    """Yield (mine, q, theirs, k, v) for all pairs of chunks in which the mask leaves scores; `later`: for all pairs."""
    rank, n = dist.get_rank(), dist.get_world_size()
    queries, *pairs = zip(*map(take, chosen(rank, n)), strict=True)
    pairs = own = torch.stack([torch.stack(each) for each in pairs], dim=1)  # [chunk, k or v, ...]
    for hop in range(n):
        for theirs, (k, v) in zip(chosen((rank - turns * way * hop) % n, n), pairs, strict=True):
            for mine, q in zip(chosen(rank, n), queries, strict=True):
                if later or mine >= theirs:
                    yield mine, q, theirs, k, v
        if hop < n - 1:
            pairs = exchange(own if stale else pairs, pairs, way)


def masked(scores, mine, theirs):
    unseen = torch.ones_like(scores).triu(1 + (mine - theirs) * len(scores)).bool()
    return scores.masked_fill(unseen, -torch.inf)


def running_maximum(take, scores, mask=masked, **how):
    kept = {}
    for mine, q, theirs, k, v in visible(take, **how):
        found = mask(scores(q, k), mine, theirs)
        largest, total, output = kept.get(mine, (torch.full((len(q), 1), -1e9), 0, 0))
        higher = torch.maximum(largest, found.amax(1, keepdim=True))
        weights, shrink = (found - higher).exp(), (largest - higher).exp()
        kept[mine] = higher, total * shrink + weights.sum(1, keepdim=True), output * shrink + weights @ v
    return torch.cat([output / total for _, total, output in kept.values()])


def weighed_by_logsumexp(take, scores):
    """As torch does; each pair is on another rank, and travels to the left."""
    kept = {}
    for mine, q, theirs, k, v in visible(take, lambda rank, n: [n - 1 - rank, n + rank], way=-1):
        found = masked(scores(q, k), mine, theirs)
        output, total = kept.get(mine, (0, torch.full((len(q), 1), -torch.inf)))
        more = found.logsumexp(1, keepdim=True)
        both = torch.logaddexp(total, more)
        kept[mine] = output * (total - both).exp() + found.softmax(1) @ v * (more - both).exp(), both
    return torch.cat([output for output, _ in kept.values()])


def all_keys_first(take, scores):
    """Collects what each chunk sees, k and v in sends of their own, and computes one softmax for each chunk."""
    seen = {}
    for mine, q, theirs, k, v in visible(take, exchange=one_by_one):
        seen.setdefault(mine, (q, {}))[1][theirs] = k, v
    for mine, (q, pairs) in seen.items():
        keys, values = map(torch.cat, zip(*(pairs[theirs] for theirs in sorted(pairs)), strict=True))
        seen[mine] = masked(scores(q, keys), mine, 0).softmax(1) @ values
    return torch.cat([*seen.values()])


RIGHT = (running_maximum, weighed_by_logsumexp, all_keys_first)
WRONG = (
    (partial(running_maximum, chosen=lambda rank, n: [2 * rank, 2 * rank + 1]), "rank 1 computes 700 scores"),
    (partial(running_maximum, later=True), "rank 0 computes 800 scores", "How many chunks of keys"),
    (partial(running_maximum, mask=lambda scores, mine, theirs: scores), "away from", "middle of a block"),
    (partial(running_maximum, turns=-1), "rank 1 is up to", "Which chunk has arrived"),
    (partial(running_maximum, stale=True), "stale data"),
    (partial(running_maximum, chosen=lambda rank, n: range(2 * n)), "take chunks [[0, 1, 2, 3], [0, 1, 2, 3]]"),
    (lambda take, scores: running_maximum(take, lambda q, k: q @ k.T / 4), "fewer scores than"),
)
