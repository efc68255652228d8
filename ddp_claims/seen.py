"""What DDP sent in a part of a trace: its collectives, and the bytes that a rank handed to them."""

import contextlib
import io
from collections.abc import Callable, Iterable

from torch import nn

from dlearn import Cluster, Trace, operations
from dlearn.analysis import traffic
from dlearn.cluster.run import Run
from dlearn.events.event import Bucket, Gradient
from dlearn.join.tables.operation_table import Operation

REBUILT = "DDP agrees on the rebuilt buckets"
USED_MAP = "DDP's map of used parameters"


def reductions(trace: Trace) -> list[Operation]:
    """Return the all-reduces of buckets of gradients."""
    return [each for each in operations(trace) if each.bucket is not None]


def buckets(trace: Trace) -> list[Bucket]:
    """Return the buckets of gradients, in the order in which they were sent."""
    return [each.bucket for each in operations(trace) if each.bucket is not None]


def ready_parameters(trace: Trace, rank: int) -> list[str]:
    """Return the parameters in the order in which their gradients were ready on this rank."""
    events = trace.where(kind="gradient", rank=rank).events
    return [event.parameter for event in events if isinstance(event, Gradient)]


def called(trace: Trace, what: str) -> list[Operation]:
    """Return DDP's other collectives that do this."""
    return [each for each in operations(trace) if each.what == what]


def handed_bytes(asked: Iterable[Operation]) -> int:
    """Sum the bytes that one rank hands to the transport in these collectives."""
    return sum(each.given_bytes for each in asked)


def sent_bytes(trace: Trace, ranks: int) -> list[int]:
    """Return the bytes that each rank sent in this part, from its messages."""
    found = traffic(trace)
    return [found.bytes_from(rank=rank) for rank in range(ranks)]


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of its parameters, and so of its gradients."""
    return sum(each.nbytes for each in model.parameters())


def run_quietly(cluster: Cluster, job: Callable[[], object], *, check: bool = True) -> Run:
    """Run a job whose torch warnings are expected."""
    with contextlib.redirect_stdout(io.StringIO()):
        return cluster.run(job, check=check, timeout=60)
