"""The names in mpi4py's module that are replaced while a recording is on: communicators whose calls are reported.

The calls are found by their signatures, and one wrapper serves all. A communicator that is made of a recorded one is
recorded, too.

Collectives go by torch's names (all_reduce), so that one colour, one word and one rule hold for both. What MPI's
library sends inside is not seen: it chooses an algorithm, and does not say which.

A Python object's `send` is done in the two steps that mpi4py makes of it (pickle, send the bytes), so that its size is
known before it is under way, and nothing is pickled twice. What collectives pickle is not known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo
from dlearn.hooks.mpi import mpi_watch
from dlearn.hooks.mpi.mpi_watch import (
    Infos,
    Post,
    Request,
    Watch,
    described,
    ending,
    made_name,
    name_of,
    pickled,
    standing_class,
    starting,
    watching,
    world_ranks,
)
from dlearn.hooks.patches import Patches

Method = Callable[..., Any]
Given = dict[str, Any]  # The arguments of a call by mpi4py's names of its parameters.
Form = dict[str, str]  # mpi4py's parameters of a call, and how it writes their types.

COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF
"""mpi4py's own. (Whoever holds them can pickle them while ours stand in their place: pickle looks for them by name.)"""


def replace(emit: Emit) -> Undo:
    """Until the returned function is called. SetupError if another recording is at it."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    if MPI.Is_finalized():
        return lambda: None
    mpi_watch.active = Watch(emit)
    patches = Patches()
    patches.callback(mpi_watch.stop)
    for name, ours in (COMMS | {"Request": Request}).items():
        patches.put(MPI, name, ours)
    if MPI.Is_initialized():
        _put_comms(patches)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI itself; before that there are no communicators.
        for name in ("Init", "Init_thread"):
            patches.replace(MPI, name, partial(partial, _begin, patches))
    return patches.close


def _put_comms(patches: Patches) -> None:
    for name, comm in (("COMM_WORLD", COMM_WORLD), ("COMM_SELF", COMM_SELF)):
        patches.put(MPI, name, COMMS["Intracomm"](comm))


def _begin(patches: Patches, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_comms(patches)
    return answer


# The calls of a communicator ------------------------------------------------------------------------------------------

COLLECTIVES = {
    "barrier": "barrier",
    "bcast": "broadcast",
    **dict.fromkeys(("gather", "gatherv"), "gather"),
    **dict.fromkeys(("scatter", "scatterv"), "scatter"),
    "allgather": "all_gather",
    "allgatherv": "all_gather_v",
    **dict.fromkeys(("alltoall", "alltoallv", "alltoallw"), "all_to_all"),
    "reduce": "reduce",
    "allreduce": "all_reduce",
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_block"), "reduce_scatter"),
    "scan": "scan",
    "exscan": "exscan",
    "neighbor_allgather": "neighbor_all_gather",
    "neighbor_allgatherv": "neighbor_all_gather_v",
    **dict.fromkeys(("neighbor_alltoall", "neighbor_alltoallv", "neighbor_alltoallw"), "neighbor_all_to_all"),
}
"""mpi4py's name in small letters (over objects it is written so, over buffers Bcast and Ibcast), and torch's."""
_PROBES, _LOOKS = ("probe", "iprobe"), ("iprobe", "improbe")
"""What Mprobe and its like find is taken out of the line: they are where it is received."""


def recorded_methods(original: type[Any]) -> dict[str, Method]:
    """Return those of this class of mpi4py: the collectives, what takes a `dest` (sends) or a `source` (receives)."""
    return dict(_recorded_methods(original))


def _recorded_methods(original: type[Any]) -> Iterator[tuple[str, Method]]:
    for name in dir(original):
        op = COLLECTIVES.get(name.lower(), COLLECTIVES.get(name.removeprefix("I")))
        if name.endswith("_init"):
            yield name, _not_recorded(original, name)
        elif op is not None:
            form = _form(original, name)
            yield name, _recorded(original, name, form, partial(_collective, op, form))
        elif callable(getattr(original, name)) and not name.startswith("_"):
            form = _form(original, name)
            if {"dest", "source"} & form.keys():
                yield name, _recorded(original, name, form, partial(_messages, name, form))


def _form(original: type[Any], name: str) -> Form:
    try:
        parameters = list(inspect.signature(getattr(original, name)).parameters.values())
    except ValueError:  # Of what Python itself has put there.
        return {}
    return {each.name: str(each.annotation) for each in parameters if each.name != "self"}


# The wrapper ----------------------------------------------------------------------------------------------------------

_Posting = Callable[[Any, Given, "bytes | None", Watch], "list[Post]"]
"""Reports that a call begins: of this communicator, with these arguments, and the object that it has pickled."""


def _recorded(original: type[Any], name: str, form: Form, post: _Posting) -> Method:
    """Make the method, reported by `post`: it ends as it returns, or one that does not block as its request does."""
    call, parameters = getattr(original, name), tuple(form)
    looks, pickles = name.lower() in _LOOKS, name.islower() and "dest" in parameters
    finish = _begun if name[0] in "iI" and not looks else ending

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, status, data = partial(call, self, *args, **kwargs), None, None
        if mpi_watch.active is None:
            return run()
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if "status" in parameters:
            status = given["status"] = given.get("status") or MPI.Status()
            run = partial(call, self, **given)
        if pickles and _reaches(given.get("dest")):
            data = MPI.pickle.dumps(given.get(parameters[0]))
            run = partial(_send_pickled, original, name, self, data, given)
        begins = partial(post, self, given, data)
        if not looks:
            return finish(watching(begins) or (), run, status)
        found = run()
        if found:  # A look that does not wait is an event only if it has found something.
            ending(watching(begins) or (), lambda: None, status)
        return found

    return method


def _begun(posts: Sequence[Post], run: Callable[[], Any], _: Any) -> Any:
    """Make a call that does not block; the request that it gives back tells the end."""
    request = starting(posts, run)
    if not posts:
        return request
    request = Request(request)
    request.posts = posts
    return request


def _send_pickled(original: type[Any], name: str, comm: Any, data: bytes, given: Given) -> Any:
    spec = [data, MPI.BYTE]
    if name != "sendrecv":
        return getattr(original, name.capitalize())(comm, spec, given["dest"], given.get("tag", 0))
    request = original.Isend(comm, spec, given["dest"], given.get("sendtag", 0))
    source, tag = given.get("source", MPI.ANY_SOURCE), given.get("recvtag", MPI.ANY_TAG)
    got = original.recv(comm, given.get("recvbuf"), source, tag, given["status"])
    request.Wait()
    return got


def _not_recorded(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if mpi_watch.active is not None:
            mpi_watch.active.emit.failed(f"{name} of mpi4py", NotImplementedError("persistent requests are not seen"))
        return call(self, *args, **kwargs)

    return method


# What is posted -------------------------------------------------------------------------------------------------------


def _messages(name: str, form: Form, comm: Any, given: Given, data: bytes | None, watch: Watch) -> list[Post]:
    """The send, then the receive or the look."""
    posts: list[Post] = []
    dest: Any = given.get("dest")
    source: Any = given.get("source", MPI.ANY_SOURCE)
    tag: Any = given.get("tag")
    if "dest" in form and _reaches(dest):
        tensors = described(_buffer(given, "sendbuf")) if data is None else pickled(len(data))
        posts.append(watch.point_to_point("send", comm, dest, given.get("sendtag", tag or 0), tensors))
    if "source" in form and source != MPI.PROC_NULL:
        room = () if name.islower() else described(_buffer(given, "recvbuf"))
        op = "probe" if name.lower() in _PROBES else "recv"
        any_tag = MPI.ANY_TAG if tag is None else tag
        posts.append(watch.point_to_point(op, comm, source, given.get("recvtag", any_tag), room))
    return posts


def _buffer(given: Given, name: str) -> Any:
    return given.get(name, given.get("buf"))


def _reaches(dest: Any) -> bool:
    """No message is sent to nobody (PROC_NULL)."""
    return dest is not None and dest != MPI.PROC_NULL


def _collective(op: str, form: Form, comm: Any, given: Given, _: bytes | None, watch: Watch) -> list[Post]:
    root = int(given.get("root", 0)) if "root" in form else None
    types = " ".join(form.values())
    # Over objects, and where each rank has a type of its own (Alltoallw), the bytes are not known.
    known = "BufSpec" in types and "BufSpecW" not in types
    inputs, outputs = _gives_and_gets(op, form, root, comm, given) if known else ((), ())
    return [watch.collective(op, comm, root, inputs, outputs)]


def _gives_and_gets(op: str, form: Form, root: int | None, comm: Any, given: Given) -> tuple[Infos, Infos]:
    """What this rank gives, and what it gets; an operation in place has the first only."""
    is_root = root in (None, comm.Get_rank())
    if op == "broadcast":
        data = described(given.get("buf"))
        return (data, ()) if is_root else ((), data)
    inputs, outputs = (
        # "BufSpecB": a count that stands alone is that of each rank's block.
        described(given.get(name), blocks=comm.Get_size() if _has_blocks(op, form[name]) else 1)
        for name in ("sendbuf", "recvbuf")
    )
    if op == "scatter":
        return inputs if is_root else (), outputs
    if op in ("gather", "reduce") and not is_root:
        return inputs, ()
    in_place = given.get("sendbuf") is MPI.IN_PLACE
    return (outputs, ()) if in_place and op != "gather" else (inputs, outputs)


def _has_blocks(op: str, written: str) -> bool:
    return written.startswith("BufSpecB") and not op.startswith("neighbor")


# Communicators --------------------------------------------------------------------------------------------------------


class CommCalls:
    """What the recording classes of communicators have in common, beside the calls of the table in `mpi_calls`."""

    mpi4py_class: type[Any]

    def __new__(cls, comm: Any = None) -> Any:
        made: Any = super().__new__(cls, comm)  # type: ignore[call-arg]
        if "name_in_trace" in getattr(comm, "__dict__", {}):
            made.name_in_trace = comm.name_in_trace
        return made

    def __reduce__(self) -> Any:
        """COMM_WORLD and COMM_SELF travel as their names."""
        root = next((name for name in ("COMM_WORLD", "COMM_SELF") if getattr(MPI, name) is self), None)
        return root or super().__reduce__()


_MAKERS = (
    *("Dup", "Dup_with_info", "Clone", "Idup", "Idup_with_info", "Split", "Split_type", "Create", "Create_group"),
    *("Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Sub"),
)


def _new_comm(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = call(self, *args, **kwargs)
        if isinstance(made, tuple):
            return (_named(self, name, made[0]), *made[1:])
        return _named(self, name, made)

    return make


def _named(parent: Any, how: str, comm: Any) -> Any:
    """Recorded, too, if the parent is; a communicator between two groups (Intercomm) is not."""
    if watching(lambda watch: True) is None or comm == MPI.COMM_NULL or not hasattr(type(comm), "Create_group"):
        return comm
    made = comm if hasattr(comm, "mpi4py_class") else COMMS[type(comm).__name__](comm)  # Dup keeps the class.
    above = world_ranks(parent)
    members = above if how.startswith("I") else world_ranks(comm)  # One of Idup is not ready yet.
    made.name_in_trace = made_name(f"{name_of(parent)}.{how}", above, members)
    return made


def _comm_class(name: str) -> Any:
    original = getattr(MPI, name)
    makers = {each: _new_comm(original, each) for each in _MAKERS if hasattr(original, each)}
    return standing_class(name, CommCalls, recorded_methods(original) | makers)


COMMS = {name: _comm_class(name) for name in ("Intracomm", "Cartcomm", "Graphcomm", "Distgraphcomm")}
