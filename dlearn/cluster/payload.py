"""What travels to the ranks: all functions of one call, their arguments, and the notebook's surroundings.

One payload goes to every rank, so functions that share globals still share them there, and a class that a cell defines
is the same class on every rank. cloudpickle sends what a notebook or script defines by value, modules by name.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from dlearn.errors import SetupError

LARGE_BYTES = 20 << 20


@dataclass(frozen=True)
class Surroundings:
    """What a rank takes over from the process that started it. `cells` maps a notebook cell's file to (name, lines)."""

    environment: dict[str, str]
    directory: str
    path: list[str]
    cells: dict[str, tuple[str, list[str]]]


def pack(functions: Sequence[Callable[..., Any] | None], args: tuple[Any, ...]) -> bytes:
    """Functions (one per rank, None serves) and arguments as bytes. SetupError names what cannot travel."""
    try:
        data: bytes = cloudpickle.dumps((tuple(functions), args))
    except Exception as error:  # Any object's own __reduce__ may raise anything.
        raise SetupError(
            f"the function or its arguments cannot be sent to the ranks ({type(error).__name__}: {error})."
            " Make what cannot travel (files, locks, generators, sockets) inside the function."
        ) from error
    if len(data) > LARGE_BYTES:
        print(
            f"dlearn: sending {len(data) / 1e6:.0f} MB to each of {len(functions)} ranks; large data is better"
            " loaded inside the function.",
            file=sys.stderr,
        )
    return data


def unpack(data: bytes) -> tuple[tuple[Callable[..., Any] | None, ...], tuple[Any, ...]]:
    """The other end. What `__main__` defined is found in this process's `__main__` afterwards."""
    functions, args = cloudpickle.loads(data)
    for function in functions:
        inner = getattr(function, "func", function)  # functools.partial
        if getattr(inner, "__module__", None) == "__main__" and hasattr(inner, "__globals__"):
            shared = {name: value for name, value in inner.__globals__.items() if not name.startswith("__")}
            vars(sys.modules["__main__"]).update(shared)
            vars(sys.modules["__main__"])[inner.__name__] = inner
    return functions, args


def surroundings() -> Surroundings:
    """Of this process, now."""
    return Surroundings(dict(os.environ), os.getcwd(), list(sys.path), _cells())


def take_over(there: Surroundings) -> None:
    """Work where the kernel works: same variables, directory, module path, and sources for tracebacks."""
    os.environ.clear()
    os.environ.update(there.environment)
    os.chdir(there.directory)
    sys.path[:] = there.path
    for name, (_, lines) in there.cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _cells() -> dict[str, tuple[str, list[str]]]:
    """The notebook's cells: the file name that each was compiled under, what people call it, and its lines."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: (f"In[{number}]", linecache.getlines(file)) for file, number in names.items()}


def is_installed(file: str) -> bool:
    """Whether this is an installed library's file, Python's or ours, and not the user's own."""
    installed = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib"))
    return file.startswith((*installed, str(Path(__file__).parent.parent) + os.sep, "<frozen"))
