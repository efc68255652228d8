"""A run whose calls wait at a gate until you let them through."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dlearn.analysis.hanging.hang_words import tell
from dlearn.analysis.hanging.stuck import hangs, inside
from dlearn.cluster.run import Run
from dlearn.errors import DlearnError
from dlearn.live.keeper import Keeper
from dlearn.live.schedule import HeldCall, Name, Passed
from dlearn.shown import Paragraph, Table
from dlearn.trace.trace import Trace

PATIENCE_SECONDS = 10.0
"""How long a call is waited for that is to be let through."""
SETTLE_SECONDS = 0.5


class WaitingCalls(tuple[HeldCall, ...]):
    """What waits at the gate, in the order of arrival."""

    def table(self) -> Table:
        rows = [(str(c.rank), c.op, "" if c.to is None else str(c.to), f"{c.bytes:,}", c.site) for c in self]
        return Table([("rank", "call", "to", "bytes", "line"), *rows], names=3, numbers=1)

    def __repr__(self) -> str:
        return "\n".join(self.table().lines())

    def _repr_html_(self) -> str:
        return self.table().html()


class HeldRun(Run):
    """A run that is under way. Its ranks are ended when it is forgotten, or the kernel is gone."""

    @classmethod
    def of(cls, run: Run, keeper: Keeper, finish: Callable[[], Run], end: Callable[[], None]) -> HeldRun:
        """Begin it: `finish` carries it out, `end` ends its ranks."""
        held = cls(run.folder, run.recorded, run.results, run.output)
        held._job = _Job(run, keeper, finish, end)
        weakref.finalize(held, held._job.end)
        return held

    _job: _Job

    @property
    def waiting(self) -> WaitingCalls:
        """The calls that wait: once every rank waits or has ended, or half a second has passed."""
        return WaitingCalls(self._keeper.settled(SETTLE_SECONDS))

    @property
    def schedule(self) -> tuple[Passed, ...]:
        """What was let through, in this order: `Cluster(..., hold=run.schedule)` does it again."""
        return tuple(self._keeper.passed)

    @property
    def hang(self) -> str:
        """Who waits inside torch for whom, in words, by the records so far; "" if nothing does."""
        trace = self.trace
        return "\n".join(told.sentence for told in tell(hangs(trace), trace))

    @property
    def trace(self) -> Trace:
        """What has been recorded so far."""
        return Trace.load(self.folder / "trace")

    @property
    def ranks(self) -> dict[Name, str]:
        """What each rank does now: waits at the gate, is inside a call, computes, or has ended."""
        trace, held = self.trace, {call.rank: call for call in self._keeper.calls}

        def now(rank: int, name: Name) -> str:
            if name in held:
                return f"waits at the gate: {held[name].text}"
            call = inside(trace, rank)
            if call is not None:
                return f"in {call.op} #{call.seq}" + f" ({call.site})" * bool(call.site)
            return "has ended" if self._keeper.has_ended(name) else "computes"

        return {name: now(rank, name) for rank, name in enumerate(self._keeper.names)}

    def step(self) -> HeldCall | None:
        """Let the call through that waits longest; None when all ranks have ended."""
        return self._let_through(lambda calls: next(iter(calls), None), "any rank")

    def release(self, rank: Name, count: int = 1) -> None:
        """Let the next `count` calls of this rank through, each when it comes."""
        for _ in range(count):
            self._let_through(lambda calls: next((c for c in calls if c.rank == rank), None), f"rank {rank}", one=True)

    def run_until(self, *, op: str | None = None, rank: Name | None = None) -> HeldCall | None:
        """Let all calls through up to the first of this op or rank, which waits then; None if there was none."""
        found: list[HeldCall] = []

        def choose(calls: list[HeldCall]) -> HeldCall | None:
            found[:] = [c for c in calls if (op is None or c.op == op) and (rank is None or c.rank == rank)][:1]
            return calls[0] if calls else None

        def passes(calls: list[HeldCall]) -> HeldCall | None:
            first = choose(calls)
            return None if found else first

        while not found:
            with self._keeper.changed:
                self._keeper.changed.wait_for(lambda: choose(self._keeper.calls) or self._keeper.over, PATIENCE_SECONDS)
            if not found and self._let_through(passes, "any rank") is None:
                return None
        return found[0]

    def free(self) -> HeldRun:
        """Open the gate for good; returns this run, whose `join()` waits for its end."""
        self._keeper.free()
        return self

    def join(self, timeout: float | None = None) -> HeldRun:
        """Wait for the end, and raise what `Cluster.run` would. DlearnError if it has not come after `timeout`."""
        job = self._job
        job.thread.join(timeout)
        if job.thread.is_alive():
            raise DlearnError(f"this run has not ended after {timeout} s; {self._why_not()}")
        if self._keeper.trouble:
            raise DlearnError(self._keeper.trouble)
        self.error, self.network = job.run.error, job.run.network
        if job.failure or self.error:
            raise job.failure or self.error  # type: ignore[misc]
        return self

    @property
    def under_way(self) -> bool:
        return self._job.thread.is_alive()

    def end(self) -> None:
        """End its ranks now."""
        self._job.end()
        self._job.thread.join()

    def paragraphs(self) -> Iterator[Paragraph]:
        if not self.under_way:
            yield from super().paragraphs()
            return
        yield f"held: {len(self.waiting)} calls wait at the gate, {len(self.schedule)} were let through"
        yield Table([("rank", "now"), *((str(name), now) for name, now in self.ranks.items())], numbers=0)
        if self.hang:
            yield self.hang

    @property
    def _keeper(self) -> Keeper:
        return self._job.keeper

    def _let_through(self, choose: Callable[[list[HeldCall]], Any], who: str, *, one: bool = False) -> HeldCall | None:
        call = self._keeper.let_through(choose, PATIENCE_SECONDS)
        if call is None and (one or not self._keeper.over):
            raise DlearnError(f"no call of {who} came in {PATIENCE_SECONDS:.0f} s: {self._why_not()}")
        return call

    def _why_not(self) -> str:
        """What is known of a job that does not go on."""
        if self._keeper.over:
            return "all ranks have ended"
        waiting = ", ".join(map(str, self._keeper.calls)) or "nothing"
        return f"{self.hang or 'nobody hangs'}. Waiting at the gate: {waiting}"


class _Job:
    """The thread that follows the ranks. It does not hold the run that the user has, which ends it when forgotten."""

    def __init__(self, run: Run, keeper: Keeper, finish: Callable[[], Run], end: Callable[[], None]) -> None:
        self.run, self.keeper, self._finish, self._end_ranks = run, keeper, finish, end
        self.failure: BaseException | None = None
        keeper.on_trouble = self.end
        self.thread = threading.Thread(target=self._follow, daemon=True, name="dlearn-held-run")
        self.thread.start()

    def _follow(self) -> None:
        try:
            self._finish()
        except BaseException as error:
            self.failure = error
        finally:
            self.keeper.close()

    def end(self) -> None:
        if self.thread.is_alive():
            self._end_ranks()
            self.keeper.close()
