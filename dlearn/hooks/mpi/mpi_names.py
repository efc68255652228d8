"""The names in mpi4py's module that are replaced while a recording is on, and the classes that stand there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from mpi4py import MPI

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo
from dlearn.hooks.mpi import mpi_watch
from dlearn.hooks.mpi.mpi_comms import COMMS
from dlearn.hooks.mpi.mpi_requests import Request
from dlearn.hooks.mpi.mpi_watch import Watch

STANDING = {**COMMS, "Request": Request}
COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF
"""mpi4py's own. (Whoever holds them can pickle them while ours stand in their place: pickle looks for them by name.)"""


def replace(emit: Emit) -> Undo:
    """Until the returned function is called. SetupError if another recording is at it."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    if MPI.Is_finalized():
        return lambda: None
    watch = mpi_watch.active = Watch(emit)
    undo = ExitStack()
    undo.callback(_stop, watch)
    _put(STANDING, undo)
    if MPI.Is_initialized():
        _put_comms(undo)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI itself; before that there are no communicators.
        _put({name: partial(_begin, getattr(MPI, name), undo) for name in ("Init", "Init_thread")}, undo)
    return undo.close


def _put(ours: Mapping[str, Any], undo: ExitStack) -> None:
    for name, each in ours.items():
        undo.callback(_give_back, name, each, getattr(MPI, name))
        setattr(MPI, name, each)


def _give_back(name: str, ours: Any, before: Any) -> None:
    if getattr(MPI, name) is ours:  # Else the program has put its own there.
        setattr(MPI, name, before)


def _stop(watch: Watch) -> None:
    mpi_watch.active = None
    watch.close()


def _put_comms(undo: ExitStack) -> None:
    ours = STANDING["Intracomm"]
    _put({"COMM_WORLD": ours(COMM_WORLD), "COMM_SELF": ours(COMM_SELF)}, undo)


def _begin(init: Callable[..., Any], undo: ExitStack, *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_comms(undo)
    return answer
