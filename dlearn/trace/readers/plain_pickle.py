"""Pickles that hold plain data: numbers, strings, lists, dicts. Nothing else is ever made, imported or called."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
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
    """The plain data of a pickle. ValueError, with the reason, where it is none, or stands for far more than it is."""
    try:
        value = PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(str(error) or "it is cut off") from None
    except (RecursionError, MemoryError, OverflowError):
        raise ValueError("it is too deep or too large") from None
    most = SPREAD * len(data) + 1000
    for number, _ in enumerate(_values(value)):
        if number > most:
            raise ValueError("it refers to the same lists again and again, and stands for too much")
    return value


def _values(value: Any) -> Iterator[Any]:
    """Every value in it, as often as it is referred to."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
