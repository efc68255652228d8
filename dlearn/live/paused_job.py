"""A job whose calls wait at a gate until you let them through: a cluster's run, or a script."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from dlearn.diagnosis.hang_detection import Hang, exit_text, hangs, inside
from dlearn.diagnosis.hang_report import call_text, report
from dlearn.errors import DlearnError, GateError, TraceError
from dlearn.events.this_host import is_stopped
from dlearn.live.gate_server import Activity, GateServer, Name, Passed, PausedCall, rank_text
from dlearn.live.held_stage import HeldHang, stage_of
from dlearn.live.live_rows import waits_for_a_call
from dlearn.notices import notice
from dlearn.shown import Paragraph, Shown, Table
from dlearn.trace import Trace

PATIENCE_SECONDS = 10.0  # For ranks that compute, once another waits at the gate; and for a transfer.
QUIET_SECONDS = 0.5  # In which nothing happens, before a rank inside a call is believed.
ACTIVE_SHARE = 0.2  # Of that time: a rank whose threads run longer is on its way out of its call.
LOCKED_SECONDS = 5.0  # After which a function that runs for another rank is taken to wait at a lock.
TELL_SECONDS = 2.0  # After which it is said which ranks are waited for.

Choice = Callable[[list[PausedCall]], PausedCall | None]


class WaitingCalls(Shown, tuple[PausedCall, ...]):
    """What waits at the gate, in the order of arrival. `why` says why nothing does."""

    why = ""

    def paragraphs(self) -> list[Paragraph]:
        rows = [("rank", "call", "to", "bytes", "line")]
        for call in self:
            to = "" if call.to is None else str(call.to)
            rows.append((str(call.rank), call.op, to, f"{call.bytes:,}", call.site))
        return [Table(rows, names=3, numbers=1)] if self else [self.why]


class PausedJob:
    """A job under way: what waits at the gate, what each rank does, and which calls are let through."""

    gate_server: GateServer
    trace_folder: Path

    @property
    def under_way(self) -> bool:
        raise NotImplementedError

    @property
    def waiting(self) -> WaitingCalls:
        """Return the calls that wait at the gate, once each rank waits there, is inside a call, or ended.

        Ranks that start or compute are waited for: as long as it takes while no call waits, else for ten seconds.
        """
        return self.waiting_within(None)

    def waiting_within(self, limit: float | None) -> WaitingCalls:
        """Return what waits at the gate, after at most `limit` seconds; None: as `waiting`."""
        self.settles(lambda seconds: seconds >= (limit or PATIENCE_SECONDS) and (limit or self.gate_server.calls))
        waiting = WaitingCalls(self.gate_server.calls)
        waiting.why = "" if waiting else f"nothing waits at the gate: {self._why_not()}"
        return waiting

    @property
    def schedule(self) -> tuple[Passed, ...]:
        """Return what was let through, in this order: `Cluster(..., hold=run.schedule)` does it again."""
        return tuple(self.gate_server.passed)

    @property
    def hang(self) -> HeldHang:
        """Return which ranks hang; ranks that compute are waited for, for ten seconds."""
        hang = self.hang_by(settled=False)
        if len(hang.stage["guilty"]) == len(self.gate_server.names):  # Then nothing can change.
            return hang
        return self.hang_by(settled=self.settles(lambda seconds: seconds >= PATIENCE_SECONDS, tell=False))

    def hang_by(self, *, settled: bool) -> HeldHang:
        """Return who hangs by the records. If not all is `settled`, ranks that compute may come."""
        trace, gate_server = self._recorded(), self.gate_server
        doing = self._doing(trace)
        if trace is None:
            return HeldHang((), _text(doing), stage_of(gate_server, doing, ()))
        gate = {gate_server.names.index(call.rank): f"waits at the gate with {call.op}" for call in gate_server.calls}
        # What all have come to goes on when its steps are let through.
        goes_on = bool(gate) or gate_server.is_open
        found = [hang for hang in hangs(trace) if not goes_on or waits_for_a_call(hang)]
        may_come = {*gate}
        for rank, name in enumerate(gate_server.names):
            if (gate_server.is_open or not settled) and name not in gate_server.ended and rank not in inside(trace):
                may_come.add(rank)
        stuck, others = _without_end(found, may_come, by_rpc=gate_server.is_open)
        sentences = tuple(each.sentence for each in report(stuck, trace, gate))
        why = "; ".join(each.sentence for each in report(others, trace, gate)) or _text(doing)
        return HeldHang(sentences, why, stage_of(gate_server, doing, stuck, inside(trace)))

    @property
    def trace(self) -> Trace:
        """Return what has been recorded so far. TraceError before any rank has begun."""
        return Trace.load(self.trace_folder)

    def _recorded(self) -> Trace | None:
        """Return the trace with the calls that have just been let through; None if there is none yet."""
        gate = self.gate_server
        with gate.changed:
            gate.changed.wait_for(lambda: not gate.unnoted or gate.is_open, QUIET_SECONDS)
        with suppress(TraceError):
            return self.trace
        return None

    @property
    def ranks(self) -> dict[Name, str]:
        """Say what each rank does now: computes, waits at the gate, is inside a call, has ended, ..."""
        return self._doing(self._recorded())

    def _doing(self, trace: Trace | None) -> dict[Name, str]:
        if trace is None:
            return dict.fromkeys(self.gate_server.names, "starting" if self.under_way else "has ended")
        rpc = _rpc_texts(trace)
        return {name: self._now(rank, name, trace, rpc) for rank, name in enumerate(self.gate_server.names)}

    def _now(self, rank: int, name: Name, trace: Trace, rpc: dict[int, str]) -> str:
        judged = {call.rank: call for call in dict(self.gate_server.judged).values()}
        paused = {call.rank: call for call in self.gate_server.calls}
        process = next((process for process in trace.processes if process.rank == rank), None)
        if process is not None and is_stopped(process.header.pid):
            return "is stopped (SIGSTOP or a debugger: state T)"
        if name in paused:
            return f"waits at the gate: {paused[name].text}"
        if name in judged:
            return f"waits for the condition of hold=: {judged[name].text}"
        if name not in self.gate_server.connections and self.under_way:
            return "starting"
        call = inside(trace).get(rank)
        if process is not None and process.exit_status is not None:
            return exit_text(process.exit_status)
        if call is not None:
            return "was ended " * (not self.under_way) + f"in {call_text(call)}"
        if not self.under_way:
            return "has ended"
        returned = process is not None and process.heartbeat is not None and process.heartbeat.ended
        if rank in rpc or not (returned or name in self.gate_server.ended):
            return rpc.get(rank, "computes")
        serves = process is not None and process.worker is not None
        return "serves others" if serves else "has ended"

    def step(self, *, patience: float | None = None) -> PausedCall | None:
        """Let the call through that waits longest; None if all ranks have ended, or the gate is open.

        A rank that starts or computes is waited for, with `patience` for so many seconds. DlearnError if no call comes.
        """
        call = self._let_through(patience)
        if call is None and not self.gate_server.over:
            raise self._nothing_came("any rank")
        return call

    def release(self, rank: Name, count: int = 1, *, patience: float | None = None) -> None:
        """Let the next `count` calls of this rank through, each when it comes; `patience` and errors as for `step`."""
        self._check_rank(rank)
        if count < 1:
            raise DlearnError(f"count is how many calls to let through: 1 or more, not {count!r}.")
        for _ in range(count):
            if self._let_through(patience, rank) is None:
                raise self._nothing_came(f"rank {rank}")

    def let_through_now(self, rank: Name | None = None) -> PausedCall | None:
        """Let the first call that waits (of this rank) through; None if none waits."""
        return self.gate_server.let_through(partial(_first, rank=rank))

    def run_until(
        self, *, op: str | None = None, rank: Name | None = None, span: str | None = None,
        patience: float | None = None,
    ) -> PausedCall | None:  # fmt: skip
        """Let all calls through up to the first of this op and rank, in this span, and return it: it waits then.

        None if there was none; `patience` and errors as for `step`.
        """
        if rank is not None:
            self._check_rank(rank)

        def is_wanted(call: PausedCall) -> bool:
            of_rank = op in (None, call.op) and rank in (None, call.rank)
            return of_rank and span in (None, *call.spans)

        def before_it(calls: list[PausedCall]) -> PausedCall | None:
            return None if any(map(is_wanted, calls)) else _first(calls)

        while self._let_through(patience, choose=before_it) is not None:
            pass
        call = next(filter(is_wanted, self.gate_server.calls), None)
        if call is None and not self.gate_server.over:
            raise self._nothing_came("any rank")
        return call

    def free(self) -> Self:
        """Open the gate for good; returns this run, whose `join()` waits for its end."""
        self.gate_server.free()
        return self

    def _let_through(
        self, patience: float | None, rank: Name | None = None, choose: Choice | None = None
    ) -> PausedCall | None:
        """Let the first call (of this rank) through once it waits, or the one that `choose` picks then."""
        of_rank = partial(_first, rank=rank)
        self.settles(lambda seconds: of_rank(self.gate_server.calls) or (patience is not None and seconds >= patience))
        return self.gate_server.let_through(choose or of_rank)

    def settles(self, enough: Callable[[float], object], *, tell: bool = True) -> bool:
        """Wait until no rank can come by itself, or it is `enough`; return whether none can."""
        began = time.monotonic()
        while (ranks := settle(self.gate_server, enough, tell)) and self._some_come_out(ranks):
            if time.monotonic() - began >= PATIENCE_SECONDS:
                return False
        return ranks is not None

    def _some_come_out(self, ranks: frozenset[Name]) -> bool:
        """Return whether one of these is inside a call to which all have come: over a slow network it takes a while."""
        trace = self._recorded()
        if trace is None:
            return False
        stuck = {rank for hang in hangs(trace) if waits_for_a_call(hang) for rank in hang.waiting}
        numbers = {number for number, name in enumerate(self.gate_server.names) if name in ranks}
        return any(number in inside(trace) for number in numbers - stuck)

    def _check_rank(self, rank: Name) -> None:
        """Raise DlearnError if there is no such rank. A script's ranks are known when one has come."""
        names = self.gate_server.names
        if names and rank not in names:
            raise DlearnError(f"there is no rank {rank!r}; the ranks of this job are {list(names)}.")

    def _nothing_came(self, who: str) -> GateError:
        return GateError(f"no call of {who} comes to the gate: {self._why_not()}")

    def _why_not(self) -> str:
        if self.gate_server.trouble:
            return self.gate_server.trouble
        if self.gate_server.is_open and self.under_way:
            return "it was opened for good"
        if self.gate_server.over:
            return "all ranks have ended"
        hang = self.hang_by(settled=True)
        return "\n".join(hang.sentences) or hang.why


def _text(doing: dict[Name, str]) -> str:
    words = [f"{rank_text(name)} {now}" for name, now in doing.items()]
    return "; ".join(words) or "no rank has come yet"


def _without_end(found: list[Hang], may_come: set[int], *, by_rpc: bool) -> tuple[list[Hang], list[Hang]]:
    """Part the hangs for a rank that never comes from those that end when these ranks come.

    What an RPC's function waits for is not known: any may end it, unless it hangs `by_rpc`.
    """
    stuck, others = found, list[Hang]()

    def can_end(hang: Hang) -> bool:
        if hang.operation.exchange is not None:
            return bool(may_come) and not by_rpc
        return bool(hang.operation.missing) and may_come.issuperset(hang.operation.missing)

    while ends := [hang for hang in stuck if can_end(hang)]:
        others += ends
        may_come.update(*(hang.waiting for hang in ends))
        stuck = [hang for hang in stuck if hang not in ends]
    return stuck, others


def _first(calls: list[PausedCall], rank: Name | None = None) -> PausedCall | None:
    """Return the call that waits longest, of this rank if one is given; None if none waits."""
    return next((call for call in calls if rank in (None, call.rank)), None)


def _rpc_texts(trace: Trace) -> dict[int, str]:
    """Say of ranks for whose answer they wait, or for whom they run a function."""
    texts: dict[int, str] = {}
    for exchange in trace.rpc.exchanges:
        call, run, caller = exchange.call, exchange.run, trace.label(exchange.src)
        if run is not None and run.pending:
            texts.setdefault(exchange.dst, f"is inside {run.function}() for {caller}")
        if call is not None and call.pending and call.op == "rpc_sync":
            line = f" ({call.site})" * bool(call.site)
            callee = trace.label(exchange.dst)
            texts[exchange.src] = f"waits for {callee} in rpc_sync {call.function}(){line}"
    return texts


def settle(gate_server: GateServer, enough: Callable[[float], object], tell: bool) -> frozenset[Name] | None:
    """Wait until each rank waits at the gate, has ended, or is inside a call; return those inside.

    None as soon as it is `enough` (asked with the seconds passed), or there is trouble. After two
    seconds a notice may `tell` whom it waits for.
    """
    began = changed = time.monotonic()
    said, last = False, gate_server.changes

    def is_over() -> bool:
        return bool(enough(time.monotonic() - began) or gate_server.trouble)

    while not is_over():
        if gate_server.all_wait():
            return frozenset()
        seen = gate_server.changes
        before = gate_server.ask(is_over, QUIET_SECONDS)
        _wait_for_quiet(gate_server, seen, is_over)
        after = gate_server.ask(is_over, QUIET_SECONDS)
        if seen != last:
            changed, last = time.monotonic(), seen
        with gate_server.changed:
            # With something at the gate, it may be what the function waits for.
            locked = bool(gate_server.calls) or time.monotonic() - changed >= LOCKED_SECONDS
            here = gate_server.ended | {call.rank for call in gate_server.calls}
            others = [name for name in gate_server.names if name not in here]
            busy = [name for name in others if _may_come(before.get(name), after.get(name), locked)]
            if threading.get_ident() not in gate_server.judged:  # Else a condition wants to know this.
                busy += [call.rank for call in dict(gate_server.judged).values()]
            if gate_server.changes == seen and gate_server.names and not busy and not is_over():
                return frozenset(gate_server.names) - here
        if busy and tell and not said and time.monotonic() - began >= TELL_SECONDS:
            who = ", ".join(map(rank_text, busy))
            notice(f"waiting until {who} calls something (an interrupt ends this wait only)")
            said = True
    return None


def _wait_for_quiet(gate_server: GateServer, seen: int, is_over: Callable[[], bool]) -> None:
    with gate_server.changed:
        gate_server.changed.wait_for(lambda: gate_server.changes != seen or is_over(), QUIET_SECONDS)


def _may_come(before: Activity | None, after: Activity | None, locked: bool) -> bool:
    if before is None or after is None:
        return True
    active_ns = after["active_ns"] - before["active_ns"]
    serves = after["serves"] and not locked
    return bool(after["computes"] or serves or active_ns > ACTIVE_SHARE * QUIET_SECONDS * 1e9)
