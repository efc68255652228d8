"""Events that repeat an earlier one, as short lines of numbers: 40 to 70 bytes instead of 300.

    [41,97,93482734982734,96,12,3]     like event 41: number 97, start_ns, parent, seq, backward
    [97,93482735107315,1]              the end of event 97: at_ns, and its index in `ENDED_BY`

docs/trace-file.md describes them. short_events.py reads millions of such lines as arrays.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import msgspec

from dlearn.events.event import NOT_OBSERVED, REFUSED, Event, RRefFork

COMMON = ("number", "start_ns", "parent")
"""The fields of every short line, after the number of the event that it repeats."""
ENDED_BY = ("callback", "wait", "return", NOT_OBSERVED, REFUSED, "reply", "future", "hook")
"""The words for `ended_by`: a short line has the index."""
INDEX_OF = {by: index for index, by in enumerate(ENDED_BY)}
LONGEST_NUMBER = 18  # Digits: a number with more stands in a line of the long kind.
MOST_REMEMBERED = 4096  # Different events that a writer remembers; after so many it begins anew.

_TOO_LONG = 10**LONGEST_NUMBER
_encode = msgspec.json.Encoder().encode


def layout(first: Event) -> tuple[str, ...]:
    """Return the names of the numbers that follow `COMMON` in a line that repeats this event."""
    names: list[str] = []
    for name in ("end_ns", *(first.own or ())):
        value = getattr(first, name)
        if type(value) is int:
            names.append(name)
        elif value is not None:
            names += names_of_numbers(name, value)
    return tuple(names)


def names_of_numbers(name: str, value: Any) -> list[str]:
    """Return a name for each number of a field that may have several: "next.0", "next.1"."""
    return [f"{name}.{index}" for index in range(len(numbers_in(value)))]


def numbers_in(value: Any) -> list[int]:
    """Return the whole numbers in a field: a number, a tuple, an RRef's id ("1:17")."""
    if type(value) is int:
        return [value]
    if isinstance(value, RRefFork):
        return [value.owner, *numbers_in(value.fork)]
    if isinstance(value, str):
        return [int(part) for part in value.split(":") if part.isdecimal()]
    return [number for each in value for number in numbers_in(each)]


def with_numbers(value: Any, numbers: Iterator[int]) -> Any:
    """Return the same value with these numbers for those that are in it."""
    if type(value) is int:
        return next(numbers)
    if isinstance(value, RRefFork):
        return RRefFork(next(numbers), with_numbers(value.fork, numbers))
    if isinstance(value, str):
        parts = (str(next(numbers)) if part.isdecimal() else part for part in value.split(":"))
        return ":".join(parts)
    return tuple(with_numbers(each, numbers) for each in value)


class Remembered:
    """The events of one file that later ones may repeat."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def begin(self, kind: type[Event], facts: dict[str, Any]) -> tuple[bytes | None, tuple[Any, ...] | None]:
        """Return an event's short line or None, and what `remember` wants then if it can repeat."""
        if kind.own is None:
            return None, None
        # This runs for every call: it takes what is its own out of the hook's dict itself.
        take = facts.pop
        number, start_ns, parent = take("number"), take("start_ns"), take("parent", None)
        own: dict[str, Any] = {}
        shape: list[Any] = []
        numbers: list[int] = []
        for name in ("end_ns", *kind.own):
            value = take(name, None)
            if value is None:
                continue
            own[name] = value
            if type(value) is int:
                shape.append(name)
                numbers.append(value)
            else:
                shape += (name, with_numbers(value, repeat(0)))
                numbers += numbers_in(value)
        pattern = (kind, *shape, *facts, *facts.values())
        like = self._numbers.get(pattern)
        if like is None or abs(start_ns) >= _TOO_LONG or (numbers and max(numbers) >= _TOO_LONG):
            facts |= own
            facts |= {"number": number, "start_ns": start_ns, "parent": parent}
            return None, pattern
        inside = -1 if parent is None else parent
        return _encode((like, number, start_ns, inside, *numbers)) + b"\n", None

    def remember(self, pattern: tuple[Any, ...], number: int) -> None:
        if len(self._numbers) >= MOST_REMEMBERED:
            self._numbers.clear()
        self._numbers[pattern] = number


def end_line(number: int, at_ns: int, by: str) -> bytes | None:
    """Return the short line of an end; None if it is none of the usual ones."""
    index = INDEX_OF.get(by)
    if index is None or abs(at_ns) >= _TOO_LONG:
        return None
    return f"[{number},{at_ns},{index}]\n".encode()
