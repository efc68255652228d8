"""The server of the gate: calls that wait, and their order; its clients are hooks/gate.py."""

import itertools
import json
import os
import reprlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dlearn.errors import DlearnError, SetupError

Name = int | str
Activity = dict[str, Any]  # What a rank says that it does: hooks/gate.py.


@dataclass(frozen=True)
class PausedCall:
    """A call that waits before torch gets it: which of its rank's calls (from 1), to whom, payload, line of code.

    `to` is a rank, the name of an RPC worker, or None (the group, or any); it is made in these `spans`.
    """

    rank: Name
    number: int
    op: str
    to: Name | None
    bytes: int
    site: str
    phase: str
    bucket: int | None = None
    spans: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.text}"

    @property
    def text(self) -> str:
        """Return "send to 1 (train.py:7)"."""
        way = "from" if self.op == "recv" else "to"
        to = f" {way} {self.to}" if self.to is not None else ""
        line = f" ({self.site})" if self.site else ""
        return f"{self.op}{to}{line}"


@dataclass(frozen=True)
class Passed:
    """A call that was let through, and the calls (rank, number) that came since the one before."""

    rank: Name
    number: int
    op: str
    beside: frozenset[tuple[Name, int]] = frozenset()


Hold = bool | Callable[[PausedCall], object] | Sequence[Passed]
"""Everything, what it says of a call, or a schedule: in this order."""


def rank_text(name: Name) -> str:
    return f"rank {name}" if isinstance(name, int) else name


def check_hold(hold: object, names: Sequence[Name]) -> None:
    """Raise SetupError unless this is one of the three kinds of `Hold`, for a job of these ranks."""
    if hold is True or callable(hold):
        return
    if not isinstance(hold, Sequence) or isinstance(hold, str | bytes | bytearray):
        raise SetupError(f"hold is True, a function of a call, or a schedule, not {type(hold).__name__}.")
    for number, item in enumerate(hold, start=1):
        if not isinstance(item, Passed) or item.rank not in names:
            is_no_call = f"is {reprlib.repr(item)}, no call of ranks {list(names)}"
            raise SetupError(f"item {number} of hold= {is_no_call}.")


class GateServer:
    """Keeps the gate of one run, and asks its condition of each call, in this process."""

    def __init__(self, names: Sequence[Name] | None, hold: Hold) -> None:
        self.names: tuple[Name, ...] = tuple(names or ())  # A script's first rank says how many.
        check_hold(hold, self.names)
        self._expected = len(names) if names is not None else None
        self._condition: Callable[[PausedCall], object] | None = hold if callable(hold) else None
        self._ahead = list(hold) if isinstance(hold, Sequence) else None
        self.changed = threading.Condition()
        self.calls: list[PausedCall] = []
        self.judged: dict[int, PausedCall] = {}  # The condition is asked of them, by this thread.
        self.passed: list[Passed] = []
        self.wires: dict[tuple[int, int], None] = {}  # Those that a stage has shown.
        self._fresh: set[tuple[Name, int]] = set()  # Calls since one was let through.
        self.unnoted: set[tuple[Name, int]] = set()  # Let through, not yet recorded.
        self.ended: set[Name] = set()
        self._returned: set[Name] = set()
        self.is_open = False
        self.changes = 0  # How often a rank has come, called, gone on or ended.
        self.answers: dict[int, dict[Name, Activity]] = {}  # By the number of the question.
        self._numbers = itertools.count(1)
        self._silent: set[Name] = set()  # Ranks that have not answered the last question.
        self.trouble = ""  # Why nothing goes on.
        self.on_trouble: Callable[[], None] = lambda: None
        self.connections: dict[Name, socket.socket] = {}
        self._folder = tempfile.mkdtemp(prefix="dlearn-")  # No other user may enter it.
        self.address = os.path.join(self._folder, "gate")
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.address)
        except OSError as error:  # A socket's path has 107 bytes at most.
            self._listener.close()
            os.rmdir(self._folder)
            raise SetupError(f"no gate at {self.address}: {error}. Set TMPDIR to a shorter path.") from None
        self._listener.listen(self._expected or 64)
        threading.Thread(target=self._meet, daemon=True, name="dlearn-gate").start()

    def _meet(self) -> None:
        try:
            for _ in range(self._expected) if self._expected is not None else itertools.count():
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="dlearn-gate").start()
        except (OSError, RuntimeError) as error:  # Too many files or threads; or it was closed.
            if not self.is_open:
                self._fail(f"the gate could not take a rank in: {error}; the ranks were ended")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        """Read the lines of one rank until its end. An error ends the job, as the rank would wait for ever."""
        name: Name | None = None
        try:
            with connection, connection.makefile("rb") as lines, suppress(OSError):
                for line in itertools.takewhile(lambda line: line.endswith(b"\n"), lines):
                    said = json.loads(line)
                    if name is None:
                        name = self._came(said["rank"], said["size"], connection)
                    else:
                        self._hear(name, said)
        except BaseException as error:  # On this thread nothing else would report it.
            self._fail(f"the gate of rank {name} failed, {error!r}; the ranks were ended")
        with self.changed:
            self.changes += 1
            if name is not None and self.connections.get(name) is connection:
                self.ended.add(name)
                self.calls = [call for call in self.calls if call.rank != name]
                self.unnoted = {call for call in self.unnoted if call[0] != name}
            self._replay()
            self.changed.notify_all()

    def _came(self, rank: int, size: int, connection: socket.socket) -> Name:
        with self.changed:
            if self._expected is None:
                self.names = tuple(range(max(size, rank + 1, len(self.names))))
            name = self.names[rank]
            self.connections[name] = connection
            self.ended.discard(name)  # A script's rank may have been started again.
            self._silent.discard(name)
            if self.is_open:
                self._say(name, b"open\n")
            self.changes += 1
            self.changed.notify_all()
        return name

    def _hear(self, name: Name, said: dict[str, Any]) -> None:
        if "number" in said:
            self._arrived(name, said)
            return
        with self.changed:
            if "noted" in said:
                self.unnoted.discard((name, said["noted"]))
            elif "returned" in said:
                self._returned.add(name)
            else:
                self._silent.discard(name)
                self.answers.get(said.pop("asked"), {})[name] = said
            self.changed.notify_all()

    def _arrived(self, name: Name, facts: dict[str, Any]) -> None:
        to = facts.pop("to")
        facts["spans"] = tuple(facts["spans"])
        call = PausedCall(rank=name, to=self.names[to] if isinstance(to, int) else to, **facts)
        thread = threading.get_ident()
        self.judged[thread] = call
        try:
            paused = self._condition is None or self.is_open or bool(self._condition(call))
        except BaseException as error:  # It is the user's, and may call sys.exit().
            raised = f"raised {type(error).__name__} at {call}: {error}"
            self._fail(f"the condition of hold= {raised}; the ranks were ended")
            return
        finally:
            self.judged.pop(thread, None)
        with self.changed:
            if self.is_open:
                return
            self.changes += 1
            self._fresh.add((name, call.number))
            self.calls.append(call)
            if not paused:
                self._pass(call)
            self._replay()
            self.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self.changed:
            self.trouble = self.trouble or why
            self.changed.notify_all()
        # Ending the ranks takes a moment, and the caller may have the lock.
        threading.Thread(target=self.on_trouble, daemon=True, name="dlearn-gate").start()

    def _pass(self, call: PausedCall) -> None:
        key = (call.rank, call.number)
        self.changes += 1
        self.calls.remove(call)
        self.passed.append(Passed(*key, call.op, frozenset(self._fresh - {key})))
        self._fresh.clear()
        self.unnoted.add(key)
        self._say(call.rank, b"%d\n" % call.number)

    def _say(self, name: Name, words: bytes) -> None:
        with suppress(OSError):  # The rank has just ended.
            self.connections[name].sendall(words)

    def _replay(self) -> None:
        """Let through what is next in the schedule, once all wait that had come by then."""
        waiting = {(call.rank, call.number): call for call in self.calls}
        while self._ahead and not (self.is_open or self.trouble):
            due = self._ahead[0]
            if not {(due.rank, due.number), *due.beside} <= waiting.keys():
                if why := self._why_never(due, {*waiting}):
                    self._fail(why)
                return
            call = waiting.pop((due.rank, due.number))
            if call.op != due.op:
                has = f"the schedule has {due.op} as call {due.number} of rank {due.rank}"
                self._fail(f"{has}, and it is {call}")
                return
            self._ahead.pop(0)
            self._pass(call)
        if self._ahead == [] and not self.is_open:
            self.free()

    def _why_never(self, due: Passed, waiting: set[tuple[Name, int]]) -> str:
        """Say why this call, or one beside it, cannot come; "" if it can, or its rank has failed."""
        for rank, number in ((due.rank, due.number), *sorted(due.beside - waiting)):
            made = sum(call.rank == rank for call in self.passed)
            has = f"the schedule has call {number} of rank {rank} next"
            if number <= made:
                return f"{has}, which has been let through before"
            if rank in self.ended & self._returned:
                return f"{has}, and rank {rank} has ended after {made}"
        return ""

    def finish(self) -> None:
        """Note that all ranks have returned: what is left of a schedule has not come."""
        with self.changed:
            self.ended = self._returned = {*self.names}
            if self._ahead and not self.is_open:
                self.trouble = self.trouble or self._why_never(self._ahead[0], set())

    def let_through(self, choose: Callable[[list[PausedCall]], PausedCall | None]) -> PausedCall | None:
        """Let the call through that `choose` picks of those that wait now; None if it picks none."""
        with self.changed:
            if self.trouble:
                raise DlearnError(self.trouble)
            call = choose(self.calls)
            if call is not None:
                self._pass(call)
            return call

    def ask(self, is_over: Callable[[], bool], seconds: float) -> dict[Name, Activity]:
        """Return what each rank does that answers in time, or before `is_over`.

        One that does not computes, and lets no thread in; one that owes an answer is not asked again.
        """
        number = next(self._numbers)
        with self.changed:
            answers = self.answers[number] = {}
            here = self.connections.keys() - self.ended
            for name in here - self._silent:
                self._silent.add(name)
                self._say(name, b"?%d\n" % number)
            self.changed.wait_for(lambda: is_over() or here <= answers.keys() | self.ended, seconds)
            return self.answers.pop(number)

    def all_wait(self) -> bool:
        here = {call.rank for call in self.calls} | self.ended
        return self.is_open or (bool(self.names) and here >= {*self.names})

    @property
    def over(self) -> bool:
        """Return whether no call will wait any more: all ranks have ended, or the gate is open for good."""
        return self.is_open or (bool(self.names) and self.ended >= {*self.names})

    def free(self) -> None:
        with self.changed:
            self.changes += 1
            self.is_open = True
            self.calls = []
            self.changed.notify_all()
            for name in self.connections:
                self._say(name, b"open\n")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self.free()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
