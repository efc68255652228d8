"""Algorithm and bus bandwidth of what was recorded, as nccl-tests define them.

The definitions are those of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. For gather, scatter
and send, which that page leaves out, they are those of the tests themselves (src/gather.cu, scatter.cu, sendrecv.cu).
Units are decimal: 1 GB/s is 10^9 bytes in a second.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from dlearn.analysis.findings import size_text, time_text
from dlearn.errors import DlearnError
from dlearn.join.joining import operations
from dlearn.shown import Answer, Paragraph, Table
from dlearn.trace.event import Collective
from dlearn.trace.message import Operation, family_of_op, payload_bytes
from dlearn.trace.trace import Trace

# Bus bandwidth over algorithm bandwidth: the bytes that pass through the busiest link for each byte of the operation.
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: (ranks - 1) / ranks,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "send": lambda ranks: 1.0,
}


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """How fast `count` equal operations were, each `size_bytes` large as nccl-tests count it; the median of the times,
    and the shortest and the longest.

    `algorithm_bandwidth` (algbw) is size over time. `bus_bandwidth` (busbw) is the speed of the busiest link if the
    algorithm sends no byte more than it must: to compare with what the hardware can do, whatever the number of ranks.
    Gloo's reduce_scatter is an all-reduce of the whole, so twice its busbw is what travels. Both in bytes per second.
    """

    op: str
    ranks: int
    size_bytes: int
    duration_ns: int
    count: int = 1
    fastest_ns: int | None = None
    slowest_ns: int | None = None
    """None of one that was not measured."""

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size_bytes / self.duration_ns * 1e9

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * _FACTORS[family_of_op(self.op)](self.ranks)

    def __str__(self) -> str:
        return (
            f"{self.op} of {size_text(self.size_bytes)} on {self.ranks} ranks: {time_text(self.duration_ns)},"
            f" algbw {speed_text(self.algorithm_bandwidth)}, busbw {speed_text(self.bus_bandwidth)}"
        )


class Bandwidths(Answer, frozen=True):
    """One row for each op, number of ranks and size, in this order. `left_out` counts the others by their reason."""

    items: tuple[Bandwidth, ...]
    left_out: dict[str, int]

    def rows(self) -> list[list[str]]:
        """The table as text, under a head."""
        head = ["op", "ranks", "size", "times", "median time", "algbw", "busbw"]
        return [head] + [
            [each.op, str(each.ranks), f"{each.size_bytes:,} B", f"{each.count:,}", time_text(each.duration_ns),
             speed_text(each.algorithm_bandwidth), speed_text(each.bus_bandwidth)]
            for each in self.items
        ]  # fmt: skip

    def paragraphs(self) -> Iterator[Paragraph]:
        yield Table(self.rows())
        for why, count in self.left_out.items():
            yield f"not here: {count:,} × {why}"


def bandwidth(operation: Operation) -> Bandwidth:
    """The bandwidth of one operation. DlearnError says why it has none.

    The time runs from the last rank's call to the last rank's end; of a message, to the end of its recv. (nccl-tests
    call many in a row and divide by their number; here each is on its own.)
    """
    if family_of_op(operation.op) not in _FACTORS:
        raise DlearnError(f"{operation.op}: nccl-tests define no bandwidth for it")
    ranks = 2 if operation.op == "send" else len(operation.group.members)
    if ranks < 2:
        raise DlearnError(f"{operation.op}: on one rank nothing travels")
    if operation.misfit or operation.missing or operation.failed or operation.unseen:
        raise DlearnError(f"{operation.op}: it failed, or not every rank's call is here")
    end_ns = operation.ends[-1].end_ns if operation.op == "send" else operation.end_ns
    if end_ns is None or end_ns <= operation.transfer_ns:
        raise DlearnError(f"{operation.op}: its end was not observed, or lies before its start")
    size = _size_bytes(operation)
    if size is None:
        raise DlearnError(f"{operation.op}: nccl-tests define it for parts of equal size only")
    return _median((operation.op, ranks, size), [end_ns - operation.transfer_ns])


def bandwidths(trace: Trace) -> Bandwidths:
    """The bandwidth of everything in the trace that has one; equal operations are counted, their times a median."""
    times: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for operation in operations(trace):
        try:
            found = bandwidth(operation)
        except DlearnError as why:
            left_out[str(why)] += 1
        else:
            times[found.op, found.ranks, found.size_bytes].append(found.duration_ns)
    items = [_median(key, alike) for key, alike in sorted(times.items())]
    return Bandwidths(tuple(items), dict(left_out))


def _median(key: tuple[str, int, int], times: Sequence[int]) -> Bandwidth:
    op, ranks, size = key
    return Bandwidth(
        op=op, ranks=ranks, size_bytes=size, duration_ns=round(median(times)), count=len(times),
        fastest_ns=min(times), slowest_ns=max(times),
    )  # fmt: skip


def _size_bytes(operation: Operation) -> int | None:
    """What nccl-tests call the size: of data that ranks hold in parts, the whole."""
    given = [payload_bytes(end) for end in operation.ends]
    if family_of_op(operation.op) in ("all_gather", "gather"):
        return sum(given)
    if family_of_op(operation.op) == "all_to_all":
        # What a rank hands over for each rank, where the program gave the sizes itself.
        calls = [end for end in operation.ends if isinstance(end, Collective)]
        parts = {size for end in calls for size in end.splits or (each.payload_bytes for each in end.inputs)}
        if len({*given}) > 1 or len(parts) > 1:
            return None
    # Of a scatter and a reduce_scatter, the root and every rank hand over the whole.
    return max(given)


# As text --------------------------------------------------------------------------------------------------------------


def speed_text(bytes_per_second: float) -> str:
    """ "450 MB/s", "1.90 GB/s": three digits, decimal units."""
    return f"{size_text(round(bytes_per_second))}/s"
