"""The names in mpi4py's module that are replaced while a recording is on: their calls are reported.

Calls are found by their signatures, and one wrapper serves all. Of rare ones (persistent and
partitioned requests, collectives of neighbours, windows) only the name is reported. Collectives
have torch's names. A Python object is sent in mpi4py's own two steps (pickle, send the bytes), so
that its size is known before it is sent; the size of what collectives pickle is not known.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from mpi4py import MPI

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo
from dlearn.hooks.callers import class_name
from dlearn.hooks.mpi import mpi_watch
from dlearn.hooks.mpi.mpi_watch import Infos, Post, Watch, described, world_ranks
from dlearn.hooks.patches import Patches, ended, guarded

Method = Callable[..., Any]
Given = dict[str, Any]  # The arguments of a call by mpi4py's names of its parameters.
Form = dict[str, str]  # mpi4py's parameters of a call, and how it writes their types.

COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF
"""mpi4py's own. (A program that holds them can pickle them meanwhile: pickle looks for the names.)"""


def replace(emit: Emit) -> Undo:
    """Replace them until the returned function is called. SetupError if another recording does."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    if MPI.Is_finalized():
        return lambda: None
    mpi_watch.active = Watch(emit)
    patches = Patches()
    patches.callback(mpi_watch.stop)
    for name in CLASSES:
        patches.replace(MPI, name, lambda original: CLASSES[original.__name__])
    if MPI.Is_initialized():
        _put_roots(patches)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI: there are no communicators yet.
        for name in ("Init", "Init_thread"):
            patches.replace(MPI, name, partial(partial, _begin, patches))
    return patches.close


def _put_roots(patches: Patches) -> None:
    for name in ("COMM_WORLD", "COMM_SELF"):
        patches.replace(MPI, name, CLASSES["Intracomm"])


def _begin(patches: Patches, init: Method, *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_roots(patches)
    return answer


# Which calls are recorded, and how ----------------------------------------------------------------

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
}
"""mpi4py's name in small letters (over objects it is written so, over buffers Bcast and Ibcast), and torch's."""
_LOOKS = ("iprobe", "improbe")
"""They do not wait, and are calls only if they have found something. (Improbe also receives it.)"""


def recorded_methods(original: type[Any]) -> dict[str, Method]:
    """Make the recording method of each call of this class that sends or receives."""
    methods = {}
    for name in dir(original):
        if callable(getattr(original, name)) and not name.startswith("_"):
            parameters = inspect.signature(getattr(original, name)).parameters.values()
            form = {each.name: str(each.annotation) for each in parameters if each.name != "self"}
            report = _report_of(name, form)
            if report is not None:
                methods[name] = _recorded(original, name, form, report)
    return methods


_Report = Callable[[Any, Given, "bytes | None", Watch], "list[Post]"]
"""Reports that a call begins: of this object, with these arguments, and the object that it has pickled."""


def _report_of(name: str, form: Form) -> _Report | None:
    op = COLLECTIVES.get(name.lower(), COLLECTIVES.get(name.removeprefix("I")))
    if name.endswith("_init") or "neighbor" in name.lower() or "target_rank" in form:
        return lambda comm, given, data, watch: watch.other(name)
    if op is not None:
        return partial(_collective, op, form)
    if {"dest", "source"} & form.keys():
        return partial(_messages, name, form)
    return None


def _recorded(original: type[Any], name: str, form: Form, report: _Report) -> Method:
    """Make the method: its call is over as it returns, or, of one that does not block, as its request is."""
    call, parameters = getattr(original, name), tuple(form)
    looks, pickles = name.lower() in _LOOKS, name.islower() and "dest" in form
    has_request = name[0] in "iI" and not looks

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = mpi_watch.active
        if watch is None:
            return call(self, *args, **kwargs)
        run: Callable[[], Any] = partial(call, self, *args, **kwargs)
        status, data = None, None
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if "status" in form:
            status = given["status"] = given.get("status") or MPI.Status()
            run = partial(call, self, **given)
        if pickles and _reaches(given.get("dest")):
            data = MPI.pickle.dumps(given.get(parameters[0]))
            run = partial(_send_pickled, original, name, self, data, given)
        if looks:
            message = run()
            if not message:
                return message
            run = lambda: message  # noqa: E731
        posts = guarded(watch.emit, "a call of mpi4py", report, self, given, data, watch) or []
        answer = _made(posts, run, by="return", status=status)
        if has_request and posts:
            answer = CLASSES["Request"](answer)
            answer.posts = posts
            return answer
        for post in posts:
            post(by="return", status=status)
        return answer

    return method


def _made(posts: Sequence[Post], run: Callable[[], Any], *, by: str, status: Any = None) -> Any:
    """Make a call; if it raises, that is the end of these.

    Only of a message that was too long has MPI filled the `status`: its rank and its tag.
    """
    try:
        return run()
    except BaseException as error:
        too_long = isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE
        for post in posts:
            post(by=by, status=status if too_long else None, error=class_name(error))
        raise


def _send_pickled(original: type[Any], name: str, comm: Any, data: bytes, given: Given) -> Any:
    spec = [data, MPI.BYTE]
    if name != "sendrecv":
        return getattr(original, name.capitalize())(comm, spec, given["dest"], given.get("tag", 0))
    request = original.Isend(comm, spec, given["dest"], given.get("sendtag", 0))
    source, tag = given.get("source", MPI.ANY_SOURCE), given.get("recvtag", MPI.ANY_TAG)
    got = original.recv(comm, given.get("recvbuf"), source, tag, given["status"])
    request.Wait()
    return got


# What is reported ---------------------------------------------------------------------------------


def _messages(name: str, form: Form, comm: Any, given: Given, data: bytes | None, watch: Watch) -> list[Post]:
    posts: list[Post] = []
    dest: Any = given.get("dest")
    source: Any = given.get("source", MPI.ANY_SOURCE)
    tag: Any
    if "dest" in form and _reaches(dest):
        buffer, tag = given.get("sendbuf", given.get("buf")), given.get("sendtag", given.get("tag", 0))
        tensors = described(buffer) if data is None else mpi_watch.pickled(len(data))
        posts.append(watch.point_to_point("send", comm, dest, tag, tensors))
    if "source" in form and source != MPI.PROC_NULL:
        buffer, tag = given.get("recvbuf", given.get("buf")), given.get("recvtag", given.get("tag", MPI.ANY_TAG))
        room = () if name.islower() else described(buffer)
        op = "probe" if name.lower() in ("probe", "iprobe") else "recv"
        posts.append(watch.point_to_point(op, comm, source, tag, room))
    return posts


def _reaches(dest: Any) -> bool:
    """Return whether a message is sent: to PROC_NULL none is."""
    return dest is not None and dest != MPI.PROC_NULL


def _collective(op: str, form: Form, comm: Any, given: Given, _: bytes | None, watch: Watch) -> list[Post]:
    root = int(given.get("root", 0)) if "root" in form else None
    types = " ".join(form.values())
    # Over objects, and where each rank has a type of its own (Alltoallw), the bytes are not known.
    known = "BufSpec" in types and "BufSpecW" not in types
    inputs, outputs = _gives_and_gets(op, form, root, comm, given) if known else ((), ())
    return [watch.collective(op, comm, root, inputs, outputs)]


def _gives_and_gets(op: str, form: Form, root: int | None, comm: Any, given: Given) -> tuple[Infos, Infos]:
    """Describe what this rank gives, and what it gets; an operation in place has the first only."""
    is_root = root in (None, comm.Get_rank())
    if op == "broadcast":
        data = described(given.get("buf"))
        return (data, ()) if is_root else ((), data)

    def data_of(name: str) -> Infos:
        # "BufSpecB": a count that stands alone is that of each rank's block.
        blocks = comm.Get_size() if form[name].startswith("BufSpecB") else 1
        return described(given.get(name), blocks=blocks)

    inputs, outputs = data_of("sendbuf"), data_of("recvbuf")
    if op == "scatter":
        return inputs if is_root else (), outputs
    if op in ("gather", "reduce") and not is_root:
        return inputs, ()
    in_place = given.get("sendbuf") is MPI.IN_PLACE
    return (outputs, ()) if in_place and op != "gather" else (inputs, outputs)


# Requests -----------------------------------------------------------------------------------------

_WAITS = ("Wait", "Test", "Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome")
"""Each also over objects, in small letters."""


def _waiting(name: str) -> Any:
    """Make the method of this name, for one or several requests; it reports their ends."""
    call, kind = getattr(MPI.Request, name), name.lower()
    many, alone = kind.endswith(("all", "some")), kind in ("wait", "test")
    parameters = ("requests", "statuses" if many else "status")

    def method(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        asked, status = given["requests"], given.get(parameters[1])
        if status is None:
            status = [] if many else MPI.Status()
        # Each stands for one call, of Isendrecv for two, one of mpi4py's own for none.
        posts = [getattr(request, "posts", ()) for request in ([asked] if alone else asked)]
        statuses: Any = status if many else [status]
        its_status = status if alone else None
        answer = _made([*chain(*posts)], partial(call, asked, status), by="wait", status=its_status)
        over = _over(kind, answer, len(posts))
        for index, its_status in zip(over, statuses, strict=False):
            for post in posts[index]:
                post(by="wait", status=its_status)
        return answer

    return method if alone else staticmethod(method)


def _over(kind: str, answer: Any, count: int) -> Iterable[int]:
    """Return the indices of the requests that are over, which mpi4py may answer with objects."""
    if kind in ("wait", "waitall"):
        return range(count)
    over = answer[0] if isinstance(answer, tuple) else answer
    if kind.endswith("some"):
        return over or ()
    if kind.endswith("any"):
        return () if over == MPI.UNDEFINED else (over,)
    return range(count if over else 0)


# Communicators ------------------------------------------------------------------------------------

_MAKERS = (
    *("Dup", "Dup_with_info", "Clone", "Idup", "Idup_with_info", "Split", "Split_type", "Create", "Create_group"),
    *("Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent", "Sub"),
)


def _new_comm(original: type[Any], name: str) -> Method:
    call = getattr(original, name)

    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = mpi_watch.active
        if watch is None:
            return call(self, *args, **kwargs)
        number = None
        if not name.startswith("I") and name != "Create_group":  # All members wait.
            number = guarded(watch.emit, name, watch.meeting, name, self)
        with ended(watch.emit, number):
            made = call(self, *args, **kwargs)
        if isinstance(made, tuple):  # With the request of Idup.
            return (_named(self, name, made[0]), *made[1:])
        return _named(self, name, made)

    return make


def _named(parent: Any, how: str, comm: Any) -> Any:
    """Record this one, too; a communicator between two groups (Intercomm) is not."""
    if mpi_watch.active is None or comm == MPI.COMM_NULL or not hasattr(type(comm), "Create_group"):
        return comm
    made = comm if hasattr(comm, "mpi4py_class") else CLASSES[type(comm).__name__](comm)  # Dup keeps the class.
    above = world_ranks(parent)
    members = above if how.startswith("I") else world_ranks(comm)  # One of Idup is not ready yet.
    made.name_in_trace = mpi_watch.made_name(f"{mpi_watch.name_of(parent)}.{how}", above, members)
    return made


# Recording classes --------------------------------------------------------------------------------


class _StandingClass(type):
    """The metaclass of a class that replaces mpi4py's, and has its instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance), cls)

    def __subclasscheck__(cls, other: type) -> bool:
        own = cls.__dict__.get("mpi4py_class")
        return issubclass(other, own) if own is not None else super().__subclasscheck__(other)


class Standing:
    """Add to mpi4py's class what is remembered of a communicator or a request: its name, its calls."""

    mpi4py_class: type[Any]

    def __new__(cls, given: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, given)  # type: ignore[call-arg]
        made.__dict__.update(getattr(given, "__dict__", {}))
        return made

    def __reduce__(self) -> Any:
        """COMM_WORLD and COMM_SELF travel as their names."""
        root = next((name for name in ("COMM_WORLD", "COMM_SELF") if getattr(MPI, name) is self), None)
        return root or super().__reduce__()


def _standing_class(name: str) -> Any:
    original = getattr(MPI, name)
    methods = recorded_methods(original)
    if issubclass(original, MPI.Comm):
        methods |= {maker: _new_comm(original, maker) for maker in _MAKERS if hasattr(original, maker)}
    if original is MPI.Request:
        methods = {method: _waiting(method) for name in _WAITS for method in (name, name.lower())}
    # By its module pickle finds COMM_WORLD, which travels as a name.
    facts = {"mpi4py_class": original, "__module__": "mpi4py.MPI", **methods}
    return _StandingClass(name, (Standing, original), facts)


COMMS = ("Intracomm", "Cartcomm", "Graphcomm", "Distgraphcomm")
CLASSES = {name: _standing_class(name) for name in (*COMMS, "Request", "Win")}
