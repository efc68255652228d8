"""The requests of the agents' logs that nobody has claimed yet, and the names of their kinds."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

from dlearn.trace.event import RpcWindow
from dlearn.trace.exchange import Exchange, KnownBy, Request

FORWARD, BACKWARD = "FORWARD_AUTOGRAD_REQ", "BACKWARD_AUTOGRAD_REQ"
FETCH, CLEANUP, RREF_BACKWARD = "RREF_FETCH_CALL", "CLEANUP_AUTOGRAD_CONTEXT_REQ", "RREF_BACKWARD_REQ"
ACCEPT, FORK, DELETE = "RREF_CHILD_ACCEPT", "RREF_FORK_REQUEST", "RREF_USER_DELETE"


class Board:
    """The requests that nobody has claimed yet, by sender, in the order of sending."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_src: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            self._by_src[request.src].append(request)
        for found in self._by_src.values():
            found.sort(key=attrgetter("first_ns"))
        self._times = {src: [each.first_ns for each in found] for src, found in self._by_src.items()}
        self._taken: set[Request] = set()

    def within(self, src: int, first_ns: int, last_ns: int | None, dst: int | None = None) -> list[Request]:
        """Unclaimed requests of `src` (to `dst`) that were sent between the two moments."""
        return [each for each in self.all_within(src, first_ns, last_ns, dst) if each not in self._taken]

    def all_within(self, src: int, first_ns: int, last_ns: int | None, dst: int | None = None) -> list[Request]:
        """The same, claimed or not."""
        found: list[Request] = []
        place = bisect_left(self._times.get(src, []), first_ns)
        for request in self._by_src.get(src, [])[place:]:
            if last_ns is not None and request.first_ns > last_ns:
                break
            if dst is None or request.dst == dst:
                found.append(request)
        return found

    def take(self, request: Request) -> Request:
        self._taken.add(request)
        return request

    def left(self) -> list[Request]:
        return [each for found in self._by_src.values() for each in found if each not in self._taken]


def exchange_of(request: Request, kind: str, known_by: KnownBy) -> Exchange:
    return Exchange(src=request.src, dst=request.dst, kind=kind, known_by=known_by, request=request)


def shortest_first(windows: Iterable[RpcWindow]) -> list[RpcWindow]:
    return sorted(windows, key=lambda window: (window.end_ns or 2**62) - window.start_ns)
