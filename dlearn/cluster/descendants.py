"""Everything that a rank has started ends with it, daemons too, which have left its process group.

The fork server and each rank become the parents of orphans below them (PR_SET_CHILD_SUBREAPER): so
what a rank has started stays below it, or the server. (On macOS a daemon outlives its rank.)
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from dlearn.events.this_host import status_of

END_SECONDS = 2.0  # For processes that were killed to end: they may be waiting for a disk.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent() -> None:
    """Have the system kill this process when its fork server ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt() -> None:
    """Have orphans among this process's descendants become its own children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(*, but: Collection[int] = ()) -> None:
    """End every child of this process, with theirs, which it has adopted; not the children `but`."""
    deadline = time.monotonic() + END_SECONDS
    ended: list[int] | None = None
    while time.monotonic() < deadline:
        children = [child for child in _children() if child not in but]
        if sum(map(_end, children)):
            time.sleep(0.001)  # Then their own children have come here.
        elif children == ended:
            return
        else:
            ended = children  # What the last of them had may have come here after they were listed.


def _children() -> list[int]:
    pids: list[int] = []
    for threads_children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            pids += map(int, threads_children.read_text().split())
    return pids


def _end(child: int) -> bool:
    """Kill a child of this process; return whether it lived. Its pid may mean another process by now."""
    with suppress(OSError):
        state, parent, *_ = status_of(child)
        # Its first thread may be gone before another one that has its children.
        ended = state in "ZX" and len(os.listdir(f"/proc/{child}/task")) <= 1
        if int(parent) == os.getpid() and not ended:
            os.kill(child, signal.SIGKILL)
            return True
    return False
