"""A rank as a client of PMI: it joins its MPI job with its first call, and leaves it when it ends in order."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from dlearn.cluster.rank_protocol import receive_descriptor
from dlearn.errors import SetupError

SHARED_MEMORY = {"UCX_TLS": "self,sm"}
"""Ranks of one machine need no network: without this each opens ports on it."""

_descriptor: int | None = None


def receive(control: Connection) -> None:
    """Receive the rank's connection to the manager of its job, which follows its first call."""
    global _descriptor
    if _descriptor is None:
        _descriptor = receive_descriptor(control)
        os.set_inheritable(_descriptor, False)


def join(rank: int, world_size: int) -> None:
    """Join the MPI job at the start of a call. SetupError without MPICH, or if MPI has been finalized."""
    for name, value in SHARED_MEMORY.items():
        os.environ.setdefault(name, value)
    os.environ.update(PMI_RANK=str(rank), PMI_SIZE=str(world_size))
    if "mpi4py.MPI" not in sys.modules:
        os.environ["PMI_FD"] = str(_descriptor)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise SetupError(f"mpi4py cannot load MPI here ({why}): pip install mpich") from None
    # What this rank starts is no member of the job, and must not speak for it.
    os.environ.pop("PMI_FD", None)
    if MPI.Is_finalized():
        raise SetupError(
            "an earlier function of these ranks has called MPI.Finalize, and MPI cannot begin again in a process:"
            " leave Finalize to the cluster."
        )
    if MPI.COMM_WORLD.Get_size() != world_size:
        library = MPI.Get_library_version().split("\n")[0].strip("\x00 ")
        raise SetupError(f"mpi4py has loaded an MPI that is not MPICH's ({library}): pip install mpich")


def leave() -> None:
    """Leave the job, together with all other ranks. A rank that fails is ended instead."""
    if "mpi4py.MPI" not in sys.modules:
        return
    import torch.distributed as dist
    from mpi4py import MPI

    if dist.is_initialized():
        dist.destroy_process_group()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()
