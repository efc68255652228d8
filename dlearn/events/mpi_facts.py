"""What MPI has and torch has not: a look at what has come, any tag, Python objects, receives that are taken back."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dlearn.events.event import Count, Event, Tag
from dlearn.shown import count_text

CANCELLED = "Cancelled"
"""`error` of a receive that the program took back (MPI's Cancel): no message is its."""

PICKLED = "pickled"
"""The dtype of Python objects on their way: bytes, whose number differs from rank to rank."""

ANY_TAG = -1  # The tag of a `recv` that takes any and has not ended, as MPI's libraries number it.


class Probe(Event, tag="probe", frozen=True, kw_only=True):
    """MPI: a look at what has come, without taking it. `peer` is None, `tag` ANY_TAG, if any will do and none came."""

    group: str
    peer: Count | None
    tag: Tag


class OtherMpiCall(Event, tag="mpi call", frozen=True, kw_only=True):
    """MPI: a rare call that may send or receive; nothing but its name in mpi4py is read."""

    op: str


def calls_not_read(calls: Sequence[OtherMpiCall], labels: Mapping[int, str]) -> Iterator[str]:
    for rank in sorted({call.rank for call in calls}):
        ops = Counter(call.op for call in calls if call.rank == rank)
        names = ", ".join(f"{op} ({count:,})" for op, count in ops.most_common())
        yield f"{labels[rank]} made {count_text(ops.total(), 'other MPI call')}, not read: {names}"
