"""Which job does this process belong to? All of its processes must find the same name, and wait for nobody to do so.

Where no launcher has told them, they find it when they meet: a `Joined` in each one's file (hooks/network/clock.py).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_MPI_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""How MPICH's and Open MPI's mpiexec tell a process who it is. (All of one host have the same parent.)"""


def job_of_process() -> tuple[str, int | None, int | None]:
    """Job, rank and size of a process that the user started: from the default group, or by its launcher's variables.

    The job is "" where nothing is known of it yet, as of ranks that were started one by one.
    """
    environment = os.environ
    if dist.is_initialized():
        found = word_in(dist.distributed_c10d._get_default_store(), "dlearn/job")
        return found or f"{socket.gethostname()}-{os.getppid()}", dist.get_rank(), dist.get_world_size()
    if "RANK" in environment and "WORLD_SIZE" in environment:
        meeting_point = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
        job = f"{environment.get('TORCHELASTIC_RUN_ID', '')}@{meeting_point}"
        return job, int(environment["RANK"]), int(environment["WORLD_SIZE"])
    for rank, size in _MPI_VARIABLES:
        if {rank, size} <= environment.keys():
            return f"{socket.gethostname()}-{os.getppid()}", int(environment[rank]), int(environment[size])
    if multiprocessing.parent_process() is not None:
        # Ranks that a script spawns have nothing else in common yet.
        return f"children of {socket.gethostname()}-{os.getppid()}", None, None
    return "", None, None


def word_in(store: Store | None, key: str) -> str:
    """What all who meet in this store find under `key`: the first of them writes it. Waits for nobody.

    "" where the store can hold nothing, as torch's FakeStore, or is gone; MPI's groups meet without one.
    """
    mine = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
    try:
        return str(store.compare_set(key, "", mine).decode()) if store is not None else ""
    except RuntimeError:
        return ""


def innermost(store: Store | None) -> Store | None:
    """The store itself that has been given prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
