"""A choice of a job's events, and what is worked out once about it: all that joining knows of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any, Self, TypeVar

import numpy as np

from dlearn.events.event import Event
from dlearn.events.event_table import Events, EventTable
from dlearn.events.process import Process
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
        """Return all events of the job."""
        return self.whole.rows.table

    @property
    def rows(self) -> Events:
        """Return the chosen events, as rows of the table."""
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
        """Return the memory of `once`."""
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
