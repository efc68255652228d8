"""The table of exchanges: one row for each request over RPC, as columns of numbers.

A row becomes an `RpcExchange` when it is looked at. Rows that differ only in their numbers and
times form a group: what is the same for all of a group is worked out for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, get_args

import numpy as np

from dlearn.events.event import Event, RpcCall, RpcReply, RpcRun, RpcWindow
from dlearn.events.event_table import NONE, Column, EventTable, Lazy, Mask, Rows, find, of_events
from dlearn.events.short_lines import ENDED_BY
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.rpc_exchange import KnownBy, RpcExchange, Workers

_KINDS = tuple(rpc.REPLY_OF)
_KNOWN_BY: tuple[KnownBy, ...] = get_args(KnownBy)
BACKWARD_KIND, UNKNOWN_KIND = _KINDS.index(rpc.BACKWARD), _KINDS.index("")
_PYTHON = _KNOWN_BY.index("python")
_ENDS = ("call", "run", "reply", "arrival", "cause")
_TIMES = ("sent_ns", "received_ns", "reply_sent_ns", "reply_received_ns")
_OWN = {"number", "start_ns", "end_ns", "ended_by", "parent", "call", "handed_ns", "arrived_ns"}
_OWN |= {"run", "returned_ns", "context", "rrefs", "fork", "message"}
"""Fields in which events of the same group may differ."""
_MOST = 2**62
_LONGEST = (2**8, 2**16, 2**31)
"""Where a context's number takes another number of bytes."""


@dataclass(eq=False)
class ExchangeTable:
    """All exchanges of a job, in the order of sending.

    `kind` and `known_by` are indices into their names. `call`, `run`, `reply`, `arrival` and
    `cause` are rows of `events`, -1 where there is none. Times are in ns, NONE if not known.
    """

    events: EventTable
    src: Column
    dst: Column
    kind: Rows
    known_by: Rows
    call: Rows
    run: Rows
    reply: Rows
    arrival: Rows
    cause: Rows
    context: Column
    sent_ns: Column
    received_ns: Column
    reply_sent_ns: Column
    reply_received_ns: Column
    request_id: Column
    """The agent's own number of the request; NONE where no log has it."""
    worker_ids: Mapping[int, int]
    """RPC's own id of each rank."""

    def __post_init__(self) -> None:
        self._made = np.full(len(self), None, object)

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def of(cls, exchanges: Sequence[RpcExchange], events: EventTable, known: Workers) -> Self:
        """Return the table of these exchanges."""

        def row(event: Event | None) -> int:
            return -1 if event is None else events.row_of(event.rank, event.number)

        count = len(exchanges)
        columns: dict[str, Any] = {"kind": [_KINDS.index(each.kind) for each in exchanges]}
        columns["known_by"] = [_KNOWN_BY.index(each.known_by) for each in exchanges]
        columns["request_id"] = [each.request.id if each.request else NONE for each in exchanges]
        for name in _ENDS:
            columns[name] = [row(getattr(each, name)) for each in exchanges]
        for name in ("src", "dst", "context", *_TIMES):
            values = [getattr(each, name) for each in exchanges]
            columns[name] = [NONE if value is None else value for value in values]
        for name, values in columns.items():
            columns[name] = np.fromiter(values, np.int64, count)
        table = cls(events=events, worker_ids=_ids(known), **columns)
        table._made[:] = np.fromiter(exchanges, object, count)
        for number, exchange in enumerate(exchanges):
            exchange.number = number
            exchange.after_backward = bool(table.after_backward[number])
            exchange.worker_ids = table._ids_of(exchange.src, exchange.dst)
        return table

    @classmethod
    def of_calls(cls, events: EventTable, known: Workers) -> Self:
        """Return an exchange for each call that Python saw, where the agents logged nothing."""
        call = np.flatnonzero(events.is_a(RpcCall))
        handed_ns = numbers_of(events, call, "handed_ns")
        call = call[np.argsort(handed_ns - events.start_ns[call], kind="stable")]
        run = np.flatnonzero(events.is_a(RpcRun))
        is_fetched = events.of_firsts(lambda first: getattr(first, "fetched", False))
        reply = np.flatnonzero(events.is_a(RpcReply) & ~is_fetched)
        run, reply = (_of_calls(events, call, rows, known) for rows in (run, reply))
        handed_ns = numbers_of(events, call, "handed_ns")
        received_ns = numbers_of(events, run, "arrived_ns")
        at_ns = np.where(handed_ns == 0, np.maximum(received_ns, 0), handed_ns)
        order = np.argsort(at_ns, kind="stable")
        call, run, reply = call[order], run[order], reply[order]
        answered = _replied(events, call)
        kinds = _of_kinds(events, call, lambda first: _KINDS.index(rpc.kind_of_call(first)))
        none = np.full(len(call), NONE)
        return cls(
            events=events,
            src=events.rank[call],
            dst=_of_kinds(events, call, lambda first: known.rank(first.to)),
            kind=kinds,
            known_by=np.full(len(call), _PYTHON),
            call=call,
            run=run,
            reply=reply,
            arrival=np.full(len(call), -1),
            cause=call,
            context=numbers_of(events, call, "context"),
            sent_ns=handed_ns[order],
            received_ns=received_ns[order],
            reply_sent_ns=at_rows(events.start_ns, reply, NONE),
            reply_received_ns=np.where(answered, events.end_ns[call], NONE),
            request_id=none,
            worker_ids=_ids(known),
        )

    @cached_property
    def after_backward(self) -> Mask:
        """Of an exchange in a context: whether its backward pass was over when it was sent."""
        windows = self.events.made(np.flatnonzero(self.events.is_a(RpcWindow)))
        over: dict[int, int] = {}
        for window in windows:
            assert isinstance(window, RpcWindow)
            if window.op == "backward" and window.end_ns is not None and window.context is not None:
                over[window.context] = window.end_ns
        contexts = np.array(sorted(over), np.int64)
        index, known = find(self.context, contexts)
        end_ns = np.array([over[context] for context in contexts.tolist()], np.int64)
        sent_ns = np.where(self.sent_ns == NONE, 0, self.sent_ns)
        after = np.zeros(len(self), bool)
        after[known] = sent_ns[known] > end_ns[index[known]]
        return after

    @property
    def called_ns(self) -> Column:
        """Return when each was called, or sent by C++ itself; NONE where that is not known."""
        return at_rows(self.events.start_ns, self.call, self.sent_ns)

    @property
    def is_logged(self) -> Mask:
        """Return which requests stand in an agent's log."""
        return np.asarray(self.request_id != NONE)

    @property
    def observer(self) -> Mask:
        """Return which calls are the cluster's own, to open connections."""
        own = self.events.of_firsts(lambda first: isinstance(first, RpcCall) and first.observer)
        return at_rows(own, self.call, 0).astype(bool)

    @cached_property
    def groups(self) -> tuple[Rows, Rows]:
        """Return the group of each exchange, and the first exchange of each group.

        All of a group have the same ranks, kind, function, tensors, sizes and errors.
        """
        present = [self.is_logged, self.received_ns != NONE, self.after_backward]
        present += [(self.reply_sent_ns != NONE) | (self.reply_received_ns != NONE)]
        length = np.searchsorted(_LONGEST, self.context, side="right")
        context = np.where(self.context == NONE, -1, length)
        likes = _groups_of_events(self.events)
        rows_of_events = (self.call, self.run, self.reply, self.cause)
        events = [at_rows(likes, rows, -1) for rows in rows_of_events]
        group = np.zeros(len(self), np.int64)
        for column in (self.src, self.dst, self.kind, self.known_by, context, *present, *events):
            low = int(column.min(initial=0))
            width = int(column.max(initial=0)) - low + 1
            if group.max(initial=0) > _MOST // width:
                group = np.unique(group, return_inverse=True)[1]
            group = group * width + (column - low)
        _, first, group = np.unique(group, return_index=True, return_inverse=True)
        return group, first

    def made(self, rows: Rows) -> list[RpcExchange]:
        """Return the exchanges in these rows, each made once."""
        new = np.array([row for row in set(rows.tolist()) if self._made[row] is None], np.intp)
        names = ("call", "run", "reply", "cause")
        ends = [self._events(getattr(self, name)[new]) for name in names]
        for row, call, run, reply, cause in zip(new.tolist(), *ends, strict=True):
            src, dst, context = int(self.src[row]), int(self.dst[row]), int(self.context[row])
            kind, known_by = _KINDS[self.kind[row]], _KNOWN_BY[self.known_by[row]]
            made = RpcExchange(src, dst, kind, known_by, None, call, run, reply, cause=cause)
            made.context = None if context == NONE else context
            made.number, made.after_backward = row, bool(self.after_backward[row])
            made.worker_ids = self._ids_of(src, dst)
            self._made[row] = made
        found: list[RpcExchange] = self._made[rows].tolist()
        return found

    def _events(self, rows: Rows) -> list[Any]:
        found = np.full(len(rows), None, object)
        found[rows >= 0] = np.fromiter(self.events.made(rows[rows >= 0]), object)
        return found.tolist()

    def _ids_of(self, src: int, dst: int) -> tuple[int, int]:
        return self.worker_ids.get(src, 0), self.worker_ids.get(dst, 0)


class Exchanges(Lazy[RpcExchange]):
    """Some exchanges of a job: rows of its table."""

    def __init__(self, table: ExchangeTable, rows: Rows) -> None:
        self.table = table
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Rows) -> list[RpcExchange]:
        """Return the exchanges at these indices."""
        return self.table.made(self.rows[places])


def numbers_of(events: EventTable, rows: Rows, name: str) -> Column:
    """Return this field of the events in these rows; NONE if it is unknown, or the row is -1."""
    return at_rows(events.column(name), rows, NONE)


def _of_kinds(events: EventTable, rows: Rows, question: Callable[[Any], int]) -> Column:
    """Return the answer of each of these rows to what is the same for all events of a kind."""
    likes, inverse = np.unique(events.like[rows], return_inverse=True)
    answers = (question(events.firsts[like]) for like in likes.tolist())
    return np.fromiter(answers, np.int64, len(likes))[inverse]


def _of_calls(events: EventTable, calls: Rows, rows: Rows, known: Workers) -> Rows:
    """Return the last of these rows, runs or replies, that belongs to each call; -1 for none."""
    ranks = 1 + max(events.rank.max(initial=0), *known.by_id.values())
    caller = _of_kinds(events, rows, lambda first: known.rank(first.caller))
    key = numbers_of(events, rows, "call") * ranks + caller
    key[caller < 0] = -1
    order = np.argsort(key, kind="stable")
    wanted = numbers_of(events, calls, "call") * ranks + events.rank[calls]
    index = np.searchsorted(key[order], wanted, side="right") - 1
    found = np.full(len(calls), -1)
    if len(rows):
        rows, key = rows[order], key[order]
        found = np.where(key[index] == wanted, rows[index], -1)
    return found


def _replied(events: EventTable, rows: Rows) -> Mask:
    """Return whose end was the arrival of the reply."""
    return np.asarray(events.ended_by[rows] == ENDED_BY.index("reply"))


def _groups_of_events(events: EventTable) -> Rows:
    """Return the same number for rows whose events differ only in their own numbers and times."""
    numbers: dict[Any, int] = {}
    shared: dict[type[Event], list[str]] = {}
    found = np.zeros(len(events.firsts), np.int64)
    for like, first in enumerate(events.firsts):
        kind = type(first)
        if kind not in shared:
            shared[kind] = [name for name in kind.__struct_fields__ if name not in _OWN]
        key = (kind, *[getattr(first, name) for name in shared[kind]])
        found[like] = numbers.setdefault(key, len(numbers))
    return found[events.like]


def _ids(known: Workers) -> dict[int, int]:
    return {rank: worker for worker, rank in known.by_id.items()}


def no_exchanges() -> Exchanges:
    """Return what a job without RPC has."""
    return Exchanges(ExchangeTable.of((), of_events(()), Workers({}, {})), np.arange(0))


def at_rows(column: np.ndarray, rows: Rows, otherwise: np.ndarray | int) -> np.ndarray:
    """Return the numbers in these rows of a column, and another one where the row is -1."""
    return np.where(rows >= 0, np.append(column, 0)[rows], otherwise)
