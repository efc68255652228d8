"""Sends, receives, probes and new communicators: the calls of a communicator, but for the collectives.

A Python object's `send` is done in the two steps that mpi4py makes of it (pickle, send the bytes), so that its size is
known before it is under way, and nothing is pickled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from dlearn.hooks.mpi_payload import described, pickled
from dlearn.hooks.mpi_watch import Post, ending, made_name, name_of, watching, world_ranks

Method = Callable[..., Any]

_RECV = ("buf", "source", "tag", "status")
_BOTH = ("sendbuf", "dest", "sendtag", "recvbuf", "source", "recvtag", "status")
_REPLACE = ("buf", "dest", "sendtag", "source", "recvtag", "status")
_PROBE = ("source", "tag", "status")


class CommCalls:
    """What the recording classes of communicators have in common; their methods are made by the tables below."""

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


def comm_methods(original: type[Any]) -> dict[str, Method]:
    """Those that this class of mpi4py has."""
    made: dict[str, Method] = {}
    for mode in ("send", "bsend", "ssend", "rsend"):
        names = {mode.capitalize(): _send, f"I{mode}": _isend, f"{mode.capitalize()}_init": _send_init}
        names |= {mode: _send_object, f"i{mode}": _isend_object}
        made |= {name: make(original, name) for name, make in names.items() if hasattr(original, name)}
    others = {"Recv": _recv, "recv": _recv, "Irecv": _irecv, "irecv": _irecv, "Recv_init": _recv_init}
    others |= {"Sendrecv": _sendrecv, "Sendrecv_replace": _sendrecv_replace, "sendrecv": _sendrecv_object}
    others |= {"Isendrecv": _isendrecv, "Isendrecv_replace": _isendrecv_replace}
    others |= dict.fromkeys(("Probe", "probe", "Iprobe", "iprobe"), _probe)
    others |= dict.fromkeys(("Mprobe", "mprobe", "Improbe", "improbe"), _matched_probe)
    others |= dict.fromkeys(_MAKERS, _new_comm)
    return made | {name: make(original, name) for name, make in others.items() if hasattr(original, name)}


def bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def standing(kind: str, made: Any) -> Any:
    """What mpi4py has made, as an object of the class that stands in the place of its own."""
    from dlearn.hooks.mpi_names import STANDING

    return STANDING[kind](made)


# Sends ----------------------------------------------------------------------------------------------------------------


def _posted_send(comm: Any, tensors: Any, dest: Any, tag: int) -> Post | None:
    """No message is sent to nobody (PROC_NULL)."""
    if dest is None or dest == MPI.PROC_NULL:
        return None
    return watching(lambda watch: watch.point_to_point("send", comm, dest, tag, tensors()))


def _given(names: Sequence[str], args: Any, kwargs: Any) -> tuple[Any, Any, int]:
    given = bound(names, args, kwargs)
    return given.get(names[0]), given.get("dest"), given.get("tag", 0)


def _send(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        buf, dest, tag = _given(("buf", "dest", "tag"), args, kwargs)
        post = _posted_send(self, lambda: described(buf), dest, tag)
        return ending([post], lambda: call(self, *args, **kwargs))

    return send


def _isend(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        buf, dest, tag = _given(("buf", "dest", "tag"), args, kwargs)
        post = _posted_send(self, lambda: described(buf), dest, tag)
        return begun([post], lambda: call(self, *args, **kwargs))

    return send


def begun(posts: Sequence[Post | None], run: Callable[[], Any]) -> Any:
    """Make a non-blocking call; the request that it gives back tells the end."""
    try:
        request = run()
    except BaseException:
        ending(posts, _raise)
        raise
    if not any(posts):
        return request
    request = standing("Request", request)
    request.posts = posts
    return request


def _raise() -> None:
    raise


def _send_object(original: type[Any], name: str) -> Method:
    call, send_bytes = getattr(original, name), getattr(original, name.capitalize())

    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        obj, dest, tag = _given(("obj", "dest", "tag"), args, kwargs)
        if dest is None or dest == MPI.PROC_NULL or watching(lambda watch: True) is None:
            return call(self, *args, **kwargs)
        data = MPI.pickle.dumps(obj)
        post = _posted_send(self, lambda: pickled(len(data)), dest, tag)
        return ending([post], lambda: send_bytes(self, [data, MPI.BYTE], dest, tag))

    return send


def _isend_object(original: type[Any], name: str) -> Method:
    call, send_bytes = getattr(original, name), getattr(original, name.capitalize())

    def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        obj, dest, tag = _given(("obj", "dest", "tag"), args, kwargs)
        if dest is None or dest == MPI.PROC_NULL or watching(lambda watch: True) is None:
            return call(self, *args, **kwargs)
        data = MPI.pickle.dumps(obj)
        post = _posted_send(self, lambda: pickled(len(data)), dest, tag)
        return begun([post], lambda: send_bytes(self, [data, MPI.BYTE], dest, tag))

    return send


# Receives -------------------------------------------------------------------------------------------------------------


def _posted_recv(comm: Any, given: dict[str, Any], *, tag: str = "tag", pickles: bool = False) -> Post | None:
    source = given.get("source", MPI.ANY_SOURCE)
    if source == MPI.PROC_NULL:
        return None
    room = None if pickles else given.get("recvbuf", given.get("buf"))
    return watching(
        lambda watch: watch.point_to_point("recv", comm, source, given.get(tag, MPI.ANY_TAG), described(room))
    )


def _recv(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def recv(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(_RECV, args, kwargs)
        status = given["status"] = given.get("status") or MPI.Status()
        post = _posted_recv(self, given, pickles=name == "recv")
        return ending([post], lambda: call(self, **given), status)

    return recv


def _irecv(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def recv(self: Any, *args: Any, **kwargs: Any) -> Any:
        post = _posted_recv(self, bound(_RECV, args, kwargs), pickles=name == "irecv")
        return begun([post], lambda: call(self, *args, **kwargs))

    return recv


# Both at once ---------------------------------------------------------------------------------------------------------


def _posted_both(comm: Any, given: dict[str, Any], buffer: str, *, sends: Any = None) -> list[Post | None]:
    """The send, then the recv."""
    dest, tag = given.get("dest"), given.get("sendtag", 0)
    send = _posted_send(comm, sends or (lambda: described(given.get(buffer))), dest, tag)
    return [send, _posted_recv(comm, given, tag="recvtag", pickles=sends is not None)]


def _sendrecv(original: type[Any], name: str) -> Method:
    call, names = getattr(original, name), _BOTH if name == "Sendrecv" else _REPLACE

    def sendrecv(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(names, args, kwargs)
        status = given["status"] = given.get("status") or MPI.Status()
        return ending(_posted_both(self, given, names[0]), lambda: call(self, **given), status)

    return sendrecv


def _isendrecv(original: type[Any], name: str) -> Method:
    call, names = getattr(original, name), _BOTH if name == "Isendrecv" else _REPLACE

    def sendrecv(self: Any, *args: Any, **kwargs: Any) -> Any:
        posts = _posted_both(self, bound(names, args, kwargs), names[0])
        return begun(posts, lambda: call(self, *args, **kwargs))

    return sendrecv


_sendrecv_replace, _isendrecv_replace = _sendrecv, _isendrecv


def _sendrecv_object(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def sendrecv(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(("sendobj", *_BOTH[1:]), args, kwargs)
        dest, tag = given.get("dest"), given.get("sendtag", 0)
        if dest is None or dest == MPI.PROC_NULL or watching(lambda watch: True) is None:
            return call(self, *args, **kwargs)
        data, status = MPI.pickle.dumps(given.get("sendobj")), given.get("status") or MPI.Status()
        posts = _posted_both(self, given, "sendobj", sends=lambda: pickled(len(data)))

        def run() -> Any:
            request = original.Isend(self, [data, MPI.BYTE], dest, tag)
            source, recvtag = given.get("source", MPI.ANY_SOURCE), given.get("recvtag", MPI.ANY_TAG)
            got = original.recv(self, given.get("recvbuf"), source, recvtag, status)
            request.Wait()
            return got

        return ending(posts, run, status)

    return sendrecv


# Persistent requests --------------------------------------------------------------------------------------------------


def _send_init(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        buf, dest, tag = _given(("buf", "dest", "tag"), args, kwargs)
        return persistent(call(self, *args, **kwargs), lambda: [_posted_send(self, lambda: described(buf), dest, tag)])

    return init


def _recv_init(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(_RECV, args, kwargs)
        return persistent(call(self, *args, **kwargs), lambda: [_posted_recv(self, given)])

    return init


def persistent(request: Any, post: Callable[[], Sequence[Post | None]]) -> Any:
    made = standing("Prequest", request)
    made.post = post
    return made


# Probes ---------------------------------------------------------------------------------------------------------------


def _probe(original: type[Any], name: str) -> Method:
    """A look that waits is an event from its begin; one that does not wait is one only if it has found something."""
    call, waits = getattr(original, name), name in ("Probe", "probe")

    def probe(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(_PROBE, args, kwargs)
        status = given["status"] = given.get("status") or MPI.Status()
        post = _posted_probe(self, given) if waits else None
        found = ending([post], lambda: call(self, **given), status)
        if found and not waits and (late := _posted_probe(self, given)) is not None:
            late.ended(by="return", status=status)
        return found

    return probe


def _matched_probe(original: type[Any], name: str) -> Method:
    """What is found is taken out of the line here, so here its receive has its place; it ends when it is received."""
    call, waits = getattr(original, name), name in ("Mprobe", "mprobe")

    def probe(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(_PROBE, args, kwargs)
        status = given["status"] = given.get("status") or MPI.Status()
        post = _posted_probe(self, given) if waits else None
        message = ending([post], lambda: call(self, **given), status)
        if message is None or status.Get_source() == MPI.PROC_NULL:
            return message
        where = {"source": status.Get_source(), "tag": status.Get_tag()}
        taken = standing("Message", message)
        taken.posts = [_posted_recv(self, where)]
        return taken

    return probe


def _posted_probe(comm: Any, given: dict[str, Any]) -> Post | None:
    source = given.get("source", MPI.ANY_SOURCE)
    if source == MPI.PROC_NULL:
        return None
    return watching(lambda watch: watch.probe(comm, source, given.get("tag", MPI.ANY_TAG)))


# New communicators ----------------------------------------------------------------------------------------------------

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
    made = comm if hasattr(comm, "mpi4py_class") else standing(type(comm).__name__, comm)  # Dup keeps the class.
    above = world_ranks(parent)
    members = above if how.startswith("I") else world_ranks(comm)  # One of Idup is not ready yet.
    made.name_in_trace = made_name(f"{name_of(parent)}.{how}", above, members)
    return made
