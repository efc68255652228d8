"""The names in mpi4py's module that are replaced while a recording is on, and the communicators that stand there.

A communicator that is made of a recorded one is recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo
from dlearn.hooks.mpi import mpi_watch
from dlearn.hooks.mpi.mpi_calls import Method, recorded_methods
from dlearn.hooks.mpi.mpi_watch import Request, Watch, made_name, name_of, standing_class, watching, world_ranks
from dlearn.hooks.patches import Patches

COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF
"""mpi4py's own. (Whoever holds them can pickle them while ours stand in their place: pickle looks for them by name.)"""


def replace(emit: Emit) -> Undo:
    """Until the returned function is called. SetupError if another recording is at it."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    if MPI.Is_finalized():
        return lambda: None
    watch = mpi_watch.active = Watch(emit)
    patches = Patches()
    patches.callback(_stop, watch)
    for name, ours in (COMMS | {"Request": Request}).items():
        patches.replace(MPI, name, partial(_instead, ours))
    if MPI.Is_initialized():
        _put_comms(patches)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI itself; before that there are no communicators.
        for name in ("Init", "Init_thread"):
            patches.replace(MPI, name, partial(partial, _begin, patches))
    return patches.close


def _instead(ours: Any, _: Any) -> Any:
    return ours


def _stop(watch: Watch) -> None:
    mpi_watch.active = None
    watch.close()


def _put_comms(patches: Patches) -> None:
    for name, comm in (("COMM_WORLD", COMM_WORLD), ("COMM_SELF", COMM_SELF)):
        patches.replace(MPI, name, partial(_instead, COMMS["Intracomm"](comm)))


def _begin(patches: Patches, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_comms(patches)
    return answer


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
