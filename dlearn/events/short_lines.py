"""Events that are like one before, as short lines of numbers: seventy bytes where the event itself takes three hundred.

A program says the same in each step: the same op, group, tensors and line of code. The first such event stands in the
file with all its fields. One that differs from it only in what `VARYING` names is a JSON list of six numbers, and an
end that tells nothing but when and how is a list of three:

    [41,97,93482734982734,96,12,3]     like event 41: number 97, start_ns, parent, seq, backward (-1: it has none)
    [97,93482735107315,1]              the end of event 97: at_ns, and its place in `ENDED_BY`

short_events.py reads millions of such lines as arrays, without an object for each.
"""

from __future__ import annotations

from typing import Any

from dlearn.events.event import NOT_OBSERVED, REFUSED, Collective, Event, Gradient, PointToPoint, Stretch

REPEATED = (Collective, PointToPoint, Gradient, Stretch)
"""The kinds of events that are written so."""
VARYING = ("number", "start_ns", "parent", "seq", "backward")
"""The fields of an event that a short line has, after the number of the event that it is like."""
ENDED_BY = ("callback", "wait", "return", NOT_OBSERVED, REFUSED)
"""A short line's words for `ended_by`, by their place."""
LONGEST_NUMBER = 18
"""Digits: a number with more stands in a line of the long kind."""
MOST_REMEMBERED = 4096
"""Different events that a writer remembers; after so many it begins anew."""

_TOO_LONG = 10**LONGEST_NUMBER


class Remembered:
    """The events of one file that later ones may be like."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def begin(self, kind: type[Event], facts: dict[str, Any]) -> tuple[bytes | None, tuple[Any, ...] | None]:
        """The short line of an event, or None if it is the first of its like.

        Beside it what `remember` wants, once the event's own line is in the file; None if none will be like it.
        """
        if kind not in REPEATED:
            return None, None
        # This runs for every call: what differs is taken out of the hook's own dict, the rest is looked up as it is.
        take = facts.pop
        number, start_ns = take("number"), take("start_ns")
        parent, seq, backward = take("parent", None), take("seq", None), take("backward", None)
        alike = (kind, *facts, *facts.values())
        like = self._numbers.get(alike)
        if like is None or abs(start_ns) >= _TOO_LONG:
            varying = zip(VARYING, (number, start_ns, parent, seq, backward), strict=True)
            facts |= {name: value for name, value in varying if value is not None}
            return None, alike
        parent, seq, backward = (-1 if each is None else each for each in (parent, seq, backward))
        return f"[{like},{number},{start_ns},{parent},{seq},{backward}]\n".encode(), None

    def remember(self, alike: tuple[Any, ...], number: int) -> None:
        """Event `number` stands in the file."""
        if len(self._numbers) >= MOST_REMEMBERED:
            self._numbers.clear()
        self._numbers[alike] = number


def end_line(number: int, at_ns: int, by: str) -> bytes | None:
    """The short line of an end; None if it is none of the usual ones."""
    place = _PLACE.get(by)
    if place is None or abs(at_ns) >= _TOO_LONG:
        return None
    return f"[{number},{at_ns},{place}]\n".encode()


_PLACE = {by: place for place, by in enumerate(ENDED_BY)}
