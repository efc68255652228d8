"""Pickles that hold plain data: numbers, strings, lists, dicts. Nothing else is ever made, imported or called."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

SPREAD = 4
"""A file that refers to one list many times stands for more than it holds: so many values for each of its bytes."""


class PlainUnpickler(pickle.Unpickler):
    """Refuses what names a class or a function, which is all that can run code."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, and data need no code")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of it")


def loads(data: bytes) -> Any:
    """Return the plain data of a pickle. ValueError where it is none, or stands for too much."""
    try:
        value = PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(str(error) or "it is cut off") from None
    except (RecursionError, MemoryError, OverflowError):
        raise ValueError("it is too deep or too large") from None
    left, waiting = SPREAD * len(data) + 1000, [value]
    while waiting and left:
        one = waiting.pop()
        left -= 1
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
    if waiting:
        raise ValueError("it refers to the same lists again and again, and stands for too much")
    return value
