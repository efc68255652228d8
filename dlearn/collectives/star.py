"""The star: every rank sends its tensor to rank 0, which adds them and sends the sum back.

    reduce, n-1 steps: 1 -> 0, then 2 -> 0, then 3 -> 0
    broadcast, n-1 steps: 0 -> 1, then 0 -> 2, then 0 -> 3

A synchronous parameter server does the same (M. Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014). It is the simplest algorithm and the slowest: 2 (n-1) whole tensors go
through the connections of one rank, one after another.
"""

from dlearn.collectives.exchange import Exchange, all_reduce_by

CENTRE = 0


def all_reduce_steps(x: Exchange) -> None:
    """Add the ranks' tensors at the centre, one after another, and send the sum to each rank."""
    others = [rank for rank in range(x.size) if rank != CENTRE]
    for step, rank in enumerate(others):
        if x.rank == CENTRE:
            x.receive(step, x.whole, source=rank, combine=True)
        elif x.rank == rank:
            x.send(step, x.whole, to=CENTRE)
    if x.rank == CENTRE:
        x.finish(x.whole)
    for step, rank in enumerate(others, start=x.size - 1):
        if x.rank == CENTRE:
            x.send(step, x.whole, to=rank)
        elif x.rank == rank:
            x.receive(step, x.whole, source=CENTRE)


all_reduce = all_reduce_by("star", all_reduce_steps)
