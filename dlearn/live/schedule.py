"""Calls that wait at the gate, and the order in which they were let through."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlearn.errors import SetupError

Name = int | str


@dataclass(frozen=True)
class HeldCall:
    """A call that waits before torch gets it: which of its rank's calls (from 1), to whom, payload, line of code.

    `to` is a rank, the name of an RPC worker, or None (the group, or any); it is made in these `spans`.
    """

    rank: Name
    number: int
    op: str
    to: Name | None
    bytes: int
    site: str
    phase: str
    bucket: int | None = None
    spans: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.text}"

    @property
    def text(self) -> str:
        """Return "send to 1 (train.py:7)"."""
        way = "from" if self.op == "recv" else "to"
        to = f" {way} {self.to}" if self.to is not None else ""
        line = f" ({self.site})" if self.site else ""
        return f"{self.op}{to}{line}"


@dataclass(frozen=True)
class Passed:
    """A call that was let through, and the calls (rank, number) that came since the one before."""

    rank: Name
    number: int
    op: str
    beside: frozenset[tuple[Name, int]] = frozenset()


Schedule = Sequence[Passed]
Hold = bool | Callable[[HeldCall], object] | Schedule  # Everything, what it says, or in this order.


def check_hold(hold: object, names: Sequence[Name]) -> None:
    """Raise SetupError unless this is one of the three, for a job of these ranks."""
    if hold is True or callable(hold):
        return
    if not isinstance(hold, Sequence) or isinstance(hold, str | bytes | bytearray):
        raise SetupError(f"hold is True, a function of a call, or a schedule, not {type(hold).__name__}.")
    for number, each in enumerate(hold, start=1):
        if not isinstance(each, Passed) or each.rank not in names:
            raise SetupError(f"item {number} of hold= is {reprlib.repr(each)}, no call of ranks {list(names)}.")
