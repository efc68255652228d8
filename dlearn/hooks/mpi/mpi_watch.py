"""What the recording classes of mpi4py report to: calls that begin, and their ends, which a request may tell."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from mpi4py import MPI

from dlearn.hooks import Emit, gate
from dlearn.hooks.callers import caller
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, GroupFact, PointToPoint, TensorInfo
from dlearn.trace.mpi_facts import CANCELLED, PICKLED, Probe

Result = TypeVar("Result")

BACKEND = "mpi4py"
NAMES_KEPT = 40
"""Characters of a list of ranks in the name of a communicator; a longer one is cut, and counted."""


class Post:
    """A call that has begun. Whoever sees its end says so, once; if nobody does, it is not observed."""

    def __init__(self, watch: Watch, number: int, *, room: Infos = (), receives: bool = False) -> None:
        self._watch, self.number = watch, number
        self._room, self._receives = room, receives
        watch.open[number] = self

    def ended(self, *, by: str, status: Any = None, error: str = "") -> None:
        """`status` is MPI's, which says who sent what was received, and how much it is."""
        watch = self._watch
        if watch.open.pop(self.number, None) is None:
            return
        facts: dict[str, Any] = {}
        try:
            if self._receives and status is not None and not error:
                if status.Is_cancelled():
                    error = CANCELLED
                else:
                    came = received(self._room, status.Get_count(MPI.BYTE))
                    facts = {"peer": status.Get_source(), "tag": status.Get_tag(), "outputs": came}
        except Exception as failure:
            watch.emit.failed("the end of a receive", failure)
        watch.emit.end(self.number, by=by, error=error, **facts)


class Watch:
    """A recording, as the recording classes see it."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.open: dict[int, Post] = {}
        self._known: set[str] = set()
        self._collectives: defaultdict[str, Iterator[int]] = defaultdict(partial(itertools.count, 1))
        self._p2ps: defaultdict[str, Iterator[int]] = defaultdict(partial(itertools.count, 1))

    def point_to_point(self, op: str, comm: Any, peer: int, tag: int, tensors: Infos) -> Post:
        """A send, a recv, or a probe, which takes nothing out of the line."""
        group, known = self._group(comm), peer if peer != MPI.ANY_SOURCE else None
        if op == "probe":
            return Post(self, self._event(Probe, group=group, peer=known, tag=tag), receives=True)
        _wait_at_gate(op, None if known is None else world_ranks(comm)[known], tensors)
        seq = next(self._p2ps[group])
        number = self._event(PointToPoint, op=op, group=group, peer=known, tag=tag, seq=seq, tensors=tensors)
        return Post(self, number, room=tensors, receives=op == "recv")

    def collective(self, op: str, comm: Any, root: int | None, inputs: Infos, outputs: Infos) -> Post:
        group = self._group(comm)
        _wait_at_gate(op, None, inputs)
        seq = next(self._collectives[group])
        facts = {"root": root, "inputs": inputs, "outputs": outputs}
        return Post(self, self._event(Collective, op=op, group=group, seq=seq, **facts))

    def _event(self, kind: type[Event], **facts: Any) -> int:
        made_by = caller(sys._getframe())
        return self.emit.event(kind, phase=made_by.phase, site=made_by.site, **facts)

    def _group(self, comm: Any) -> str:
        name = name_of(comm)
        if name not in self._known:
            self._known.add(name)
            self.emit.fact(
                GroupFact(
                    name=name,
                    backend=BACKEND,
                    rank=comm.Get_rank(),
                    size=comm.Get_size(),
                    ranks=world_ranks(comm),
                    default=name == "COMM_WORLD",
                )
            )
        return name


def _wait_at_gate(op: str, to: int | None, given: Infos) -> None:
    """Of a held job: mpi4py has not got the call yet. Of a `sendrecv` first the send waits, then the receive."""
    if gate.current is not None:
        gate.current.wait(op, to, sum(each.payload_bytes for each in given))


active: Watch | None = None
"""The recording that is on. The classes live on without one, as objects that the program holds."""


def stop() -> None:
    """End the recording: nobody has waited for what is open."""
    global active
    watch, active = active, None
    for post in list(watch.open.values()) if watch is not None else ():
        post.ended(by=NOT_OBSERVED)


def watching(what: Callable[[Watch], Result]) -> Result | None:
    """Report a call, if anybody records; what goes wrong in reporting never reaches the program."""
    watch = active
    if watch is None:
        return None
    try:
        return what(watch)
    except Exception as error:
        watch.emit.failed("a call of mpi4py", error)
        return None


def starting(posts: Sequence[Post], run: Callable[[], Result]) -> Result:
    """Make a call; if it raises, that is the end of what was posted."""
    try:
        return run()
    except BaseException as error:
        for post in posts:
            post.ended(by="return", error=error_name(error))
        raise


def ending(posts: Sequence[Post], run: Callable[[], Result], status: Any = None) -> Result:
    """Make a blocking call: its return is the end of what was posted."""
    result = starting(posts, run)
    for post in posts:
        post.ended(by="return", status=status)
    return result


def error_name(error: BaseException) -> str:
    return "MPI.Exception" if isinstance(error, MPI.Exception) else type(error).__name__


# Names of communicators -----------------------------------------------------------------------------------------------

_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def name_of(comm: Any) -> str:
    """The communicator's name in the trace, the same on all its members and no other's."""
    name = comm.__dict__.get("name_in_trace")
    if name is None:
        name = comm.name_in_trace = _root_name(comm) or made_name("Comm", (), world_ranks(comm))
    return str(name)


def made_name(how: str, parent: tuple[int, ...], members: tuple[int, ...]) -> str:
    """ "COMM_WORLD.Split(0,2)". All members have made the same communicators of just these members, in one order."""
    _made[how, members] += 1
    shown = "" if members == parent else f"({','.join(map(str, members))})"
    if len(shown) > NAMES_KEPT:
        shown = f"{shown[:NAMES_KEPT]}... {len(members)} ranks)"
    times = _made[how, members]
    return f"{how}{shown}" + (f" #{times}" if times > 1 else "")


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Of the members, in their order."""
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


# Recording classes ----------------------------------------------------------------------------------------------------


class _Standing(type):
    """Of a class that stands in the place of mpi4py's: what is an instance of that one passes for one of this."""

    def __instancecheck__(cls, instance: Any) -> bool:
        own = cls.__dict__.get("mpi4py_class")
        return isinstance(instance, own) if own is not None else super().__instancecheck__(instance)

    def __subclasscheck__(cls, other: type) -> bool:
        own = cls.__dict__.get("mpi4py_class")
        return issubclass(other, own) if own is not None else super().__subclasscheck__(other)


def standing_class(name: str, calls: type, methods: Mapping[str, Any]) -> Any:
    """Make the class that stands in the place of mpi4py's while a recording is on."""
    original = getattr(MPI, name)
    # By its module pickle finds COMM_WORLD, which travels as a name.
    return _Standing(name, (calls, original), {"mpi4py_class": original, "__module__": "mpi4py.MPI", **methods})


# Requests -------------------------------------------------------------------------------------------------------------

_NAMES = ("Wait", "Test", "Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome")
"""Each also over objects, in small letters."""


class RequestCalls:
    """Add to `Request` the calls that it stands for: one, or of Isendrecv two."""

    posts: Sequence[Post] = ()

    def __new__(cls, request: Any = None) -> Any:
        made = super().__new__(cls, request)  # type: ignore[call-arg]
        made.posts = getattr(request, "posts", ())
        return made


def _waiting(name: str) -> Any:
    """Return mpi4py's method of this name, or its class method for several requests; it tells which are over."""
    call, kind = getattr(MPI.Request, name), name.lower()
    many = kind.endswith(("all", "some"))
    places = "requests", "statuses" if many else "status"

    def method(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args, strict=False)) | kwargs
        asked, status = given["requests"], given.get(places[1])
        if status is None:
            status = [] if many else MPI.Status()
        statuses: Any = status if many else [status]
        requests = [asked] if kind in ("wait", "test") else asked
        try:
            answer = call(asked, status)
        except BaseException as error:
            for request in requests:
                _ended(request, error=error_name(error))
            raise
        for place, each in zip(_over(kind, answer, len(requests)), statuses, strict=False):
            _ended(requests[place], status=each)
        return answer

    return method if kind in ("wait", "test") else staticmethod(method)


def _over(kind: str, answer: Any, count: int) -> Iterable[int]:
    """The places of the requests that are over, as mpi4py answers; over objects these come behind."""
    if kind in ("wait", "waitall"):
        return range(count)
    told = answer[0] if isinstance(answer, tuple) else answer
    if kind in ("test", "testall"):
        return range(count if told else 0)
    if kind in ("waitany", "testany"):
        return () if told == MPI.UNDEFINED else (told,)
    return told or ()


def _ended(request: Any, **how: Any) -> None:
    for post in getattr(request, "posts", ()):
        post.ended(by="wait", **how)


_METHODS: dict[str, Callable[..., Any]] = {each: _waiting(each) for name in _NAMES for each in (name, name.lower())}
Request = standing_class("Request", RequestCalls, _METHODS)


# What travels: a buffer or [buffer, count, type] ----------------------------------------------------------------------


_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}

Infos = tuple[TensorInfo, ...]


def described(spec: Any, *, blocks: int = 1) -> Infos:
    """The data of one argument; none of None and IN_PLACE. Of a single count each of `blocks` ranks has that much."""
    if spec is None or spec is MPI.IN_PLACE:
        return ()
    buffer, counts, datatype = _parts(spec)
    item_bytes, dtype = _type_of(buffer, datatype)
    if counts is None:
        count = _bytes_of(buffer) // max(item_bytes, 1)
    else:
        count = counts * blocks if isinstance(counts, int) else sum(map(int, counts))
    return (TensorInfo((count,), dtype, "cpu", count * item_bytes, count * item_bytes),)


def received(room: Infos, got_bytes: int) -> Infos:
    """Of a receive that is over: what has come, if that is not what there was room for."""
    if room and room[0].payload_bytes == got_bytes:
        return ()
    known = room[0] if room and room[0].shape[0] else None
    if known is None:
        return pickled(got_bytes)
    count = got_bytes * known.shape[0] // max(known.payload_bytes, 1)
    return (TensorInfo((count,), known.dtype, "cpu", got_bytes, got_bytes),)


def pickled(count: int) -> Infos:
    """Python objects, as the bytes that pickle has made of them."""
    return (TensorInfo((count,), PICKLED, "cpu", count, count),)


def _parts(spec: Any) -> tuple[Any, int | Sequence[int] | None, Any]:
    """Buffer, counts, type of `buffer`, [buffer, type], [buffer, count, type], [buffer, counts, displacements, type] or
    [buffer, (counts, displacements), type]."""
    if not isinstance(spec, list | tuple):
        return spec, None, None
    buffer, *rest = spec
    datatype = rest.pop() if rest and (isinstance(rest[-1], MPI.Datatype | str) or rest[-1] is None) else None
    counts = rest[0] if rest else None
    if isinstance(counts, tuple) and len(counts) == 2 and len(rest) == 1 and not isinstance(counts[0], int):
        counts = counts[0]
    return buffer, counts, datatype


def _type_of(buffer: Any, datatype: Any) -> tuple[int, str]:
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    if datatype is not None:
        return datatype.Get_size(), _name(datatype.typestr)
    dtype = getattr(buffer, "dtype", None)
    if dtype is not None:
        return int(dtype.itemsize), str(dtype).removeprefix("torch.")
    view = memoryview(buffer)
    return view.itemsize, _name(MPI.Datatype.fromcode(view.format).typestr)


@cache
def _name(typestr: str) -> str:
    """ "f8" -> "float64", as numpy and torch call it; what neither has a name for is bytes."""
    kind, size = typestr[:1], typestr[1:]
    return f"{_KINDS[kind]}{int(size) * 8}" if kind in _KINDS and size.isdigit() else "bytes"


def _bytes_of(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes
