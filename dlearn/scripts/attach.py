"""What `dlearn run` asks of the processes of its job, and how each is recorded.

One environment variable says it, which their children inherit. They attach after `import torch`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from dlearn.events.options import Options
from dlearn.scripts.exits import watch_children

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
VARIABLE = "DLEARN_RUN"


class Order(msgspec.Struct, frozen=True):
    """How a job is recorded. `job` is "" where other hosts take part; at `gate` calls wait.

    `options` are the arguments of `Options` but for the steps: from the first, before the last.
    """

    folder: str
    job: str
    launcher: int  # The pid of `dlearn run`.
    options: dict[str, Any]
    steps: tuple[int, int] | None = None
    gate: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables that the job's processes get in addition."""
        site = os.path.join(os.path.dirname(__file__), "site")
        path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: msgspec.json.encode(self).decode(), "PYTHONPATH": os.pathsep.join(path)}


def attach() -> None:
    """Record this process. Whatever goes wrong, the program goes on, and stderr says that it is not recorded."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        order = msgspec.json.decode(text, type=Order)
        _end_with_launcher(order)
        _record(order)
    except Exception as error:
        print(f"dlearn: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)


def _record(order: Order) -> None:
    # Here, as the launcher records nothing and needs no torch.
    from multiprocessing.util import Finalize, register_after_fork

    from dlearn.hooks import gate
    from dlearn.hooks.network.clock import job_of_process
    from dlearn.recorder import make_header, start

    job = order.job or job_of_process()[0]
    # Only a rank that the launcher has started is what RANK says; its own children have inherited the variable.
    is_rank = os.getppid() == order.launcher and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if is_rank else (None, None)
    folder = Path(order.folder)
    steps = range(*order.steps) if order.steps else None
    header = make_header(job=job, rank=rank, world_size=world_size)
    options = Options(**order.options, steps=steps)
    recording = start(folder, header=header, options=options, follow=True, lazy=not is_rank)
    if order.gate:
        gate.forget_timeouts()
        gate.hold(order.gate, recording, rank, world_size)
    # A child that multiprocessing forks ends without Python's own `atexit`.
    register_after_fork(recording, lambda own: Finalize(own, own.exiting, exitpriority=-100))
    watch_children(recording)


def _end_with_launcher(order: Order) -> None:
    """Have the system send SIGTERM to this process if `dlearn run` is killed: no orphans."""
    if sys.platform != "linux" or os.getppid() != order.launcher:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != order.launcher:
        os.kill(os.getpid(), signal.SIGTERM)
