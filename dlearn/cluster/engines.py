"""Ranks beside ipyparallel's engines: to their pool they are processes like those of this machine.

The engine is not the rank, and stays usable when that hangs or is ended. The notebook asks for news
again and again, over ipyparallel's own connections: it opens no port. A rank ends with its engine,
and when the notebook has stopped asking.
"""

import multiprocessing as mp
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dlearn.cluster import warm_pool
from dlearn.cluster.answers import Raised
from dlearn.cluster.fork_server import warm_up
from dlearn.cluster.hosted_rank import ANSWER_SECONDS, ask, interface_towards, introduction
from dlearn.cluster.rank_process import RankProcess, StackLine
from dlearn.cluster.rank_protocol import LOOPBACK, Call, HostPosition
from dlearn.errors import SetupError, optional
from dlearn.events.agent_log import widen
from dlearn.events.this_host import kernel_id
from dlearn.notices import notice

PAUSE_SECONDS = 0.1
INTRODUCE = "__import__('dlearn.cluster.hosted_rank', fromlist=['']).introduction()"
"""Sent to the engine as text: a function would be sent as the byte code of this Python."""

_asking = threading.Lock()


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


def choose(client: Any, ranks: int) -> list[Engine]:
    """Return the first `ranks` engines (0: all) by id. SetupError if they are too few, or unfit."""
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
    return _with_addresses(engines) if several_hosts else engines


def _introduced(client: Any, id: int) -> Engine:
    """Return the engine with this id, with its host. SetupError if its versions are not this process's."""
    engine = Engine(id, client)
    versions, host, host_id = engine.ask(eval, INTRODUCE)
    here, _, _ = introduction()
    if versions != here:
        raise SetupError(f"{engine} has {versions}, and this notebook {here}: install the same.")
    engine.ask(warm_up)
    return replace(engine, host=host, host_id=host_id)


def _with_addresses(engines: Sequence[Engine]) -> list[Engine]:
    """Give each engine the address by which the ranks of other hosts reach its own."""
    known = [engine.ask(interface_towards, "") for engine in engines]
    outside = [address for _, address in known if not address.startswith("127.")]
    hosts = [engine.host_id for engine in engines]
    reachable = []
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
        reachable.append(replace(engine, address=address, position=position))
    return reachable


class EngineRank(RankProcess):
    """A rank beside an engine. Its connections lead to a thread that asks the engine for news."""

    halted, lost = False, ""
    beside_engine = True

    def __init__(self, engine: Engine) -> None:
        self._engine, self._key = engine, secrets.token_hex(8)
        self._scratch = self._folder = ""
        pid = self._ask("start") or 0
        control, their_control = mp.Pipe()
        output, their_output = mp.Pipe(duplex=False)
        death, their_death = mp.Pipe(duplex=False)
        widen(output.fileno())
        super().__init__(pid, control, output, death, engine.address)
        ends = their_control, their_output, their_death
        threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def send(self, call: Call) -> None:
        """Send the call without this process's environment, which is not for other hosts."""
        around = replace(call.environment, variables={})
        there = replace(call, environment=around, position=self._engine.position)
        self._folder = call.folder
        self._scratch = self._ask("begin", there, kernel_id("net")) or ""

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        return self._ask("stack") or ()

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
            notice(f"{what}: {trouble or self.lost}")

    def close(self) -> None:
        self.collect()
        self._ask("end")
        self.control.close()
        self.output.close()  # The thread that forwards notices, and ends.
        super().close()

    def _ask(self, method: str, *args: Any) -> Any:
        """Return what the method of its HostedRank does; None once the rank is lost."""
        if not self.lost:
            try:
                return self._engine.ask(ask, self._key, method, *args)
            except SetupError as error:
                self.lost = f"lost its engine: {error}"
        return None

    def _forward(self, control: Connection, output: Connection, death: Connection) -> None:
        """Forward messages and output until the rank has ended, is lost, or is closed."""
        with control, output, death, suppress(EOFError, OSError):
            over = False
            while not over:
                messages = [control.recv()] if control.poll(PAUSE_SECONDS) else []
                news = self._ask("exchange", *messages)
                if news is None:
                    silent = "was ended by its engine, which had not been asked for long"
                    self.lost = self.lost or silent
                    return
                printed, answers, over, exit_code = news
                with open(output.fileno(), "wb", closefd=False) as stream:
                    stream.write(printed)
                for answer in answers:
                    if isinstance(answer, Raised):  # Each host has a clock of its own.
                        answer = replace(answer, at_ns=time.monotonic_ns())
                    control.send(answer)
            death.send(exit_code)


def start_ranks(engines: Sequence[Engine]) -> list[RankProcess]:
    """Start a rank beside each engine; if one cannot be, none is left."""
    with warm_pool.ended_on_error() as ranks:
        for engine in engines:
            ranks.append(EngineRank(engine))
        return ranks
