"""What gloo does for each of torch's collectives: who sends which bytes to whom, step by step.

Equal, to the byte, to what torch 2.13 puts on the wire; `framed_bytes` adds gloo's framing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from dlearn.events.event import Collective
from dlearn.join import gloo_schedules as algorithms
from dlearn.join.gloo_schedules import Schedule, Send, one_after_another, ring_all_gather, star
from dlearn.join.mismatch import ALL_TO_ALL, part_sizes
from dlearn.join.wording import Fact, Reason, ReasonKind

FRAME_BYTES = 48
"""Gloo's byte framing (`Op`, tcp/pair.h). A message costs two frames from its sender, "I have one for you" and its
header, and one back from its receiver, "I am ready for it"; a message of no bytes costs them too."""

MOST_MESSAGES = 20_000
"""Of one operation. A longer schedule is not unrolled; `messages` says so. (8 ranks reach it with 1.4 GB.)"""

Pair = tuple[int, int]  # Sender and receiver.
Rows = tuple[tuple[int, ...], ...]
"""Bytes of each tensor that a rank hands over: one row where that is the same on every rank, else a row for each."""


def schedule_of(calls: Sequence[Collective], ranks: int) -> Schedule:
    """Return the schedule by these `calls`, ordered by group rank; often one of them is enough."""
    call = calls[0]
    if any(tensor.sparse for each in calls for tensor in each.inputs):
        return _sparse(calls, ranks)
    # Of a scatter and a broadcast only the root has inputs. In a scatter it has one for each rank.
    given = call.outputs if call.op == "scatter" else call.inputs or call.outputs
    itemsizes = tuple(_itemsize(tensor.dtype) for tensor in given)
    if call.op in ALL_TO_ALL:
        return _all_to_all(calls, ranks, itemsizes)
    sizes = tuple(tensor.payload_bytes for tensor in given)
    if call.op == "all_gather_single_coalesced":
        # Torch converts all of the tensors to the type of the first, and so gathers them as one.
        counts = [tensor.payload_bytes // _itemsize(tensor.dtype) for tensor in given]
        sizes = tuple(count * itemsizes[0] for count in counts)
    return schedule(call.op, ranks, (sizes,), itemsizes, call.root)


def unknown(kind: ReasonKind, *facts: Fact) -> Schedule:
    return Schedule(unknown=Reason.of(kind, *facts))


def _sparse(calls: Sequence[Collective], ranks: int) -> Schedule:
    """Return the schedule of sparse tensors: torch gathers counts, indices and values, and each rank sums them."""
    rows = []
    for call in calls:
        for tensor in call.inputs:
            if tensor.indices_bytes is None:
                return unknown(ReasonKind.SPARSE_SUMS)
            rows.append((tensor.indices_bytes, tensor.payload_bytes - tensor.indices_bytes))
    if len(rows) != ranks:
        return unknown(ReasonKind.SPARSE_UNSEEN)
    return schedule("sparse all_reduce", ranks, tuple(rows))


def _all_to_all(calls: Sequence[Collective], ranks: int, itemsizes: tuple[int, ...]) -> Schedule:
    if ranks * (ranks - 1) > MOST_MESSAGES:
        return unknown(ReasonKind.LONG_SCHEDULE, MOST_MESSAGES)
    rows = []
    for call in calls:
        row = part_sizes(call, call.splits, call.inputs, ranks)
        if len(row) != ranks:
            return unknown(ReasonKind.WRONG_PARTS, len(row), ranks)
        rows.append(row)
    if len({size for row in rows for size in row}) == 1:
        rows = rows[:1]
    elif len(rows) < ranks:
        return unknown(ReasonKind.PARTS_UNSEEN)
    return schedule(calls[0].op, ranks, tuple(rows), itemsizes, calls[0].root)


@lru_cache
def _itemsize(dtype: str) -> int:
    """Return the bytes of one number, from the name: float32, float8_e4m3fn, complex64."""
    base = dtype.split("_")[0]
    size = next((size for suffix, size in _ITEMSIZE.items() if base.endswith(suffix)), 1)
    return max(1, size // 2) if base.startswith("complex") else size


_ITEMSIZE = {"64": 8, "128": 16, "32": 4, "16": 2, "8": 1}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


@lru_cache(maxsize=64)  # A training loop repeats the same few operations.
def schedule(
    op: str,
    ranks: int,
    sizes: Rows = ((),),
    itemsizes: tuple[int, ...] = (),
    root: int | None = None,
) -> Schedule:
    """Return the schedule of `op`; only an all-to-all may have `sizes` of more than one row."""
    if ranks == 1:
        return Schedule()
    if op in _ROOTED and (root is None or root >= ranks):
        return unknown(ReasonKind.ROOT_OUTSIDE)
    found = _plan(op, ranks, sizes, itemsizes, root or 0)
    if found is None:
        return unknown(ReasonKind.NO_SCHEDULE, "gloo", op)
    # A trace may come from anyone: of a longer schedule no more is made.
    sends = tuple(islice(found, MOST_MESSAGES + 1))
    return unknown(ReasonKind.LONG_SCHEDULE, MOST_MESSAGES) if len(sends) > MOST_MESSAGES else Schedule(sends)


def _plan(op: str, ranks: int, sizes: Rows, itemsizes: tuple[int, ...], root: int) -> Iterator[Send] | None:
    payload, itemsize = sum(sizes[0]), max(itemsizes, default=1)
    match op:
        case "all_reduce" | "all_reduce_coalesced":
            return algorithms.ring_all_reduce(ranks, payload, itemsize)
        case "sparse all_reduce":
            indices, values = zip(*sizes, strict=True)
            blocks = map(algorithms.uneven_ring_all_gather, (indices, values))
            runs = (ring_all_gather(ranks, 72), *blocks)
            return one_after_another((72 * ranks, sum(indices), sum(values)), runs)
        case "reduce_scatter" | "reduce_scatter_single" | "reduce_scatter_single_coalesced":
            # Torch reduces ALL of each tensor to every rank, which then keeps its share: twice what is needed.
            tensors = zip(sizes[0], itemsizes, strict=True)
            return one_after_another(sizes[0], (algorithms.ring_all_reduce(ranks, *tensor) for tensor in tensors))
        case "reduce":
            return algorithms.ring_reduce(ranks, payload, itemsize, root)
        case "broadcast":
            return algorithms.tree_broadcast(ranks, payload, root)
        case "all_gather" | "all_gather_single" | "all_gather_coalesced" | "all_gather_single_coalesced":
            return ring_all_gather(ranks, payload)
        case "gather" | "scatter":
            return star(ranks, payload, root, inward=op == "gather")
        case "all_to_all" | "all_to_all_single":
            return algorithms.direct(ranks, sizes)
        case "barrier":
            return algorithms.dissemination(ranks)
        case "monitored_barrier":
            # Every rank sends its number, an int32, to rank 0, which answers all when the last has come.
            there_and_back = (star(ranks, 4, 0, inward=inward) for inward in (True, False))
            return one_after_another((0, 0), there_and_back)
    return None


def framed_bytes(payload: Mapping[Pair, int], count: Mapping[Pair, int]) -> Counter[Pair]:
    """Add gloo's frames, which go in both directions, to the payload of so many messages."""
    sizes = Counter(payload)
    for (src, dst), messages in count.items():
        sizes[src, dst] += 2 * FRAME_BYTES * messages
        sizes[dst, src] += FRAME_BYTES * messages
    return sizes
