"""The calls of a communicator that are recorded: a table of their names, and one wrapper for all of them.

Collectives go by torch's names (all_reduce), so that one colour, one word and one rule hold for both. What MPI's
library sends inside is not seen: it chooses an algorithm, and does not say which.

A Python object's `send` is done in the two steps that mpi4py makes of it (pickle, send the bytes), so that its size is
known before it is under way, and nothing is pickled twice. What collectives pickle is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from dlearn.hooks.mpi import mpi_watch
from dlearn.hooks.mpi.mpi_payload import Infos, described, pickled
from dlearn.hooks.mpi.mpi_watch import Post, Request, Watch, ending, starting, watching

Method = Callable[..., Any]
Given = dict[str, Any]
"""The arguments of a call by MPI's names of its parameters."""

_RECV, _PROBE = ("buf", "source", "tag"), ("source", "tag", "status")
_BOTH = ("dest", "sendtag", "recvbuf", "source", "recvtag")
_REPLACE = ("buf", "dest", "sendtag", "source", "recvtag")

MESSAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Send", "Bsend", "Ssend", "Rsend"), ("buf", "dest", "tag")),
    **dict.fromkeys(("Isend", "Ibsend", "Issend", "Irsend"), ("buf", "dest", "tag")),
    **dict.fromkeys(("send", "bsend", "ssend", "isend", "ibsend", "issend"), ("obj", "dest", "tag")),
    **dict.fromkeys(("Recv", "recv"), (*_RECV, "status")),
    **dict.fromkeys(("Irecv", "irecv"), _RECV),
    "Sendrecv": ("sendbuf", *_BOTH, "status"),
    "Isendrecv": ("sendbuf", *_BOTH),
    "sendrecv": ("sendobj", *_BOTH, "status"),
    "Sendrecv_replace": (*_REPLACE, "status"),
    "Isendrecv_replace": _REPLACE,
    **dict.fromkeys(("Probe", "probe", "Iprobe", "iprobe"), _PROBE),
    # What these find is taken out of the line: they are where it is received.
    **dict.fromkeys(("Mprobe", "mprobe", "Improbe", "improbe"), _PROBE),
}
"""MPI's parameters of each call that sends (`dest`), receives or looks (`source`)."""
_PROBES, _LOOKS = ("probe", "iprobe"), ("iprobe", "improbe")


class CollectiveCall(NamedTuple):
    """Torch's name of a collective, MPI's parameters, and which side names one block for each rank."""

    op: str
    parameters: tuple[str, ...]
    blocks: str = ""
    """Of a count that stands alone: "send", "recv" or both have that much for each rank."""


_BUFFERS, _TO_ROOT = ("sendbuf", "recvbuf"), ("sendbuf", "recvbuf", "root")
_SUMMED, _SUMMED_TO_ROOT = ("sendbuf", "recvbuf", "op"), ("sendbuf", "recvbuf", "op", "root")

COLLECTIVES = {
    "Barrier": CollectiveCall("barrier", ()),
    "Bcast": CollectiveCall("broadcast", ("buf", "root")),
    "Gather": CollectiveCall("gather", _TO_ROOT, "recv"),
    "Gatherv": CollectiveCall("gather", _TO_ROOT),
    "Scatter": CollectiveCall("scatter", _TO_ROOT, "send"),
    "Scatterv": CollectiveCall("scatter", _TO_ROOT),
    "Allgather": CollectiveCall("all_gather", _BUFFERS, "recv"),
    "Allgatherv": CollectiveCall("all_gather_v", _BUFFERS),
    "Alltoall": CollectiveCall("all_to_all", _BUFFERS, "send recv"),
    "Alltoallv": CollectiveCall("all_to_all", _BUFFERS),
    "Alltoallw": CollectiveCall("all_to_all", ()),  # A type for each rank: how many bytes is not known.
    "Reduce": CollectiveCall("reduce", _SUMMED_TO_ROOT),
    "Allreduce": CollectiveCall("all_reduce", _SUMMED),
    "Reduce_scatter_block": CollectiveCall("reduce_scatter", _SUMMED, "send"),
    "Reduce_scatter": CollectiveCall("reduce_scatter", ("sendbuf", "recvbuf", "recvcounts", "op")),
    "Scan": CollectiveCall("scan", _SUMMED),
    "Exscan": CollectiveCall("exscan", _SUMMED),
    "Neighbor_allgather": CollectiveCall("neighbor_all_gather", _BUFFERS),
    "Neighbor_allgatherv": CollectiveCall("neighbor_all_gather_v", _BUFFERS),
    "Neighbor_alltoall": CollectiveCall("neighbor_all_to_all", _BUFFERS),
    "Neighbor_alltoallv": CollectiveCall("neighbor_all_to_all", _BUFFERS),
    "Neighbor_alltoallw": CollectiveCall("neighbor_all_to_all", ()),
}
"""Over buffers. Each may have a form that does not block (Ibcast), and one over objects (bcast, without `recvbuf`)."""


def recorded_methods(original: type[Any]) -> dict[str, Method]:
    """Return those that this class of mpi4py has."""
    posts: dict[str, tuple[tuple[str, ...], _Posting]] = {}
    for name, parameters in MESSAGES.items():
        posts[name] = parameters, partial(_messages, name)
    for name, form in COLLECTIVES.items():
        of_objects = tuple(each for each in form.parameters if each != "recvbuf")
        posts[name] = posts[f"I{name.lower()}"] = form.parameters, partial(_collective, form, True)
        posts[name.lower()] = of_objects, partial(_collective, form, False)
    made = {name: _recorded(original, name, *how) for name, how in posts.items() if hasattr(original, name)}
    return made | {name: _not_recorded(original, name) for name in dir(original) if name.endswith("_init")}


# The wrapper ----------------------------------------------------------------------------------------------------------

_Posting = Callable[[Any, Given, "bytes | None", Watch], "list[Post]"]
"""Reports that a call begins: of this communicator, with these arguments, and the object that it has pickled."""


def _recorded(original: type[Any], name: str, parameters: tuple[str, ...], post: _Posting) -> Method:
    """Make the method, reported by `post`: it ends as it returns, or one that does not block as its request does."""
    call = getattr(original, name)
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


# Sends, receives, probes ----------------------------------------------------------------------------------------------


def _messages(name: str, comm: Any, given: Given, data: bytes | None, watch: Watch) -> list[Post]:
    """The send, then the recv or the look."""
    posts: list[Post] = []
    tag: Any
    dest: Any = given.get("dest")
    source: Any = given.get("source", MPI.ANY_SOURCE)
    if "dest" in MESSAGES[name] and _reaches(dest):
        tag = given.get("sendtag", given.get("tag", 0))
        tensors = described(_buffer(given, "sendbuf")) if data is None else pickled(len(data))
        posts.append(watch.point_to_point("send", comm, dest, tag, tensors))
    if "source" in MESSAGES[name] and source != MPI.PROC_NULL:
        tag = given.get("recvtag", given.get("tag", MPI.ANY_TAG))
        room = () if name.islower() else described(_buffer(given, "recvbuf"))
        op = "probe" if name.lower() in _PROBES else "recv"
        posts.append(watch.point_to_point(op, comm, source, tag, room))
    return posts


def _buffer(given: Given, name: str) -> Any:
    return given.get(name, given.get("buf"))


def _reaches(dest: Any) -> bool:
    """No message is sent to nobody (PROC_NULL)."""
    return dest is not None and dest != MPI.PROC_NULL


# Collectives ----------------------------------------------------------------------------------------------------------


def _collective(
    form: CollectiveCall, buffers: bool, comm: Any, given: Given, _: bytes | None, watch: Watch
) -> list[Post]:
    known = buffers and form.parameters
    inputs, outputs = _gives_and_gets(comm, form, given) if known else ((), ())
    return [watch.collective(form.op, comm, _root(form, given), inputs, outputs)]


def _root(form: CollectiveCall, given: Given) -> int | None:
    return int(given.get("root", 0)) if "root" in form.parameters else None


def _gives_and_gets(comm: Any, form: CollectiveCall, given: Given) -> tuple[Infos, Infos]:
    """What this rank gives, and what it gets; an operation in place has the first only."""
    is_root = _root(form, given) in (None, comm.Get_rank())
    if form.op == "broadcast":
        data = described(given.get("buf"))
        return (data, ()) if is_root else ((), data)
    inputs, outputs = (
        described(given.get(f"{side}buf"), blocks=comm.Get_size() if side in form.blocks else 1)
        for side in ("send", "recv")
    )
    if form.op == "scatter":
        return inputs if is_root else (), outputs
    if form.op in ("gather", "reduce") and not is_root:
        return inputs, ()
    in_place = given.get("sendbuf") is MPI.IN_PLACE
    return (outputs, ()) if in_place and form.op != "gather" else (inputs, outputs)
