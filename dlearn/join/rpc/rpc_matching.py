"""The requests of the agents' logs, matched to what Python saw of RPC.

Python saw: this worker sent a request of this kind within this window of time. Several windows may
fit the same requests, so they are matched by augmenting paths (Kuhn's algorithm for bipartite
graphs): where all requests of a window are taken, an exchange moves on to another request of its
own window.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from dlearn.events.event import Event, RpcWindow
from dlearn.join.rpc.rpc_exchange import KnownBy, Request, RpcExchange

_sent = attrgetter("first_ns")


@dataclass(frozen=True)
class TimeWindow:
    """The requests that `src` sent (to `dst`) between two moments in ns; `last_ns` None: from the first one on."""

    src: int
    first_ns: int
    last_ns: int | None
    dst: int | None = None


class RequestMatcher:
    """The requests of the logs, by sender, in the order of sending, and the exchange of each."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_src: dict[int, list[Request]] = defaultdict(list)
        for request in sorted(requests, key=_sent):
            self._by_src[request.src].append(request)
        self._times = {src: [each.first_ns for each in found] for src, found in self._by_src.items()}
        self._matched: dict[Request, RpcExchange] = {}
        self._windows: dict[RpcExchange, tuple[TimeWindow, Callable[[Request], int]]] = {}
        self.exchanges: list[RpcExchange] = []
        """The exchanges so far; also the calls that no log has."""

    def within(self, window: TimeWindow) -> list[Request]:
        """Return the requests of this window that are not matched yet."""
        return [each for each in self._all_within(window) if each not in self._matched]

    def match(
        self,
        exchange: RpcExchange,
        window: TimeWindow,
        mismatch: Callable[[Request], int] = _sent,
    ) -> Request | None:
        """Give an exchange the request that fits best of those that are or can be made free."""
        self._windows[exchange] = window, mismatch
        if self._augment(exchange):
            self.exchanges.append(exchange)
        return exchange.request

    def take(
        self,
        request: Request,
        kind: str,
        known_by: KnownBy,
        cause: Event | None = None,
        context: int | None = None,
    ) -> RpcExchange:
        """Return an exchange of this request."""
        exchange = RpcExchange(request.src, request.dst, kind, known_by, cause=cause, context=context)
        self._assign(request, exchange)
        self.exchanges.append(exchange)
        return exchange

    def left(self) -> list[Request]:
        """Return the requests that are not matched, in the order of sending."""
        every = sorted(chain.from_iterable(self._by_src.values()), key=_sent)
        return [request for request in every if request not in self._matched]

    def _all_within(self, window: TimeWindow) -> list[Request]:
        times = self._times.get(window.src, [])
        last = len(times) if window.last_ns is None else bisect_right(times, window.last_ns)
        inside = slice(bisect_left(times, window.first_ns), last)
        found = self._by_src.get(window.src, [])[inside]
        return [request for request in found if window.dst in (None, request.dst)]

    def _augment(self, exchange: RpcExchange) -> bool:
        """Return whether a shortest chain of exchanges that move on ends at a free request."""
        wanted_by: dict[Request, RpcExchange] = {}
        without = deque([exchange])
        while without:
            asker = without.popleft()
            window, mismatch = self._windows[asker]
            for request in sorted(self._all_within(window), key=mismatch):
                if request in wanted_by:
                    continue
                wanted_by[request] = asker
                holder = self._matched.get(request)
                if holder is None:
                    self._move_along(request, wanted_by)
                    return True
                if holder in self._windows:
                    without.append(holder)
        return False

    def _move_along(self, free: Request | None, wanted_by: dict[Request, RpcExchange]) -> None:
        while free is not None:
            exchange = wanted_by[free]
            before = exchange.request
            self._assign(free, exchange)
            free = before

    def _assign(self, request: Request, exchange: RpcExchange) -> None:
        self._matched[request] = exchange
        exchange.request, exchange.dst = request, request.dst


def span_of(window: RpcWindow, dst: int | None) -> TimeWindow:
    """Return the time of a window that Python saw, for requests to `dst`."""
    return TimeWindow(window.rank, window.start_ns, window.end_ns, dst)


def shortest_first(windows: Iterable[RpcWindow]) -> list[RpcWindow]:
    """Sort windows by their length, as the shorter one leaves less to choose from."""
    return sorted(windows, key=lambda window: (window.end_ns or 2**62) - window.start_ns)
