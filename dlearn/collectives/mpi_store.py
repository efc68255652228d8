"""Where the ranks of an MPI job meet as torch's ranks: a store that rank 0 serves on loopback, told to all by MPI."""

from __future__ import annotations

import socket
from typing import Any

from mpi4py import MPI
from torch._C._distributed_c10d import TCPStore

from dlearn.errors import SetupError

LOOPBACK = "127.0.0.1"


def meet() -> tuple[Any, int, int]:
    """Store, rank and size. SetupError if the ranks are on more than one host: they need a store that all can reach."""
    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    together = here.size == world.size
    here.Free()
    if not together:
        raise SetupError(
            'init_method="mpi4py://" is for ranks on one host; on several give init_process_group a store of your own,'
            " with MPI's rank and size."
        )
    if world.rank != 0:
        return TCPStore(LOOPBACK, world.bcast(None), world.size, is_master=False), world.rank, world.size
    with socket.create_server((LOOPBACK, 0), backlog=4 * world.size) as listener:
        port = world.bcast(listener.getsockname()[1])
        store = TCPStore(
            LOOPBACK, port, world.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, 0, world.size
