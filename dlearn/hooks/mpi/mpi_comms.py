"""The recording classes of communicators, and the communicators that are made of one: they are recorded, too."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dlearn.hooks.mpi.mpi_calls import Method, recorded_methods
from dlearn.hooks.mpi.mpi_watch import made_name, name_of, standing_class, watching, world_ranks


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
