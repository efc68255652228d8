"""Every call of mpi4py, seen by classes that stand in the place of its own while a recording is on.

mpi4py's classes are C and cannot be patched, but the names in its module can be replaced: while we
record, `MPI.COMM_WORLD`, `MPI.Request`, ... are subclasses that report each call and forward it. What a
program takes from the module then, or makes of it (Dup, Split, ...), is seen; what it took before the
recording (`from mpi4py.MPI import COMM_WORLD` at the top of a script that records later) is not.

dlearn itself never imports mpi4py, which joins the MPI job at once: it waits for the program's import.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlearn.hooks import Emit, Undo
from dlearn.hooks.patches import guarded
from dlearn.hooks.private import untraced

_MPI = "mpi4py.MPI"


def install(emit: Emit) -> Undo:
    """Report every call of mpi4py to `emit` until the returned function is called; now, or once it is imported."""
    undo = ExitStack()

    def watch() -> None:
        from dlearn.hooks.mpi import mpi_calls

        undo.callback(mpi_calls.replace(emit))

    if _MPI in sys.modules:
        watch()
    elif importlib.util.find_spec("mpi4py") is not None:
        finder = _AfterMpi(watch, emit)
        sys.meta_path.insert(0, finder)
        undo.callback(finder.go)
    return undo.close


def unrecorded(comm: Any) -> Any:
    """Return the same communicator as mpi4py's own object, of which no call is reported."""
    return comm.mpi4py_class(comm) if hasattr(comm, "mpi4py_class") else comm


class _AfterMpi(MetaPathFinder):
    """Waits for the first import of mpi4py.MPI, lets it happen, and has the names replaced."""

    def __init__(self, then: Callable[[], None], emit: Emit) -> None:
        self._then, self._emit = then, emit
        self._asking = False

    @untraced
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MPI or self._asking:
            return None
        self._asking = True  # mpi4py has a finder of its own, which looks for the MPI that is installed.
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._exec, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        if self in sys.meta_path:
            self.go()
            guarded(self._emit, "mpi4py", self._then)

    def go(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)
