"""`dlearn run --network`: torchrun's ranks on a network that was chosen.

A rank goes into a network of its own when its Python starts (site/sitecustomize.py). It asks for its
seat over a socket file, which leads out of a network namespace, and waits until all are connected.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlearn.errors import SetupError, WrongArguments
from dlearn.events.job_facts import Switched
from dlearn.events.writer import note_end
from dlearn.network.live import LiveNetwork, SwitchProcess
from dlearn.network.namespace import refusal
from dlearn.network.plan import Network

VARIABLE = "DLEARN_RUN_NETWORK"
"""Where a rank asks for its seat: a socket's file."""
_ANSWER_BYTES = 200


class WiredRun:
    """The network of one run of torchrun here: `with` it, ranks find their seats. Else SetupError."""

    def __init__(self, asked: Network, ranks: int, folder: Path) -> None:
        self.network = LiveNetwork(asked, range(ranks))
        if refused := refusal():
            raise SetupError(f"ranks cannot have a network of their own on this machine: {refused}.")
        self._ranks, self._trace = ranks, folder
        self._switch: SwitchProcess | None = None
        self._seated: dict[int, tuple[socket.socket, int, int]] = {}
        """Rank -> the connection on which it waits, its device, its pid."""
        self._pids: list[int] = []  # of the ranks that are on the switch

    def __enter__(self) -> WiredRun:
        self._folder = tempfile.mkdtemp(prefix="dlearn-net-")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(os.path.join(self._folder, "seats"))
        self._server.listen(self._ranks)
        os.environ[VARIABLE] = self._server.getsockname()
        threading.Thread(target=self._seat_all, name="dlearn-seats", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(VARIABLE, None)
        self._server.close()
        if self._switch is not None:
            self._switch.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def note(self) -> None:
        """Write into the ranks' trace files what was carried, and say it on stderr."""
        carried = self.network.latest()
        if carried is None:
            return
        for pid, sent in zip(self._pids, self.network.sent(), strict=True):
            path = self._trace / f"{socket.gethostname()}-{pid}.jsonl"
            if path.exists():
                note_end(path, Switched(asked=str(self.network.asked), sent=sent))
        print(f"dlearn: over {next(carried.paragraphs())}", file=sys.stderr)

    def _seat_all(self) -> None:
        with suppress(OSError):  # The server is closed: the run is over.
            while True:
                asking, _ = self._server.accept()
                with suppress(OSError, ValueError):  # A rank that has ended: torchrun reports it.
                    self._seat(asking)

    def _seat(self, asking: socket.socket) -> None:
        seat = {"ranks": self._ranks, "mtu": self.network.packet_bytes, "window": self.network.asked.window_bytes}
        asking.sendall(json.dumps(seat).encode() + b"\n")
        answer, devices, _, _ = socket.recv_fds(asking, _ANSWER_BYTES, 1)
        rank, pid = json.loads(answer)
        self._seated[rank] = asking, devices[0], pid
        if len(self._seated) == self._ranks:
            self._connect()

    def _connect(self) -> None:
        """Connect all ranks. If torchrun has restarted them, end the switch of those before."""
        if self._switch is not None:
            self.note()
            self._switch.close()
        seated = [self._seated.pop(rank) for rank in range(self._ranks)]
        self._pids = pids = [pid for _, _, pid in seated]
        self._switch = self.network.connect([device for _, device, _ in seated], pids, lambda: _end(pids))
        for asking, device, _ in seated:
            os.close(device)
            asking.sendall(b"go")
            asking.close()


def _end(pids: list[int]) -> None:
    print("dlearn: the ranks lost their network: the switch has ended.", file=sys.stderr)
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def wired_run(words: str, args: Any, folder: Path) -> WiredRun:
    """Make the network for what torchrun will start with these arguments. WrongArguments if there can be none."""
    if args is None:
        raise WrongArguments("dlearn run --network is for ranks that torchrun starts: say --nproc-per-node, too.")
    if str(args.nnodes) not in ("1", "1:1"):
        raise WrongArguments("dlearn run --network is for the ranks of one machine, without --nnodes.")
    try:
        return WiredRun(Network.of(words), int(args.nproc_per_node), folder)
    except SetupError as error:
        raise WrongArguments(f"dlearn run --network: {error}") from None
