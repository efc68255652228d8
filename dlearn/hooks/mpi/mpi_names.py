"""The names in mpi4py's module that are replaced while a recording is on, and the classes that stand there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    names = _MpiNames()
    names.put(STANDING)
    if MPI.Is_initialized():
        _put_comms(names)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI itself; before that there are no communicators.
        names.put({name: partial(_begin, getattr(MPI, name), names) for name in ("Init", "Init_thread")})

    def undo() -> None:
        names.give_back()
        mpi_watch.active = None
        watch.close()

    return undo


class _MpiNames:
    """Names of mpi4py's module that hold something of ours."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def put(self, ours: Mapping[str, Any]) -> None:
        for name, each in ours.items():
            self._before[name], self._ours[name] = getattr(MPI, name), each
            setattr(MPI, name, each)

    def give_back(self) -> None:
        for name, each in self._ours.items():
            if getattr(MPI, name) is each:  # Else the program has put its own there.
                setattr(MPI, name, self._before[name])


def _put_comms(names: _MpiNames) -> None:
    ours = STANDING["Intracomm"]
    names.put({"COMM_WORLD": ours(COMM_WORLD), "COMM_SELF": ours(COMM_SELF)})


def _begin(init: Callable[..., Any], names: _MpiNames, *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_comms(names)
    return answer
