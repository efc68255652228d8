"""What `dlearn run` asks of its job's processes, by one variable; how each is recorded and ends."""

from __future__ import annotations

import ctypes
import multiprocessing.popen_fork
import os
import signal
import socket
import sys
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dlearn.events.job_facts import Exit
from dlearn.events.options import Options
from dlearn.events.writer import note_end
from dlearn.notices import notice

if TYPE_CHECKING:
    from dlearn.hooks.patches import Patches
    from dlearn.recorder.recording import Recording

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
        notice(f"this process is not recorded: {type(error).__name__}: {error}")


def _record(order: Order) -> None:
    # Here, as the launcher records nothing and needs no torch.
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


def note_exit(folder: Path, pid: int, status: int) -> None:
    """Write into the files of a process of this host how it ended, which it cannot do itself."""
    name = f"{socket.gethostname()}-{pid}"
    for path in (*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}-*.jsonl")):
        try:
            note_end(path, Exit(status=status))
        except OSError as error:
            notice(f"{path.name} does not say how it ended: {error.strerror}")


def watch_exits(folder: Path, kind: type) -> Patches:
    """Note how each child ends that this process waits for, by a `kind` of Popen, until closed."""
    from dlearn.hooks.patches import Patches  # It imports torch.

    noted: set[int] = set()

    def ask(original: Any, child: Any, *args: Any, **kwargs: Any) -> Any:
        status = original(child, *args, **kwargs)
        if status is not None and child.pid not in noted:
            noted.add(child.pid)
            note_exit(folder, child.pid, status)
        return status

    patches = Patches()
    for name in ("poll", "wait"):
        patches.wrap(kind, name, ask)
    return patches


def watch_children(recording: Recording) -> None:
    """Note how children of multiprocessing end; and in such a child the exception that ends it."""

    def run(original: Any, process: BaseProcess) -> Any:
        try:
            return original(process)
        except SystemExit as ending:
            # torch's spawn writes the exception down, and exits; who exits with 0 has handled it.
            if ending.code and ending.__context__ is not None:
                recording.raised(ending.__context__)
            raise
        except BaseException as error:
            recording.raised(error)
            raise

    patches = watch_exits(recording.path.parent, multiprocessing.popen_fork.Popen)
    recording.undo.enter_context(patches).wrap(BaseProcess, "run", run)
