"""`dlearn run --network`: torchrun's ranks on a network that was chosen.

A rank asks for its network namespace over a socket's file when its Python starts
(site/sitecustomize.py), and waits until all are connected.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dlearn.errors import SetupError, WrongArguments
from dlearn.events.job_facts import Switched
from dlearn.events.writer import note_end
from dlearn.network.live import LiveNetwork, SwitchProcess
from dlearn.network.namespace import refusal
from dlearn.network.plan import Network
from dlearn.notices import notice

VARIABLE = "DLEARN_RUN_NETWORK"
"""Where a rank asks for its namespace: a socket's file."""
_ANSWER_BYTES = 200


class WiredRun:
    """The network of one run of torchrun; WrongArguments if there can be none for its arguments."""

    def __init__(self, words: str, args: Any, folder: Path) -> None:
        option = "dlearn run --network"
        if args is None:
            raise WrongArguments(f"{option} is for ranks that torchrun starts: say --nproc-per-node, too.")
        if str(args.nnodes) not in ("1", "1:1"):
            raise WrongArguments(f"{option} is for the ranks of one machine, without --nnodes.")
        self._ranks, self._trace = int(args.nproc_per_node), folder
        try:
            self.network = LiveNetwork(Network.of(words), range(self._ranks))
            if refused := refusal():
                what = "ranks cannot have a network of their own on this machine"
                raise SetupError(f"{what}: {refused}.")
        except SetupError as error:
            raise WrongArguments(f"{option}: {error}") from None
        self._switch: SwitchProcess | None = None
        self._waiting: dict[int, tuple[socket.socket, int, int]] = {}
        """Rank -> the connection on which it waits, its device, its pid."""
        self._pids: Sequence[int] = ()  # Of the ranks that are on the switch.

    def __enter__(self) -> WiredRun:
        self._folder = tempfile.TemporaryDirectory(prefix="dlearn-net-", ignore_cleanup_errors=True)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(os.path.join(self._folder.name, "namespaces"))
        self._server.listen(self._ranks)
        os.environ[VARIABLE] = self._server.getsockname()
        threading.Thread(target=self._serve, name="dlearn-namespaces", daemon=True).start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._note()  # Not if torchrun itself was interrupted.
        os.environ.pop(VARIABLE, None)
        self._server.close()
        if self._switch is not None:
            self._switch.close()
        self._folder.cleanup()

    def _note(self) -> None:
        """Write into the ranks' trace files what was carried, and say it on stderr."""
        carried = self.network.latest()
        if carried is None:
            return
        for pid, sent in zip(self._pids, self.network.sent(), strict=True):
            path = self._trace / f"{socket.gethostname()}-{pid}.jsonl"
            if path.exists():
                note_end(path, Switched(asked=str(self.network.asked), sent=sent))
        notice(f"over {next(carried.paragraphs())}", alone=True)

    def _serve(self) -> None:
        with suppress(OSError):  # The server is closed: the run is over.
            while True:
                connection, _ = self._server.accept()
                with suppress(OSError, ValueError):  # A rank that has ended: torchrun reports it.
                    self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Give a rank its namespace, and take its device; after the last, connect them all."""
        mtu, window = self.network.packet_bytes, self.network.asked.window_bytes
        namespace = {"ranks": self._ranks, "mtu": mtu, "window": window}
        connection.sendall(json.dumps(namespace).encode() + b"\n")
        answer, devices, _, _ = socket.recv_fds(connection, _ANSWER_BYTES, 1)
        rank, pid = json.loads(answer)
        self._waiting[rank] = connection, devices[0], pid
        if len(self._waiting) == self._ranks:
            self._connect()

    def _connect(self) -> None:
        """Connect all ranks. If torchrun has restarted them, end the switch of those before."""
        if self._switch is not None:
            self._note()
            self._switch.close()
        waiting = [self._waiting.pop(rank) for rank in range(self._ranks)]
        connections, devices, self._pids = zip(*waiting, strict=True)
        self._switch = self.network.connect(devices, self._pids, partial(_end, self._pids))
        for connection, device in zip(connections, devices, strict=True):
            os.close(device)
            connection.sendall(b"go")
            connection.close()


def _end(pids: Sequence[int]) -> None:
    notice("the ranks lost their network: the switch has ended.")
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
