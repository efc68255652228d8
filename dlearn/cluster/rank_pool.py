"""Ranks at work: send a call to each, follow them until all are done or one fails, and leave none behind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dlearn.cluster import warm_pool
from dlearn.cluster.answers import Raised, Returned
from dlearn.cluster.networks import users_connected_to
from dlearn.cluster.output import OutputStreams
from dlearn.cluster.rank_process import DEATH_SECONDS, RankProcess, StackLine
from dlearn.cluster.rank_protocol import FINISH, Call
from dlearn.errors import SetupError
from dlearn.events.agent_log import LOOK_SECONDS, PAUSE_SECONDS, SUFFIX
from dlearn.events.this_host import scheduled_ns
from dlearn.live.live_rows import LiveDisplay, LiveRows
from dlearn.notices import notice

DEFAULT_SECONDS = 300.0  # For one run. It is known by identity: a caller's own 300 is another.
GRACE_SECONDS = 0.5  # After one rank has failed: for the others to notice; more if they starve.
MOST_GRACE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
LEAVE_SECONDS = 1.0
DRAIN_SECONDS = 2.0  # Of reading what was printed before the end: a child may still print.


@dataclass(frozen=True)
class Died:
    """The outcome of a rank that ended inside its function: its exit code (negative: a signal), its last line.

    Without a code it lives and has closed its connection; or it is `lost`, which says how.
    """

    exit_code: int | None
    last_line: str
    at_ns: int
    lost: str = ""
    beside_engine: bool = False
    aborted_mpi: bool = False

    @classmethod
    def of(cls, rank: RankProcess, at_ns: int, last_line: str = "") -> Died:
        exit_code = None if rank.lost else rank.exit_code
        return cls(exit_code, last_line, at_ns, rank.lost, rank.beside_engine, rank.has_aborted)


@dataclass(frozen=True)
class Ended:
    """The outcome of a rank that was ended, as another had failed or the time was over.

    `stack`: where in the user's code; `at_ns`: when, by its host's clock; `halted`: stopped before.
    """

    stack: tuple[StackLine, ...] = ()
    at_ns: int | None = None
    halted: bool = False
    begun: bool = True


Outcome = Returned | Raised | Died | Ended


class RankPool:
    """The ranks of one cluster. After a fault they are gone, and `alive` is False."""

    def __init__(self, tags: Sequence[str], ranks: Sequence[RankProcess]) -> None:
        self.tags, self.ranks = tuple(tags), list(ranks)
        self._busy = threading.Lock()
        self._sender: threading.Thread | None = None
        self._look_again = 0.0

    @property
    def alive(self) -> bool:
        return bool(self.ranks) and all(rank.lives for rank in self.ranks)

    def call(
        self, calls: Sequence[Call], timeout: float | None, display: LiveDisplay
    ) -> tuple[list[Outcome], OutputStreams]:
        """Run one call to its end on all ranks; where that fails or is interrupted, end them all."""
        logs = [_agent_log(call, rank) for call, rank in zip(calls, self.ranks, strict=True)]
        streams = OutputStreams(self.tags, logs)
        if not self._busy.acquire(blocking=False):
            raise SetupError("these ranks are at work on another run: use a Cluster of its own in each thread.")
        keep, healthy = calls[0].keep, False
        try:
            store = self.ranks[0].listen(backlog=len(calls) * 4)
            calls = [replace(call, store=store) for call in calls]
            outcomes = self._lost_before() or self._send_and_follow(calls, streams, display, timeout)
            answered = all(isinstance(outcome, Returned | Raised) for outcome in outcomes)
            self._finish(outcomes, streams, keep=answered and keep)
            if answered:
                for rank in self.ranks:
                    rank.collect()
            healthy = answered
        finally:
            if not healthy:
                self.kill()
            self._busy.release()
            if self._sender is not None:
                self._sender.join()
            display.step_aside()
            streams.finish()
        if healthy and not keep:
            # They have closed their files and are leaving by themselves.
            used, self.ranks = self.ranks, []
            warm_pool.recycle(partial(_retire, used), sum(map(_is_on_loopback, used)))
        return outcomes, streams

    def _lost_before(self) -> list[Outcome]:
        """Return the outcomes if a rank was lost before the call, which no other one need begin; else []."""
        if not any(rank.lost for rank in self.ranks):
            return []
        now_ns = time.monotonic_ns()
        return [Died.of(rank, now_ns) if rank.lost else Ended(begun=False) for rank in self.ranks]

    def _send_and_follow(
        self, calls: Sequence[Call], streams: OutputStreams, display: LiveDisplay, timeout: float | None
    ) -> list[Outcome]:
        # On a thread: a rank that does not read must not stop the clock. It ends when the ranks do.
        self._sender = threading.Thread(target=_send, args=(list(self.ranks), calls), daemon=True)
        self._sender.start()
        outcomes: list[Outcome | None] = [None] * len(self.ranks)
        rows = LiveRows(Path(calls[0].folder, "trace"), self.tags)
        half_over = time.monotonic() + DEFAULT_SECONDS / 2
        for _ in self._rounds(outcomes, streams, timeout):
            self._refuse_other_users(calls[0], now=False)
            if streams.lines:
                display.step_aside()
                streams.show()
            running = outcomes.count(None)
            if timeout is DEFAULT_SECONDS and time.monotonic() > half_over:
                half_over = float("inf")
                display.step_aside()
                limit = f"{timeout:g} s, the default limit"
                notice(f"this run has used half of its {limit}; run(..., timeout=) sets another.")
            if not calls[0].gate:
                display.update(f"dlearn: {running} of {len(outcomes)} ranks at work", rows)
            if running and any(output.log for output in streams.ranks):
                # Each line of a log would wake this process up, and take the ranks' time.
                time.sleep(PAUSE_SECONDS)
        self._refuse_other_users(calls[0], now=True)
        late = [index for index, outcome in enumerate(outcomes) if outcome is None]
        for index, stack in zip(late, self._stacks(calls, late), strict=True):
            rank = self.ranks[index]
            halted = rank.halted
            outcomes[index] = Ended(stack, rank.pause(), halted)
        return [outcome or Ended() for outcome in outcomes]

    def _rounds(self, outcomes: list[Outcome | None], streams: OutputStreams, timeout: float | None) -> Iterator[None]:
        """Fill in the outcomes as ranks end; yield after each look, until all are there or time is over."""
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        grace: GracePeriod | None = None
        look = LOOK_SECONDS
        open_outputs: list[Connection] = []
        ends: dict[Connection, int] = {}
        for index, rank in enumerate(self.ranks):
            open_outputs.append(rank.output)
            # A rank's own children may keep its connection open after its death; `death` shows it.
            ends |= {rank.control: index, rank.death: index}
        while None in outcomes and time.monotonic() < deadline:
            asked_ns = time.monotonic_ns()
            seconds = min(look, max(0.0, deadline - time.monotonic()))
            ready: list[Any] = wait([*open_outputs, *ends], seconds)
            for rank, output in zip(self.ranks, streams.ranks, strict=True):
                if rank.output not in ready:
                    output.found_empty(asked_ns)
                elif not output.read(rank.output):
                    open_outputs.remove(rank.output)
            for index in {ends[end] for end in ready if end in ends}:
                outcome = outcomes[index] = self._receive(index, streams)
                del ends[self.ranks[index].control], ends[self.ranks[index].death]
                if not isinstance(outcome, Returned) and grace is None:
                    # The first fault. The others get a moment to fail by themselves, and to say why.
                    grace = GracePeriod(self._pids_here(outcomes))
                    look = LOOK_SECONDS / 5
            yield
            if grace is not None and grace.is_over(self._pids_here(outcomes)):
                break

    def _refuse_other_users(self, call: Call, *, now: bool) -> None:
        """Raise SetupError if another user has connected to RPC workers; look seldom, or `now`."""
        open_to_others = call.rpc and all(map(_is_on_loopback, self.ranks))
        if not open_to_others or (not now and time.monotonic() < self._look_again):
            return
        self._look_again = time.monotonic() + LOOK_SECONDS
        if users := users_connected_to(rank.pid for rank in self.ranks):
            raise SetupError(
                f"user {min(users)} of this machine has connected to these ranks, and may have had them run anything"
                f" as you: they were ended. What they had recorded is in {call.folder}/trace. Where dlearn doctor says"
                " that private ranks are possible, leave out private=False."
            )

    def _pids_here(self, outcomes: Sequence[Outcome | None]) -> list[int]:
        working = [rank for rank, outcome in zip(self.ranks, outcomes, strict=True) if outcome is None]
        return [rank.pid for rank in working if not rank.beside_engine]

    def _stacks(self, calls: Sequence[Call], ranks: Sequence[int]) -> list[tuple[StackLine, ...]]:
        """Return where the ranks that are still at work are: all are asked at the same time."""
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
        rank.kill()  # It may live, with its connection closed.
        self._drain(index, streams)
        return Died.of(rank, noticed_ns, streams.ranks[index].last_line)

    def _drain(self, index: int, streams: OutputStreams) -> None:
        """Read what this rank has printed so far; its children may hold the pipe open, so never wait for its end."""
        pipe, output = self.ranks[index].output, streams.ranks[index]
        deadline = time.monotonic() + DRAIN_SECONDS
        while pipe.poll(0) and output.read(pipe) and time.monotonic() < deadline:
            pass

    def _finish(self, outcomes: Sequence[Outcome], streams: OutputStreams, *, keep: bool) -> None:
        """Let the ranks that answered close their trace files, together, and read what they printed last."""
        pairs = zip(self.ranks, outcomes, strict=True)
        answered = [rank for rank, outcome in pairs if isinstance(outcome, Returned | Raised)]
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
        """Have idle ranks end by themselves; return when they are gone."""
        for rank in self.ranks:
            with suppress(BrokenPipeError, ConnectionResetError):
                rank.control.send(None)
        _retire(self.ranks)

    def kill(self) -> None:
        """End every rank now, with all it started; return when they are gone."""
        for rank in self.ranks:
            # Else the sends and receives of the last fail when the first is gone, and look as if they had ended.
            rank.pause()
        warm_pool.kill_all(self.ranks)
        if self._sender is not None:
            self._sender.join()  # It must not find its pipes closed at this end.
        warm_pool.end(self.ranks)


def _is_on_loopback(rank: RankProcess) -> bool:
    """Return whether this rank is on this machine's own loopback, as fresh ones that wait are."""
    return not (rank.own_address or rank.beside_engine)


def _retire(ranks: list[RankProcess]) -> None:
    """Wait a moment until ranks have ended by themselves, and end those that have not."""
    for rank in ranks:
        rank.wait(LEAVE_SECONDS)
    warm_pool.end(ranks)


def _agent_log(call: Call, rank: RankProcess) -> Path | None:
    """Return where the log of this rank's RPC agent goes; None if it does not come with what it prints."""
    if call.record is None or call.own_log:
        return None
    return Path(call.folder, "trace", f"{socket.gethostname()}-{rank.pid}{SUFFIX}")


def _send(ranks: Sequence[RankProcess], calls: Sequence[Call]) -> None:
    for rank, call in zip(ranks, calls, strict=True):
        with suppress(OSError):  # It died already; following it will show.
            rank.send(call)


class GracePeriod:
    """The time for other ranks to fail, too, and say why; more for those that wait for a core."""

    def __init__(self, pids: Collection[int]) -> None:
        self._began = time.monotonic()
        self._waited_before = {pid: scheduled_ns(pid)[1] for pid in pids}

    def is_over(self, pids: Collection[int]) -> bool:
        """Return whether the time of these is over. They have more if they waited half of it for a core."""
        passed = time.monotonic() - self._began
        if not GRACE_SECONDS <= passed < MOST_GRACE_SECONDS:
            return passed >= GRACE_SECONDS
        waited = [scheduled_ns(pid)[1] - self._waited_before.get(pid, 0) for pid in pids]
        return max(waited, default=0) < 1e9 * passed / 2
