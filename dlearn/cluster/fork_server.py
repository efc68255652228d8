"""Fork ranks from a process that has loaded torch, has one thread, and does nothing else.

A fork takes milliseconds, a fresh interpreter seconds. (A notebook's kernel cannot be forked: the
threads of its OpenMP do not survive; on macOS, torch cannot: the server is a bare Python.) Orphans
below ranks become the server's children (descendants.py): it ends them before it reports the end of
a rank. When the notebook ends, it does, with all below it.
"""

import atexit
import gc
import multiprocessing as mp
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from dlearn.cluster import descendants
from dlearn.errors import SetupError

REQUEST_BYTES, REQUEST_FILES = 1 << 16, 4
ATTEMPTS = 3
MOST_FILES = 1 << 16
_owner = os.getpid()


class ForkServer:
    """The server of this process; it is started when it is needed, and again if it was killed."""

    loads_torch = sys.platform == "linux"

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._requests: socket.socket | None = None
        self._pid = 0

    def fork(self, ends: Sequence[Connection], enter: Any) -> tuple[int, Connection]:
        """Return the pid of a rank that has these `ends`, and the connection for its exit code."""
        request = pickle.dumps((sys.argv, [*map(str, sys.path)], enter))
        for _ in range(ATTEMPTS):
            with self._asking:
                requests = self.start()
                status, their_status = mp.Pipe(duplex=False)
                with suppress(BrokenPipeError, ConnectionResetError, EOFError), their_status:
                    files: list[Any] = [resource_tracker.getfd()]
                    files += [end.fileno() for end in (their_status, *ends)]
                    socket.send_fds(requests, [request], files)
                    their_status.close()
                    pid: int = status.recv()
                    return pid, status
                self.forget()  # It was killed.
                with suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)
        raise SetupError("the process that ranks are forked from ends at once; its own message stands above.")

    def start(self) -> socket.socket:
        """Start the server, unless it runs; return the connection for requests before it has loaded torch."""
        if os.getpid() != _owner:
            raise SetupError(
                "this process was forked from one that has clusters, and cannot start ranks of its own."
                " Start it as a new process (subprocess, or multiprocessing's spawn)."
            )
        if self._requests is not None:
            return self._requests
        options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        serve_it = f"from dlearn.cluster.fork_server import serve; serve({self.loads_torch})"
        code = f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; {serve_it}"
        ours, theirs = socket.socketpair()
        with theirs:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *options, "-c", code],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
                setpgroup=0,  # An interrupt of the notebook's process group must not reach it.
            )
        self._requests = ours
        return ours

    def forget(self) -> None:
        """Close this process's connection to the server."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None


SERVER = ForkServer()
atexit.register(SERVER.forget)


def warm_up() -> None:
    """Start the fork server now, in the background, except in a rank of another launcher's job."""
    if SERVER.loads_torch and "RANK" not in os.environ:
        SERVER.start()


# What follows runs in the server.


def serve(loads_torch: bool) -> NoReturn:
    """Fork a rank for each request until the connection on standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, MOST_FILES)
    requests = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    descendants.adopt()
    if loads_torch:
        _load()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, Connection] = {}
    watched: list[Any] = [requests, woken]
    private = [requests.fileno(), woken, wakes]
    while True:
        ready, _, _ = select.select(watched, (), ())
        if woken in ready:
            os.read(woken, REQUEST_BYTES)
            _report_ends(statuses)
        if requests in ready:
            request, files, _, _ = socket.recv_fds(requests, REQUEST_BYTES, REQUEST_FILES)
            if not request:
                break
            if len(files) == REQUEST_FILES:
                _fork(request, files, statuses, private)
    for pid in statuses:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    descendants.end_children()
    os._exit(0)


def _load() -> None:
    """Import what a training cell would wait for: a DDP model imports `torch._dynamo`, 4 s."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # A thread per core in each rank makes all slow.
    for name in ("cloudpickle", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim"):
        import_module(name)
    import_module("dlearn.cluster.rank")
    with suppress(SetupError):  # A torch that does not fit: each rank reports it.
        import_module("dlearn.recorder")
        import_module("dlearn.hooks.c10d.collectives").self_test()
    # Without this, a rank's first garbage collection would copy all of it into its own memory.
    gc.freeze()


def _fork(request: bytes, files: list[int], statuses: dict[int, Connection], private: list[int]) -> None:
    pid = os.fork()
    if pid == 0:
        for descriptor in (*private, files[1], *(status.fileno() for status in statuses.values())):
            os.close(descriptor)
        _become_rank(request, files[0], files[2:])
    with suppress(ProcessLookupError):
        os.setpgid(pid, pid)  # It does so itself: who is first counts.
    for descriptor in (files[0], *files[2:]):
        os.close(descriptor)
    statuses[pid] = Connection(files[1], readable=False)
    with suppress(BrokenPipeError):  # The notebook was interrupted; the rank ends by itself.
        statuses[pid].send(pid)


def _become_rank(request: bytes, tracker: int, ends: list[int]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
        sys.argv, sys.path[:], enter = pickle.loads(request)
        for descriptor in ends:
            os.set_inheritable(descriptor, False)
        main: Callable[..., None] = import_module("dlearn.cluster.rank").main
        main(Connection(ends[0]), Connection(ends[1], readable=False), enter)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _report_ends(statuses: dict[int, Connection]) -> None:
    """Report the ranks that have ended, after everything that they have left behind has ended, too."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            ended[reaped[0]] = os.waitstatus_to_exitcode(reaped[1])
    reports = {pid: statuses.pop(pid) for pid in ended if pid in statuses}
    if reports:
        descendants.end_children(but=statuses)
    for pid, report in reports.items():
        with report, suppress(BrokenPipeError):
            report.send(ended[pid])
