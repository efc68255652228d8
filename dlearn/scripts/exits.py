"""How processes end: what their parents see, and what ends a child of multiprocessing."""

from __future__ import annotations

import multiprocessing.popen_fork
import socket
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlearn.events.job_facts import Exit
from dlearn.events.writer import note_end

if TYPE_CHECKING:
    from dlearn.hooks.patches import Patches
    from dlearn.recorder.recording import Recording


def note_exit(folder: Path, pid: int, status: int) -> None:
    """Write into the files of a process of this host how it ended, which it cannot do itself."""
    name = f"{socket.gethostname()}-{pid}"
    for path in (*folder.glob(f"{name}.jsonl"), *folder.glob(f"{name}-*.jsonl")):
        try:
            note_end(path, Exit(status=status))
        except OSError as error:
            print(f"dlearn: {path.name} does not say how it ended: {error.strerror}", file=sys.stderr)


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
