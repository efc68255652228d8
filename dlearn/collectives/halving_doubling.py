"""Recursive halving and doubling: few steps, and as few bytes as a ring (Thakur, Rabenseifner and Gropp, 2005).

    halving, log2(n) steps: two partners cut what they have in half; each keeps one half, and adds the other's share
    doubling, log2(n) steps, backwards: the same partners give each other what is complete; what each has doubles

The partners of rank r are r xor n/2, ..., r xor 2, r xor 1. That needs a power of two. Of other numbers of ranks, the
first ones join in pairs: the even one folds its data into the odd one's before, and gets the result afterwards.
"""

from __future__ import annotations

from dlearn.collectives.exchange import Chunk, Exchange, all_reduce_by


def all_reduce_steps(x: Exchange) -> None:
    core = 1 << (x.size.bit_length() - 1)  # the largest power of two that is not above n: so many halve and double
    folded = x.size - core
    halvings = core.bit_length() - 1
    last = 2 * halvings + 1
    if x.rank < 2 * folded and x.rank % 2 == 0:
        x.trade(0, give=x.whole, to=x.rank + 1)
        x.trade(last, take=x.whole, by=x.rank + 1)
        return
    if x.rank < 2 * folded:
        x.trade(0, take=x.whole, by=x.rank - 1, combine=True)
    # The ranks that take part are numbered anew, without gaps.
    me = x.rank // 2 if x.rank < 2 * folded else x.rank - folded
    blocks = x.blocks(core)
    distances = [1 << i for i in range(halvings)]
    first = 1 if folded else 0
    for step, distance in enumerate(reversed(distances), start=first):
        partner = me ^ distance
        theirs, mine = side(blocks, partner, distance), side(blocks, me, distance)
        rank = rank_of(partner, folded)
        x.trade(step, give=theirs, to=rank, take=mine, by=rank, combine=True)
    x.finish(blocks[me])
    for step, distance in enumerate(distances, start=first + halvings):
        partner = me ^ distance
        theirs, mine = side(blocks, partner, distance), side(blocks, me, distance)
        rank = rank_of(partner, folded)
        x.trade(step, give=mine, to=rank, take=theirs, by=rank)
    if x.rank < 2 * folded:
        x.trade(last, give=x.whole, to=x.rank - 1)


def rank_of(number: int, folded: int) -> int:
    return 2 * number + 1 if number < folded else number + folded


def side(blocks: tuple[Chunk, ...], number: int, distance: int) -> Chunk:
    """The `distance` blocks, side by side, that `number` shares with those closer to it than that."""
    first = number // distance * distance
    return Chunk(blocks[first].start, blocks[first + distance - 1].stop)


all_reduce = all_reduce_by("halving-doubling", all_reduce_steps)
