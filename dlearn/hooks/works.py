"""Works whose end only `Work.wait` tells: sends, receives, and gloo's reduce_scatter.

They have no future, `is_completed()` stays False until somebody waits, and a second `wait` hangs; so `Work.wait` is
patched, and the hook holds each Work until then (torch makes a new Python object for a Work that nobody holds).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch._C._distributed_c10d import Work

from dlearn.hooks import Emit, Undo
from dlearn.trace.event import NOT_OBSERVED

WORKS_HELD = 1000
WORK_BYTES_HELD = 64 << 20
"""A Work keeps its tensors alive, so we hold few: beyond either limit the oldest is let go, and counted."""


class WaitingWorks:
    """Works without a future, whose end nobody has seen yet."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: OrderedDict[int, tuple[Work, int, int, bool]] = OrderedDict()
        self._bytes = 0

    def hold(self, work: Work, number: int, size: int, *, any_source: bool = False) -> None:
        self._held[id(work)] = (work, number, size, any_source)
        self._bytes += size
        while len(self._held) > WORKS_HELD or (self._bytes > WORK_BYTES_HELD and len(self._held) > 1):
            _, (_, oldest, oldest_size, _) = self._held.popitem(last=False)
            self._bytes -= oldest_size
            self._emit.end(oldest, by=NOT_OBSERVED)
            self._emit.dropped()

    def patch_wait(self) -> Undo:
        original = Work.wait

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                self._ended(work, type(error).__name__)
                raise
            self._ended(work, "")
            return result

        Work.wait = wait  # type: ignore[method-assign, assignment]

        def restore() -> None:
            Work.wait = original  # type: ignore[method-assign]

        return restore

    def _ended(self, work: Work, error: str) -> None:
        held = self._held.pop(id(work), None)
        if held is None:
            return
        try:
            _, number, size, any_source = held
            self._bytes -= size
            peer = work._source_rank() if any_source and not error else None
            self._emit.end(number, by="wait", error=error, peer=peer)
        except Exception as failure:
            self._emit.failed("Work.wait", failure)

    def release(self) -> None:
        """At the end of the recording: nobody has waited for these."""
        for _, number, _, _ in self._held.values():
            self._emit.end(number, by=NOT_OBSERVED)
        self._held.clear()
        self._bytes = 0
