"""What a recording does beside noting every call."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from dlearn.errors import SetupError
from dlearn.events.source import find

Measure = Literal["span", "phase"]


@dataclass(frozen=True)
class Options:
    """What a recording does beside noting every call.

    `measure="span"` reads the kernel's counters of bytes on the wire at both ends of the recording and of each span.
    With "phase" it also reads them before each operation, and first waits until nothing is under way and they stand
    still: intrusive, it changes the times of what it measures. None reads none. `checksums` adds one to each send
    and to what each rank gives to a collective.
    `max_bytes` limits the file; what it keeps out is counted, and every result says so. `graph` adds the graph of each
    distributed autograd context, and when each of its nodes runs. Only events of these `steps` are written, if given;
    after `hang_after` seconds without any the hang is told; `gather` brings other hosts' files to rank 0 at the end.
    `sources` names more recorders, installed ones or "module:NAME" (dlearn.events.source).
    """

    measure: Measure | None = "span"
    checksums: bool = False
    max_bytes: int = 2 << 30
    graph: bool = False
    steps: Container[int] | None = None
    hang_after: float | None = None
    gather: bool = False
    sources: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.measure not in ("span", "phase", None):
            raise SetupError(f'measure is "span", "phase" or None, not {self.measure!r}.')
        if self.steps is not None and (isinstance(self.steps, str | bytes) or not isinstance(self.steps, Container)):
            raise SetupError(f"steps says which, as range(10, 12) or {{3, 7}} do, not {self.steps!r}.")
        if self.hang_after is not None and not (
            isinstance(self.hang_after, int | float) and 0 < self.hang_after < float("inf")
        ):
            raise SetupError(f"hang_after is a number of seconds above 0, not {self.hang_after!r}.")
        if isinstance(self.sources, str) or not all(isinstance(name, str) for name in self.sources):
            raise SetupError(f"sources is a list of names, as ['tcp_store'], not {self.sources!r}.")
        for name in self.sources:
            find(name)
