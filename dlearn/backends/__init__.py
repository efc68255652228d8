"""Process groups of torch that are written in Python. Importing this package registers them with torch.

import dlearn.backends
torch.distributed.init_process_group("mpi4py", init_method="mpi4py://")   # or "dlearn_ring"
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from dlearn.errors import optional

GROUPS = {
    "dlearn_ring": ("dlearn.collectives.ring_backend", "RingGroup"),
    "mpi4py": ("dlearn.backends.mpi_group", "MpiGroup"),
}
"""Backend -> the module and class of its process group, loaded when a program asks for the backend."""


def _make(backend: str, options: Any, _: Any) -> Any:
    return getattr(_module(backend), GROUPS[backend][1])(options)


def _meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and size of an MPI job."""
    yield _module("mpi4py").meet()


def _module(backend: str) -> Any:
    """Load the module of a backend. Raises SetupError if mpi4py is needed and not installed."""
    if backend == "mpi4py":
        optional("mpi4py", needed_by="the backend mpi4py")
    return import_module(GROUPS[backend][0])


for _name in GROUPS:
    dist.Backend.register_backend(_name, partial(_make, _name), extended_api=True, devices=["cpu"])
register_rendezvous_handler("mpi4py", _meet)  # type: ignore[no-untyped-call]
