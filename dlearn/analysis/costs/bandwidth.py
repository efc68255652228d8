"""Algorithm and bus bandwidth of what was recorded, as nccl-tests define them (PERFORMANCE.md).

For gather, scatter and send, which that page leaves out, the definitions are those of the tests
themselves (src/gather.cu, scatter.cu, sendrecv.cu). 1 GB/s is 10^9 bytes in a second.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

import msgspec
from msgspec.structs import replace

from dlearn.errors import DlearnError
from dlearn.events.event import Collective
from dlearn.join.ends import family_of_op, payload_bytes
from dlearn.join.joining import operations
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Paragraph, Result, Table, size_text, time_text
from dlearn.trace import Trace

_WHOLE = ("broadcast", "reduce", "send")  # The busiest link transports all bytes once.
_SHARES = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""It transports all of them but one rank's share; in an all_reduce, twice that."""


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of `count` equal operations: `duration_ns` is the median.

    `algorithm_bandwidth` (algbw) is size over time, in bytes per second. `bus_bandwidth` (busbw) is
    the speed of the busiest link if the algorithm sends no byte more than it must: to compare with
    what the hardware can do, whatever the number of ranks. Gloo's reduce_scatter is an all-reduce
    of the whole, so twice its busbw is what travels.
    """

    op: str
    ranks: int
    size_bytes: int
    duration_ns: int
    count: int = 1

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size_bytes / self.duration_ns * 1e9

    @property
    def bus_bandwidth(self) -> float:
        family, share = family_of_op(self.op), (self.ranks - 1) / self.ranks
        factor = 1 if family in _WHOLE else 2 * share if family == "all_reduce" else share
        return self.algorithm_bandwidth * factor


class Bandwidths(Result, frozen=True):
    """A row for each op, number of ranks and size. `left_out` counts the others by their reason."""

    items: tuple[Bandwidth, ...]
    left_out: dict[str, int]

    def records(self) -> Iterator[dict[str, object]]:
        """Yield the fields of each `Bandwidth`, and both bandwidths in bytes per second."""
        for each in self.items:
            row = msgspec.structs.asdict(each)
            yield row | {"algbw": each.algorithm_bandwidth, "busbw": each.bus_bandwidth}

    def paragraphs(self) -> Iterator[Paragraph]:
        rows = [["op", "ranks", "size", "times", "median time", "algbw", "busbw"]]
        for each in self.items:
            speeds = [speed_text(each.algorithm_bandwidth), speed_text(each.bus_bandwidth)]
            counts = [str(each.ranks), f"{each.size_bytes:,} B", f"{each.count:,}"]
            rows.append([each.op, *counts, time_text(each.duration_ns), *speeds])
        yield Table(rows)
        for why, count in self.left_out.items():
            yield f"not here: {count:,} × {why}"


def bandwidth(operation: Operation) -> Bandwidth:
    """Return the bandwidth of one operation, or raise DlearnError: why it has none.

    The time runs from the last rank's call to the last rank's end; of a message, to the end of its
    recv. (nccl-tests call many in a row and divide by their number; here each is on its own.)
    """
    op, family = operation.op, family_of_op(operation.op)
    if family not in ("all_reduce", *_SHARES, *_WHOLE):
        raise DlearnError(f"{op}: nccl-tests define no bandwidth for it")
    ranks = 2 if op == "send" else len(operation.group.members)
    if ranks < 2:
        raise DlearnError(f"{op}: on one rank nothing travels")
    if operation.mismatch or operation.missing or operation.failed or operation.unseen:
        raise DlearnError(f"{op}: it failed, or not every rank's call is here")
    end_ns = operation.ends[-1].end_ns if op == "send" else operation.end_ns
    if end_ns is None or end_ns <= operation.last_arrival_ns:
        raise DlearnError(f"{op}: its end was not observed, or lies before its start")
    if family == "all_to_all" and not _is_even(operation):
        raise DlearnError(f"{op}: nccl-tests define it for parts of equal size only")
    # The size is that of the whole, of which ranks give blocks to a gather.
    given = [payload_bytes(end) for end in operation.ends]
    size = sum(given) if family in ("all_gather", "gather") else max(given)
    duration_ns = end_ns - operation.last_arrival_ns
    return Bandwidth(op=op, ranks=ranks, size_bytes=size, duration_ns=duration_ns)


def bandwidths(trace: Trace) -> Bandwidths:
    """Count equal operations, with the median of their times; say why others have no bandwidth."""
    equal: defaultdict[tuple[str, int, int], list[Bandwidth]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    for operation in operations(trace):
        try:
            found = bandwidth(operation)
        except DlearnError as why:
            left_out[str(why)] += 1
        else:
            equal[found.op, found.ranks, found.size_bytes].append(found)
    items = []
    for _, group in sorted(equal.items()):
        middle_ns = round(median(each.duration_ns for each in group))
        items.append(replace(group[0], duration_ns=middle_ns, count=len(group)))
    return Bandwidths(tuple(items), dict(left_out))


def _is_even(all_to_all: Operation) -> bool:
    """Return whether each rank gives each other as much, where the program itself gave the sizes."""
    calls = [end for end in all_to_all.ends if isinstance(end, Collective)]
    parts: set[int] = set()
    for call in calls:
        parts.update(call.splits or [tensor.payload_bytes for tensor in call.inputs])
    return len(parts) <= 1 and len({payload_bytes(call) for call in calls}) <= 1


def speed_text(bytes_per_second: float) -> str:
    """Return "450 MB/s", "1.90 GB/s": three digits, decimal units."""
    return f"{size_text(round(bytes_per_second))}/s"
