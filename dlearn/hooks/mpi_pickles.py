"""How many bytes mpi4py pickles and unpickles for a collective over Python objects.

`MPI.pickle` is asked to use functions that count. That they may be put there is documented; which were there before is
read off the object by the garbage collector's eyes, checked, and given back.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from dlearn.hooks import Undo


class Pickles:
    """Bytes given and got by this thread since `begin`."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def begin(self) -> None:
        self._thread.given = self._thread.got = 0

    def given(self) -> int:
        return int(getattr(self._thread, "given", 0))

    def got(self) -> int:
        return int(getattr(self._thread, "got", 0))

    def install(self) -> Undo:
        """Count until the returned function is called. Where this mpi4py keeps its functions elsewhere: nothing."""
        found = _functions()
        if found is None:
            return lambda: None
        dumps, loads, *rest = found

        def counting_dumps(*args: Any, **kwargs: Any) -> Any:
            data = dumps(*args, **kwargs)
            self._thread.given = self.given() + len(data)
            return data

        def counting_loads(data: Any, *args: Any, **kwargs: Any) -> Any:
            self._thread.got = self.got() + memoryview(data).nbytes
            return loads(data, *args, **kwargs)

        _put(counting_dumps, counting_loads, *rest)

        def undo() -> None:
            now = _functions()
            if now is not None and now[0] is counting_dumps:  # Else the program has put its own there.
                _put(dumps, loads, *rest)

        return undo


def _functions() -> tuple[Callable[..., Any], Callable[..., Any], Any, Any] | None:
    """dumps, loads, protocol and threshold of mpi4py's pickle."""
    match gc.get_referents(MPI.pickle):
        case [dumps, loads, protocol, int(threshold)] if callable(dumps) and callable(loads):
            return (dumps, loads, protocol, threshold) if protocol == MPI.pickle.PROTOCOL else None
    return None


def _put(*functions: Any) -> None:
    MPI.pickle.__init__(*functions)  # type: ignore[misc]
