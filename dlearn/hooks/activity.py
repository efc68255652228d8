"""Activity of a paused rank between two of its calls: it computes, or waits inside a call of torch.

Read off the stacks of its threads when the gate's server asks, so that calls pay nothing for it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch.autograd import graph as autograd_graph
from torch.distributed.rpc import internal

_TORCH = os.path.dirname(torch.__file__)
_DLEARN = os.path.dirname(os.path.dirname(__file__))
_WAITS = (
    threading.__file__,
    queue.__file__,
    os.path.join(_TORCH, "distributed", ""),
    os.path.join(_TORCH, "futures", ""),
    os.path.join(_TORCH, "nn", "parallel", "distributed.py"),
    *(os.path.join(_DLEARN, room, "") for room in ("backends", "collectives", "hooks", "recorder")),
)
"""Code whose innermost function, while it lasts, waits for another rank or for another thread."""
_SPINS = os.path.join(_DLEARN, "hooks", "mpi", "")
"""MPI asks repeatedly whether a message has arrived, and runs all the time that it waits."""
_ENGINE = autograd_graph._engine_run_backward.__code__
_HANDLER = internal._run_function.__code__


class Activity(NamedTuple):
    """Whether the program computes, or runs a function that another rank called by RPC.

    `active_ns` is how long its threads have run, or been ready to run, since they began. It separates an autograd
    engine that computes from one that waits: both show the same stack.
    """

    computes: bool
    serves: bool
    active_ns: int


def look(*, function_over: bool) -> Activity:
    """Look at all threads. When the rank's function is over, its main thread only serves others."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    computes = not function_over and main is not None and _computes(main)
    serves = any(_computes(frame) for frame in frames.values() if _is_handler(frame))
    spins = main is not None and main.f_code.co_filename.startswith(_SPINS)
    return Activity(computes, serves, 0 if spins else _active_ns())


def _computes(frame: FrameType) -> bool:
    """Return whether a thread's innermost function is the program's, or torch's on one rank."""
    return frame.f_code is not _ENGINE and not frame.f_code.co_filename.startswith(_WAITS)


def _is_handler(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _HANDLER:
        frame = frame.f_back
    return frame is not None


def _active_ns() -> int:
    counted_ns = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):  # Linux, Documentation/scheduler/sched-stats.
        with suppress(OSError):  # It has ended.
            ran_ns, ready_ns, _ = thread.read_text().split()
            counted_ns += int(ran_ns) + int(ready_ns)
    return counted_ns or time.process_time_ns()
