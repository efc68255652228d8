"""The only place that touches the insides of torch and of mpi4py. Each hook is `install(emit) -> undo` and a guest.

A guest changes no result, gives everything back when `undo` is called, and never breaks training: what goes wrong
inside a hook is told to `emit.failed`, and the call goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dlearn.hooks.private import ask_for_names
from dlearn.trace.event import Event, Line

ask_for_names()

Undo = Callable[[], None]


class Emit(Protocol):
    """Where hooks report what they see. The recorder implements it."""

    def event(self, kind: type[Event], /, **facts: Any) -> int:
        """An event starts now; returns its number. Time, thread and enclosing span are filled in."""

    def end(self, number: int, *, by: str, error: str = "", **facts: Any) -> None:
        """Event `number` ends now. With `by=NOT_OBSERVED` nobody will ever see its end. `facts`: known only now."""

    def enter(self, number: int) -> None:
        """What this thread reports from now on happens inside event `number`."""

    def leave(self, number: int) -> None:
        """No longer."""

    def fact(self, line: Line) -> None:
        """Something about this process that is no event: a process group that it belongs to, a connection."""

    def failed(self, where: str, error: Exception) -> None:
        """The hook itself failed; reported to the user once."""

    def dropped(self) -> None:
        """One point-to-point work was let go unfinished, because too many were held."""
