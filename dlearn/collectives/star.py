"""The star: everybody sends to rank 0, which adds, and sends the result back. A parameter server does the same.

The simplest algorithm, and the slowest: 2 (n-1) whole tensors go through one rank's connections, one after another.
"""

from __future__ import annotations

from dlearn.collectives.exchange import Exchange, all_reduce_by

CENTRE = 0


def all_reduce_steps(x: Exchange) -> None:
    """The centre takes one rank's tensor after the other and adds it to its own; then it sends all of them the sum."""
    others = [rank for rank in range(x.size) if rank != CENTRE]
    for step, rank in enumerate(others):
        if x.rank == CENTRE:
            x.trade(step, take=x.whole, by=rank, combine=True)
        elif x.rank == rank:
            x.trade(step, give=x.whole, to=CENTRE)
    if x.rank == CENTRE:
        x.finish()
    for step, rank in enumerate(others, start=x.size - 1):
        if x.rank == CENTRE:
            x.trade(step, give=x.whole, to=rank)
        elif x.rank == rank:
            x.trade(step, take=x.whole, by=CENTRE)


all_reduce = all_reduce_by("star", all_reduce_steps)
