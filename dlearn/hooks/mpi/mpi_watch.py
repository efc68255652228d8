"""The recording of mpi4py's calls: their starts, their ends, and what they send."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from dlearn.events.event import NOT_OBSERVED, Collective, Event, GroupFact, PointToPoint, TensorInfo
from dlearn.events.mpi_facts import CANCELLED, PICKLED, OtherMpiCall, Probe
from dlearn.events.rendezvous import Rendezvous
from dlearn.hooks import Emit, gate
from dlearn.hooks.callers import caller
from dlearn.hooks.patches import guarded
from dlearn.shown import first_few

BACKEND = "mpi4py"
RANKS_NAMED = 16
"""In the name of a communicator; of more members the first are named, and the others counted."""


Post = Callable[..., None]
"""Ends a call that has begun: `by` whom it is seen, `status` of MPI's, or `error`. Once; then it does nothing."""


class Watch:
    """A recording, as the recording classes see it."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.open: dict[int, Post] = {}
        self._known: set[str] = set()
        self._p2ps = defaultdict[str, Iterator[int]](lambda: itertools.count(1))
        self._collectives = defaultdict[str, Iterator[int]](lambda: itertools.count(1))

    def point_to_point(self, op: str, comm: Any, peer: int, tag: int, tensors: Infos) -> Post:
        """Report a send, a recv, or a probe, which leaves the message to be received."""
        group, known = self._group(comm), None if peer == MPI.ANY_SOURCE else peer
        facts: dict[str, Any] = {"group": group, "peer": known, "tag": tag}
        if op == "probe":
            return self._post(Probe, room=(), **facts)
        _wait_at_gate(op, None if known is None else world_ranks(comm)[known], tensors)
        facts |= {"op": op, "seq": next(self._p2ps[group]), "tensors": tensors}
        return self._post(PointToPoint, room=tensors if op == "recv" else None, **facts)

    def collective(self, op: str, comm: Any, root: int | None, inputs: Infos, outputs: Infos) -> Post:
        """Report a collective: what this rank gives, and what it gets."""
        group = self._group(comm)
        _wait_at_gate(op, None, inputs)
        facts: dict[str, Any] = {"op": op, "seq": next(self._collectives[group]), "root": root}
        return self._post(Collective, group=group, inputs=inputs, outputs=outputs, **facts)

    def other(self, name: str) -> list[Post]:
        """Report a call of which nothing but the name is read."""
        return [self._post(OtherMpiCall, op=name)]

    def meeting(self, op: str, comm: Any) -> int | None:
        """Report that a communicator is made, to which all members of `comm` have to come."""
        site, members = caller(sys._getframe()).site, world_ranks(comm)
        if len(members) < 2:
            return None
        return self.emit.event(Rendezvous, op=op, ranks=members, group=name_of(comm), site=site)

    def _post(self, kind: type[Event], room: Infos | None = None, **facts: Any) -> Post:
        """Report that a call begins; with `room`, the end of a receive tells what has come."""
        made_by = caller(sys._getframe())
        number = self.emit.event(kind, phase=made_by.phase, site=made_by.site, **facts)
        self.open[number] = partial(self._end, number, room)
        return self.open[number]

    def _end(self, number: int, room: Infos | None, *, by: str, status: Any = None, error: str = "") -> None:
        if self.open.pop(number, None) is None:
            return
        facts: dict[str, Any] = {"error": error}
        if room is not None and status is not None:
            facts |= guarded(self.emit, "the end of a receive", _learn, room, status, error) or {}
        self.emit.end(number, by=by, **facts)

    def _group(self, comm: Any) -> str:
        name = name_of(comm)
        if name not in self._known:
            self._known.add(name)
            facts: dict[str, Any] = {"rank": comm.Get_rank(), "size": comm.Get_size()}
            facts |= {"ranks": world_ranks(comm), "default": name == "COMM_WORLD"}
            self.emit.fact(GroupFact(name=name, backend=BACKEND, **facts))
        return name


def _wait_at_gate(op: str, to: int | None, given: Infos) -> None:
    """Wait in a held job, before mpi4py gets the call; in a `sendrecv` as a send, then as a receive."""
    if gate.current is not None:
        gate.current.wait(op, to, sum(info.payload_bytes for info in given))


active: Watch | None = None
"""The recording that is on. The classes live on without one, as objects that the program holds."""


def stop() -> None:
    """End the recording: no call has waited for what is open."""
    global active
    watch, active = active, None
    for post in list(watch.open.values()) if watch is not None else ():
        post(by=NOT_OBSERVED)


# Names of communicators ---------------------------------------------------------------------------

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def name_of(comm: Any) -> str:
    """Return the communicator's name in the trace, the same on all its members and no other's."""
    name = comm.__dict__.get("name_in_trace")
    if name is None:
        name = comm.name_in_trace = _root_name(comm) or made_name("Comm", (), world_ranks(comm))
    return str(name)


def made_name(how: str, parent: tuple[int, ...], members: tuple[int, ...]) -> str:
    """Return "COMM_WORLD.Split(0,2)": all members have made the same of these, in one order."""
    _made[how, members] += 1
    times = _made[how, members]
    shown = "" if members == parent else f"({first_few([*map(str, members)], RANKS_NAMED, ',')})"
    return f"{how}{shown}" + (f" #{times}" if times > 1 else "")


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Return the members, in their order."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = tuple(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    return ranks


def _root_name(comm: Any) -> str:
    for name in ("COMM_WORLD", "COMM_SELF"):
        if comm.handle == getattr(MPI, name).handle:
            # Without mpiexec each process is a world of its own, and all have the same rank in it.
            return name if MPI.COMM_WORLD.Get_size() > 1 else f"{name} of process {os.getpid()}"
    return ""


# What travels: a buffer or [buffer, count, type] --------------------------------------------------

Infos = tuple[TensorInfo, ...]


def described(spec: Any, *, blocks: int = 1) -> Infos:
    """Describe the data of one argument; a single count is that of each of `blocks` ranks."""
    if spec is None or spec is MPI.IN_PLACE:
        return ()
    buffer, counts, datatype = _parts(spec)
    item_bytes, dtype = _type_of(buffer, datatype)
    if counts is None:
        size = buffer.nbytes if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes
        count = int(size) // max(item_bytes, 1)
    else:
        count = counts * blocks if isinstance(counts, int) else sum(map(int, counts))
    return _values(count, dtype, count * item_bytes)


def pickled(count: int) -> Infos:
    """Describe Python objects, as the bytes that pickle has made of them."""
    return _values(count, PICKLED, count)


def _learn(room: Infos, status: Any, error: str) -> dict[str, Any]:
    """Return peer, tag and what came, if it is not what there was room for; or the cancelling."""
    if error:
        known = status.Get_source() != MPI.ANY_SOURCE  # It failed on this rank's message.
        return {"peer": status.Get_source(), "tag": status.Get_tag()} if known else {}
    if status.Is_cancelled():
        return {"error": CANCELLED}
    got_bytes = status.Get_count(MPI.BYTE)
    arrived: Infos = pickled(got_bytes)
    if room and room[0].payload_bytes == got_bytes:
        arrived = ()
    elif room and room[0].shape[0]:
        count = got_bytes * room[0].shape[0] // max(room[0].payload_bytes, 1)
        arrived = _values(count, room[0].dtype, got_bytes)
    return {"peer": status.Get_source(), "tag": status.Get_tag(), "outputs": arrived}


def _values(count: int, dtype: str, size: int) -> Infos:
    return (TensorInfo((count,), dtype, "cpu", size, size),)


def _parts(spec: Any) -> tuple[Any, int | Sequence[int] | None, Any]:
    """Return buffer, counts and type of what may be `buffer`, [buffer, type], [buffer, count, type],
    [buffer, counts, displacements, type] or [buffer, (counts, displacements), type]."""
    if not isinstance(spec, list | tuple):
        return spec, None, None
    buffer, *rest = spec
    has_type = rest and (isinstance(rest[-1], MPI.Datatype | str) or rest[-1] is None)
    datatype = rest.pop() if has_type else None
    counts = rest[0] if rest else None
    if isinstance(counts, tuple) and len(counts) == 2 and len(rest) == 1:
        counts = counts if isinstance(counts[0], int) else counts[0]
    return buffer, counts, datatype


def _type_of(buffer: Any, datatype: Any) -> tuple[int, str]:
    """Return the bytes of a value, and the name of its dtype."""
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    if datatype is not None:
        return datatype.Get_size(), _name(datatype.typestr)
    dtype = getattr(buffer, "dtype", None)
    if dtype is not None:
        return int(dtype.itemsize), str(dtype).removeprefix("torch.")
    view = memoryview(buffer)
    return view.itemsize, np.dtype(view.format).name


@cache
def _name(typestr: str) -> str:
    """Return "float64" of "f8", as numpy and torch call it; what neither has a name for is bytes."""
    return np.dtype(typestr).name if typestr[1:].isdigit() and typestr[0] in "fiucb" else "bytes"
