"""Trace: the events of all processes of a job, on one clock, and selections of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from dlearn.errors import TraceError
from dlearn.events.event import Counters, Event, Span
from dlearn.events.event_table import Column, Events, Mask, of_events
from dlearn.events.loading import NAMES_SHOWN, load_job
from dlearn.events.mpi_facts import OtherMpiCall, calls_not_read
from dlearn.events.printable import printable
from dlearn.events.process import Process
from dlearn.events.rendezvous import Rendezvous
from dlearn.join import selection
from dlearn.join.rpc.rpc_kinds import Rpc
from dlearn.join.selection import Selection
from dlearn.join.training_phases import numbered_steps, step_of_rows
from dlearn.join.wait_times import clock_problems
from dlearn.shown import Shown, first_few


@dataclass(frozen=True, repr=False)
class Trace(Selection, Shown):
    """The events of a job, ordered by start. `problems` says in words what is damaged or missing."""

    path: Path
    processes: tuple[Process, ...]
    events: Sequence[Event]
    """Of any sequence of events a table is made (`event_table.Events`)."""
    problems: tuple[str, ...] = ()
    selected_from: Trace | None = None
    requests: Rpc | None = None
    """Of a selection by time: what of RPC was sent in it, for C++ sends some that no event tells of."""
    span: str = ""
    """The name of the span that was selected, of a selection by one."""

    @classmethod
    def load(cls, *folders: str | os.PathLike[str], attempt: int | None = None) -> Trace:
        """Read every process's file in these folders: one, or one from each host that the job ran on.

        Of a job that was restarted the last attempt, or the one with this number, from 0. Raises
        TraceError where that is no trace of one job.
        """
        if not folders:
            raise TraceError("Trace.load needs a folder: Trace.load('traces/ddp').")
        processes, table, problems = load_job([Path(folder) for folder in folders], attempt)
        trace = cls(Path(folders[0]), processes, Events(table))
        problems += calls_not_read(trace.of(OtherMpiCall), trace.labels)
        if len({each.clock.name for each in processes}) > 1:
            problems += clock_problems(processes, trace.met)
        # Frozen from here on; it is still being made.
        object.__setattr__(trace, "problems", tuple(map(printable, problems)))
        return trace

    def __post_init__(self) -> None:
        events = self.events
        if self.selected_from is not None and not isinstance(events, Events):
            table = self.selected_from.table
            rows = sorted(table.row_of[event.rank, event.number] for event in events)
            events = Events(table, np.array(rows, np.intp))
        rows_of_table = events if isinstance(events, Events) else Events(of_events(tuple(events)))
        object.__setattr__(self, "events", rows_of_table)  # Frozen from here on.

    @cached_property
    def all_problems(self) -> tuple[str, ...]:
        """Return `problems`, and what is missing or unknown of this selection's RPC."""
        return (*self.problems, *self.rpc.problems)

    @cached_property
    def spans(self) -> tuple[str, ...]:
        """Return the names of all spans, in the order of first opening."""
        return tuple(dict.fromkeys(span.name for span in self.of(Span)))

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Return the phases of its events, in the order of a training step: setup, forward, backward, optimizer, ..."""
        seen = sorted({event.phase for event in self.rows.firsts()})
        return tuple(sorted(seen, key=[*selection.PHASES, *seen].index))

    def where(
        self,
        *,
        kind: str | None = None,
        op: str | None = None,
        rank: int | str | Collection[int | str] | None = None,
        phase: str | None = None,
        dimension: str | None = None,
    ) -> Trace:
        """Return the events of this kind ("collective", "p2p", "rpc", ...), op ("all_reduce"),
        phase ("backward"), dimension of a mesh ("shard"), and of this rank or these (numbers or
        names).

        An operation that has one of them stays whole, with its ends on other ranks.
        """
        if kind is not None:
            selection.check_kind(kind)
        if op is not None:
            selection.check_op(op, self.table)
        if phase is not None and phase not in (*selection.PHASES, *self.whole.phases):
            raise TraceError(f"there is no phase {phase!r}; the phases are: {', '.join(selection.PHASES)}")
        chosen = self.rows.table.of_firsts(
            lambda event: (
                (phase is None or event.phase == phase)
                and kind in (None, selection.kind_of(event), selection.kind_of(event).split()[0])
                and (op is None or getattr(event, "op", None) == op)
            )
        )
        if dimension is not None:
            chosen &= selection.of_dimension(dimension, self.processes, self.table)
        if rank is not None:
            several = (rank,) if isinstance(rank, int | str) else rank
            chosen &= np.isin(self.table.rank, [self._number(each) for each in several])
        return self._keep(self.rows.where(chosen))

    def within(self, span: str) -> Trace:
        """Return the events inside spans of this name, and their ends on other ranks."""
        if span not in self.whole.spans:
            known = first_few(self.whole.spans, NAMES_SHOWN) or "none"
            raise TraceError(f"there is no span {span!r} in this trace; its spans are: {known}")
        return replace(self._keep_caused_by(selection.within_span(self.table, span)), span=span)

    def step(self, number: int) -> Trace:
        """Return the events of one training step, and their ends on other ranks.

        It is the user's span with this number ("step 3"). Of an unmodified script it goes from DDP's
        forward pass to the end of the optimizer's step, or from FSDP's optimizer's step to its next, as
        in `analysis.step_times`.
        """
        if f"step {number}" in self.whole.spans:
            return self.within(f"step {number}")
        steps = numbered_steps(self.whole)
        if not steps:
            text = "no training by DDP or FSDP, and no spans as dlearn.span('step 3')"
            how = "dlearn run --steps A:B makes spans of steps"
            raise TraceError(f"this trace has no steps: {text}; {how}")
        if number not in steps:
            known = first_few([*map(str, steps)], NAMES_SHOWN)
            if len(steps) > 2 and [*steps] == [*range(min(steps), max(steps) + 1)]:
                known = f"{min(steps)} to {max(steps)}"
            raise TraceError(f"there is no step {number}; this trace has the steps {known}")
        title = steps[number]
        if title in self.whole.spans and [*steps.values()].count(title) == 1:
            return self.within(title)
        return self._keep_caused_by(step_of_rows(self.whole) == [*steps].index(number))

    def between(self, start_ms: float = 0.0, end_ms: float | None = None) -> Trace:
        """Return what began from `start_ms` on, before `end_ms`, in ms from `first_ns`.

        An operation stays whole, and begins when its first rank calls it: of windows side by side one has it. Of RPC a
        request is where it was called, or sent. A span that began before the window is not in it.
        """
        if end_ms is not None and not start_ms <= end_ms:
            raise TraceError(f"a window from {start_ms:g} ms to {end_ms:g} ms ends before it begins: swap the two.")
        first_ns = self.whole.first_ns

        def is_in(at_ns: Column) -> Mask:
            # What the agents of RPC logged before the first event belongs to the first window.
            at_ms = (np.maximum(at_ns, first_ns) - first_ns) / 1e6
            return (start_ms <= at_ms) & (end_ms is None or at_ms < end_ms)

        begun = is_in(self.whole.begins_ns)
        return self._keep(self.rows.where(begun), self.rpc.sent_between(is_in))

    @cached_property
    def first_ns(self) -> int:
        """Return when the first event of the whole trace began; counters and waits for other ranks do not count."""
        began = self.table.start_ns[~self.table.is_a(Counters, Rendezvous)]
        return int(began[0]) if len(began) else 0

    @cached_property
    def begins_ns(self) -> Column:
        """Return when the operation of each row of the table began."""
        return selection.begins_of_operations(self.table, self.met, self.rpc)

    def _number(self, rank: int | str) -> int:
        for number, label in self.labels.items():
            if rank in (number, label):
                return number
        known = first_few([*self.labels.values()], NAMES_SHOWN)
        raise TraceError(f"there is no rank {rank!r} in this trace; its ranks are: {known}")

    def _keep_caused_by(self, inside: Mask) -> Trace:
        whole = self.whole
        caused = selection.caused_by(inside, self.table, whole.met, whole.rpc)
        return self._keep(self.rows.where(caused))

    def _keep(self, kept: Events, requests: Rpc | None = None) -> Trace:
        if requests is None and self.requests is not None:
            requests = self.requests.of(kept)
        return Trace(self.path, self.processes, kept, self.problems, self.whole, requests)

    def paragraphs(self) -> Iterator[str]:
        kinds = Counter[str]()
        for first, count in self.rows.counts():
            kinds[selection.kind_of(first)] += count
        events = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()) or "no events"
        names = first_few([process.label for process in self.processes], NAMES_SHOWN)
        dead = [each.label for each in self.processes if not each.closed and each.imported is None]
        yield f"Trace of {len(self.processes)} processes ({names}): {events}"
        if dead:
            yield f"  died, or still runs: {first_few(dead, NAMES_SHOWN)}"
        for problem in self.problems:
            yield f"  problem: {problem}"
