"""The client of the gate at which calls of a paused job wait. The server is dlearn/live/gate_server.py.

A line of JSON says which call waits. A line back lets it through, opens the gate, or asks what this rank does. If the
connection ends before the gate was opened, the server was killed, and this rank ends, too.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_rpc import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
)
from torch.autograd import graph as autograd_graph
from torch.distributed import distributed_c10d, rpc
from torch.distributed.rpc import internal

from dlearn.events.event import Span
from dlearn.events.this_host import scheduled_ns
from dlearn.hooks.callers import caller
from dlearn.notices import notice

if TYPE_CHECKING:
    from dlearn.hooks.host import Host

NO_TIMEOUT = timedelta(days=20)
"""Of process groups: a call that was let through waits inside torch for others. (Some count it in 31 bits.)"""
END_SECONDS = 5.0
"""How long a rank waits for its launcher to end it and its children, before it ends itself."""

current: Gate | None = None  # The gate of this process, while it is held.


class Gate:
    """A rank's end of the connection; calls on any thread may wait."""

    def __init__(self, address: str, emit: Host) -> None:
        self._address, self._emit = address, emit
        self._socket = socket.socket(socket.AF_UNIX)
        self._sending = threading.RLock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, threading.Event] = {}
        self._let_through: dict[int, int] = {}
        """The last call of each thread that was let through and is not in the records yet."""
        self._open = False
        self._function_over = False
        self.met = False

    def meet(self, rank: int, size: int) -> None:
        """Connect, report which rank this is, and let its calls by RPC wait for ever."""
        self.met = True
        if _is_current_rpc_agent_set():
            _set_rpc_timeout(0)
        try:
            self._socket.connect(self._address)
        except FileNotFoundError:
            self._open = True  # The job was over before this process came.
        except OSError as error:
            notice(f"this rank cannot reach its gate: {error.strerror}")
        self._send({"rank": rank, "size": size})
        threading.Thread(target=self._listen, daemon=True, name="dlearn-gate").start()

    def wait(self, op: str, to: int | str | None, payload_bytes: int) -> None:
        """Wait until this call may go on. `to` is a rank, or the name of an RPC worker."""
        if self._open or (self._function_over and threading.current_thread() is threading.main_thread()):
            return  # (The main thread may be shutting RPC down, which is no call of the program.)
        self.noted()  # What this thread did before may not be recorded at all.
        made_by = caller(sys._getframe())
        arrived = threading.Event()
        with self._sending:
            if not self.met:
                self.meet(*_rank_and_size())
            number = next(self._numbers)
            self._waiting[number] = arrived
            call = {"number": number, "op": op, "to": to, "bytes": payload_bytes, "site": made_by.site}
            call |= {"phase": made_by.phase, "bucket": made_by.bucket_index, "spans": self._emit.span_names()}
            self._send(call)
        if self._open:
            return  # It was opened meanwhile, and this call may not have been seen.
        span = self._emit.event(Span, name=f"held before {op}", held=op)
        arrived.wait()
        self._emit.end(span, by="return")
        self._let_through[threading.get_ident()] = number

    def noted(self) -> None:
        """Report that the call of this thread that was let through is in the trace now."""
        number = self._let_through.pop(threading.get_ident(), None)
        if number is not None:
            self._send({"noted": number})

    def function_over(self) -> None:
        self._function_over = True
        self._send({"returned": True})

    def close(self) -> None:
        self._open = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, line: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):  # The other end is gone: `_listen` hears of it.
            self._socket.sendall(json.dumps(line).encode() + b"\n")

    def _listen(self) -> None:
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._hear(line)
        self._socket.close()
        if not self._open:
            _end_this_rank()
        self._open_up()

    def _hear(self, line: bytes) -> None:
        if line == b"open\n":
            self._open_up()
        elif line.startswith(b"?"):
            self._send({"asked": int(line[1:])} | activity(function_over=self._function_over))
        else:
            self._waiting.pop(int(line)).set()

    def _open_up(self) -> None:
        self._open = True
        for arrived in list(self._waiting.values()):
            arrived.set()


def _end_this_rank() -> None:
    """End this rank if its launcher does not: the process that paused this job was killed."""
    notice("what held this job was killed: this rank ends")
    time.sleep(END_SECONDS)
    group = os.getpgrp() == os.getpid()  # As torchrun has it.
    (os.killpg if group else os.kill)(os.getpid(), signal.SIGKILL)


def _rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, by its process group, else by RPC."""
    if distributed_c10d.is_initialized():
        return distributed_c10d.get_rank(), distributed_c10d.get_world_size()
    return rpc.get_worker_info().id, len(_get_current_rpc_agent().get_worker_infos())


def forget_timeouts() -> None:
    """Let new process groups wait for paused ranks, unless the program gives a timeout."""
    distributed_c10d.default_pg_timeout = NO_TIMEOUT


def hold(address: str, emit: Host, rank: int | None = None, size: int | None = None) -> None:
    """Make all calls of this process wait from now on; without a rank the first call reports it."""
    global current
    current = Gate(address, emit)
    if rank is not None and size is not None:
        current.meet(rank, size)


def function_over() -> None:
    """Report that the rank's function is over: its main thread only sends what ends torch."""
    if current is not None:
        current.function_over()


def leave() -> None:
    """Let every call go on from now on."""
    global current
    if current is not None:
        current.close()
    current = None


def _forked() -> None:
    """Drop the gate in a forked child of a rank; a child of a launcher is a rank itself."""
    global current
    if current is not None and current.met:
        current = None


os.register_at_fork(after_in_child=_forked)


# What a paused rank does between two of its calls: it computes, or waits inside a call of torch. Read
# off the stacks of its threads when the server asks, so that calls pay nothing for it.

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
_HANDLER = internal._run_function.__code__  # It runs a function that another rank called by RPC.


def activity(*, function_over: bool) -> dict[str, Any]:
    """Look at all threads: does the program compute, or run a function that another rank called?

    When the rank's function is over, its main thread only serves others. `active_ns` is how long
    the threads have run, or been ready to: engines that compute and that wait have one stack.
    """
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    computes = not function_over and main is not None and _computes(main)
    serves = False
    for innermost in frames.values():
        is_called = any(frame.f_code is _HANDLER for frame, _ in walk_stack(innermost))
        serves |= is_called and _computes(innermost)
    spins = main is not None and main.f_code.co_filename.startswith(_SPINS)
    active_ns = sum(scheduled_ns("self")) or time.process_time_ns()
    return {"computes": computes, "serves": serves, "active_ns": 0 if spins else active_ns}


def _computes(frame: FrameType) -> bool:
    """Return whether a thread's innermost function is the program's, or torch's on one rank."""
    return frame.f_code is not _ENGINE and not frame.f_code.co_filename.startswith(_WAITS)
