"""What is sent to the ranks: the functions of one call, their arguments, and the environment.

One payload for all: functions that share globals, or a class, share them there. cloudpickle sends
what a notebook or script defines by value, modules by name.
"""

import functools
import hashlib
import io
import linecache
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

from dlearn.errors import SetupError
from dlearn.notices import notice

LARGE_BYTES = 20 << 20


@dataclass(frozen=True)
class Environment:
    """What a rank adopts from the notebook. `cells` maps a notebook cell's file to (name, lines)."""

    variables: dict[str, str]
    directory: str
    path: list[str]
    cells: dict[str, tuple[str, list[str]]]


def pack(functions: Sequence[Callable[..., Any] | None], args: tuple[Any, ...]) -> bytes:
    """Pickle functions (one per rank, None serves) and arguments. SetupError names what cannot be sent."""
    try:
        data: bytes = cloudpickle.dumps((tuple(functions), args))
    except Exception as error:  # Any object's own __reduce__ may raise anything.
        raise SetupError(
            f"the function or its arguments cannot be sent to the ranks ({type(error).__name__}: {error})."
            " Make what cannot travel (files, locks, generators, sockets) inside the function."
        ) from error
    if len(data) > LARGE_BYTES:
        notice(
            f"sending {len(data) / 1e6:.0f} MB to each of {len(functions)} ranks;"
            " large data is better loaded inside the function."
        )
    return data


class Unpacker:
    """Unpacks a rank's calls into its `__main__`: if it is kept, only those that have changed."""

    def __init__(self) -> None:
        self._taken: dict[str, bytes] = {}

    def unpack(self, data: bytes, *, keep: bool) -> tuple[tuple[Callable[..., Any] | None, ...], tuple[Any, ...]]:
        """Return the functions and the arguments of a call, and define in `__main__` what they need."""
        loader = _Loader(io.BytesIO(data))
        functions, args = loader.load()
        main = vars(sys.modules["__main__"])
        for name, value in loader.globals.items():
            # RPC sends a function by name: one that came as an argument, too, must be the one of that name.
            if not keep or isinstance(value, FunctionType) or self._is_new(name, value):
                main[name] = value
        for function in functions:
            inner = getattr(function, "func", function)  # functools.partial
            if getattr(inner, "__module__", None) == "__main__" and hasattr(inner, "__name__"):
                main[inner.__name__] = inner
        return functions, args

    def _is_new(self, name: str, value: Any) -> bool:
        try:
            digest = hashlib.sha256(cloudpickle.dumps(value)).digest()
        except Exception:  # Any object's own __reduce__ may raise anything; then it is taken over as it came.
            return True
        known = self._taken.get(name)
        self._taken[name] = digest
        return digest != known


class _Loader(pickle.Unpickler):
    """A loader that gives functions of `__main__` this process's `__main__` as their globals."""

    # Should cloudpickle rename these two functions, ranks would work and keep no globals (tested).

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.globals: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        function = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle" and name == "_make_function":
            return functools.partial(_make_in_main, function)
        if module == "cloudpickle.cloudpickle" and name == "_function_setstate":
            return functools.partial(self._set_state, function)
        return function

    def _set_state(self, original: Callable[[Any, Any], None], function: Any, state: tuple[Any, Any]) -> None:
        if function.__globals__ is vars(sys.modules["__main__"]):
            self.globals.update(state[1]["__globals__"])
            state = (state[0], {**state[1], "__globals__": {}})
        original(function, state)


def _make_in_main(original: Callable[..., Any], code: Any, its_globals: dict[str, Any], *rest: Any) -> Any:
    if its_globals.get("__name__") == "__main__":
        its_globals = vars(sys.modules["__main__"])
    return original(code, its_globals, *rest)


def environment_here() -> Environment:
    return Environment(dict(os.environ), os.getcwd(), list(sys.path), notebook_cells())


def adopt(there: Environment) -> None:
    """Work with the notebook's variables, directory, module path, and sources for tracebacks."""
    os.environ.clear()
    os.environ.update(there.variables)
    os.chdir(there.directory)
    sys.path[:] = there.path
    for name, (_, lines) in there.cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def notebook_cells() -> dict[str, tuple[str, list[str]]]:
    """Return the notebook's cells: the file under which each was compiled -> (shown name, lines)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: (f"In[{number}]", linecache.getlines(file)) for file, number in names.items()}


def is_installed(file: str) -> bool:
    """Return whether this is an installed library's file, Python's or ours, and not the user's own."""
    installed = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))
    dlearn = str(Path(__file__).parent.parent) + os.sep
    # A lesson's code is its reader's; "<string>" is Python's own way into a process.
    ours = file.startswith(dlearn) and not file.startswith(f"{dlearn}lessons{os.sep}")
    return ours or file.startswith((*installed, "<frozen", "<string>"))
