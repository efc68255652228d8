"""A cluster's network while it is there: slow a link, cut a path, heal it, read its counts."""

import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from typing import Any

from dlearn.errors import SetupError
from dlearn.network import switch
from dlearn.network.forwarded import Forwarded, carried
from dlearn.network.plan import Network

END_SECONDS = 5.0  # How long a switch may take to end when its connection is closed.
ANSWER_SECONDS = 10.0
MOST_FACTOR = 100


class SwitchProcess:
    """The switch of one set of ranks: a process. `on_loss` is called if it ends before `close`."""

    def __init__(self, plan: dict[str, Any], tuns: Sequence[int], on_loss: Callable[[], None]) -> None:
        self.lost = self._closing = False
        self._on_loss = on_loss
        self._asking = threading.Lock()
        self._control, theirs = socket.socketpair()
        weakref.finalize(self, self._control.close)  # Of one that is forgotten, as by an interrupt.
        self._control.settimeout(ANSWER_SECONDS)
        with theirs:
            command = [sys.executable, "-I", "-S", switch.__file__]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        self._answers = self._control.makefile("rb")
        socket.send_fds(self._control, [b"\n"], tuns)
        self._control.sendall(json.dumps(plan).encode() + b"\n")
        watch = partial(_watch, self._process, weakref.ref(self))
        threading.Thread(target=watch, name="dlearn-switch", daemon=True).start()

    def ask(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """Give an order; return what the switch has counted so far, None if it has ended."""
        with self._asking, suppress(OSError, ValueError):  # A closed file is a ValueError.
            self._control.sendall(json.dumps(order).encode() + b"\n")
            line = self._answers.readline()
            return dict(json.loads(line)) if line else None
        return None

    def close(self) -> None:
        """End it; return when it is gone, and the ranks' devices with it."""
        self._closing = True
        with self._asking:
            self._answers.close()
            self._control.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _watch(process: subprocess.Popen[bytes], switch: weakref.ref[SwitchProcess]) -> None:
    """Wait for its end. A switch that is forgotten closes its connection, and so ends."""
    process.wait()
    known = switch()
    if known is not None and not known._closing:
        known.lost = True
        known._on_loss()


class LiveNetwork:
    """The network between the ranks of a cluster. What is changed here holds for later runs, too.

    cluster.network.slow(2, "10 Mbit/s")
    cluster.network.cut(0, 1)
    cluster.network.straggler(rank=1, factor=3)
    cluster.network.heal()
    cluster.network.carried()
    """

    def __init__(self, asked: Network, names: Sequence[int | str]) -> None:
        self.asked = self._now = asked.fitted(len(names))
        self.packet_bytes = self.asked.packet_bytes
        self._names = list(names)
        self._cut: list[list[int]] = []
        self._factors: dict[int, float] = {}
        self._pids: list[int] = []
        self._switch: SwitchProcess | None = None
        self._latest: Forwarded | None = None
        self._before: dict[tuple[int, int], tuple[int, int]] = {}

    def slow(self, rank: int | str, words: str) -> None:
        """Change the link of a rank, as in "10 Mbit/s, 5 ms": what the words do not name stays."""
        self._now = self._now.changed(self._number(rank), words)
        self.latest()

    def cut(self, first: int | str, second: int | str) -> None:
        """Drop from now on all that these two ranks send to each other."""
        ends = [self._number(first), self._number(second)]
        if ends[0] == ends[1]:
            itself = f"rank {first!r} and itself"
            raise SetupError(f"a way has two ends: there is none to cut between {itself}.")
        self._cut += [ends, ends[::-1]]
        self.latest()

    def straggler(self, rank: int | str, factor: float) -> None:
        """Make this rank's computing take `factor` times as long (1: as long as by itself).

        The rank is stopped for a few ms, again and again. Waiting is no computing.
        """
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 1 <= factor <= MOST_FACTOR:
            raise SetupError(f"computing can take 1 to {MOST_FACTOR} times as long, not {factor!r}.")
        self._factors[self._number(rank)] = factor
        self.latest()

    def let_compute(self) -> None:
        """Slow no rank any more: these ranks are being ended."""
        self._pids = []
        self.latest()

    def heal(self) -> None:
        """Restore all links as they were asked for, and slow no rank."""
        self._now, self._cut, self._factors = self.asked, [], {}
        self.latest()

    def trouble(self) -> str:
        """Return a sentence about the paths that are cut now; "" if none is."""
        cut = [f"{self._names[a]} and {self._names[b]}" for a, b in self._cut if a < b]
        return f"The link between ranks {'; '.join(dict.fromkeys(cut))} is cut." if cut else ""

    def carried(self) -> Forwarded:
        """Return what was forwarded since the ranks began: in the latest run, or in all of kept ranks."""
        latest = self.latest()
        if latest is None:
            missing = "this network is there while ranks are; run something first"
            raise SetupError(f"nothing was carried yet: {missing}.")
        return latest

    def begin(self) -> None:
        """Count a run's own bytes from here on."""
        self._before = self._sent_so_far()

    def sent(self) -> list[dict[int, tuple[int, int]]]:
        """Return what each rank sent to each other since `begin`: TCP's payload, and what again."""
        sent: list[dict[int, tuple[int, int]]] = [{} for _ in self._names]
        for (source, target), (payload, again) in self._sent_so_far().items():
            payload_before, again_before = self._before.get((source, target), (0, 0))
            sent[source][target] = payload - payload_before, again - again_before
        return sent

    def _sent_so_far(self) -> dict[tuple[int, int], tuple[int, int]]:
        latest = self.latest()
        pairs = latest.pairs if latest is not None else ()
        return {(pair.source, pair.target): (pair.payload, pair.again) for pair in pairs}

    def connect(self, tuns: Sequence[int], pids: Sequence[int], on_loss: Callable[[], None]) -> SwitchProcess:
        """Start a switch between fresh ranks, which have these devices and pids."""
        names = list(self._now.ports(self.packet_bytes))
        routes = []
        for source, target in permutations(range(len(self._names)), 2):
            ports = [names.index(name) for name in self._now.path(source, target)]
            routes.append([source, target, ports])
        self._latest, self._before, self._pids = None, {}, list(pids)
        self._switch = SwitchProcess({"ports": self._ports(), "routes": routes}, tuns, on_loss)
        try:
            self.latest()
        except BaseException:
            self._switch.close()
            raise
        return self._switch

    def latest(self) -> Forwarded | None:
        """Say to the switch what is asked now; return what it has forwarded, None if nothing."""
        if self._switch is not None:
            factors = [(pid, self._factors.get(rank, 1)) for rank, pid in enumerate(self._pids)]
            slowed = [(pid, factor) for pid, factor in factors if factor > 1]
            order = {"ports": self._ports(), "cut": self._cut, "stragglers": slowed}
            counts = self._switch.ask(order)
            if counts is not None:
                self._latest = carried(str(self._now), self._now.ports(self.packet_bytes), self._pids, counts)
        return self._latest

    def _ports(self) -> list[list[float | None]]:
        links = self._now.ports(self.packet_bytes).values()
        return [[(link.rate or 0) / 8, link.latency, link.jitter, link.loss, link.queue] for link in links]

    def _number(self, rank: int | str) -> int:
        if rank not in self._names:
            raise SetupError(f"this network has no rank {rank!r}; its ranks are {self._names}.")
        return self._names.index(rank)

    def __repr__(self) -> str:
        return f"LiveNetwork({self._now}; ranks {self._names})"
