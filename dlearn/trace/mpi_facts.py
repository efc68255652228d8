"""What MPI has and torch has not: a look at what has come, any tag, Python objects, receives that are taken back."""

from __future__ import annotations

from dlearn.trace.event import Count, Event, Tag

CANCELLED = "Cancelled"
"""`error` of a receive that the program took back (MPI's Cancel): no message is its."""

PICKLED = "pickled"
"""The dtype of Python objects on their way: bytes, whose number differs from rank to rank."""

ANY_TAG = -1
"""The tag of a `recv` that takes any and has not ended, as MPI's libraries number it."""


class Probe(Event, tag="probe", frozen=True, kw_only=True):
    """MPI: a look at what has come, without taking it. `peer` is None, `tag` ANY_TAG, if any will do and none came."""

    group: str
    peer: Count | None
    tag: Tag
