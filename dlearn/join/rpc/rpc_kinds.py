"""Of what kind is each request of the agent's log?

The log gives both ends and all times, but no kind. Python's side knows when it called, and within which stretch of time
C++ sent something of its own. What is left follows from torch's protocol for remote references and for distributed
autograd (torch's notes "Remote Reference Protocol" and "Distributed Autograd Design"):

* whoever unpacks an RRef tells: its owner accepts the sender's new copy (RREF_CHILD_ACCEPT to the sender); a user that
  got it from another user asks the owner first (RREF_FORK_REQUEST) and then accepts; from the owner itself: nothing;
* only a user deletes (RREF_USER_DELETE), and only at the owner;
* the end of a context is told to all workers that it knows, and each tells all that *it* knows
  (CLEANUP_AUTOGRAD_CONTEXT_REQ);
* a backward pass crosses (BACKWARD_AUTOGRAD_REQ) where the forward pass did, the other way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from dlearn.events.event import RpcCall, RpcReply, RpcRun, RpcWindow
from dlearn.events.event_table import Column, Events, Mask
from dlearn.events.process import Process
from dlearn.join.rpc import exchange_table
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.exchange_table import Exchanges, ExchangeTable, at_rows
from dlearn.join.rpc.rpc_exchange import KnownBy, Request, RpcExchange, Seen, Workers
from dlearn.join.rpc.rpc_matching import Cause, RequestMatcher, TimeWindow, shortest_first, stretch_of


@dataclass(frozen=True)
class Rpc:
    """All exchanges, in the order of sending. `gaps` says what is missing from the agents' logs."""

    exchanges: Exchanges = field(default_factory=exchange_table.no_exchanges)
    gaps: tuple[str, ...] = ()

    @property
    def logged(self) -> int:
        """Count the requests that stand in the agents' logs."""
        return int(self.exchanges.table.is_logged[self.exchanges.rows].sum())

    @property
    def explained(self) -> int:
        """Count the requests of the logs whose kind is known."""
        table = self.exchanges.table
        return int((table.is_logged & (table.kind != exchange_table.UNKNOWN_KIND))[self.exchanges.rows].sum())

    @property
    def complete(self) -> bool:
        """Whether the logs are here: then no request is missing."""
        return not self.gaps

    @property
    def problems(self) -> tuple[str, ...]:
        """Say what is missing, and how many requests are of an unknown kind."""
        unknown = self.logged - self.explained
        if not unknown:
            return self.gaps
        return (*self.gaps, f"of {unknown:,} of {self.logged:,} requests over RPC the kind is unknown")

    def of(self, events: Events) -> Rpc:
        """Return the exchanges that these events caused.

        That is by a call, a window, or all of a context or a backward pass that they began.
        """
        table = self.exchanges.table
        opened: dict[str, set[int]] = {"context": set(), "backward": set()}
        for window in events.of(RpcWindow):
            if window.op in opened and window.context is not None:
                opened[window.op].add(window.context)
        begun, backward = (np.isin(table.context, list(contexts)) for contexts in opened.values())
        caused = at_rows(events.chosen, table.cause, 0) > 0
        kept = caused | begun | (backward & (table.kind == exchange_table.BACKWARD_KIND))
        return self._keep(kept)

    def sent_between(self, wanted: Callable[[Column], Mask]) -> Rpc:
        """Return the exchanges that were called, or sent by C++, at a time in ns that is wanted."""
        return self._keep(wanted(self.exchanges.table.called_ns))

    def _keep(self, kept: Mask) -> Rpc:
        rows = self.exchanges.rows
        return replace(self, exchanges=Exchanges(self.exchanges.table, rows[kept[rows]]))


def join_rpc(processes: Sequence[Process], events: Events) -> Rpc:
    """Return all RPCs that the processes of a job know; `events` are all events of the job."""
    known = rpc.workers(processes)
    if not known.by_id:
        return Rpc()
    found, gaps = rpc.requests(processes, known)
    if found:
        table = ExchangeTable.of(join(rpc.seen(events, known), found, known), events.table, known)
    else:
        table = ExchangeTable.of_calls(events.table, known)
    lost = len(table) - int(table.is_logged.sum())
    if lost and not gaps:
        torch = sorted({process.header.torch for process in processes})
        gaps.append(
            f"{lost:,} of {len(table):,} calls do not stand in the agents' logs as torch {', '.join(torch)} writes"
            " them: what else was sent is not known"
        )
    return Rpc(Exchanges(table, np.arange(len(table))), tuple(gaps))


def join(saw: Seen, logged: Sequence[Request], known: Workers) -> list[RpcExchange]:
    """Every request as an exchange, with all that is known of it; and the calls that the log does not have."""
    board = RequestMatcher(logged)
    _python_calls(saw, board, known)
    _fetches(saw, board, known)
    _backward(saw, board, known)
    # What a stretch tells before what only an order does: two messages may be under way at the same time.
    asked = _references(saw, board, known)
    _cleanups(saw, board)
    _acceptances(asked, board)
    _backward_in_cpp(saw, board)
    _deletions(saw, board, known)
    _unknown(saw, board)
    return sorted(board.exchanges, key=lambda each: each.sent_ns or each.received_ns or 0)


# Calls ----------------------------------------------------------------------------------------------------------------


def _python_calls(saw: Seen, board: RequestMatcher, known: Workers) -> None:
    """The narrowest stretches first; of several requests in one, that whose times at both ends are nearest."""
    for call in sorted(saw.calls, key=lambda call: call.handed_ns - call.start_ns):
        kind, dst, cause = rpc.kind_of_call(call), known.rank(call.to), (call, call.context)
        run, reply = saw.runs.get((call.rank, call.call)), saw.replies.get((call.rank, call.call))
        stretch = TimeWindow(call.rank, call.start_ns, call.handed_ns, dst)
        exchange = board.claim(kind, "python", cause, stretch, partial(_misfit, call, run, reply))
        if exchange is None:
            exchange = RpcExchange(call.rank, dst, kind, "python", cause=call, context=call.context)
            board.exchanges.append(exchange)
        exchange.call, exchange.run, exchange.reply = call, run, reply


_IMPOSSIBLE_NS = 10**12


def _misfit(call: RpcCall, run: RpcRun | None, reply: RpcReply | None, request: Request) -> int:
    """How far what Python saw at both ends is from what the log says of this request; a wrong order counts most."""
    steps = (
        (call.start_ns, request.sending_ns),
        (request.running_ns or request.received_ns, run.arrived_ns if run is not None else None),
        (run.end_ns if run is not None else None, request.ran_ns),
        (reply.start_ns if reply is not None else None, request.replying_ns),
        (request.answered_ns, call.end_ns),
    )
    gaps = [later - earlier for earlier, later in steps if earlier is not None and later is not None]
    return sum(gap if gap >= 0 else _IMPOSSIBLE_NS for gap in gaps)


def _fetches(saw: Seen, board: RequestMatcher, known: Workers) -> None:
    for window in shortest_first([*saw.windows["to_here"], *saw.windows["rref backward"]]):
        kind = rpc.FETCH if window.context is None else rpc.FORWARD
        if window.op == "rref backward":
            kind = rpc.RREF_BACKWARD
        cause, stretch = (window, window.context), stretch_of(window, known.rank(window.to))
        exchange = board.claim(kind, "window", cause, stretch)
        if exchange is not None:
            _add_fetched_value(exchange, saw, known)


def _add_fetched_value(exchange: RpcExchange, saw: Seen, known: Workers) -> None:
    """The value was packed at the owner before the reply went, and has arrived inside the window."""
    request, window = exchange.request, exchange.cause
    if request is None or window is None:
        return
    for (owner, number), reply in saw.fetched.items():
        arrival = saw.arrivals.get((owner, number))
        if arrival is None or owner != exchange.dst or arrival.rank != exchange.src:
            continue
        inside = window.start_ns <= arrival.start_ns <= (window.end_ns or arrival.start_ns)
        if inside and arrival.thread == window.thread:
            exchange.reply, exchange.arrival = reply, arrival
            return


# Distributed autograd -------------------------------------------------------------------------------------------------


def _backward(saw: Seen, board: RequestMatcher, known: Workers) -> None:
    """Inside the execution of a recv node; else while a gradient from elsewhere is being worked on.

    Then it is the last that came in this backward pass before the gradient was there; the last gradient chooses first.
    """
    for window in shortest_first(saw.windows["crossing"]):
        dst = known.by_id.get(window.to) if window.to is not None else None
        board.claim(rpc.BACKWARD, "window", (window, window.context), stretch_of(window, dst))
    began = {window.context: window.start_ns for window in saw.windows["backward"]}
    for window in sorted(saw.windows["gradient"], key=lambda window: -window.start_ns):
        src = known.rank(window.to)
        sent = board.within(TimeWindow(src, began.get(window.context, 0), window.start_ns, window.rank))
        came = [(each.received_ns, each) for each in sent if each.received_ns is not None]
        candidates = [each for each in came if each[0] <= window.start_ns]
        if candidates:
            request = max(candidates, key=lambda each: each[0])[1]
            board.take(request, rpc.BACKWARD, "window", (window, window.context))


def _backward_in_cpp(saw: Seen, board: RequestMatcher) -> None:
    """Where no Python saw the tensors come in: back along each way that they took forward, during the backward pass."""
    ways: dict[int | None, Counter[tuple[int, int]]] = defaultdict(Counter)
    for exchange in board.exchanges:
        call, reply = exchange.call, exchange.reply
        if exchange.kind == rpc.BACKWARD:
            ways[exchange.context][exchange.src, exchange.dst] -= 1
        if exchange.kind != rpc.FORWARD:
            continue
        if call is not None and call.needs_grad:
            ways[exchange.context][exchange.dst, exchange.src] += 1
        unseen = reply is None and (call is None or (call.flavour != "python" and call.needs_grad))
        if unseen or (reply is not None and reply.needs_grad):
            ways[exchange.context][exchange.src, exchange.dst] += 1
    for window in [*saw.windows["backward"], *saw.windows["rref backward"]]:
        for (here, there), count in ways[window.context].items():
            for request in board.within(TimeWindow(here, window.start_ns, window.end_ns, there))[: max(0, count)]:
                board.take(request, rpc.BACKWARD, "rule", (window, window.context))


def _cleanups(saw: Seen, board: RequestMatcher) -> None:
    """From the driver inside its release; from there on, by each worker to all that it has met in this context.

    A worker does so once, while it works on the first such request that its threads take up: with two under way that
    need not be the one that came first. So each of them is a stretch in which it may have passed the end on.
    """
    met: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for exchange in board.exchanges:
        if exchange.context is not None and exchange.kind in (rpc.FORWARD, rpc.BACKWARD):
            met[exchange.src, exchange.context].add(exchange.dst)
            met[exchange.dst, exchange.context].add(exchange.src)
    for window in saw.windows["release"]:
        # When it begins there, until when, and where.
        waves: list[tuple[int, int, int]] = [(window.start_ns, window.end_ns or 2**62, window.rank)]
        told: set[tuple[int, int]] = set()
        while waves:
            first_ns, last_ns, rank = heappop(waves)
            for dst in sorted(met[rank, window.context]):
                if (rank, dst) in told:
                    continue
                known_by: KnownBy = "window" if rank == window.rank else "rule"
                misfit = partial(_no_cleanup, board, met[dst, window.context], last_ns)
                cause, stretch = (window, window.context), TimeWindow(rank, first_ns, last_ns, dst)
                told_it = board.claim(rpc.CLEANUP, known_by, cause, stretch, misfit)
                if told_it is None:
                    continue
                told.add((rank, dst))
                if told_it.received_ns is not None:
                    heappush(waves, (told_it.received_ns, told_it.reply_sent_ns or 2**62, dst))


def _no_cleanup(board: RequestMatcher, peers: set[int], last_ns: int, request: Request) -> int:
    """How unlike the end of a context: to how many peers its receiver sends nothing while it works on it counts most.

    Then how long before the end of its sender's own work it went, which is the last thing that is done there.
    """
    if request.received_ns is None:
        return _IMPOSSIBLE_NS * len(peers)
    meanwhile = [TimeWindow(request.dst, request.received_ns, request.replying_ns, peer) for peer in peers]
    silent = sum(not board.within(each) for each in meanwhile)
    return silent * _IMPOSSIBLE_NS + min(last_ns - request.first_ns, _IMPOSSIBLE_NS - 1)


# Remote references ----------------------------------------------------------------------------------------------------

Asked = list[tuple[RpcExchange, int]]
"""The requests for a copy, each with the rank that waits to be told that it is accepted."""


def _references(saw: Seen, board: RequestMatcher, known: Workers) -> Asked:
    """What is sent while a reference is unpacked."""
    asked: Asked = []
    causes = _Causes(board.exchanges)
    for window in shortest_first(saw.windows["rref"]):
        owner, parent = known.rank(window.to), known.rank(window.parent_worker)
        if parent == owner:
            continue  # The owner took note of the copy when it sent it.
        cause = causes.of(window, parent)
        if owner == window.rank:
            board.claim(rpc.ACCEPT, "window", cause, stretch_of(window, parent))
            continue
        exchange = board.claim(rpc.FORK, "window", cause, stretch_of(window, owner), partial(_delay, parent, board))
        if exchange is not None:
            asked.append((exchange, parent))
    return asked


def _acceptances(asked: Asked, board: RequestMatcher) -> None:
    """What follows another message: it can be told apart only when all that has a stretch of its own is claimed."""
    calls = [exchange for exchange in board.exchanges if exchange.call is not None]
    for exchange, parent in sorted(asked, key=lambda each: each[0].reply_received_ns or 0):
        granted = _granted(exchange.request, parent, board)
        if granted is not None:
            board.take(granted, rpc.ACCEPT, "rule", (exchange.cause, exchange.context))
    for exchange in calls:
        _unpacked_in_cpp(exchange, board)


def _granted(asked: Request | None, parent: int, board: RequestMatcher) -> Request | None:
    """The acceptance that follows when the owner has answered a request for a copy."""
    if asked is None or asked.answered_ns is None:
        return None
    return next(iter(board.within(TimeWindow(asked.src, asked.answered_ns, None, parent))), None)


def _delay(parent: int, board: RequestMatcher, asked: Request) -> int:
    granted = _granted(asked, parent, board)
    if granted is None or granted.sending_ns is None or asked.answered_ns is None:
        return 2**62
    return granted.sending_ns - asked.answered_ns


def _unpacked_in_cpp(asked: RpcExchange, board: RequestMatcher) -> None:
    """A TorchScript call unpacks its RRefs in C++: their owner accepts them while it works on the call."""
    call, request = asked.call, asked.request
    if call is None or request is None or call.flavour == "python" or request.received_ns is None:
        return
    mine = [rref for rref in call.rrefs if rref.owner == call.to]
    candidates = board.within(TimeWindow(asked.dst, request.received_ns, request.replying_ns, asked.src))
    for each in candidates[: len(mine)]:
        board.take(each, rpc.ACCEPT, "rule", (call, asked.context))


class _Causes:
    """The message whose unpacking a window belongs to: the call that is being taken in, or the reply."""

    def __init__(self, exchanges: Sequence[RpcExchange]) -> None:
        self._spans: dict[tuple[int, int], list[tuple[int, int, RpcExchange]]] = defaultdict(list)
        for exchange in exchanges:
            run, call, request = exchange.run, exchange.call, exchange.request
            if run is not None:
                self._spans[run.rank, exchange.src].append((run.arrived_ns, run.start_ns, exchange))
            if call is not None and call.ended_by == "reply" and call.end_ns is not None:
                first = request.answered_ns if request is not None and request.answered_ns else call.handed_ns
                self._spans[call.rank, exchange.dst].append((first, call.end_ns, exchange))

    def of(self, window: RpcWindow, sender: int) -> Cause:
        """Of a message from `sender`: a server takes in the messages of several workers at the same time."""
        around = [each for each in self._spans[window.rank, sender] if each[0] <= window.start_ns <= each[1]]
        if not around:
            return window, window.context
        exchange = min(around, key=lambda each: each[1] - each[0])[2]
        return exchange.call or window, exchange.context


def _deletions(saw: Seen, board: RequestMatcher, known: Workers) -> None:
    """What is left can only be the end of a copy, if the sender has copies of the receiver's values."""
    copies: Counter[tuple[int, int]] = Counter()
    for call in saw.calls:
        if call.op == "remote":
            copies[call.rank, known.rank(call.to)] += 1
    for window in saw.windows["rref"]:
        copies[window.rank, known.rank(window.to)] += 1
    for request in board.left():
        if copies[request.src, request.dst] > 0 and request.src != request.dst:
            copies[request.src, request.dst] -= 1
            board.take(request, rpc.DELETE, "rule")


def _unknown(saw: Seen, board: RequestMatcher) -> None:
    """The requests whose kind nothing tells; each belongs to the one context that was open at both its ends."""
    windows = {window.context: window for window in saw.windows["context"]}
    met: dict[int, set[int | None]] = defaultdict(set)
    for window in windows.values():
        met[window.rank].add(window.context)
    for exchange in board.exchanges:
        met[exchange.src].add(exchange.context)
        met[exchange.dst].add(exchange.context)

    def is_open(context: int | None, at_ns: int) -> bool:
        window = windows.get(context)
        return window is not None and window.start_ns <= at_ns <= (window.end_ns or at_ns)

    for request in board.left():
        exchange = board.take(request, "", "unknown")
        common = met[request.src] & met[request.dst]
        contexts = [context for context in common if is_open(context, request.first_ns)]
        if len(contexts) == 1:
            exchange.context = contexts[0]
