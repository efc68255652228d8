"""The notebook's end of the gate: what waits, and who is let through. The ranks' end is dlearn/hooks/gate.py."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dlearn.errors import DlearnError, SetupError
from dlearn.live.schedule import HeldCall, Hold, Name, Passed


class Keeper:
    """Keeps the gate of one run. A condition is asked of each call here, in this process.

    Without `names` (a script's ranks) they are numbers, as many as the first that comes says.
    `trouble` says why nothing can be let through any more: the condition raised, or a schedule does not fit.
    """

    def __init__(self, names: Sequence[Name] | None, hold: Hold) -> None:
        if not (hold is True or callable(hold) or (isinstance(hold, Sequence) and not isinstance(hold, str))):
            raise SetupError(f"hold is True, a function of a call, or a run's schedule, not {type(hold).__name__}.")
        self.names: tuple[Name, ...] = tuple(names or ())
        self._expected = len(names) if names is not None else None
        self._condition: Callable[[HeldCall], object] | None = hold if callable(hold) else None
        self._ahead = list(hold) if isinstance(hold, Sequence) else []
        self.replaying = isinstance(hold, Sequence)
        self.changed = threading.Condition()
        self.calls: list[HeldCall] = []
        self.passed: list[Passed] = []
        self.unnoted: set[tuple[Name, int]] = set()
        """Calls (rank, number) that were let through, and of which the records do not know yet."""
        self.ended: set[Name] = set()
        self.closed = False
        self.changes = 0
        """How often a rank has come, called, gone on or ended."""
        self.answers: dict[int, dict[Name, dict[str, Any]]] = {}
        """What each rank says that it does, by the number of the question."""
        self.trouble = ""
        self.on_trouble: Callable[[], None] = lambda: None
        self._open = False
        self._ways: dict[Name, socket.socket] = {}
        self._folder = tempfile.mkdtemp(prefix="dlearn-")  # Nobody else may enter it.
        self.address = os.path.join(self._folder, "gate")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(self._expected or 64)
        threading.Thread(target=self._meet, daemon=True, name="dlearn-gate").start()

    def _meet(self) -> None:
        with suppress(OSError):  # Closed before all had come.
            for _ in range(self._expected) if self._expected is not None else itertools.count():
                way, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(way,), daemon=True, name="dlearn-gate").start()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, way: socket.socket) -> None:
        name = None
        with way, way.makefile("rb") as lines, suppress(OSError):
            for line in lines:
                told = json.loads(line)
                if name is None:
                    name = self._came(told["rank"], told["size"], way)
                elif "number" in told:
                    self._arrived(name, told)
                elif "noted" in told:
                    with self.changed:
                        self.unnoted.discard((name, told["noted"]))
                        self.changed.notify_all()
                else:
                    with self.changed:
                        self.answers.get(told.pop("asked"), {})[name] = told
                        self.changed.notify_all()
        with self.changed:
            self.changes += 1
            if name is not None and self._ways.get(name) is way:
                self.ended.add(name)
                self.calls = [call for call in self.calls if call.rank != name]
                self.unnoted = {call for call in self.unnoted if call[0] != name}
            self._replay()
            self.changed.notify_all()

    def _came(self, rank: int, size: int, way: socket.socket) -> Name:
        with self.changed:
            if self._expected is None:
                self.names = tuple(range(max(size, rank + 1, len(self.names))))
            name = self.names[rank]
            self._ways[name] = way
            self.ended.discard(name)  # A script's rank may have been started again.
            if self._open:
                way.shutdown(socket.SHUT_RDWR)
            self.changes += 1
            self.changed.notify_all()
        return name

    def _arrived(self, name: Name, told: dict[str, Any]) -> None:
        to = told.pop("to")
        told["spans"] = tuple(told["spans"])
        call = HeldCall(rank=name, to=self.names[to] if isinstance(to, int) else to, **told)
        try:
            held = self._condition is None or bool(self._condition(call))
        except Exception as error:  # It is the user's.
            self._fail(f"the condition of hold= raised {type(error).__name__} at {call}: {error}; the ranks were ended")
            return
        with self.changed:
            self.changes += 1
            self.calls.append(call)
            if not held:
                self._pass(call)
            self._replay()
            self.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self.changed:
            self.trouble = self.trouble or why
            self.changed.notify_all()
        self.on_trouble()

    def _pass(self, call: HeldCall) -> None:
        beside = frozenset((each.rank, each.number) for each in self.calls if each != call)
        self.changes += 1
        self.calls.remove(call)
        self.passed.append(Passed(call.rank, call.number, call.op, beside))
        self.unnoted.add((call.rank, call.number))
        with suppress(OSError):  # The rank has just ended.
            self._ways[call.rank].sendall(b"%d\n" % call.number)

    def _replay(self) -> None:
        """Let through what is next in the schedule, once all those wait that waited with it then."""
        while self.replaying and self._ahead and not self._open:
            due = self._ahead[0]
            waiting = {(call.rank, call.number): call for call in self.calls}
            call = waiting.get((due.rank, due.number))
            if call is None or not due.beside <= waiting.keys():
                return
            if call.op != due.op:
                threading.Thread(
                    target=self._fail,
                    args=(f"the schedule has {due.op} as call {due.number} of rank {due.rank}, and it is {call}",),
                ).start()  # Ending the ranks takes a moment, and we have the lock.
                return
            self._ahead.pop(0)
            self._pass(call)
        if self.replaying and not self._ahead:
            self._let_all_through()

    def let_through(self, choose: Callable[[list[HeldCall]], HeldCall | None]) -> HeldCall | None:
        """Let the call through that `choose` picks of those that wait now; None if it picks none."""
        with self.changed:
            if self.trouble:
                raise DlearnError(self.trouble)
            call = choose(self.calls)
            if call is not None:
                self._pass(call)
            return call

    def ask(self, number: int) -> set[Name]:
        """Ask each rank that is here what it does; its answer will be in `answers`, under this number."""
        here = self._ways.keys() - self.ended
        for name in here:
            with suppress(OSError):  # The rank has just ended.
                self._ways[name].sendall(b"?%d\n" % number)
        return here

    def wait_for_records(self, seconds: float) -> None:
        """Wait until all calls that were let through are in the records, or for so long."""
        with self.changed:
            self.changed.wait_for(lambda: not self.unnoted or self._open, seconds)

    def has_come(self, name: Name) -> bool:
        return name in self._ways

    def all_wait(self) -> bool:
        return self.closed or (bool(self.names) and {call.rank for call in self.calls} | self.ended >= set(self.names))

    def has_ended(self, name: Name) -> bool:
        """Of a rank whose gate was opened for good this is not known."""
        return name in self.ended and not self._open

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def over(self) -> bool:
        return self.closed or (bool(self.names) and self.ended >= set(self.names))

    def free(self) -> None:
        with self.changed:
            self.changes += 1
            self._let_all_through()

    def _let_all_through(self) -> None:
        """The end of a rank's connection opens its gate."""
        self._open = True
        self.calls = []
        self.changed.notify_all()
        for way in self._ways.values():
            with suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Also before all have come."""
        self.closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.free()
