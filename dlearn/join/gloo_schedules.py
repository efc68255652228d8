"""Gloo's algorithms, as schedules of messages: ranks are group ranks, sizes bytes of payload.

Read from gloo's own source (allreduce.cc, reduce.cc, broadcast.cc, allgather.cc, gather.cc,
scatter.cc, alltoall.cc, barrier.cc). "Left" is rank r-1, "right" is rank r+1.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from dlearn.join.wording import Reason

SEGMENT_BYTES = 1 << 20  # Gloo's largest segment (`maxSegmentSize`).


class Send(NamedTuple):
    """`length` bytes from `offset` on, between group ranks; those of one step may go at once."""

    step: int
    src: int
    dst: int
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """All messages of one operation, in the order of steps; none, and the reason, where they are not known.

    `inferred`: those of the algorithm that was probably chosen, which nothing says.
    """

    sends: tuple[Send, ...] = ()
    unknown: Reason | None = None
    inferred: bool = False

    @cached_property
    def columns(self) -> np.ndarray:
        """Return the fields of `Send`, a row each: a job repeats its operations."""
        return np.array(self.sends, np.int64).T

    @cached_property
    def sizes_by_pair(self) -> dict[tuple[int, int], list[int]]:
        """Return the payload of each message in bytes, for each (src, dst), in group ranks."""
        sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for send in self.sends:
            sizes[send.src, send.dst].append(send.length)
        return sizes


def ring_all_reduce(ranks: int, payload: int, itemsize: int) -> Iterator[Send]:
    """Yield a reduce-scatter, then an all-gather, both to the LEFT: each rank sends to the one before it.

    The data is cut into one chunk per rank and each chunk into at least two segments, so that one segment travels while
    the other is added up. Each rank sends 2 (ranks-1)/ranks of the payload, where the chunks come out even.
    """
    cut = _segments(ranks, payload, itemsize)
    steps = (ranks - 1) * cut.per_chunk
    # Reduce-scatter starts with the chunk of the next rank, all-gather with its own, which is complete by then.
    yield from _ring(ranks, payload, cut, first_chunk=1, first_step=0, steps=steps)
    yield from _ring(ranks, payload, cut, first_chunk=0, first_step=steps, steps=steps)


class Segments(NamedTuple):
    """How a ring cuts its data: `filled` segments of `size` bytes (the last may be shorter), `per_chunk` to a chunk.

    If there are fewer than ranks x `per_chunk`, the last chunks are short or empty; what is empty is not sent.
    """

    size: int
    per_chunk: int
    filled: int


def _segments(ranks: int, payload: int, itemsize: int) -> Segments:
    """Return how many segments there are, of 1 MiB at most and two per chunk at least, and then their size."""
    per_chunk = max(2, _ceil(_ceil(payload, _largest(itemsize)), ranks))
    size = itemsize * max(1, _ceil(_ceil(payload, ranks * per_chunk), itemsize))
    return Segments(size, per_chunk, _ceil(payload, size))


def _ring(ranks: int, payload: int, cut: Segments, *, first_chunk: int, first_step: int, steps: int) -> Iterator[Send]:
    """Yield a ring to the LEFT: in step i each sends the i-th segment from its first chunk on."""
    for i in range(steps if payload else 0):
        for segment in range(i % cut.per_chunk, cut.filled, cut.per_chunk):
            rank = ((segment - i) // cut.per_chunk - first_chunk) % ranks
            offset = segment * cut.size
            yield Send(first_step + i, rank, (rank - 1) % ranks, offset, min(cut.size, payload - offset))


def chunk_bounds(ranks: int, payload: int, itemsize: int) -> tuple[tuple[int, int], ...]:
    """Return offset and length of each rank's chunk in `ring_all_reduce`, in bytes; some may be empty."""
    return _chunks(ranks, payload, _segments(ranks, payload, itemsize))


def _chunks(ranks: int, payload: int, cut: Segments) -> tuple[tuple[int, int], ...]:
    edges = [min(payload, rank * cut.per_chunk * cut.size) for rank in range(ranks + 1)]
    return tuple((start, end - start) for start, end in pairwise(edges))


def ring_reduce(ranks: int, payload: int, itemsize: int, root: int) -> Iterator[Send]:
    """Yield the same reduce-scatter, then each rank's completed chunk, sent straight to the root.

    Gloo stops the ring two segments before it is round, as if a chunk had no more. Where it has more, from 2 MiB per
    rank on, each rank sends the rest of its own chunk for nothing.
    """
    # As `_segments`, the other way round: first the size, half a chunk or 1 MiB, then how many.
    size = min(_ceil(payload, 2 * ranks), _largest(itemsize))
    size = itemsize * max(1, _ceil(size, itemsize))
    filled = _ceil(payload, size)
    cut = Segments(size, max(2, _ceil(filled, ranks)), filled)
    steps = ranks * cut.per_chunk - 2
    yield from _ring(ranks, payload, cut, first_chunk=1, first_step=0, steps=steps)
    for rank, (offset, length) in enumerate(_chunks(ranks, payload, cut)):
        if rank != root and length > 0:
            yield Send(steps, rank, root, offset, length)


def _largest(itemsize: int) -> int:
    """Return the bytes of the largest segment of whole items."""
    return itemsize * max(1, SEGMENT_BYTES // itemsize)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def tree_broadcast(ranks: int, payload: int, root: int) -> Iterator[Send]:
    """Yield a binomial tree from the root: in step i every rank that has the data sends it 2^i ranks further."""
    for step in range((ranks - 1).bit_length()):
        reach = 1 << step
        for virtual in range(min(reach, ranks - reach)):
            yield Send(step, (virtual + root) % ranks, (virtual + reach + root) % ranks, 0, payload)


def ring_all_gather(ranks: int, payload: int) -> Iterator[Send]:
    """Yield each block (`payload`) round the ring to the RIGHT, in two halves, even empty ones."""
    if payload == 0:
        return
    halves = ((0, payload // 2), (payload // 2, payload - payload // 2))
    for i in range((ranks - 1) * 2):
        start, length = halves[i % 2]
        for rank in range(ranks):
            block = (rank - i // 2) % ranks
            yield Send(i, rank, (rank + 1) % ranks, block * payload + start, length)


def uneven_ring_all_gather(sizes: Sequence[int]) -> Iterator[Send]:
    """Yield the same with a block of its own size from each rank, whole (allgatherv.cc)."""
    ranks, starts = len(sizes), tuple(accumulate(sizes, initial=0))
    for step in range(ranks - 1 if any(sizes) else 0):
        for rank in range(ranks):
            block = (rank - step) % ranks
            yield Send(step, rank, (rank + 1) % ranks, starts[block], sizes[block])


def star(ranks: int, payload: int, root: int, *, inward: bool) -> Iterator[Send]:
    """Yield every rank's block, straight to the root, or from it; the root's own stays. `payload` is one block."""
    for rank in range(ranks):
        if rank != root:
            src, dst = (rank, root) if inward else (root, rank)
            yield Send(0, src, dst, rank * payload, payload)


def direct(ranks: int, sizes: tuple[tuple[int, ...], ...]) -> Iterator[Send]:
    """Yield a message from each rank to each other; `sizes` has a row for each, or for all."""
    starts = [tuple(accumulate(row, initial=0)) for row in sizes]
    for distance in range(1, ranks):
        for src in range(ranks):
            dst, row = (src + distance) % ranks, src % len(sizes)
            yield Send(0, src, dst, starts[row][dst], sizes[row][dst])


def dissemination(ranks: int) -> Iterator[Send]:
    """Yield a barrier: in step i every rank sends 0 B 2^i ranks further, once it has heard from the step before."""
    for step in range((ranks - 1).bit_length()):
        for rank in range(ranks):
            yield Send(step, rank, (rank + (1 << step)) % ranks, 0, 0)


def one_after_another(sizes: Iterable[int], runs: Iterable[Iterator[Send]]) -> Iterator[Send]:
    """Yield several runs as one, each on its own part of the data. (Gloo's two threads may overlap two runs.)"""
    first_step = offset = 0
    for size, run in zip(sizes, runs, strict=True):
        step = first_step - 1
        for send in run:
            step = first_step + send.step
            yield send._replace(step=step, offset=offset + send.offset)
        first_step, offset = step + 1, offset + size
