"""In a process of a job under `dlearn run`, right after `import torch`: record it, its children, and theirs."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
from pathlib import Path

from dlearn import recorder
from dlearn.events.options import Options
from dlearn.hooks import gate
from dlearn.hooks.network.clock import job_of_process
from dlearn.scripts.order import Order, order_of_process

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def attach() -> None:
    """Record this process. Whatever goes wrong, the program goes on, and stderr says that it is not recorded."""
    order = order_of_process()
    if order is None:
        return
    try:
        _end_with_launcher(order)
        _record(order)
    except Exception as error:
        print(f"dlearn: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)


def _record(order: Order) -> None:
    job = order.job or job_of_process()[0]
    # Only a rank that the launcher has started is what RANK says; its own children have inherited the variable.
    is_rank = os.getppid() == order.launcher and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if is_rank else (None, None)
    recording = recorder.start(
        Path(order.folder),
        header=recorder.make_header(job=job, rank=rank, world_size=world_size),
        options=Options(
            graph=order.graph,
            steps=range(*order.steps) if order.steps is not None else None,
            hang_after=order.hang_after,
            gather=order.gather,
            sources=order.sources,
        ),
        follow=True,
        lazy=not is_rank,
    )
    if order.gate:
        gate.forget_timeouts()
        if rank is not None and world_size is not None:
            gate.meet(order.gate, rank, world_size, recording)
        else:
            gate.expect(order.gate, recording)
    # A child that multiprocessing forks ends without Python's own `atexit`.
    multiprocessing.util.register_after_fork(
        recording, lambda own: multiprocessing.util.Finalize(own, own.stop, exitpriority=-100)
    )


def _end_with_launcher(order: Order) -> None:
    """Have the system send SIGTERM to this process if `dlearn run` is killed: no orphans."""
    if sys.platform != "linux" or os.getppid() != order.launcher:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != order.launcher:
        os.kill(os.getpid(), signal.SIGTERM)
