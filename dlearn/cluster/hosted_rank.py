"""A rank beside an ipyparallel engine, as its engine sees it. All of this runs in the engine's process."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from dlearn.cluster import warm_pool
from dlearn.cluster.rank_process import DEATH_SECONDS, StackLine
from dlearn.cluster.rank_protocol import Call
from dlearn.errors import optional
from dlearn.events.agent_log import PIPE_BYTES
from dlearn.events.this_host import kernel_id
from dlearn.version import __version__

ANSWER_SECONDS = 60.0  # An engine or a notebook that is silent for so long counts as gone.

_ranks: dict[str, HostedRank] = {}


def ask(key: str, method: str, *args: Any) -> Any:
    """Return what `method` of the rank named `key` returns, None if it was ended; "start" starts it."""
    if method == "start":
        _ranks[key] = HostedRank(key)
        return _ranks[key].rank.pid
    hosted = _ranks.get(key)
    if hosted is None:
        return None
    hosted.asked_at = time.monotonic()
    return getattr(hosted, method)(*args)


class HostedRank:
    """A rank beside this engine; `scratch` is where it records if the run's folder is not here."""

    call: Call | None = None
    scratch = ""

    def __init__(self, key: str) -> None:
        (self.rank,) = warm_pool.take(1)
        self.key, self.asked_at = key, time.monotonic()
        self.pause, self.kill = self.rank.pause, self.rank.kill
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()

    def begin(self, call: Call, notebook: str) -> str:
        """Send the call, as it fits this host, to the rank; return `scratch`."""
        around, folder = call.environment, call.folder
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch = ""
        if notebook != kernel_id("net") or not os.access(f"{folder}/trace", os.W_OK):
            folder = self.scratch = tempfile.mkdtemp(prefix="dlearn-")
            os.mkdir(f"{folder}/trace")
        directory = around.directory if os.path.isdir(around.directory) else os.getcwd()
        path = [entry or os.getcwd() for entry in sys.path] + around.path
        around = replace(around, variables=dict(os.environ), directory=directory, path=path)
        self.call = replace(call, folder=folder, environment=around)
        with suppress(OSError):  # It has ended, which `exchange` will report.
            self.rank.send(self.call)
        return self.scratch

    def exchange(self, *messages: Any) -> tuple[bytes, list[Any], bool, int | None]:
        """Forward messages; return output, answers, whether the rank is over, and its exit code."""
        rank, answers = self.rank, []
        over = not rank.lives
        try:
            for message in messages:
                rank.control.send(message)
            while rank.control.poll(0):
                answers.append(rank.control.recv())
        except (EOFError, OSError):
            over = True
        if over:
            rank.wait(DEATH_SECONDS)
            rank.kill()  # It may live, with its connection closed.
        # Read last: what was printed before an answer is shown before it. A pipe holds no more.
        printed = rank.output.poll(0)
        output = os.read(rank.output.fileno(), PIPE_BYTES) if printed else b""
        return output, answers, over, rank.exit_code

    def stack(self) -> tuple[StackLine, ...]:
        return self.rank.stack(self.call) if self.call is not None else ()

    def recorded(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(self.scratch, "trace").iterdir()}

    def end(self) -> None:
        """End the rank with all it started, and have a fresh one wait for the next run."""
        if _ranks.pop(self.key, None) is not None:
            self.rank.kill()
            shutil.rmtree(self.scratch, ignore_errors=True)
            warm_pool.recycle(self.rank.close, 1)

    def _end_when_forgotten(self) -> None:
        while time.monotonic() < self.asked_at + ANSWER_SECONDS:
            time.sleep(1.0)
        self.end()


def introduction() -> tuple[str, str, str]:
    """Return the versions of this process, and the name and the network of its host."""
    python = ".".join(platform.python_version_tuple()[:2])
    torch = metadata.version("torch").partition("+")[0]
    versions = f"Python {python}, dlearn {__version__}, torch {torch}"
    return versions, socket.gethostname(), kernel_id("net")


def interface_towards(address: str) -> tuple[str, str]:
    """Return the interface that leads to an address ("": the controller's), and its own address."""
    from ipyparallel.engine.app import IPEngine

    controller = IPEngine.instance().registration_url.split("://")[-1].rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address or controller, 9))  # Sends nothing.
        route = probe.getsockname()[0]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")  # The engine's environment may name another one.
    for name, addresses in optional("psutil", needed_by="engine=").net_if_addrs().items():
        for own in addresses:
            leads_there = name == wanted if wanted else own.address == route
            if leads_there and own.family == socket.AF_INET:
                return name, own.address
    raise LookupError(f"its host has no interface {wanted or route}")
