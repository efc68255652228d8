"""How long the other ranks may take to fail by themselves after a first fault, and to say why.

A moment, on a machine that has time for them. Where other work takes the cores, a rank that has found its peer gone is
runnable and does not run: it gets more time, up to a limit.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

MOST_SECONDS = 5.0
"""After which nobody gets more time."""


class Grace:
    """The time that these processes have, from now on."""

    def __init__(self, seconds: float, pids: Collection[int]) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._waited_before = {pid: _waited_seconds(pid) for pid in pids}

    def is_over(self, pids: Collection[int]) -> bool:
        """Whether these, which have not ended yet, have had their time: more, if they waited half of it for a core."""
        passed = time.monotonic() - self._began
        if passed < self.seconds or passed >= max(self.seconds, MOST_SECONDS):
            return passed >= self.seconds
        return all(_waited_seconds(pid) - self._waited_before.get(pid, 0.0) < passed / 2 for pid in pids)


def _waited_seconds(pid: int) -> float:
    """How long the process's threads have been runnable and did not run; 0 where the system does not tell."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # Linux, Documentation/scheduler/sched-stats.
        with suppress(OSError):  # It has ended.
            waited_ns += int(thread.read_text().split()[1])
    return waited_ns / 1e9
