"""Of what kind is each request of the agents' logs?

The log gives both ends and all times, but no kind. Python saw when it called, and in which window of
time C++ sent something of its own. The rest follows from torch's protocol for remote references and
for distributed autograd (torch's notes "Remote Reference Protocol", "Distributed Autograd Design"):

* who unpacks an RRef reports it: its owner accepts the sender's new copy (RREF_CHILD_ACCEPT to the
  sender); a user that got it from another user asks the owner (RREF_FORK_REQUEST) and then accepts;
  from the owner itself: nothing;
* only a user deletes (RREF_USER_DELETE), and only at the owner;
* the end of a context goes to all workers that the driver has met in it, and each of them sends it
  on to all that *it* has met (CLEANUP_AUTOGRAD_CONTEXT_REQ);
* a backward pass crosses (BACKWARD_AUTOGRAD_REQ) where the forward pass did, the other way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

from dlearn.events.event import RpcWindow
from dlearn.events.event_table import Column, Events, Mask
from dlearn.events.process import Process
from dlearn.join.rpc import rpc_exchange as rpc
from dlearn.join.rpc.exchange_table import BACKWARD_KIND, UNKNOWN_KIND, Exchanges, ExchangeTable, at_rows
from dlearn.join.rpc.rpc_exchange import KnownBy, Request, RequestMatcher, RpcExchange, Seen, TimeWindow, Workers


@dataclass(frozen=True)
class Rpc:
    """All exchanges, in the order of sending. `gaps` says what is missing from the agents' logs."""

    exchanges: Exchanges
    gaps: tuple[str, ...] = ()

    @property
    def logged(self) -> int:
        return int(self.exchanges.table.is_logged[self.exchanges.rows].sum())

    @property
    def explained(self) -> int:
        """Count the requests of the logs whose kind is known."""
        table = self.exchanges.table
        return int((table.is_logged & (table.kind != UNKNOWN_KIND))[self.exchanges.rows].sum())

    @property
    def complete(self) -> bool:
        """Return whether the logs are here: then no request is missing."""
        return not self.gaps

    @property
    def problems(self) -> tuple[str, ...]:
        """Say what is missing, and how many requests are of an unknown kind."""
        unknown = self.logged - self.explained
        if not unknown:
            return self.gaps
        sentence = f"of {unknown:,} of {self.logged:,} requests over RPC the kind is unknown"
        return (*self.gaps, sentence)

    def of(self, events: Events) -> Rpc:
        """Return what these events caused, by a call, a window, or a context or pass they began."""
        table = self.exchanges.table
        opened: dict[str, list[int]] = {"context": [], "backward": []}
        for window in events.of(RpcWindow):
            if window.op in opened and window.context is not None:
                opened[window.op].append(window.context)
        begun, backward = (np.isin(table.context, contexts) for contexts in opened.values())
        caused = at_rows(events.chosen, table.cause, 0) > 0
        return self._keep(caused | begun | (backward & (table.kind == BACKWARD_KIND)))

    def sent_between(self, wanted: Callable[[Column], Mask]) -> Rpc:
        """Return the exchanges that were called, or sent by C++, at a time in ns that is wanted."""
        table = self.exchanges.table
        return self._keep(wanted(at_rows(table.events.start_ns, table.call, table.sent_ns)))

    def _keep(self, kept: Mask) -> Rpc:
        rows = self.exchanges.rows
        return replace(self, exchanges=Exchanges(self.exchanges.table, rows[kept[rows]]))


def join_rpc(processes: Sequence[Process], events: Events) -> Rpc:
    """Return all RPCs that the processes of a job know; `events` are all events of the job."""
    known = rpc.workers(processes)
    logged, gaps = rpc.requests(processes, known)
    table = ExchangeTable.of_calls(events.table, known)
    if logged:
        calls = table.made(np.arange(len(table)))
        exchanges = join(calls, Seen(events, known), logged, known)
        table = ExchangeTable.of(exchanges, events.table, known)
    lost = len(table) - int(table.is_logged.sum())
    if lost and not gaps:
        torch = sorted({process.header.torch for process in processes})
        gaps.append(
            f"{lost:,} of {len(table):,} calls do not stand in the agents' logs as torch {', '.join(torch)} writes"
            " them: what else was sent is not known"
        )
    return Rpc(Exchanges(table, np.arange(len(table))), tuple(gaps))


def join(calls: Sequence[RpcExchange], saw: Seen, logged: Sequence[Request], known: Workers) -> list[RpcExchange]:
    """Return an exchange for every request, with all that is known of it, and for calls without one."""
    requests = RequestMatcher(logged)
    _python_calls(calls, requests)
    _fetches(saw, requests, known)
    _backward(saw, requests, known)
    # First what has a window, then what has an order only: messages may travel at the same time.
    asked = _references(saw, requests, known)
    _cleanups(saw, requests)
    _acceptances(asked, requests)
    _backward_in_cpp(saw, requests)
    _deletions(calls, saw, requests, known)
    _unknown(saw, requests)
    return sorted(requests.exchanges, key=_sent_ns)


def _sent_ns(exchange: RpcExchange) -> int:
    request = exchange.request or Request(exchange.src, exchange.dst, 0)
    sent_ns = request.sending_ns or exchange.sent_ns
    return sent_ns or request.received_ns or exchange.received_ns or 0


# Calls ----------------------------------------------------------------------------------------------------------------


def _python_calls(calls: Sequence[RpcExchange], requests: RequestMatcher) -> None:
    """Match Python's calls, narrowest window first, to the requests whose times are nearest."""
    windows = []
    for exchange in calls:
        assert exchange.call is not None
        first_ns, last_ns = exchange.call.start_ns, exchange.call.handed_ns
        span = TimeWindow(exchange.src, first_ns, last_ns, exchange.dst)
        windows.append((last_ns - first_ns, span, exchange))
    for _, span, exchange in sorted(windows, key=itemgetter(0)):
        if requests.match(exchange, span, partial(_mismatch, exchange)) is None:
            requests.exchanges.append(exchange)


_IMPOSSIBLE_NS = 10**12


def _mismatch(exchange: RpcExchange, request: Request) -> int:
    """Return how many ns Python's times are off from the request's; a wrong order counts most."""
    call, run, reply = exchange.call, exchange.run, exchange.reply
    assert call is not None
    steps = [(call.start_ns, request.sending_ns), (request.answered_ns, call.end_ns)]
    if run is not None:
        steps.append((request.running_ns or request.received_ns, run.arrived_ns))
        steps.append((run.end_ns, request.ran_ns))
    if reply is not None:
        steps.append((reply.start_ns, request.replying_ns))
    known = [(before, after) for before, after in steps if before is not None and after is not None]
    return sum(after - before if after >= before else _IMPOSSIBLE_NS for before, after in known)


def _fetches(saw: Seen, requests: RequestMatcher, known: Workers) -> None:
    for window in rpc.shortest_first([*saw.windows["to_here"], *saw.windows["rref backward"]]):
        kind = rpc.FETCH if window.context is None else rpc.FORWARD
        if window.op == "rref backward":
            kind = rpc.RREF_BACKWARD
        exchange = _sent_in(window, kind)
        if requests.match(exchange, rpc.span_of(window, known.rank(window.to))) is not None:
            _add_fetched_value(exchange, window, saw)


def _sent_in(window: RpcWindow, kind: str, known_by: KnownBy = "window") -> RpcExchange:
    """Return an exchange that belongs to a window; its receiver is not known yet."""
    return RpcExchange(window.rank, -1, kind, known_by, cause=window, context=window.context)


def _add_fetched_value(exchange: RpcExchange, window: RpcWindow, saw: Seen) -> None:
    """Add the value that the owner packed before it replied, and that arrived inside the window."""
    for (owner, number), reply in saw.fetched.items():
        arrival = saw.arrivals.get((owner, number))
        if arrival is None or owner != exchange.dst or arrival.rank != exchange.src:
            continue
        inside = window.start_ns <= arrival.start_ns <= (window.end_ns or arrival.start_ns)
        if inside and arrival.thread == window.thread:
            exchange.reply, exchange.arrival = reply, arrival
            return


# Distributed autograd -------------------------------------------------------------------------------------------------


def _backward(saw: Seen, requests: RequestMatcher, known: Workers) -> None:
    """Match gradients to a recv node's run, else to the last that came before the work on one.

    Of these the last gradient chooses first.
    """
    for window in rpc.shortest_first(saw.windows["crossing"]):
        dst = known.by_id.get(window.to) if window.to is not None else None
        requests.match(_sent_in(window, rpc.BACKWARD), rpc.span_of(window, dst))
    began = {window.context: window.start_ns for window in saw.windows["backward"]}
    for window in sorted(saw.windows["gradient"], key=lambda window: -window.start_ns):
        first_ns = began.get(window.context, 0)
        span = TimeWindow(known.rank(window.to), first_ns, window.start_ns, window.rank)
        sent = requests.within(span)
        came = [each for each in sent if (each.received_ns or 2**62) <= window.start_ns]
        if came:
            request = max(came, key=lambda each: each.received_ns or 0)
            requests.take(request, rpc.BACKWARD, "window", window, window.context)


def _backward_in_cpp(saw: Seen, requests: RequestMatcher) -> None:
    """Take a request back for each crossing of the forward pass without a gradient so far."""
    ways: dict[int | None, Counter[tuple[int, int]]] = defaultdict(Counter)
    for exchange in requests.exchanges:
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
            span = TimeWindow(here, window.start_ns, window.end_ns, there)
            for request in requests.within(span)[: max(0, count)]:
                requests.take(request, rpc.BACKWARD, "rule", window, window.context)


def _cleanups(saw: Seen, requests: RequestMatcher) -> None:
    """Match the end of each context, from the driver on, to all that a worker has met in it.

    A worker sends it on once, while it works on the first such request that its threads take up: with
    two under way that need not be the one that came first. So each of them has a window.
    """
    met: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for exchange in requests.exchanges:
        if exchange.context is not None and exchange.kind in (rpc.FORWARD, rpc.BACKWARD):
            met[exchange.src, exchange.context].add(exchange.dst)
            met[exchange.dst, exchange.context].add(exchange.src)
    for window in saw.windows["release"]:
        # From when to when a rank works on it.
        frontier: list[tuple[int, int, int]] = [(window.start_ns, window.end_ns or 2**62, window.rank)]
        visited: set[tuple[int, int]] = set()
        while frontier:
            first_ns, last_ns, rank = heappop(frontier)
            known_by: KnownBy = "window" if rank == window.rank else "rule"
            for dst in sorted(met[rank, window.context]):
                if (rank, dst) in visited:
                    continue
                mismatch = partial(_no_cleanup, requests, met[dst, window.context], last_ns)
                span = TimeWindow(rank, first_ns, last_ns, dst)
                cleanup = _sent_in(window, rpc.CLEANUP, known_by)
                cleanup.src = rank
                request = requests.match(cleanup, span, mismatch)
                if request is None:
                    continue
                visited.add((rank, dst))
                if request.received_ns is not None:
                    heappush(frontier, (request.received_ns, request.replying_ns or 2**62, dst))


def _no_cleanup(requests: RequestMatcher, peers: set[int], last_ns: int, request: Request) -> int:
    """Return how unlike the end of a context a request is.

    Most counts to how many peers its receiver sends nothing meanwhile; then how long before the end
    of its sender's own work it went, where it is the last thing.
    """
    if request.received_ns is None:
        return _IMPOSSIBLE_NS * len(peers)
    meanwhile = [TimeWindow(request.dst, request.received_ns, request.replying_ns, peer) for peer in peers]
    silent = sum(not requests.within(each) for each in meanwhile)
    return silent * _IMPOSSIBLE_NS + min(last_ns - request.first_ns, _IMPOSSIBLE_NS - 1)


# Remote references ----------------------------------------------------------------------------------------------------

Asked = list[tuple[RpcExchange, int]]
"""The requests for a copy, each with the rank that waits for the acceptance."""


def _references(saw: Seen, requests: RequestMatcher, known: Workers) -> Asked:
    """Match what is sent while a reference is unpacked; return the requests for a copy."""
    asked: Asked = []
    unpackings = _unpackings(requests.exchanges)
    for window in rpc.shortest_first(saw.windows["rref"]):
        owner, parent = known.rank(window.to), known.rank(window.parent_worker)
        if parent == owner:
            continue  # The owner took note of the copy when it sent it.
        # Of a message from `parent`: a server unpacks those of several workers at the same time.
        spans = unpackings[window.rank, parent]
        around = [each for each in spans if each[0] <= window.start_ns <= each[1]]
        exchange = _sent_in(window, rpc.ACCEPT if owner == window.rank else rpc.FORK)
        if around:
            message = min(around, key=lambda each: each[1] - each[0])[2]
            exchange.cause, exchange.context = message.call or window, message.context
        if owner == window.rank:
            requests.match(exchange, rpc.span_of(window, parent))
        elif requests.match(exchange, rpc.span_of(window, owner), partial(_delay, parent, requests)) is not None:
            asked.append((exchange, parent))
    return asked


Unpackings = dict[tuple[int, int], list[tuple[int, int, RpcExchange]]]
"""From when to when, in ns, a rank unpacks each message, a call or a reply, of another."""


def _unpackings(exchanges: Sequence[RpcExchange]) -> Unpackings:
    spans: Unpackings = defaultdict(list)
    for exchange in exchanges:
        run, call, request = exchange.run, exchange.call, exchange.request
        if run is not None:
            spans[run.rank, exchange.src].append((run.arrived_ns, run.start_ns, exchange))
        if call is not None and call.ended_by == "reply" and call.end_ns is not None:
            first = request.answered_ns if request is not None and request.answered_ns else call.handed_ns
            spans[call.rank, exchange.dst].append((first, call.end_ns, exchange))
    return spans


def _acceptances(asked: Asked, requests: RequestMatcher) -> None:
    """Take what follows another message: all that has a window of its own is matched by now."""
    for exchange, parent in sorted(asked, key=_answered_ns):
        granted = _granted(exchange.request, parent, requests)
        if granted is not None:
            requests.take(granted, rpc.ACCEPT, "rule", exchange.cause, exchange.context)
    for exchange in tuple(requests.exchanges):
        _unpacked_in_cpp(exchange, requests)


def _answered_ns(asked: tuple[RpcExchange, int]) -> int:
    request = asked[0].request
    return 0 if request is None else request.answered_ns or 0


def _granted(asked: Request | None, parent: int, requests: RequestMatcher) -> Request | None:
    """Return the acceptance that follows when the owner has answered a request for a copy."""
    if asked is None or asked.answered_ns is None:
        return None
    return next(iter(requests.within(TimeWindow(asked.src, asked.answered_ns, None, parent))), None)


def _delay(parent: int, requests: RequestMatcher, asked: Request) -> int:
    granted = _granted(asked, parent, requests)
    if granted is None or granted.sending_ns is None or asked.answered_ns is None:
        return 2**62
    return granted.sending_ns - asked.answered_ns


def _unpacked_in_cpp(asked: RpcExchange, requests: RequestMatcher) -> None:
    """Take the acceptances of a TorchScript call, whose RRefs C++ unpacks: sent during the call."""
    call, request = asked.call, asked.request
    if call is None or request is None or call.flavour == "python" or request.received_ns is None:
        return
    count = sum(rref.owner == call.to for rref in call.rrefs)
    span = TimeWindow(asked.dst, request.received_ns, request.replying_ns, asked.src)
    for acceptance in requests.within(span)[:count]:
        requests.take(acceptance, rpc.ACCEPT, "rule", call, asked.context)


def _deletions(calls: Sequence[RpcExchange], saw: Seen, requests: RequestMatcher, known: Workers) -> None:
    """Take what is left for the end of a copy, where the sender has copies of the receiver's values."""
    made = [each.call for each in calls if each.call is not None and each.call.op == "remote"]
    copies = Counter((call.rank, known.rank(call.to)) for call in made)
    copies.update((window.rank, known.rank(window.to)) for window in saw.windows["rref"])
    for request in requests.left():
        if copies[request.src, request.dst] > 0 and request.src != request.dst:
            copies[request.src, request.dst] -= 1
            requests.take(request, rpc.DELETE, "rule")


def _unknown(saw: Seen, requests: RequestMatcher) -> None:
    """Take the rest, of unknown kind, for the one context that was open at both ends."""
    windows = {window.context: window for window in saw.windows["context"]}
    met: dict[int, set[int | None]] = defaultdict(set)
    for window in windows.values():
        met[window.rank].add(window.context)
    for exchange in requests.exchanges:
        met[exchange.src].add(exchange.context)
        met[exchange.dst].add(exchange.context)

    def is_open(context: int | None, at_ns: int) -> bool:
        window = windows.get(context)
        return window is not None and window.start_ns <= at_ns <= (window.end_ns or at_ns)

    for request in requests.left():
        exchange = requests.take(request, "", "unknown")
        common = met[request.src] & met[request.dst]
        contexts = [context for context in common if is_open(context, request.first_ns)]
        if len(contexts) == 1:
            exchange.context = contexts[0]
