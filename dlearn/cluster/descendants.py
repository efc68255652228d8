"""Everything that a rank has started ends with it: daemons, too, which have left its process group.

On Linux the orphans among a process's descendants become its own children if it asks for that
(PR_SET_CHILD_SUBREAPER; else they become children of the system's first process). The fork server
and each rank ask: what a rank has started stays below it while it lives, and below the fork server
when it is gone. What the notebook itself has started is never there. (macOS has nothing like that:
there a daemon outlives its rank. So it does on Linux where a spawned rank dies all of a sudden.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

END_SECONDS = 2.0
"""How long processes may take to end that have been killed: they may be waiting for a disk."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """Orphans among this process's descendants become its own children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(parent: int, *, but: Collection[int] = ()) -> None:
    """End every process that this adopter has started or taken in, and all of theirs; not the children `but`."""
    deadline = time.monotonic() + END_SECONDS
    while sum(_end(child, parent) for child in _children(parent) if child not in but):
        if time.monotonic() > deadline:
            return
        time.sleep(0.001)  # Then their own children have come here.


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for threads_children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            found += map(int, threads_children.read_text().split())
    return found


def _end(child: int, parent: int) -> bool:
    """Kill it, if it is what we take it for: a number may mean another process from one moment to the next."""
    with ExitStack() as stack, suppress(ProcessLookupError):
        kill = partial(os.kill, child)
        with suppress(OSError):  # Linux before 5.3 has no such handles.
            handle = os.pidfd_open(child)
            stack.callback(os.close, handle)
            kill = partial(signal.pidfd_send_signal, handle)
        if _lives_below(child, parent):
            kill(signal.SIGKILL)
            return True
    return False


def _lives_below(child: int, parent: int) -> bool:
    with suppress(OSError):
        state, its_parent = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[:2]
        return int(its_parent) == parent and state not in "ZX"
    return False
