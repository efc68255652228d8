"""A choice of a job's events, by kind, span or time, and what is worked out once about it."""

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from itertools import chain
from typing import Any, Self, TypeVar, get_args

import numpy as np

from dlearn.errors import TraceError
from dlearn.events.event import Event, Span
from dlearn.events.event_table import Column, Events, EventTable, Mask
from dlearn.events.job_facts import AnyLine
from dlearn.events.process import Process
from dlearn.events.source import in_use
from dlearn.join.ends import family_of_op
from dlearn.join.matching import match
from dlearn.join.rpc.rpc_kinds import Rpc, join_rpc
from dlearn.join.tables.operation_table import OperationTable
from dlearn.join.tables.operations import Operations
from dlearn.shown import RankNames

Kind = TypeVar("Kind", bound=Event)
Answer = TypeVar("Answer")
Asked = TypeVar("Asked", bound="Selection")


class Selection:
    """The chosen events of a job. `Trace` is one that can be loaded, narrowed and shown."""

    processes: tuple[Process, ...]
    events: Sequence[Event]
    selected_from: Self | None
    requests: Rpc | None

    @property
    def table(self) -> EventTable:
        return self.whole.rows.table

    @property
    def rows(self) -> Events:
        assert isinstance(self.events, Events)
        return self.events

    def of(self, *kinds: type[Kind]) -> list[Kind]:
        """Return the events of these classes, in the order of their start."""
        return self.rows.of(*kinds)

    @property
    def whole(self) -> Self:
        """Return all events of the job: what this is a selection of, or itself."""
        return self.selected_from or self

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(process.rank for process in self.processes)

    @cached_property
    def labels(self) -> RankNames:
        return RankNames((process.rank, process.label) for process in self.processes)

    def label(self, rank: int) -> str:
        """Return what people call this rank: "rank 2", or its name in the cluster."""
        return self.labels[rank]

    @cached_property
    def matches(self) -> Operations:
        """Return the operations that the chosen events take part in; each with all its ends."""
        met = self.whole.met
        return Operations(met, np.flatnonzero(met.with_an_end(self.rows.chosen)), self.labels)

    @cached_property
    def met(self) -> OperationTable:
        """Return what the processes did together: collectives, and sends with their receives."""
        return match(self.processes, self.table)

    @cached_property
    def rpc(self) -> Rpc:
        """Return every chosen RPC request with its reply, and what keeps the record from being complete."""
        if self.selected_from is None:
            return join_rpc(self.processes, self.rows)
        return self.requests if self.requests is not None else self.whole.rpc.of(self.rows)

    @cached_property
    def answers(self) -> dict[str, Any]:
        return {}


def once(question: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """Work out the answer at the first call for a selection, and remember it there."""
    name = f"{question.__module__}.{question.__qualname__}"

    @wraps(question)
    def answer(selection: Asked) -> Answer:
        if name not in selection.answers:
            selection.answers[name] = question(selection)
        found: Answer = selection.answers[name]
        return found

    return answer


PHASES = ("setup", "forward", "backward", "optimizer", "cleanup", "none")
KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyLine) if issubclass(kind, Event))
OPS = {"all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce"}
OPS |= {"reduce_scatter", "scatter", "send"}
"""Families of torch.distributed's ops: "all_gather" stands for "all_gather_single", too."""


def kind_of(event: Event) -> str:
    return str(type(event).__struct_config__.tag)


def check_kind(kind: str) -> None:
    """Raise TraceError if neither dlearn nor a Source in use has such a kind of events."""
    tags = [*KINDS, *(each.tag for source in in_use.values() for each in source.kinds)]
    known = dict.fromkeys((*tags, *(tag.split()[0] for tag in tags)))  # "rpc" for "rpc call".
    if kind not in known:
        raise TraceError(f"there is no kind {kind!r} of events; the kinds are: {', '.join(known)}")


def check_op(op: str, table: EventTable) -> None:
    """Raise TraceError if neither torch.distributed, nor its RPC, nor this trace has such an op."""
    seen = {str(first.op) for first in table.firsts if hasattr(first, "op")}
    if op not in {*seen, "rpc_sync", "rpc_async", "remote"} and family_of_op(op) not in OPS:
        raise TraceError(f"there is no op {op!r}; this trace has: {', '.join(sorted(seen)[:30])}")


def of_dimension(name: str, processes: Sequence[Process], table: EventTable) -> Mask:
    """Return the calls in groups that are this dimension of a mesh. TraceError if none is."""
    facts = ((process, fact) for process in processes for fact in process.groups.values())
    groups = {(process.rank, fact.name): process.dimensions(fact) for process, fact in facts}
    if name not in (known := {*chain(*groups.values())}):
        has = ", ".join(sorted(known)) or "none"
        raise TraceError(f"there is no dimension {name!r} of a mesh; this trace has: {has}")

    def is_in(first: Event) -> bool:
        return name in groups.get((first.rank, getattr(first, "group", "")), ())

    return table.of_firsts(is_in)


# Spans ----------------------------------------------------------------------------------------------------------------


def within_span(table: EventTable, span: str) -> Mask:
    enclosing = table.of_firsts(lambda first: isinstance(first, Span) and first.name == span)
    return _below(table, enclosing)


def caused_by(inside: Mask, table: EventTable, met: OperationTable, rpc: Rpc) -> Mask:
    """Return these rows, and those that they cause on other ranks."""
    inside = inside.copy()
    inside[met.end_row[met.ends_of(np.flatnonzero(met.with_an_end(inside)))]] = True
    exchanges = rpc.exchanges.table
    ran = (exchanges.call >= 0) & (exchanges.run >= 0)
    call, run = exchanges.call[ran], exchanges.run[ran]
    # What calls of RPC have set going on other ranks, and what that called in turn.
    while (set_going := inside[call] & ~inside[run]).any():
        inside[run[set_going]] = True
        inside |= _below(table, inside)
    return inside


def _below(table: EventTable, enclosing: Mask) -> Mask:
    """Return which rows are inside of these, however deep."""
    return table.around(np.where(enclosing, 0, -1)) >= 0


# Time -----------------------------------------------------------------------------------------------------------------


def begins_of_operations(table: EventTable, met: OperationTable, rpc: Rpc) -> Column:
    """Return when each event's operation began, in ns: of steps the collective, of RPC the call."""
    begins = table.start_ns.copy()
    start_ns = np.where(met.outer >= 0, met.start_ns[met.outer], met.start_ns) if len(met) else met.start_ns
    begins[met.end_row] = np.repeat(start_ns, np.diff(met.first))
    exchanges = rpc.exchanges.table
    for rows in (exchanges.run, exchanges.reply, exchanges.arrival):
        known = (rows >= 0) & (exchanges.call >= 0)
        begins[rows[known]] = table.start_ns[exchanges.call[known]]
    return begins
