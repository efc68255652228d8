"""Everything that a rank has started ends with it, daemons too, which have left its process group.

On Linux a process can ask to become the parent of orphans among its descendants
(PR_SET_CHILD_SUBREAPER). The fork server and each rank do: so what a rank has started stays below it,
and below the fork server when it is gone. (On macOS a daemon outlives its rank.)
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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent() -> None:
    """Have the system kill this process when its fork server ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt() -> None:
    """Have orphans among this process's descendants become its own children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(parent: int, *, but: Collection[int] = ()) -> None:
    """End every process that an adopter has started or adopted, with theirs; not the children `but`."""
    deadline = time.monotonic() + END_SECONDS
    ended: list[int] | None = None
    while time.monotonic() < deadline:
        found = [child for child in _children(parent) if child not in but]
        if sum(_end(child, parent) for child in found):
            time.sleep(0.001)  # Then their own children have come here.
        elif found == ended:
            return
        else:
            ended = found  # Since they were listed: what the last one had may have come here after that.


def _children(parent: int) -> list[int]:
    found: list[int] = []
    for threads_children in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            found += map(int, threads_children.read_text().split())
    return found


def _end(child: int, parent: int) -> bool:
    """Kill a child of `parent`; return whether it was one. A pid may soon mean another process."""
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
        # Its first thread may be gone before another one that has its children.
        ended = state in "ZX" and len(os.listdir(f"/proc/{child}/task")) <= 1
        return int(its_parent) == parent and not ended
    return False
