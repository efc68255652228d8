"""A job whose calls wait at a gate until you let them through: a cluster's run, or a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dlearn.analysis.hanging.hang_words import tell
from dlearn.analysis.hanging.stuck import exit_text, hangs, inside
from dlearn.errors import DlearnError
from dlearn.live.keeper import Keeper
from dlearn.live.live_rows import waits_for_a_call
from dlearn.live.schedule import HeldCall, Name, Passed
from dlearn.shown import Table
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


class HeldJob:
    """It is under way: what waits, what each rank does, and who is let through."""

    keeper: Keeper
    trace_folder: Path

    @property
    def under_way(self) -> bool:
        raise NotImplementedError

    @property
    def waiting(self) -> WaitingCalls:
        """The calls that wait: once every rank waits or has ended, or half a second has passed."""
        return WaitingCalls(self.keeper.settled(SETTLE_SECONDS))

    @property
    def schedule(self) -> tuple[Passed, ...]:
        """What was let through, in this order: `Cluster(..., hold=run.schedule)` does it again."""
        return tuple(self.keeper.passed)

    @property
    def hang(self) -> str:
        """Who waits inside torch for whom, in words, by the records so far; "" if nothing does."""
        trace, names = self.trace, self.keeper.names
        gate = {names.index(call.rank): f"waits at the gate with {call.op}" for call in self.keeper.calls}
        # What all have come to goes on when its steps are let through.
        stuck = [each for each in hangs(trace) if not gate or waits_for_a_call(each)]
        return "\n".join(told.sentence for told in tell(stuck, trace, gate))

    @property
    def trace(self) -> Trace:
        """What has been recorded so far."""
        return Trace.load(self.trace_folder)

    @property
    def ranks(self) -> dict[Name, str]:
        """What each rank does now: waits at the gate, is inside a call, waits for the answer of one or runs one for
        somebody, computes, has ended."""
        trace, held = self.trace, {call.rank: call for call in self.keeper.calls}
        asked = {each.src: each for each in trace.rpc.exchanges if each.call is not None and each.call.pending}

        runs = {each.dst: each for each in trace.rpc.exchanges if each.run is not None and each.run.pending}
        known = {process.rank: process for process in trace.processes}

        def now(rank: int, name: Name) -> str:
            if name in held:
                return f"waits at the gate: {held[name].text}"
            process, call = known.get(rank), inside(trace, rank)
            if process is not None and process.exit_status is not None:
                return exit_text(process.exit_status)
            if call is not None:
                return f"in {call.op} #{call.seq}" + f" ({call.site})" * bool(call.site)
            if rank in asked and (request := asked[rank].call) is not None and request.op == "rpc_sync":
                line = f" ({request.site})" * bool(request.site)
                return f"waits for {trace.label(asked[rank].dst)} in rpc_sync {request.function}(){line}"
            if rank in runs and (run := runs[rank].run) is not None:
                return f"is inside {run.function}() for {trace.label(runs[rank].src)}"
            returned = process is not None and process.place is not None and process.place.ended
            if not (returned or self.keeper.has_ended(name)) and self.under_way:
                return "computes"
            serves = process is not None and process.worker is not None and self.under_way
            return "serves others" if serves else "has ended"

        return {name: now(rank, name) for rank, name in enumerate(self.keeper.names)}

    def step(self) -> HeldCall | None:
        """Let the call through that waits longest; None when all ranks have ended."""
        return self._let_through(lambda calls: next(iter(calls), None), "any rank")

    def release(self, rank: Name, count: int = 1) -> None:
        """Let the next `count` calls of this rank through, each when it comes."""
        for _ in range(count):
            self._let_through(lambda calls: next((c for c in calls if c.rank == rank), None), f"rank {rank}", one=True)

    def let_through_now(self, rank: Name | None = None) -> HeldCall | None:
        """Let the first call that waits (of this rank) through; None if none waits."""
        return self.keeper.let_through(
            lambda calls: next((call for call in calls if rank is None or call.rank == rank), None), patience=0
        )

    def run_until(self, *, op: str | None = None, rank: Name | None = None, span: str | None = None) -> HeldCall | None:
        """Let all calls through up to the first of this op, this rank, or in this span of the program's, which waits
        then; None if there was none."""
        found: list[HeldCall] = []

        def is_it(call: HeldCall) -> bool:
            return (
                (op is None or call.op == op)
                and (rank is None or call.rank == rank)
                and (span is None or span in call.spans)
            )

        def choose(calls: list[HeldCall]) -> HeldCall | None:
            found[:] = [call for call in calls if is_it(call)][:1]
            return calls[0] if calls else None

        def passes(calls: list[HeldCall]) -> HeldCall | None:
            first = choose(calls)
            return None if found else first

        while not found:
            with self.keeper.changed:
                self.keeper.changed.wait_for(lambda: choose(self.keeper.calls) or self.keeper.over, PATIENCE_SECONDS)
            if not found and self._let_through(passes, "any rank") is None:
                return None
        return found[0]

    def free(self) -> Self:
        """Open the gate for good; returns this run, whose `join()` waits for its end."""
        self.keeper.free()
        return self

    def _let_through(self, choose: Callable[[list[HeldCall]], Any], who: str, *, one: bool = False) -> HeldCall | None:
        call = self.keeper.let_through(choose, PATIENCE_SECONDS)
        if call is None and (one or not self.keeper.over):
            raise DlearnError(f"no call of {who} came in {PATIENCE_SECONDS:.0f} s: {self._why_not()}")
        return call

    def _why_not(self) -> str:
        """What is known of a job that does not go on."""
        if self.keeper.over:
            return "all ranks have ended"
        waiting = ", ".join(map(str, self.keeper.calls)) or "nothing"
        return f"{self.hang or 'nobody hangs'}. Waiting at the gate: {waiting}"
