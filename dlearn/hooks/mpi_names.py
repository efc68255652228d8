"""The names in mpi4py's module that are replaced while a recording is on, and the classes that stand there."""

from __future__ import annotations

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
_COMMS = {name: getattr(MPI, name) for name in ("COMM_WORLD", "COMM_SELF")}


def replace(emit: Emit) -> Undo:
    """Until the returned function is called. SetupError if another recording is at it."""
    if mpi_watch.active is not None:
        raise SetupError("another recording already watches mpi4py in this process. Stop it first.")
    watch = mpi_watch.active = Watch(emit)
    forget = watch.pickles.install()
    before = {name: getattr(MPI, name) for name in (*STANDING, *_COMMS)}
    now = STANDING | {name: STANDING["Intracomm"](comm) for name, comm in _COMMS.items()}
    for name, standing in now.items():
        setattr(MPI, name, standing)
    return partial(_give_back, watch, forget, before, now)


def _give_back(watch: Watch, forget: Undo, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, standing in now.items():
        if getattr(MPI, name) is standing:
            setattr(MPI, name, before[name])
    forget()
    mpi_watch.active = None
    watch.close()
