"""Turn the RPC agent's own log on and off; events/agent_log.py takes its lines out of stderr."""

import ctypes
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from dlearn.events import agent_log

_LEVEL = "FLAGS_caffe2_log_level"
_EVERYTHING = -1
CLOSE_SECONDS = 2.0
"""How long the end of the filter is waited for: children of the program may hold stderr open longer."""


class AgentLog:
    """The agent's log of this process. `path` is its file, or None where a cluster sorts our stderr."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._level: ctypes.c_int | None = None
        self._before = 0
        self._stderr = -1
        self._filter: subprocess.Popen[bytes] | None = None

    def open(self) -> str:
        """Start to log; returns why it cannot be, or nothing."""
        if self._level is not None:
            return ""
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        try:
            self._level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), _LEVEL)
        except (OSError, ValueError):
            return f"this torch ({torch.__version__}) has no log level that could be set"
        self._before = self._level.value
        if self._path is not None:
            self._redirect(self._path)
        self._level.value = _EVERYTHING
        return ""

    def forget(self, path: Path) -> None:
        """Send the log of a forked child's own agent to `path`; an open log is the parent's."""
        if self._level is not None:
            self._level.value = self._before
        self._path, self._level, self._filter = path, None, None

    def close(self) -> None:
        """Give level and stderr back; returns when every line that was written is where it belongs."""
        if self._level is None:
            return
        self._level.value = self._before
        self._level = None
        if self._filter is not None:
            sys.stderr.flush()
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            with suppress(subprocess.TimeoutExpired):
                self._filter.wait(CLOSE_SECONDS)
            self._filter = None

    def _redirect(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)  # An agent may start before anything was recorded.
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        empty_ns = time.monotonic_ns()
        reader, writer = os.pipe()
        agent_log.widen(writer)
        try:
            self._filter = subprocess.Popen(
                [sys.executable, "-I", "-S", agent_log.__file__, str(log), str(self._before), str(empty_ns)],
                stdin=reader,
                pass_fds=(log,),
                start_new_session=True,  # An interrupt is for the program; the filter ends when its last writer does.
            )
            self._stderr = os.dup(2)
            os.dup2(writer, 2)
        finally:
            for fd in (log, reader, writer):
                os.close(fd)
