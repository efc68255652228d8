"""Ranks at work: send a call to each, follow them until all are done or one fails, and leave none behind."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dlearn.cluster import spares
from dlearn.cluster.answers import Raised, Returned
from dlearn.cluster.engines import EngineRank
from dlearn.cluster.launch import DEATH_SECONDS, RankProcess, StackLine, StartMethod
from dlearn.cluster.output import OutputStreams
from dlearn.cluster.rank import FINISH, Call
from dlearn.cluster.strangers import users_connected_to
from dlearn.errors import SetupError
from dlearn.events.agent_log import LOOK_SECONDS, PAUSE_SECONDS, SUFFIX
from dlearn.live.live_display import LiveDisplay
from dlearn.live.live_rows import LiveRows

GRACE_SECONDS = 0.5
"""After one rank has failed: how long the others may take to notice, before they are ended; longer if they starve."""
MOST_GRACE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
LEAVE_SECONDS = 1.0
DRAIN_SECONDS = 2.0
"""How long what was printed before the end is read; a thread or child of the rank may still print."""


@dataclass(frozen=True)
class Died:
    """The process ended inside the function: its exit code (negative: a signal), its last line.

    Without a code it lives and has closed its connection; or it is `lost`, which says how.
    """

    exit_code: int | None
    last_line: str
    at_ns: int
    lost: str = ""
    beside_engine: bool = False
    aborted_mpi: bool = False

    @classmethod
    def of(cls, rank: Rank, at_ns: int, last_line: str = "") -> Died:
        return cls(rank.exit_code, last_line, at_ns, rank.lost, rank.beside_engine, rank.aborted_mpi)


@dataclass(frozen=True)
class Ended:
    """We ended it, as another rank had failed or the time was over.

    `stack` is where it was in the user's code, innermost call first; `at_ns`, when it was stopped, is
    its host's clock. `halted`: it had been stopped before.
    """

    stack: tuple[StackLine, ...] = ()
    at_ns: int | None = None
    halted: bool = False
    begun: bool = True


Outcome = Returned | Raised | Died | Ended


Rank = RankProcess | EngineRank


class Crew:
    """The processes of one cluster. After a fault they are gone, and `alive` is False."""

    def __init__(self, tags: Sequence[str], start: StartMethod) -> None:
        self.tags = tuple(tags)
        self.ranks: list[Rank] = []
        self._start = start
        self._busy = threading.Lock()
        self._sender: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return bool(self.ranks) and all(rank.lives for rank in self.ranks)

    def call(
        self, calls: Sequence[Call], timeout: float | None, display: LiveDisplay
    ) -> tuple[list[Outcome], OutputStreams]:
        """Run one call to its end on all ranks; where that fails or is interrupted, end them all."""
        if not self._busy.acquire(blocking=False):
            raise SetupError("these ranks are at work on another run: use a Cluster of its own in each thread.")
        try:
            return self._call(calls, timeout, display)
        finally:
            self._busy.release()

    def _call(
        self, calls: Sequence[Call], timeout: float | None, display: LiveDisplay
    ) -> tuple[list[Outcome], OutputStreams]:
        logs = [_agent_log(call, rank) for call, rank in zip(calls, self.ranks, strict=True)]
        streams = OutputStreams(self.tags, logs)
        try:
            store = self.ranks[0].listen(backlog=len(calls) * 4)
            calls = [replace(call, store=store) for call in calls]
            outcomes = self._lost_before() or self._send_and_follow(calls, streams, display, timeout)
            healthy = all(isinstance(outcome, Returned | Raised) for outcome in outcomes)
            self._finish(outcomes, streams, keep=healthy and calls[0].keep)
            if healthy:
                for rank in self.ranks:
                    rank.collect()
        except BaseException:
            self.kill()
            raise
        else:
            if not healthy:
                self.kill()
        finally:
            if self._sender is not None:
                self._sender.join()
            display.step_aside()
            streams.finish()
        if healthy and not calls[0].keep:
            # They have closed their files and are leaving by themselves.
            used, self.ranks = self.ranks, []
            fresh = sum(rank.leaves_a_spare for rank in used)
            spares.turn_over(partial(_see_off, used), fresh, self._start)
        return outcomes, streams

    def _lost_before(self) -> list[Outcome]:
        """The outcomes if a rank has been lost before the call: no other one need begin."""
        if not any(rank.lost for rank in self.ranks):
            return []
        now_ns = time.monotonic_ns()
        return [Died.of(rank, now_ns) if rank.lost else Ended(begun=False) for rank in self.ranks]

    def _send_and_follow(
        self, calls: Sequence[Call], streams: OutputStreams, display: LiveDisplay, timeout: float | None
    ) -> list[Outcome]:
        # On a thread: a rank that does not read must not hold up the clock. It ends when the ranks do.
        self._sender = threading.Thread(target=_send, args=(list(self.ranks), calls), daemon=True)
        self._sender.start()
        return self._follow(calls, streams, display, timeout)

    def _follow(
        self, calls: Sequence[Call], streams: OutputStreams, display: LiveDisplay, timeout: float | None
    ) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(self.ranks)
        deadline = time.monotonic() + timeout if timeout is not None else None
        grace: Grace | None = None
        look_again_ns = 0
        rows = LiveRows(Path(calls[0].folder, "trace"), self.tags)
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self.ranks):
                selector.register(rank.control, selectors.EVENT_READ, ("control", index))
                selector.register(rank.output, selectors.EVENT_READ, ("output", index))
                # A rank's own children may keep its connection open after it has died; this tells all the same.
                selector.register(rank.sentinel, selectors.EVENT_READ, ("death", index))
            while any(outcome is None for outcome in outcomes):
                asked_ns = time.monotonic_ns()
                if asked_ns > look_again_ns:
                    self._refuse_strangers(calls[0])
                    look_again_ns = asked_ns + round(1e9 * LOOK_SECONDS)
                look = LOOK_SECONDS if grace is None else LOOK_SECONDS / 5
                wait = look if deadline is None else min(look, max(0.0, deadline - time.monotonic()))
                ready = [key.data for key, _ in selector.select(wait)]
                for index in range(len(self.ranks)):
                    if ("output", index) not in ready:
                        streams.found_empty(index, asked_ns)
                for what, index in ready:
                    rank = self.ranks[index]
                    if what == "output":
                        if not streams.read(index, rank.output):
                            selector.unregister(rank.output)
                        continue
                    if outcomes[index] is not None:
                        continue  # Its answer and its end came together.
                    outcome = self._receive(index, streams)
                    outcomes[index] = outcome
                    selector.unregister(rank.control)
                    selector.unregister(rank.sentinel)
                    if not isinstance(outcome, Returned) and grace is None:
                        # The first fault. The others get a moment to fail by themselves, and to say why.
                        grace = Grace(GRACE_SECONDS, self._pids_here(outcomes))
                if streams.waiting:
                    display.step_aside()
                    streams.show()
                running = sum(outcome is None for outcome in outcomes)
                if not calls[0].gate:
                    display.update(f"dlearn: {running} of {len(outcomes)} ranks at work", rows)
                if deadline is not None and time.monotonic() >= deadline:
                    break
                if grace is not None and grace.is_over(self._pids_here(outcomes)):
                    break
                if streams.logging and running:
                    # Each of its lines would wake this process up, and take the ranks' time.
                    time.sleep(PAUSE_SECONDS)
        self._refuse_strangers(calls[0])
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        for index, stack in zip(late, self._stacks(calls, late), strict=True):
            rank = self.ranks[index]
            halted = rank.halted
            outcomes[index] = Ended(stack, rank.pause(), halted)
        return [outcome or Ended() for outcome in outcomes]

    def _refuse_strangers(self, call: Call) -> None:
        """SetupError if another user of this machine has connected to RPC workers, which can be had to run anything."""
        open_to_others = call.rpc and all(type(rank) is RankProcess for rank in self.ranks)
        users = users_connected_to(rank.pid or 0 for rank in self.ranks) if open_to_others else ()
        if users:
            raise SetupError(
                f"user {min(users)} of this machine has connected to these ranks, and may have had them run anything"
                f" as you: they were ended. What they had recorded is in {call.folder}/trace. Where dlearn doctor says"
                " that private ranks are possible, leave out private=False."
            )

    def _pids_here(self, outcomes: Sequence[Outcome | None]) -> list[int]:
        ranks = [rank for rank, outcome in zip(self.ranks, outcomes, strict=True) if outcome is None]
        return [rank.pid for rank in ranks if rank.pid is not None and rank.host == socket.gethostname()]

    def _stacks(self, calls: Sequence[Call], ranks: Sequence[int]) -> list[tuple[StackLine, ...]]:
        """Where the ranks that are still at work are: all are asked at the same time."""
        if not ranks:
            return []
        with ThreadPoolExecutor(len(ranks)) as asking:
            return list(asking.map(lambda rank: self.ranks[rank].stack(calls[rank]), ranks))

    def _receive(self, index: int, streams: OutputStreams) -> Outcome:
        rank = self.ranks[index]
        with suppress(EOFError, ConnectionResetError):
            if rank.control.poll(0):
                outcome: Outcome = rank.control.recv()
                return outcome
        noticed_ns = time.monotonic_ns()
        rank.wait(DEATH_SECONDS)
        rank.kill()  # What it had started.
        self._drain(index, streams)
        return Died.of(rank, noticed_ns, streams.last_line(index))

    def _drain(self, index: int, streams: OutputStreams) -> None:
        """Read what this rank has printed so far; its children may hold the pipe open, so never wait for its end."""
        pipe = self.ranks[index].output
        deadline = time.monotonic() + DRAIN_SECONDS
        while pipe.poll(0) and streams.read(index, pipe) and time.monotonic() < deadline:
            pass

    def _finish(self, outcomes: Sequence[Outcome], streams: OutputStreams, *, keep: bool) -> None:
        """Let the ranks that answered close their trace files, together, and read what they printed last."""
        answered = [
            rank for rank, outcome in zip(self.ranks, outcomes, strict=True) if isinstance(outcome, Returned | Raised)
        ]
        deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(BrokenPipeError, ConnectionResetError, EOFError):
            for rank in answered:
                rank.control.send(FINISH if keep else None)
            for rank in answered:
                if rank.control.poll(max(0.0, deadline - time.monotonic())):
                    rank.control.recv()
        for index in range(len(self.ranks)):
            self._drain(index, streams)

    def stop(self) -> None:
        for rank in self.ranks:
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.control.send(None)
        _see_off(self.ranks)
        self.ranks.clear()

    def kill(self) -> None:
        """End every rank now, with all it started; returns when they are gone."""
        for rank in self.ranks:
            # Else the sends and receives of the last fail when the first is gone, and look as if they had ended.
            rank.pause()
        kill_all(self.ranks)
        if self._sender is not None:
            self._sender.join()  # It must not find its pipes closed at this end.
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()


def kill_all(ranks: Iterable[Rank]) -> None:
    for rank in tuple(ranks):
        rank.kill()


def _see_off(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.wait(LEAVE_SECONDS)
    spares.end(list(ranks))


def _agent_log(call: Call, rank: Rank) -> Path | None:
    """Where the log of this rank's RPC agent goes, if it comes with what the rank prints; an engine's stays there."""
    if call.record is None or call.own_log:
        return None
    return Path(call.folder, "trace", f"{rank.host}-{rank.pid}{SUFFIX}")


def _send(ranks: Sequence[Rank], calls: Sequence[Call]) -> None:
    for rank, call in zip(ranks, calls, strict=True):
        with suppress(OSError):  # It died already; following it will tell.
            rank.send(call)


class Grace:
    """How long the others may take after a first fault to fail by themselves, and to say why.

    A rank that is runnable and gets no core has more time, up to a limit.
    """

    def __init__(self, seconds: float, pids: Collection[int]) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._waited_before = {pid: _waited_seconds(pid) for pid in pids}

    def is_over(self, pids: Collection[int]) -> bool:
        """Whether these, which have not ended yet, have had their time: more, if they waited half of it for a core."""
        passed = time.monotonic() - self._began
        if passed < self.seconds or passed >= max(self.seconds, MOST_GRACE_SECONDS):
            return passed >= self.seconds
        return all(_waited_seconds(pid) - self._waited_before.get(pid, 0.0) < passed / 2 for pid in pids)


def _waited_seconds(pid: int) -> float:
    """How long the process's threads have been runnable and did not run; 0 where the system does not tell."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):  # Linux, Documentation/scheduler/sched-stats.
        with suppress(OSError):  # It has ended.
            waited_ns += int(thread.read_text().split()[1])
    return waited_ns / 1e9
