"""What DDP sent in a part of a trace: its collectives, and the bytes that a rank handed to them."""

from dlearn import Trace, operations
from dlearn.analysis import traffic
from dlearn.events.event import Bucket
from dlearn.join.tables.operation_table import Operation


def reductions(trace: Trace) -> list[Operation]:
    """Return the all-reduces of buckets of gradients."""
    return [each for each in operations(trace) if each.bucket is not None]


def buckets(trace: Trace) -> list[Bucket]:
    """Return the buckets of gradients, in the order in which they were sent."""
    return [each.bucket for each in operations(trace) if each.bucket is not None]


def sent_bytes(trace: Trace, ranks: int) -> list[int]:
    """Return the bytes that each rank sent in this part, from its messages."""
    found = traffic(trace)
    return [found.bytes_from(rank=rank) for rank in range(ranks)]
