"""Collectives of mpi4py: over buffers and over objects, blocking, not blocking (Ibcast) and persistent (Bcast_init).

They go by torch's names (all_reduce), so that one colour, one word and one rule holds for both. What MPI's library
sends inside is not seen: it chooses an algorithm, and does not say which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpi4py import MPI

from dlearn.hooks.mpi_comms import Method, begun, bound, persistent
from dlearn.hooks.mpi_payload import Infos, described, pickled
from dlearn.hooks.mpi_watch import Post, Watch, ending, error_name, watching


class _Form(NamedTuple):
    """A collective: torch's name, MPI's parameters, and which side names one block for each rank."""

    op: str
    parameters: tuple[str, ...]
    blocks: str = ""
    """Of a count that stands alone: "send", "recv" or both have that much for each rank."""


_BUFFERS, _TO_ROOT = ("sendbuf", "recvbuf"), ("sendbuf", "recvbuf", "root")
_SUMMED, _SUMMED_TO_ROOT = ("sendbuf", "recvbuf", "op"), ("sendbuf", "recvbuf", "op", "root")

_FORMS = {
    "Barrier": _Form("barrier", ()),
    "Bcast": _Form("broadcast", ("buf", "root")),
    "Gather": _Form("gather", _TO_ROOT, "recv"),
    "Gatherv": _Form("gather", _TO_ROOT),
    "Scatter": _Form("scatter", _TO_ROOT, "send"),
    "Scatterv": _Form("scatter", _TO_ROOT),
    "Allgather": _Form("all_gather", _BUFFERS, "recv"),
    "Allgatherv": _Form("all_gather_v", _BUFFERS),
    "Alltoall": _Form("all_to_all", _BUFFERS, "send recv"),
    "Alltoallv": _Form("all_to_all", _BUFFERS),
    "Alltoallw": _Form("all_to_all", _BUFFERS),
    "Reduce": _Form("reduce", _SUMMED_TO_ROOT),
    "Allreduce": _Form("all_reduce", _SUMMED),
    "Reduce_scatter_block": _Form("reduce_scatter", _SUMMED, "send"),
    "Reduce_scatter": _Form("reduce_scatter", ("sendbuf", "recvbuf", "recvcounts", "op")),
    "Scan": _Form("scan", _SUMMED),
    "Exscan": _Form("exscan", _SUMMED),
    "Neighbor_allgather": _Form("neighbor_all_gather", _BUFFERS),
    "Neighbor_allgatherv": _Form("neighbor_all_gather_v", _BUFFERS),
    "Neighbor_alltoall": _Form("neighbor_all_to_all", _BUFFERS),
    "Neighbor_alltoallv": _Form("neighbor_all_to_all", _BUFFERS),
    "Neighbor_alltoallw": _Form("neighbor_all_to_all", _BUFFERS),
}

_OBJECTS = {
    "barrier": _Form("barrier", ()),
    "bcast": _Form("broadcast", ("obj", "root")),
    "gather": _Form("gather", ("sendobj", "root")),
    "scatter": _Form("scatter", ("sendobj", "root")),
    "allgather": _Form("all_gather", ("sendobj",)),
    "alltoall": _Form("all_to_all", ("sendobj",)),
    "reduce": _Form("reduce", ("sendobj", "op", "root")),
    "allreduce": _Form("all_reduce", ("sendobj", "op")),
    "scan": _Form("scan", ("sendobj", "op")),
    "exscan": _Form("exscan", ("sendobj", "op")),
    "neighbor_allgather": _Form("neighbor_all_gather", ("sendobj",)),
    "neighbor_alltoall": _Form("neighbor_all_to_all", ("sendobj",)),
}


def collective_methods(original: type[Any]) -> dict[str, Method]:
    """Those that this class of mpi4py has."""
    made: dict[str, Method] = {}
    for name, form in _FORMS.items():
        made[name] = _blocking(original, name, form)
        made[f"I{name.lower()}"] = _not_blocking(original, f"I{name.lower()}", form)
        made[f"{name}_init"] = _persistent(original, f"{name}_init", form)
    made |= {name: _over_objects(original, name, form) for name, form in _OBJECTS.items()}
    return {name: method for name, method in made.items() if hasattr(original, name)}


def _blocking(original: type[Any], name: str, form: _Form) -> Method:
    call = getattr(original, name, None)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        post = _posted(self, form, bound(form.parameters, args, kwargs))
        return ending([post], lambda: call(self, *args, **kwargs))  # type: ignore[misc]

    return collective


def _not_blocking(original: type[Any], name: str, form: _Form) -> Method:
    call = getattr(original, name, None)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        post = _posted(self, form, bound(form.parameters, args, kwargs))
        return begun([post], lambda: call(self, *args, **kwargs))  # type: ignore[misc]

    return collective


def _persistent(original: type[Any], name: str, form: _Form) -> Method:
    call = getattr(original, name, None)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(form.parameters, args, kwargs)
        return persistent(call(self, *args, **kwargs), lambda: [_posted(self, form, given)])  # type: ignore[misc]

    return collective


def _posted(comm: Any, form: _Form, given: dict[str, Any]) -> Post | None:
    def post(watch: Watch) -> Post:
        inputs, outputs = _gives_and_gets(comm, form, given)
        return watch.collective(form.op, comm, _root(form, given), inputs, outputs)

    return watching(post)


def _root(form: _Form, given: dict[str, Any]) -> int | None:
    return int(given.get("root", 0)) if "root" in form.parameters else None


def _gives_and_gets(comm: Any, form: _Form, given: dict[str, Any]) -> tuple[Infos, Infos]:
    """What this rank gives, and what it gets; an operation in place has the first only."""
    is_root = _root(form, given) in (None, comm.Get_rank())
    if form.op == "broadcast":
        data = described(given.get("buf"))
        return (data, ()) if is_root else ((), data)
    inputs, outputs = (_side(comm, form, given, side) for side in ("send", "recv"))
    if form.op == "scatter":
        return inputs if is_root else (), outputs
    if form.op in ("gather", "reduce") and not is_root:
        return inputs, ()
    in_place = given.get("sendbuf") is MPI.IN_PLACE
    return (outputs, ()) if in_place and form.op != "gather" else (inputs, outputs)


def _side(comm: Any, form: _Form, given: dict[str, Any], side: str) -> Infos:
    spec = given.get(f"{side}buf")
    if isinstance(spec, list | tuple) and spec and isinstance(spec[-1], list | tuple) and len(spec) > 2:
        return _of_types(spec)
    return described(spec, blocks=comm.Get_size() if side in form.blocks else 1)


def _of_types(spec: Any) -> Infos:
    """[buffer, counts, displacements, types] of Alltoallw: a type for each rank."""
    counts = spec[1][0] if isinstance(spec[1], tuple) else spec[1]
    types = spec[-1]
    return tuple(
        info for count, each in zip(counts, types, strict=True) for info in described([spec[0], int(count), each])
    )


def _over_objects(original: type[Any], name: str, form: _Form) -> Method:
    """Of objects the size is known when they are pickled: at the end, from mpi4py's own pickling."""
    call = getattr(original, name, None)

    def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bound(form.parameters, args, kwargs)
        post = watching(lambda watch: watch.collective(form.op, self, _root(form, given), (), ()))
        if post is None:
            return call(self, *args, **kwargs)  # type: ignore[misc]
        return _counted(post, lambda: call(self, *args, **kwargs))  # type: ignore[misc]

    return collective


def _counted(post: Post, run: Callable[[], Any]) -> Any:
    pickles = post.pickles
    pickles.begin()
    try:
        result = run()
    except BaseException as error:
        post.ended(by="return", error=error_name(error))
        raise
    inputs = pickled(pickles.given()) if pickles.given() else ()
    outputs = pickled(pickles.got()) if pickles.got() else ()
    post.ended(by="return", inputs=inputs, outputs=outputs)
    return result
