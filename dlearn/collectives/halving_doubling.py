"""Recursive halving and doubling: few steps, and as few bytes as a ring.

    reduce-scatter by halving, log2(n) steps: two partners cut what they have in half; each keeps one half, adding the
    other's share to it
    all-gather by doubling, log2(n) steps: the same partners, in the opposite order, exchange what is complete

The partners of rank r are r xor n/2, ..., r xor 2, r xor 1, so n must be a power of two. Otherwise the first ranks
join in pairs: the even rank sends its data to the odd one before, and receives the result afterwards. (R. Thakur,
R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.)
"""

from dlearn.collectives.exchange import Chunk, Exchange, all_reduce_by


def all_reduce_steps(x: Exchange) -> None:
    """Fold the ranks beyond a power of two into their neighbours, halve, double, and unfold."""
    power = 1 << (x.size.bit_length() - 1)  # the largest power of two that is not above n
    folded = x.size - power
    halvings = power.bit_length() - 1
    first, last = (1 if folded else 0), 2 * halvings + 1
    paired = x.rank < 2 * folded
    if paired and x.rank % 2 == 0:
        x.send(0, x.whole, to=x.rank + 1)
        x.receive(last, x.whole, source=x.rank + 1)
        return
    if paired:
        x.receive(0, x.whole, source=x.rank - 1, combine=True)
    number = x.rank // 2 if paired else x.rank - folded
    halve_and_double(x, number, folded, halvings, first)
    if paired:
        x.send(last, x.whole, to=x.rank - 1)


def halve_and_double(x: Exchange, number: int, folded: int, halvings: int, first: int) -> None:
    """All-reduce over 2^`halvings` ranks, numbered without gaps; `number` is this rank's, `first` the first step."""
    chunks = x.chunks(1 << halvings)
    distances = [1 << i for i in range(halvings)]
    for step, distance in enumerate(reversed(distances), start=first):
        partner = number ^ distance
        theirs, mine = side(chunks, partner, distance), side(chunks, number, distance)
        rank = rank_of(partner, folded)
        x.sendrecv(step, theirs, mine, to=rank, source=rank, combine=True)
    x.finish(chunks[number])
    for step, distance in enumerate(distances, start=first + halvings):
        partner = number ^ distance
        theirs, mine = side(chunks, partner, distance), side(chunks, number, distance)
        rank = rank_of(partner, folded)
        x.sendrecv(step, mine, theirs, to=rank, source=rank)


def rank_of(number: int, folded: int) -> int:
    """Return the rank with this number among those that halve and double."""
    return 2 * number + 1 if number < folded else number + folded


def side(chunks: tuple[Chunk, ...], number: int, distance: int) -> Chunk:
    """Return the `distance` neighbouring chunks of the half that `number` keeps at this distance."""
    first = number // distance * distance
    return Chunk(chunks[first].start, chunks[first + distance - 1].stop)


all_reduce = all_reduce_by("halving-doubling", all_reduce_steps)
