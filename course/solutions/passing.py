"""Exercise `token`: two right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist
from own_ring import all_receive_first


def round_the_ring(tensor, way=1, times=1, adds=True):
    rank, n = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + way) % n, (rank - way) % n
    came = torch.empty_like(tensor)
    for _ in range(times):
        if rank == 0:
            dist.send(tensor, ahead)
            dist.recv(tensor, behind)
        else:
            dist.recv(came, behind)
            dist.send(came + tensor if adds else came, ahead)


def to_the_left_in_place(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        came = torch.empty_like(tensor)
        dist.recv(came, (rank + 1) % n)
        tensor += came
    dist.send(tensor, (rank - 1) % n)
    if not rank:
        dist.recv(tensor, 1)


def twice_round(tensor):
    round_the_ring(tensor, times=2)


def with_isend(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(tensor)
    if rank:
        dist.recv(came, rank - 1)
        dist.isend(came + tensor, (rank + 1) % n).wait()
        return
    sending = dist.isend(tensor.clone(), 1 % n)
    dist.recv(tensor, n - 1)
    sending.wait()


def passes_on_without_adding(tensor):
    round_the_ring(tensor, adds=False)


def rank_0_adds_again(tensor):
    own = tensor.clone()
    round_the_ring(tensor)
    tensor += own


def each_sends_to_rank_0(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor, 0)
        return
    came = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(came, other)
        tensor += came


RIGHT = (round_the_ring, to_the_left_in_place)
WRONG = (
    (all_receive_first, "rank 0 and rank 1 wait for each other"),
    (twice_round, "each rank sends 19,200 B instead of 9,600 B"),
    (with_isend, "rank 0 calls a send or a receive before the last one is over"),
    (passes_on_without_adding, "away from the sum of all tensors"),
    (rank_0_adds_again, "away from the sum of all tensors"),
    (each_sends_to_rank_0, "rank 0 sends nothing to rank 1, in a ring it does"),
)
