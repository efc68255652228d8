"""Where a call of a held job waits, before it is handed to torch. The other end is dlearn/live/keeper.py.

A line of JSON says what waits, a line back lets it through. When the connection ends (the notebook is gone, or has let
the job go), nothing waits any more.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d, rpc

from dlearn.hooks import Emit
from dlearn.hooks.callers import caller
from dlearn.trace.event import Span

NO_TIMEOUT = timedelta(days=20)
"""Of process groups: who was let through waits inside torch for those that were not. (Some count it in 31 bits.)"""

current: Gate | None = None
"""The gate of this process, while it is held."""


class Gate:
    """A rank's end of the connection; calls on any thread may wait."""

    def __init__(self, address: str, rank: int, emit: Emit) -> None:
        self._emit = emit
        self._way = socket.socket(socket.AF_UNIX)
        self._way.connect(address)
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, threading.Event] = {}
        self._open = False
        self._function_over = False
        self._send({"rank": rank})
        threading.Thread(target=self._listen, daemon=True, name="dlearn-gate").start()

    def wait(self, op: str, to: int | str | None, payload_bytes: int) -> None:
        """Return when this call may go on. `to` is a rank of the cluster, or an RPC worker's name."""
        if self._open or (self._function_over and threading.current_thread() is threading.main_thread()):
            return  # (The main thread may be shutting RPC down, which is nobody's call.)
        made_by = caller(sys._getframe())
        arrived = threading.Event()
        with self._sending:
            number = next(self._numbers)
            self._waiting[number] = arrived
            call = {"number": number, "op": op, "to": to, "bytes": payload_bytes, "site": made_by.site}
            self._send(call | {"phase": made_by.phase, "bucket": made_by.bucket_index})
        if self._open:
            return  # Since we looked; who opened it may not have seen this call.
        span = self._emit.event(Span, name=f"held before {op}")
        arrived.wait()
        self._emit.end(span, by="return")

    def function_over(self) -> None:
        self._function_over = True

    def close(self) -> None:
        with suppress(OSError):
            self._way.shutdown(socket.SHUT_RDWR)

    def _send(self, line: dict[str, Any]) -> None:
        with suppress(OSError):  # The other end is gone: `_listen` opens the gate.
            self._way.sendall(json.dumps(line).encode() + b"\n")

    def _listen(self) -> None:
        with suppress(OSError), self._way.makefile("rb") as lines:
            for line in lines:
                self._waiting.pop(int(line)).set()
        self._open = True
        for arrived in list(self._waiting.values()):
            arrived.set()
        self._way.close()


def forget_timeouts() -> None:
    """Process groups that are made from now on wait for who is held; a timeout that the program gives stays its own."""
    distributed_c10d.default_pg_timeout = NO_TIMEOUT


def meet(address: str, rank: int, emit: Emit) -> None:
    """Every call of this process waits from now on."""
    global current
    if rpc.is_available():
        from torch._C._distributed_rpc import _is_current_rpc_agent_set, _set_rpc_timeout

        if _is_current_rpc_agent_set():
            _set_rpc_timeout(0)  # For ever.
    current = Gate(address, rank, emit)


def function_over() -> None:
    """What the main thread sends from now on is torch's own end."""
    if current is not None:
        current.function_over()


def leave() -> None:
    """Nothing waits any more."""
    global current
    if current is not None:
        current.close()
    current = None
