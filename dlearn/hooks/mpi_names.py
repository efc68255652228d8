"""The names in mpi4py's module that are replaced while a recording is on, and the classes that stand there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mpi4py import MPI

from dlearn.errors import SetupError
from dlearn.hooks import Emit, Undo, mpi_watch
from dlearn.hooks.mpi_collectives import collective_methods
from dlearn.hooks.mpi_comms import CommCalls, comm_methods
from dlearn.hooks.mpi_messages import MessageCalls
from dlearn.hooks.mpi_requests import PrequestCalls, RequestCalls
from dlearn.hooks.mpi_watch import Watch

_PLAIN = {
    "Intracomm": CommCalls,
    "Cartcomm": CommCalls,
    "Graphcomm": CommCalls,
    "Distgraphcomm": CommCalls,
    "Request": RequestCalls,
    "Prequest": PrequestCalls,
    "Message": MessageCalls,
}


class _Standing(type):
    """Of a class that stands in the place of mpi4py's: what is an instance of that one passes for one of this."""

    def __instancecheck__(cls, instance: Any) -> bool:
        own = cls.__dict__.get("mpi4py_class")
        return isinstance(instance, own) if own is not None else super().__instancecheck__(instance)

    def __subclasscheck__(cls, other: type) -> bool:
        own = cls.__dict__.get("mpi4py_class")
        return issubclass(other, own) if own is not None else super().__subclasscheck__(other)


def _standing_class(name: str, calls: type) -> type:
    original = getattr(MPI, name)
    methods = comm_methods(original) | collective_methods(original) if calls is CommCalls else {}
    # By its module pickle finds COMM_WORLD, which travels as a name.
    return _Standing(name, (calls, original), {"mpi4py_class": original, "__module__": "mpi4py.MPI", **methods})


STANDING = {name: _standing_class(name, calls) for name, calls in _PLAIN.items()}
COMM_WORLD, COMM_SELF = MPI.COMM_WORLD, MPI.COMM_SELF
"""mpi4py's own. (Whoever holds them can pickle them while ours stand in their place: pickle looks for them by name.)"""


def replace(emit: Emit) -> Undo:
    """Until the returned function is called. SetupError if another recording is at it."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    if MPI.Is_finalized():
        return lambda: None
    watch = mpi_watch.active = Watch(emit)
    names = _Names()
    names.put(STANDING)
    if MPI.Is_initialized():
        _put_comms(names)
    else:
        # With mpi4py.rc.initialize = False the program begins MPI itself; before that there are no communicators.
        names.put({name: partial(_begin, getattr(MPI, name), names) for name in ("Init", "Init_thread")})
    forget = watch.pickles.install()

    def undo() -> None:
        names.give_back()
        forget()
        mpi_watch.active = None
        watch.close()

    return undo


class _Names:
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


def _put_comms(names: _Names) -> None:
    ours = STANDING["Intracomm"]
    names.put({"COMM_WORLD": ours(COMM_WORLD), "COMM_SELF": ours(COMM_SELF)})


def _begin(init: Callable[..., Any], names: _Names, *args: Any, **kwargs: Any) -> Any:
    answer = init(*args, **kwargs)
    if mpi_watch.active is not None:
        _put_comms(names)
    return answer
