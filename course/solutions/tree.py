"""Exercise `tree_broadcast`: two binomial trees, and wrong answers with what the grade says of them."""

import torch.distributed as dist

import dlearn.collectives


def highest_bit(tensor, root):
    """In round k the first 2^k ranks, counted from the root, each send 2^k ahead."""
    rank, n = dist.get_rank(), dist.get_world_size()
    place, ahead = (rank - root) % n, 1
    while ahead < n:
        if place < ahead and place + ahead < n:
            dist.send(tensor, (rank + ahead) % n)
        elif ahead <= place < 2 * ahead:
            dist.recv(tensor, (rank - ahead) % n)
        ahead *= 2


def lowest_bit(tensor, root):
    """As MPICH does it: the farthest first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    place, bit = (rank - root) % n, 1
    while bit < n and not place & bit:
        bit *= 2
    if place:
        dist.recv(tensor, (rank - bit) % n)
    bit //= 2
    while bit:
        if place + bit < n:
            dist.send(tensor, (rank + bit) % n)
        bit //= 2


def star(tensor, root):
    if dist.get_rank() != root:
        dist.recv(tensor, root)
        return
    for other in range(dist.get_world_size()):
        if other != root:
            dist.send(tensor, other)


def chain(tensor, root):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.recv(tensor, (rank - 1) % n)
    if (rank + 1) % n != root:
        dist.send(tensor, (rank + 1) % n)


def root_is_always_0(tensor, root):
    del root
    highest_bit(tensor, 0)


def twice(tensor, root):
    highest_bit(tensor, root)
    highest_bit(tensor, root)


def leaves_it_to_torch(tensor, root):
    dist.broadcast(tensor, root)


def leaves_it_to_dlearn(tensor, root):
    dlearn.collectives.tree.broadcast(tensor, root)


RIGHT = (highest_bit, lowest_bit)
WRONG = (
    (star, "after round 3, and not after 2"),
    (chain, "after round 3, and not after 2"),
    (root_is_always_0, "before it has received anything itself", "if root is not 0"),
    (leaves_it_to_torch, "in broadcast, which is a collective", "move a tensor from one rank to one other"),
    (leaves_it_to_dlearn, "in broadcast, which is a collective"),
    (twice, "which has the data already", "get it once"),
)
