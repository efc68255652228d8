"""What a recording does beside noting every call, and which values make sense."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from dlearn.errors import SetupError
from dlearn.events.source import find

Measure = Literal["span", "phase"]


@dataclass(frozen=True)
class Options:
    """The options of `dlearn.record`, which says what each of them does."""

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
