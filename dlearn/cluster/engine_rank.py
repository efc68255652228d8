"""A rank beside an ipyparallel engine: to its crew the same as one of this machine.

A thread exchanges what goes through its pipes with the engine's relay, over ipyparallel's own
connections: so this machine opens no port, and ipyparallel's authentication and tunnels count.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlearn.cluster import engine_relay, spares
from dlearn.cluster.answers import Raised
from dlearn.cluster.engine_relay import Report
from dlearn.cluster.engines import ANSWER_SECONDS, Engine, EngineGone
from dlearn.cluster.launch import StackLine
from dlearn.cluster.rank import Call
from dlearn.live.live_display import LiveDisplay
from dlearn.trace.rpc.agent_log import widen

SHORTEST_SECONDS, LONGEST_SECONDS = 0.05, 0.5
"""How long the engine waits for something from the rank before it answers: a tenth of the run so far, within these."""
IDLE_SECONDS = 2.0
KILL_SECONDS = 10.0
START_SECONDS = 300.0


class EngineRank:
    """A rank that its `engine` starts. It is not there yet when this returns: see `is_there`."""

    halted = False
    beside_engine = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._key = secrets.token_hex(8)
        self.control, self._their_control = mp.Pipe()
        self.output, self._their_output = mp.Pipe(duplex=False)
        self._death, self._their_death = mp.Pipe(duplex=False)
        widen(self.output.fileno())
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.lost = ""
        self._engine_gone = False
        self._begun: Call | None = None
        self._folders: tuple[str, str] | None = None
        self._unwanted = False
        self._there, self._over = threading.Event(), threading.Event()
        self._carrier = threading.Thread(target=self._carry, name=f"dlearn-engine-{engine.id}", daemon=True)
        self._carrier.start()

    @property
    def host(self) -> str:
        return self.engine.host[0]

    @property
    def sentinel(self) -> int:
        return self._death.fileno()

    @property
    def lives(self) -> bool:
        return not self._over.is_set()

    def is_there(self, seconds: float) -> bool:
        return self._there.wait(seconds)

    def wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    def listen(self, backlog: int) -> tuple[str, int]:
        found: tuple[str, int] | None = self._ask("listen", backlog, self.engine.address, seconds=ANSWER_SECONDS)
        return found or ("", 0)

    def send(self, call: Call) -> None:
        """The rank records in a folder of its own host. The environment of this process is nobody's business there."""
        folder = f"{self.engine.told['scratch']}/dlearn-{call.job}-rank{call.rank}"
        self._folders = (folder, call.folder)
        around = replace(call.surroundings, environment={})
        there = replace(call, folder=folder, surroundings=around, place=self.engine.place)
        self._begun = replace(there, payload=b"")
        self.control.send(there)

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        found: tuple[StackLine, ...] | None = self._ask("stack", self._begun) if self._begun is not None else None
        return found or ()

    def pause(self) -> int | None:
        at_ns: int | None = self._ask("pause")
        return at_ns

    def kill(self) -> None:
        if not self._there.is_set():
            self._unwanted = True  # It is only being started: the carrier ends it then.
        else:
            self._ask_engine(engine_relay.end, seconds=KILL_SECONDS)

    def collect(self) -> None:
        """Bring what it recorded into the run's folder here; of an engine that is gone, from a disk that both share."""
        if self._folders is None:
            return
        (there, here), self._folders = self._folders, None
        why = ""
        try:
            if self._bring(there, Path(here, "trace")):
                return
        except OSError as error:  # A full disk here is no reason to lose the results.
            why = f" ({error.strerror or error})"
        print(f"dlearn: what was recorded beside {self.engine} stayed there, in {there}/trace{why}", file=sys.stderr)

    def _bring(self, there: str, here: Path) -> bool:
        if not self._engine_gone:
            try:
                self._fetch(there, here)
                return True
            except EngineGone as gone:
                self._lose(gone)
        if not Path(there).is_dir():  # Its name is one of a kind.
            return False
        shutil.copytree(Path(there, "trace"), here, dirs_exist_ok=True)
        shutil.rmtree(there, ignore_errors=True)
        return True

    def close(self) -> None:
        self.collect()
        for end in (self.control, self.output):
            end.close()  # The carrier notices, and ends.
        if self._there.is_set():
            self._carrier.join(KILL_SECONDS)
        self._death.close()

    def _ask(self, method: str, *args: Any, seconds: float = KILL_SECONDS) -> Any:
        """What its `RankProcess` there answers; None if it is not there, or its engine is gone."""
        return self._ask_engine(engine_relay.ask, method, *args, seconds=seconds) if self._there.is_set() else None

    def _ask_engine(self, function: Callable[..., Any], *args: Any, seconds: float) -> Any:
        if not self._engine_gone:
            try:
                return self.engine.ask(function, self._key, *args, seconds=seconds)
            except EngineGone as gone:
                self._lose(gone)
        return None

    def _lose(self, gone: EngineGone) -> None:
        self._engine_gone = True
        self.lost = f"lost its {self.engine}, which {gone}"
        if self._folders is not None and not Path(self._folders[0]).is_dir():
            self.lost += f"; what it had recorded stayed there, in {self._folders[0]}/trace"

    def _fetch(self, there: str, here: Path) -> None:
        for name in self.engine.ask(engine_relay.files, there):
            with (here / Path(name).name).open("wb") as file:
                while piece := self.engine.ask(engine_relay.piece, there, name, file.tell()):
                    file.write(piece)
        # Not before all of it is here.
        self.engine.ask(shutil.rmtree, there, True)

    def _carry(self) -> None:
        """The carrier's life: start the rank, carry what there is, and tell our ends when nothing comes any more."""
        try:
            self.pid = self.engine.ask(engine_relay.start, self._key, seconds=START_SECONDS)
            self._there.set()
            if not self._unwanted:
                self._carry_on()
        except EngineGone as gone:
            self._lose(gone)
        except (EOFError, OSError):
            pass  # Our ends were closed: the crew has done with this rank.
        finally:
            self._over.set()
            self._there.set()
            for end in (self._their_control, self._their_output, self._their_death):
                end.close()
        if self._unwanted:
            with suppress(EngineGone):
                self.engine.ask(engine_relay.end, self._key)

    def _carry_on(self) -> None:
        answers_due, since = 0, time.monotonic()
        while True:
            if not answers_due and self._their_control.poll(IDLE_SECONDS):
                since = time.monotonic()
            messages = []
            while self._their_control.poll(0):
                messages.append(self._their_control.recv())
            answers_due += len(messages)
            patience = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, (time.monotonic() - since) / 10))
            asked_ns = time.monotonic_ns()
            report = self.engine.ask(engine_relay.exchange, self._key, messages, patience if answers_due else 0.0)
            self._write(report.output)
            for message in report.messages:
                self._their_control.send(_on_our_clock(message, report, asked_ns))
            answers_due -= len(report.messages)
            if report.over:
                self.exit_code, self.lost = report.exit_code, report.note
                return

    def _write(self, output: bytes) -> None:
        left = memoryview(output)
        while left:
            left = left[os.write(self._their_output.fileno(), left) :]


def _on_our_clock(message: Any, report: Report, asked_ns: int) -> Any:
    """The fault that came first is blamed. On another host's clock, its age is what counts."""
    now_ns = time.monotonic_ns()
    if isinstance(message, Raised) and not asked_ns <= report.at_ns <= now_ns:
        return replace(message, at_ns=now_ns - (report.at_ns - message.at_ns))
    return message


def start_ranks(engines: Sequence[Engine]) -> list[EngineRank]:
    """A fresh rank beside each engine. If one cannot be waited for, none is left."""
    ranks = [EngineRank(engine) for engine in engines]  # They start at the same time.
    progress = LiveDisplay()
    try:
        for rank in ranks:
            while not rank.is_there(LONGEST_SECONDS):
                progress.update(f"dlearn: {rank.engine} loads torch, or does other work")
    except BaseException:
        spares.end(ranks)
        raise
    finally:
        progress.clear()
    return ranks
