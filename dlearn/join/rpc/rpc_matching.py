"""Which request of the agents' logs belongs to which claim.

A claim says: a request of this kind was sent by this worker within this stretch of time. Several may fit the same
requests, so they are matched by augmenting paths (Kuhn's algorithm for bipartite graphs): a claim whose requests are
all taken has a holder move on to another request of the holder's own stretch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from dlearn.events.event import Event, RpcWindow
from dlearn.join.rpc.rpc_exchange import KnownBy, Request, RpcExchange

Cause = tuple[Event | None, int | None]
"""The call or window that a request belongs to, and its autograd context."""
NO_CAUSE: Cause = None, None

_sent = attrgetter("first_ns")


@dataclass(frozen=True)
class TimeWindow:
    """The requests that `src` sent (to `dst`) between two moments in ns; `last_ns` None: from the first one on."""

    src: int
    first_ns: int
    last_ns: int | None
    dst: int | None = None


class RequestMatcher:
    """The requests of the logs, by sender, in the order of sending, and who has claimed them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_src: dict[int, list[Request]] = defaultdict(list)
        for request in sorted(requests, key=_sent):
            self._by_src[request.src].append(request)
        self._times = {src: [each.first_ns for each in found] for src, found in self._by_src.items()}
        self._holder: dict[Request, RpcExchange] = {}
        self._claims: dict[RpcExchange, tuple[TimeWindow, Callable[[Request], int]]] = {}
        self.exchanges: list[RpcExchange] = []
        """What was made of them, and the calls that no log tells of, in the order of the claims."""

    def within(self, stretch: TimeWindow) -> list[Request]:
        """Return the requests of this stretch that nothing has claimed yet."""
        return [each for each in self._all_within(stretch) if each not in self._holder]

    def claim(
        self, kind: str, known_by: KnownBy, cause: Cause, stretch: TimeWindow, misfit: Callable[[Request], int] = _sent
    ) -> RpcExchange | None:
        """Make an exchange of the free request that fits best, or else of one that its holder can do without."""
        exchange = RpcExchange(stretch.src, -1, kind, known_by, cause=cause[0], context=cause[1])
        self._claims[exchange] = stretch, misfit
        free = self.within(stretch)
        if free:
            self._give(min(free, key=misfit), exchange)
        elif not self._augment(exchange):
            return None
        self.exchanges.append(exchange)
        return exchange

    def take(self, request: Request, kind: str, known_by: KnownBy, cause: Cause = NO_CAUSE) -> RpcExchange:
        """Make an exchange of this request."""
        exchange = RpcExchange(request.src, request.dst, kind, known_by, cause=cause[0], context=cause[1])
        self._give(request, exchange)
        self.exchanges.append(exchange)
        return exchange

    def left(self) -> list[Request]:
        """Return the requests that nothing has claimed, in the order of sending."""
        unclaimed = [each for found in self._by_src.values() for each in found if each not in self._holder]
        return sorted(unclaimed, key=_sent)

    def _all_within(self, stretch: TimeWindow) -> list[Request]:
        times = self._times.get(stretch.src, [])
        last = len(times) if stretch.last_ns is None else bisect_right(times, stretch.last_ns)
        inside = slice(bisect_left(times, stretch.first_ns), last)
        return [each for each in self._by_src.get(stretch.src, [])[inside] if stretch.dst in (None, each.dst)]

    def _augment(self, exchange: RpcExchange) -> bool:
        """Find the shortest chain of holders that move on, the last one to a free request; whether there is one."""
        wanted_by: dict[Request, RpcExchange] = {}
        without = deque([exchange])
        while without:
            asker = without.popleft()
            stretch, misfit = self._claims[asker]
            for request in sorted(self._all_within(stretch), key=misfit):
                if request in wanted_by:
                    continue
                wanted_by[request] = asker
                holder = self._holder.get(request)
                if holder is None:
                    free: Request | None = request
                    while free is not None:
                        asker = wanted_by[free]
                        before = asker.request
                        self._give(free, asker)
                        free = before
                    return True
                if holder in self._claims:
                    without.append(holder)
        return False

    def _give(self, request: Request, exchange: RpcExchange) -> None:
        self._holder[request] = exchange
        exchange.request, exchange.dst = request, request.dst


def stretch_of(window: RpcWindow, dst: int | None) -> TimeWindow:
    """Return the stretch of a window of Python's, for requests to `dst`."""
    return TimeWindow(window.rank, window.start_ns, window.end_ns, dst)


def shortest_first(windows: Iterable[RpcWindow]) -> list[RpcWindow]:
    """Sort windows by their length, as the shorter one leaves less to choose from."""
    return sorted(windows, key=lambda window: (window.end_ns or 2**62) - window.start_ns)
