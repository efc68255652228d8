"""Gloo's collectives as schedules: which rank sends which bytes to whom, step by step.

Read from gloo's own source (allreduce.cc, broadcast.cc, allgather.cc) and equal to what torch 2.13 puts on the wire.
`length` is payload in bytes; gloo adds 96 B of framing to each message and answers with 48 B. In a group of n ranks
"left" is rank r-1, "right" is rank r+1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

SEGMENT_BYTES = 1 << 20
"""Gloo's largest segment (`maxSegmentSize`)."""

MOST_MESSAGES = 20_000
"""Of one operation. A longer schedule is not unrolled; `messages` says so. (8 ranks reach it with 1.4 GB.)"""


class Send(NamedTuple):
    """One message of a schedule: bytes `offset : offset + length` of the operation's data, between group ranks."""

    step: int
    src: int
    dst: int
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """All messages of one operation, in the order of steps."""

    sends: tuple[Send, ...]

    @cached_property
    def bytes_by_pair(self) -> Counter[tuple[int, int]]:
        """Payload bytes for each (src, dst), in group ranks."""
        sizes: Counter[tuple[int, int]] = Counter()
        for send in self.sends:
            sizes[send.src, send.dst] += send.length
        return sizes

    @cached_property
    def count_by_pair(self) -> Counter[tuple[int, int]]:
        """Messages for each (src, dst), in group ranks."""
        return Counter((send.src, send.dst) for send in self.sends)


def ring_all_reduce(ranks: int, payload: int, itemsize: int) -> Iterator[Send]:
    """Reduce-scatter, then all-gather, both to the LEFT: the reverse of most pictures.

    The data is cut into one chunk per rank and each chunk into at least two segments, so that one segment travels while
    the other is added up. Each rank sends 2 (ranks-1)/ranks of the payload, where the chunks come out even.
    """
    if payload == 0:
        return
    segments, size = _segments(ranks, payload, itemsize)
    per_rank = segments // ranks
    steps = segments - per_rank
    for phase, first_chunk in enumerate((1, 0)):
        # Reduce-scatter starts with the chunk of the next rank, all-gather with its own, which is complete by then.
        for i in range(steps):
            for rank in range(ranks):
                offset = ((rank + first_chunk) * per_rank + i) % segments * size
                length = min(size, payload - offset)
                if length > 0:
                    yield Send(phase * steps + i, rank, (rank - 1) % ranks, offset, length)


def _segments(ranks: int, payload: int, itemsize: int) -> tuple[int, int]:
    """Number of segments, a multiple of `ranks`, and the bytes of each but the last, a multiple of the item."""
    largest = itemsize * max(1, SEGMENT_BYTES // itemsize)
    segments = max(-(-payload // largest), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    size = -(-payload // segments)
    return segments, -(-size // itemsize) * itemsize


def tree_broadcast(ranks: int, payload: int, root: int) -> Iterator[Send]:
    """A binomial tree from the root: in step i every rank that has the data sends it 2^i ranks further."""
    if payload == 0:
        return
    reach = 1
    step = 0
    while reach < ranks:
        for virtual in range(min(reach, ranks - reach)):
            yield Send(step, (virtual + root) % ranks, (virtual + reach + root) % ranks, 0, payload)
        reach *= 2
        step += 1


def ring_all_gather(ranks: int, payload: int) -> Iterator[Send]:
    """Each rank's block goes round the ring to the RIGHT, in two halves, sent even if empty. `payload` is one block."""
    if payload == 0:
        return
    halves = ((0, payload // 2), (payload // 2, payload - payload // 2))
    for i in range((ranks - 1) * 2):
        start, length = halves[i % 2]
        for rank in range(ranks):
            block = (rank - i // 2) % ranks
            yield Send(i, rank, (rank + 1) % ranks, block * payload + start, length)


@lru_cache(maxsize=64)  # A training loop repeats the same few operations.
def schedule(op: str, *, ranks: int, payload: int, itemsize: int, root: int | None) -> Schedule | str:
    """The schedule of `op`, or why there is none. `payload` in bytes per rank, as the caller hands it over."""
    if ranks == 1:
        return Schedule(())
    if op in ("all_reduce", "all_reduce_coalesced"):
        segments, _ = _segments(ranks, payload, itemsize)
        count, sends = 2 * (segments - segments // ranks) * ranks, ring_all_reduce(ranks, payload, itemsize)
    elif op == "broadcast":
        if root is None or root >= ranks:
            return "its root is no member of the process group"
        count, sends = ranks - 1, tree_broadcast(ranks, payload, root)
    elif op in ("all_gather", "all_gather_single"):
        count, sends = 2 * (ranks - 1) * ranks, ring_all_gather(ranks, payload)
    else:
        return f"no schedule of gloo's {op} is known here yet"
    if count > MOST_MESSAGES:
        return f"its schedule has {count:,} messages, more than {MOST_MESSAGES:,}"
    return Schedule(tuple(sends))
