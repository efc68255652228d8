"""How long the other ranks may take to fail by themselves after a first fault, and to say why.

A moment, on a machine that has time for them. Where other work takes the cores, a rank that has found its peer gone is
runnable and does not run: it gets more time, up to a limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

MOST_SECONDS = 5.0
"""After which nobody gets more time."""
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Grace:
    """The time that these processes have, from now on."""

    def __init__(self, seconds: float, pids: Collection[int]) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._used_before = {pid: _used_seconds(pid) for pid in pids}

    def is_over(self, pids: Collection[int]) -> bool:
        """Whether these, which have not ended yet, have had their time."""
        passed = time.monotonic() - self._began
        if passed < self.seconds or passed >= max(self.seconds, MOST_SECONDS):
            return passed >= self.seconds
        return not any(self._starves(pid, passed) for pid in pids)

    def _starves(self, pid: int, passed: float) -> bool:
        """Whether it would run, and got less than half of a core so far."""
        used = _used_seconds(pid) - self._used_before.get(pid, 0.0)
        return used < passed / 2 and _is_runnable(pid)


def _used_seconds(pid: int) -> float:
    """Of all threads of the process on all cores; 0 where the system does not tell."""
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS_A_SECOND
    return 0.0


def _is_runnable(pid: int) -> bool:
    """Whether a thread of it runs, or waits for a core; no where the system does not tell."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # It has ended.
            if thread.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
