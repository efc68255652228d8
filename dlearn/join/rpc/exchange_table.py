"""The table of exchanges: a row of numbers for each request over RPC, an object when looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, get_args

import numpy as np

from dlearn.events.event import Event, RpcCall, RpcReply, RpcRun, RpcWindow
from dlearn.events.event_table import NONE, Column, EventTable, Mask, Rows, View, or_none
from dlearn.events.short_lines import ENDED_BY
from dlearn.join.columns import number_rows
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.rpc_exchange import KnownBy, Request, RpcExchange, Workers

_KINDS = tuple(rpc.REPLY_OF)
_KNOWN_BY: tuple[KnownBy, ...] = get_args(KnownBy)
BACKWARD_KIND, UNKNOWN_KIND = _KINDS.index(rpc.BACKWARD), _KINDS.index("")
_ENDS = ("call", "run", "reply", "arrival", "cause")
_TIMES = ("sent_ns", "received_ns", "reply_sent_ns", "reply_received_ns")
_OWN = {"number", "start_ns", "end_ns", "ended_by", "parent", "call", "handed_ns", "arrived_ns"}
_OWN |= {"run", "returned_ns", "context", "rrefs", "fork", "message"}
"""Fields in which events of the same group may differ."""
_LONGEST = (2**8, 2**16, 2**31)  # Where a context's number takes another number of bytes.


@dataclass(eq=False, repr=False)
class ExchangeTable:
    """All exchanges of a job, in the order of sending.

    `kind` and `known_by` are indices into their names. `call`, `run`, `reply`, `arrival` and
    `cause` are rows of `events`, -1 where there is none. Times are in ns, NONE if not known.
    """

    events: EventTable
    known: Workers
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
    requests: Mapping[int, Request]  # By row, what the agents' logs say of a request.

    def __post_init__(self) -> None:
        self._made = np.full(len(self), None, object)

    def __len__(self) -> int:
        return len(self.src)

    @classmethod
    def of(cls, exchanges: Sequence[RpcExchange], events: EventTable, known: Workers) -> Self:

        def row(event: Event | None) -> int:
            return -1 if event is None else events.row_of[event.rank, event.number]

        columns: dict[str, Any] = {"kind": [_KINDS.index(each.kind) for each in exchanges]}
        columns["known_by"] = [_KNOWN_BY.index(each.known_by) for each in exchanges]
        contexts = [each.context for each in exchanges]
        columns["context"] = [NONE if context is None else context for context in contexts]
        for name in ("src", "dst"):
            columns[name] = [getattr(each, name) for each in exchanges]
        for name in _ENDS:
            columns[name] = [row(getattr(each, name)) for each in exchanges]
        for name, values in columns.items():
            columns[name] = np.array(values, np.int64)
        requests = {row: each.request for row, each in enumerate(exchanges) if each.request}
        return cls(events, known, **columns, requests=requests)

    @classmethod
    def of_calls(cls, events: EventTable, known: Workers) -> Self:
        """Return an exchange for each call that Python saw of a known worker."""
        call = np.flatnonzero(events.is_a(RpcCall) & bool(known.by_id))
        run = np.flatnonzero(events.is_a(RpcRun))
        is_fetched = events.of_firsts(lambda first: getattr(first, "fetched", False))
        reply = np.flatnonzero(events.is_a(RpcReply) & ~is_fetched)
        run, reply = (_match_to_calls(events, call, rows, known) for rows in (run, reply))
        handed_ns = numbers_of(events, call, "handed_ns")
        received_ns = numbers_of(events, run, "arrived_ns")
        at_ns = np.where(handed_ns == 0, np.maximum(received_ns, 0), handed_ns)
        order = np.lexsort((handed_ns - events.start_ns[call], at_ns))
        call, run, reply = call[order], run[order], reply[order]
        dst = events.of_firsts(lambda first: known.rank(getattr(first, "to", None)), np.int64)
        kind = events.of_firsts(lambda first: _KINDS.index(rpc.kind_of_call(first)), np.intp)
        return cls(
            events=events, known=known, src=events.rank[call], dst=dst[call], kind=kind[call],
            known_by=np.full(len(call), _KNOWN_BY.index("python")), call=call, run=run, reply=reply,
            arrival=np.full(len(call), -1), cause=call, context=numbers_of(events, call, "context"),
            requests={},
        )  # fmt: skip

    def _logged(self, name: str, seen: Column) -> Column:
        """Return this number as the agents' logs have it, else as Python saw it."""
        for row, request in self.requests.items():
            number = getattr(request, name)
            if number is not None:
                seen[row] = number
        return seen

    @cached_property
    def request_id(self) -> Column:
        """Return the agent's own number of each request; NONE where no log has it."""
        return self._logged("id", np.full(len(self), NONE))

    @cached_property
    def sent_ns(self) -> Column:
        return self._logged("sending_ns", numbers_of(self.events, self.call, "handed_ns"))

    @cached_property
    def received_ns(self) -> Column:
        return self._logged("received_ns", numbers_of(self.events, self.run, "arrived_ns"))

    @cached_property
    def reply_sent_ns(self) -> Column:
        return self._logged("replying_ns", at_rows(self.events.start_ns, self.reply, NONE))

    @cached_property
    def reply_received_ns(self) -> Column:
        replied = self.events.ended_by == ENDED_BY.index("reply")
        seen_ns = at_rows(np.where(replied, self.events.end_ns, NONE), self.call, NONE)
        return self._logged("answered_ns", at_rows(self.events.start_ns, self.arrival, seen_ns))

    @cached_property
    def after_backward(self) -> Mask:
        """Return whether each was sent in a context whose backward pass was over."""
        over: dict[int, int] = {}
        for window in self.events.made(np.flatnonzero(self.events.is_a(RpcWindow))):
            assert isinstance(window, RpcWindow)
            if window.op == "backward" and window.end_ns is not None and window.context is not None:
                over[window.context] = window.end_ns
        end_ns = np.array([over.get(context, 2**62) for context in self.context.tolist()], np.int64)
        return np.asarray(np.maximum(self.sent_ns, 0) > end_ns)

    @property
    def is_logged(self) -> Mask:
        return np.asarray(self.request_id != NONE)

    @property
    def observer(self) -> Mask:
        """Return which calls are the cluster's own, to open connections."""
        own = self.events.of_firsts(lambda first: isinstance(first, RpcCall) and first.observer)
        return at_rows(own, self.call, 0).astype(bool)

    @cached_property
    def groups(self) -> tuple[Rows, Rows]:
        """Return the group of each exchange, and the first exchange of each group."""
        present = [self.is_logged, self.received_ns != NONE, self.after_backward]
        present += [(self.reply_sent_ns != NONE) | (self.reply_received_ns != NONE)]
        length = np.searchsorted(_LONGEST, self.context, side="right")
        context = np.where(self.context == NONE, -1, length)
        likes = _groups_of_events(self.events)
        rows_of_events = (self.call, self.run, self.reply, self.cause)
        events = [at_rows(likes, rows, -1) for rows in rows_of_events]
        return number_rows(self.src, self.dst, self.kind, self.known_by, context, *present, *events)

    def made(self, rows: Rows) -> list[RpcExchange]:
        """Return the exchanges in these rows, each made once."""
        new = np.array([row for row in set(rows.tolist()) if self._made[row] is None], np.intp)
        if not len(new):
            return [*self._made[rows]]
        columns: dict[str, list[Any]] = {"number": new.tolist()}
        for name in ("src", "dst", "context", *_TIMES):
            columns[name] = or_none(getattr(self, name)[new])
        for name in _ENDS:
            ends = getattr(self, name)[new]
            events = np.full(len(new), None, object)
            events[ends >= 0] = np.fromiter(self.events.made(ends[ends >= 0]), object)
            columns[name] = events.tolist()
        columns["kind"] = [_KINDS[kind] for kind in self.kind[new].tolist()]
        columns["known_by"] = [_KNOWN_BY[how] for how in self.known_by[new].tolist()]
        columns["after_backward"] = self.after_backward[new].tolist()
        columns["request"] = [self.requests.get(row) for row in new.tolist()]
        ids = {rank: self.known.id(rank) for rank in {*columns["src"], *columns["dst"]}}
        for row, *values in zip(new.tolist(), *columns.values(), strict=True):
            exchange = RpcExchange(**dict(zip(columns, values, strict=True)))
            exchange.worker_ids = ids[exchange.src], ids[exchange.dst]
            self._made[row] = exchange
        return [*self._made[rows]]


class Exchanges(View[RpcExchange]):
    table: ExchangeTable


def numbers_of(events: EventTable, rows: Rows, name: str) -> Column:
    """Return this field of the events in these rows; NONE if it is unknown, or the row is -1."""
    return at_rows(events.column(name), rows, NONE)


def _match_to_calls(events: EventTable, calls: Rows, rows: Rows, known: Workers) -> Rows:
    """Match executions (or replies) to calls: return the last of these rows that belongs to each call; -1: none."""
    ranks = 1 + max([events.rank.max(initial=0), *known.by_id.values()])
    callers = events.of_firsts(lambda first: known.rank(getattr(first, "caller", None)), np.int64)
    caller = callers[rows]
    key = numbers_of(events, rows, "call") * ranks + caller
    key[caller < 0] = -1
    order = np.argsort(key, kind="stable")
    rows, key = np.append(-1, rows[order]), np.append(NONE, key[order])  # Before all, none.
    wanted = numbers_of(events, calls, "call") * ranks + events.rank[calls]
    index = np.searchsorted(key, wanted, side="right") - 1
    return np.where(key[index] == wanted, rows[index], -1)


def _groups_of_events(events: EventTable) -> Rows:
    """Return the same number for rows whose events differ only in their own numbers and times."""
    numbers: dict[Any, int] = {}
    found = np.zeros(len(events.firsts), np.int64)
    for like, first in enumerate(events.firsts):
        shared = [getattr(first, name) for name in first.__struct_fields__ if name not in _OWN]
        found[like] = numbers.setdefault((type(first), *shared), len(numbers))
    return found[events.like]


def at_rows(column: np.ndarray, rows: Rows, otherwise: np.ndarray | int) -> np.ndarray:
    """Return the numbers in these rows of a column, and another one where the row is -1."""
    return np.where(rows >= 0, np.append(column, 0)[rows], otherwise)
