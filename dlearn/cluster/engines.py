"""Ranks beside ipyparallel's engines: to their pool they are processes like those of this machine.

The engine is not the rank: one that hangs, exits or is ended leaves its engine usable. The notebook
asks for news again and again, over ipyparallel's own connections: it opens no port. In between the
engine is free for others. A rank ends with its engine, and when the notebook has stopped asking.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlearn.cluster import warm_pool
from dlearn.cluster.answers import Raised
from dlearn.cluster.fork_server import warm_up
from dlearn.cluster.rank_process import DEATH_SECONDS, RankProcess, StackLine
from dlearn.cluster.rank_protocol import LOOPBACK, Call, HostPosition
from dlearn.cluster.run import kernel_id
from dlearn.errors import SetupError, optional
from dlearn.events.agent_log import PIPE_BYTES, widen

ANSWER_SECONDS = 60.0
"""An engine that is silent for so long counts as gone, and so does a notebook."""
PAUSE_SECONDS = 0.1
_VERSIONS = """', '.join([
    'Python ' + '.'.join(__import__('platform').python_version_tuple()[:2]),
    'dlearn ' + __import__('dlearn').__version__,
    'torch ' + __import__('importlib.metadata').metadata.version('torch').split('+')[0],
])"""
"""Sent to the engine as text: a function would be sent as the byte code of this Python."""


@dataclass(frozen=True)
class Engine:
    """An engine, and the position of the rank beside it; `address` is for the ranks of other hosts."""

    id: int
    client: Any
    host: str = "its host"
    host_id: str = ""
    address: str = LOOPBACK
    position: HostPosition | None = None

    def __str__(self) -> str:
        return f"engine {self.id} on {self.host}"

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(*args)` returns on the engine. SetupError if it does not."""
        from ipyparallel.error import IPythonError

        try:
            with _asking:  # A client takes note of what it sent by looking at what has come since.
                asked = self.client[self.id].apply_async(function, *args)
                with suppress(ValueError):  # What the user asked last stays the last there.
                    self.client.history.remove(asked.msg_ids[0])
            return asked.get(ANSWER_SECONDS)
        except (IPythonError, IndexError, OSError, RuntimeError) as error:
            lives = self.id in self.client.ids
            why = f"gave no answer ({error})" if lives else "was killed, or has ended"
            raise SetupError(f"{self} {why}") from None


_asking = threading.Lock()


def choose(client: Any, ranks: int) -> list[Engine]:
    """Return the first `ranks` engines of an ipyparallel client (0: all), in the order of ids.

    SetupError if there are too few, or they do not fit this process.
    """
    ipyparallel = optional("ipyparallel", needed_by="engine=")
    if not isinstance(client, ipyparallel.Client):
        example = "ipyparallel.Cluster(n=3).start_and_connect_sync()"
        what = type(client).__name__
        raise SetupError(f"engine= takes an ipyparallel Client, as {example} returns, not {what}.")
    ids, needed = sorted(client.ids), ranks or 1
    if len(ids) < needed:
        raise SetupError(
            f"{needed} ranks need {needed} engines, and this ipyparallel client has {len(ids)};"
            f" client.wait_for_engines({needed}) waits until they are there."
        )
    with ThreadPoolExecutor(len(ids)) as at_the_same_time:
        engines = list(at_the_same_time.map(partial(_introduced, client), ids[: ranks or None]))
    several_hosts = len({engine.host_id for engine in engines}) > 1
    return _placed(engines) if several_hosts else engines


def _introduced(client: Any, id: int) -> Engine:
    engine = Engine(id, client)
    there, here = engine.ask(eval, _VERSIONS), eval(_VERSIONS)
    if there != here:
        raise SetupError(f"{engine} has {there}, and this notebook {here}: install the same.")
    engine.ask(warm_up)
    host, host_id = engine.ask(socket.gethostname), engine.ask(kernel_id, "net")
    return replace(engine, host=host, host_id=host_id)


def _placed(engines: Sequence[Engine]) -> list[Engine]:
    """Give each engine the address by which the ranks of other hosts reach its own."""
    known = [engine.ask(interface_towards, "") for engine in engines]
    outside = [address for _, address in known if not address.startswith("127.")]
    hosts = [engine.host_id for engine in engines]
    placed = []
    for number, (engine, (interface, address)) in enumerate(zip(engines, known, strict=True)):
        if address not in outside and outside:  # The controller is on this host.
            interface, address = engine.ask(interface_towards, outside[0])
        if address.startswith("127."):
            raise SetupError(
                f"no address is known by which the other hosts reach {engine}: start it with the"
                " environment variable GLOO_SOCKET_IFNAME, its host's interface to them."
            )
        host = engine.host_id
        position = HostPosition(interface, hosts[:number].count(host), hosts.count(host))
        placed.append(replace(engine, address=address, position=position))
    return placed


class EngineRank(RankProcess):
    """A rank beside an engine. Its connections lead to a thread that asks the engine for news."""

    halted, lost = False, ""
    beside_engine = True

    def __init__(self, engine: Engine) -> None:
        self._engine, self._key = engine, secrets.token_hex(8)
        self._scratch = self._folder = ""
        pid = self._ask_engine(start) or 0
        control, self._their_control = mp.Pipe()
        output, self._their_output = mp.Pipe(duplex=False)
        death, self._their_death = mp.Pipe(duplex=False)
        widen(output.fileno())
        super().__init__(pid, control, output, death)
        threading.Thread(target=self._forward_all, daemon=True).start()

    def listen(self, backlog: int, address: str = "") -> tuple[str, int]:
        return self._ask("listen", backlog, address or self._engine.address) or ("", 0)

    def send(self, call: Call) -> None:
        """Send the call without this process's environment, which is not for other hosts."""
        around = replace(call.environment, variables={})
        there = replace(call, environment=around, position=self._engine.position)
        self._folder = call.folder
        self._scratch = self._ask("begin", there, kernel_id("net")) or ""

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        return self._ask("where") or ()

    def pause(self) -> int | None:
        at_ns: int | None = self._ask("pause")
        return at_ns

    def kill(self) -> None:
        self._ask("kill")

    def collect(self) -> None:
        """Bring what the rank has recorded on another host into the run's folder."""
        scratch, self._scratch = self._scratch, ""
        if not scratch:
            return
        files, trouble = self._ask("recorded"), ""
        try:
            for name, data in (files or {}).items():
                Path(self._folder, "trace", Path(name).name).write_bytes(data)
        except OSError as error:  # A full disk here is no reason to lose the results.
            trouble = str(error)
        if trouble or files is None:
            what = f"what was recorded in {scratch} on {self._engine.host} is not here"
            print(f"dlearn: {what}: {trouble or self.lost}", file=sys.stderr)

    def close(self) -> None:
        self.collect()
        self._ask_engine(end)
        self.control.close()
        self.output.close()  # The thread that forwards notices, and ends.
        super().close()

    def _ask(self, method: str, *args: Any) -> Any:
        """Return what the method of its HostedRank does; None once the rank is lost."""
        return self._ask_engine(ask, method, *args)

    def _ask_engine(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.lost:
            try:
                return self._engine.ask(function, self._key, *args)
            except SetupError as error:
                self.lost = f"lost its engine: {error}"
        return None

    def _forward_all(self) -> None:
        """Forward messages and output until the rank has ended, is lost, or is closed."""
        with self._their_control, self._their_output, self._their_death:
            with suppress(EOFError, OSError):
                while self._forward():
                    pass

    def _forward(self) -> bool:
        due = self._their_control.poll(PAUSE_SECONDS)
        messages = [self._their_control.recv()] if due else []
        news = self._ask("exchange", *messages)
        if news is None:
            self.lost = self.lost or "was ended by its engine, which had not been asked for long"
            return False
        output, answers, over, exit_code = news
        with open(self._their_output.fileno(), "wb", closefd=False) as stream:
            stream.write(output)
        for answer in answers:
            if isinstance(answer, Raised):  # Each host has a clock of its own.
                answer = replace(answer, at_ns=time.monotonic_ns())
            self._their_control.send(answer)
        if over:
            self._their_death.send(exit_code)
        return not over


def start_ranks(engines: Sequence[Engine]) -> list[RankProcess]:
    """Start a rank beside each engine; if one cannot be, none is left."""
    with warm_pool.ended_on_error() as ranks:
        for engine in engines:
            ranks.append(EngineRank(engine))
        return ranks


# What follows runs on the engine.


class HostedRank:
    """A rank beside this engine; `scratch` is where it records if the run's folder is not here."""

    call: Call | None = None
    scratch = ""

    def __init__(self, rank: RankProcess) -> None:
        self.rank = rank
        self.listen, self.pause, self.kill = rank.listen, rank.pause, rank.kill
        self.asked_at = time.monotonic()

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

    def where(self) -> tuple[StackLine, ...]:
        """Return the rank's stack in the user's code."""
        return self.rank.stack(self.call) if self.call is not None else ()

    def recorded(self) -> dict[str, bytes]:
        """Return the files that the rank has recorded in `scratch`."""
        return {path.name: path.read_bytes() for path in Path(self.scratch, "trace").iterdir()}


_ranks: dict[str, HostedRank] = {}


def interface_towards(address: str) -> tuple[str, str]:
    """Return the interface that leads to an address ("": the controller's), and its own address.

    GLOO_SOCKET_IFNAME in the engine's environment names another one.
    """
    from ipyparallel.engine.app import IPEngine

    controller = IPEngine.instance().registration_url.split("://")[-1].rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address or controller, 9))  # Sends nothing.
        route = probe.getsockname()[0]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    for name, addresses in optional("psutil", needed_by="engine=").net_if_addrs().items():
        for own in addresses:
            is_it = name == wanted if wanted else own.address == route
            if is_it and own.family == socket.AF_INET:
                return name, own.address
    raise LookupError(f"its host has no interface {wanted or route}")


def start(key: str) -> int | None:
    """Start a rank that is called `key` from now on, and return its pid."""
    (rank,) = warm_pool.take(1)
    _ranks[key] = HostedRank(rank)
    threading.Thread(target=_end_when_forgotten, args=(key,), daemon=True).start()
    return rank.pid


def ask(key: str, method: str, *args: Any) -> Any:
    """Return what the rank's `HostedRank.method(*args)` does; None if it has been ended."""
    rank = _ranks.get(key)
    if rank is None:
        return None
    rank.asked_at = time.monotonic()
    return getattr(rank, method)(*args)


def end(key: str) -> None:
    """End the rank with all it started, and have a fresh one wait for the next run."""
    hosted = _ranks.pop(key, None)
    if hosted is not None:
        hosted.rank.kill()
        shutil.rmtree(hosted.scratch, ignore_errors=True)
        warm_pool.recycle(hosted.rank.close, 1)


def _end_when_forgotten(key: str) -> None:
    rank = _ranks[key]
    while time.monotonic() < rank.asked_at + ANSWER_SECONDS:
        time.sleep(1.0)
    end(key)
