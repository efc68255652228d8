"""Every call of mpi4py, seen by classes that stand in the place of its own while a recording is on.

mpi4py's classes are C and cannot be patched, but the names in its module can be replaced. What a
program takes from the module then, or makes of it (Dup, Split, ...), is seen; what it took before
the recording is not. dlearn itself never imports mpi4py, which joins the MPI job at once.
"""

from contextlib import ExitStack
from typing import Any

from dlearn.hooks import Emit, Undo
from dlearn.hooks.patches import AfterImport


def install(emit: Emit) -> Undo:
    """Report every call of mpi4py to `emit` until the returned function is called; now, or once it is imported."""
    undo = ExitStack()

    def watch() -> None:
        from dlearn.hooks.mpi import mpi_calls

        undo.callback(mpi_calls.replace(emit))

    undo.callback(AfterImport("mpi4py.MPI", watch, emit).go)
    return undo.close


def unrecorded(comm: Any) -> Any:
    """Return the same communicator as mpi4py's own object, of which no call is reported."""
    return comm.mpi4py_class(comm) if hasattr(comm, "mpi4py_class") else comm
