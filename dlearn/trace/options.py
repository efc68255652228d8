"""What a recording does beside noting every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlearn.errors import SetupError

Measure = Literal["span", "phase"]


@dataclass(frozen=True)
class Options:
    """What a recording does beside noting every call.

    `measure="span"` reads the kernel's counters of bytes on the wire at both ends of the recording and of each span.
    With "phase" it also reads them before each operation, and first waits until nothing is under way and they stand
    still: intrusive, it changes the times of what it measures. None reads none. `checksums` adds one to each send.
    `max_bytes` limits the file; what it keeps out is counted, and every result says so. `graph` adds the graph of each
    distributed autograd context, and when each of its nodes runs.
    """

    measure: Measure | None = "span"
    checksums: bool = False
    max_bytes: int = 2 << 30
    graph: bool = False

    def __post_init__(self) -> None:
        if self.measure not in ("span", "phase", None):
            raise SetupError(f'measure is "span", "phase" or None, not {self.measure!r}.')
