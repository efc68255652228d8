"""Makes MPI known to torch as a backend; mpi4py is imported when somebody asks for it, and not before."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.rendezvous import register_rendezvous_handler

from dlearn.errors import not_installed

NAME = "mpi4py"


def register() -> None:
    """`init_process_group("mpi4py", init_method="mpi4py://")` works from now on; once is enough."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
        register_rendezvous_handler(NAME, _meet)  # type: ignore[no-untyped-call]


def _make(options: Any, _: object) -> ProcessGroup:
    _need_mpi4py()
    from dlearn.collectives.mpi_group import MpiGroup

    return MpiGroup(options)


def _meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
    _need_mpi4py()
    from dlearn.collectives.mpi_store import meet

    yield meet()
    raise RuntimeError("ranks of MPI meet once per init_process_group; they are not restarted.")


def _need_mpi4py() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        raise not_installed("mpi4py", needed_by="the backend mpi4py")
