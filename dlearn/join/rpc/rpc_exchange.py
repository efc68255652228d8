"""RPC: requests and their replies, joined from both sides' events and from the agents' logs.

Each request of the logs is one exchange: so nothing is missing. What Python saw (a call, a window)
says of what kind it is (rpc_kinds.py). Without a log there is an exchange for each call that Python
saw, and what C++ sent by itself is not known.
"""

import os
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Literal

from dlearn.errors import TraceError
from dlearn.events import agent_log
from dlearn.events.event import Event, RpcArrival, RpcCall, RpcReply, RpcResult, RpcRun, RpcWindow
from dlearn.events.event_table import Events
from dlearn.events.process import Process
from dlearn.join.columns import grouped

KnownBy = Literal["python", "window", "rule", "unknown"]

FORWARD, BACKWARD = "FORWARD_AUTOGRAD_REQ", "BACKWARD_AUTOGRAD_REQ"
FETCH, CLEANUP, RREF_BACKWARD = "RREF_FETCH_CALL", "CLEANUP_AUTOGRAD_CONTEXT_REQ", "RREF_BACKWARD_REQ"
ACCEPT, FORK, DELETE = "RREF_CHILD_ACCEPT", "RREF_FORK_REQUEST", "RREF_USER_DELETE"

REPLY_OF = {
    "PYTHON_CALL": "PYTHON_RET",
    "SCRIPT_CALL": "SCRIPT_RET",
    "PYTHON_REMOTE_CALL": "REMOTE_RET",
    "SCRIPT_REMOTE_CALL": "REMOTE_RET",
    FORWARD: "FORWARD_AUTOGRAD_RESP",
    BACKWARD: "BACKWARD_AUTOGRAD_RESP",
    FETCH: "RREF_FETCH_RET",
    CLEANUP: "CLEANUP_AUTOGRAD_CONTEXT_RESP",
    ACCEPT: "RREF_ACK",
    FORK: "RREF_ACK",
    DELETE: "RREF_ACK",
    RREF_BACKWARD: "RREF_BACKWARD_RESP",
    "": "",
}

_FIELDS = {
    "is sending request": "sending_ns",
    "received request": "received_ns",
    "is running request": "running_ns",
    "done running request": "ran_ns",
    "is sending response to request": "replying_ns",
    "received response": "answered_ns",
}


@dataclass(eq=False)
class Request:
    """A request in the agents' logs: times in ns, None where the line is not there."""

    src: int
    dst: int
    id: int
    sending_ns: int | None = None
    received_ns: int | None = None
    running_ns: int | None = None
    ran_ns: int | None = None
    replying_ns: int | None = None
    answered_ns: int | None = None

    @property
    def first_ns(self) -> int:
        """Return when it was sent, else the first time that the logs have of it."""
        times = [getattr(self, name) for name in _FIELDS.values()]
        return next((at_ns for at_ns in times if at_ns is not None), 0)


@dataclass(eq=False)
class RpcExchange:
    """A request and its reply. `src` and `dst` are ranks of the trace.

    `kind` is torch's own name of the request's message type; `known_by` tells how it is known: "python" saw the call,
    a "window" of Python's encloses it, a "rule" of the protocol leaves nothing else, or it is "unknown". `cause` is the
    call or window, `context` the distributed autograd context that it belongs to.
    """

    src: int
    dst: int
    kind: str = ""
    known_by: KnownBy = "unknown"
    request: Request | None = None
    call: RpcCall | None = None
    run: RpcRun | None = None
    reply: RpcReply | None = None
    arrival: RpcArrival | None = None
    cause: Event | None = None
    context: int | None = None
    number: int = 0  # In the order of sending.
    sent_ns: int | None = None
    received_ns: int | None = None
    reply_sent_ns: int | None = None
    reply_received_ns: int | None = None
    after_backward: bool = False  # Of one in a context: whether its backward pass was over.
    worker_ids: tuple[int, int] = (0, 0)  # RPC's own ids of the two.


def kind_of_reply(exchange: RpcExchange) -> str:
    """Return the message type of a reply. In a context it is wrapped where a tensor in it needs a gradient."""
    call, answer = exchange.call, answer_of(exchange)
    if exchange.reply is None and exchange.cause is not None and exchange.cause.failed:
        return "EXCEPTION"
    if call is not None and call.op == "remote":
        return "REMOTE_RET"
    if exchange.kind != FORWARD or (answer is not None and answer.needs_grad):
        return REPLY_OF[exchange.kind]
    if call is None:
        return REPLY_OF[FETCH]
    if call.flavour == "python":
        return "PYTHON_RET"
    # Where the result was not seen: a builtin hands its need of a gradient on.
    return REPLY_OF[FORWARD] if call.needs_grad and answer is None else "SCRIPT_RET"


def answer_of(exchange: RpcExchange) -> RpcReply | RpcResult | None:
    """Return what was sent back: as Python packed it, or, where C++ did, as the caller got it."""
    if exchange.reply is not None:
        return exchange.reply
    if exchange.call is not None:
        return exchange.call.result
    cause = exchange.cause
    return cause.result if isinstance(cause, RpcWindow) and exchange.kind in (FETCH, FORWARD) else None


def kind_of_call(call: Event) -> str:
    """Return the message type of a call. In a context it is wrapped; a builtin only for a gradient."""
    if not isinstance(call, RpcCall):
        return ""
    if call.context is not None and (call.flavour != "builtin" or call.needs_grad):
        return FORWARD
    packed_by = "PYTHON" if call.flavour == "python" else "SCRIPT"
    return f"{packed_by}_REMOTE_CALL" if call.op == "remote" else f"{packed_by}_CALL"


@dataclass
class Workers:
    """RPC's names and ids of the processes, as ranks of the trace."""

    by_id: dict[int, int]
    by_name: dict[str, int]

    def rank(self, worker: int | None) -> int:
        """Return the rank of this worker, -1 where none is known."""
        return -1 if worker is None else self.by_id.get(worker, -1)

    def id(self, rank: int) -> int:
        """Return the worker's id of this rank, 0 where none is known."""
        return next((worker for worker, each in self.by_id.items() if each == rank), 0)


def workers(processes: Sequence[Process]) -> Workers:
    known = [(process.worker, process.rank) for process in processes if process.worker is not None]
    return Workers({worker.id: rank for worker, rank in known}, {worker.name: rank for worker, rank in known})


def requests(processes: Sequence[Process], known: Workers) -> tuple[list[Request], list[str]]:
    """Return all requests of the agents' logs, in the order of sending, and what the logs lack."""
    found: dict[tuple[int, int, int, int], Request] = {}
    problems: list[str] = []
    for process in processes:
        worker, path = process.worker, agent_log.log_path(process.path)
        if worker is None:
            continue
        if worker.log or not path.is_file():
            problems.append(f"{process.label}: no agent's log ({worker.log or f'{path.name} is not there'})")
            continue
        try:
            with path.open("rb") as stream:
                moments = list(agent_log.moments(iter(stream), wall_ns=worker.wall_ns))
        except OSError as error:
            raise TraceError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
        # An agent that is made again, by another init_rpc, counts its requests from 0 again: the nth line of a kind
        # about request 7 to a worker is about that worker's nth request 7.
        seen: Counter[tuple[str, int, int, int]] = Counter()
        for moment in moments:
            src, dst = known.by_name.get(moment.src), known.by_name.get(moment.dst)
            name = _FIELDS.get(moment.what)
            if src is None or dst is None or name is None:
                continue
            line = (name, src, dst, moment.id)
            request = found.setdefault((src, dst, moment.id, seen[line]), Request(src, dst, moment.id))
            seen[line] += 1
            setattr(request, name, process.clock.to_reference(moment.at_ns))
    return sorted(found.values(), key=attrgetter("first_ns")), problems


# What Python saw beside calls -----------------------------------------------------------------------------------------


class Seen:
    """The windows in which C++ sends, by op, and the fetched values, by owner and call."""

    def __init__(self, events: Events, known: Workers) -> None:
        self.windows = grouped(events.of(RpcWindow), lambda window: window.op)
        self.arrivals = {(known.rank(end.caller), end.call): end for end in events.of(RpcArrival)}
        replies = [reply for reply in events.of(RpcReply) if reply.fetched]
        self.fetched = {(known.rank(reply.caller), reply.call): reply for reply in replies}


_sent = attrgetter("first_ns")


@dataclass(frozen=True)
class TimeWindow:
    """The requests that `src` sent (to `dst`) between two moments in ns; `last_ns` None: from the first one on."""

    src: int
    first_ns: int
    last_ns: int | None
    dst: int | None = None


class RequestMatcher:
    """The requests of the logs, by sender, in the order of sending, and the exchange of each.

    Several windows of time in which Python saw a kind sent may fit the same requests: so they are
    matched by augmenting paths (Kuhn's algorithm for bipartite graphs), on which exchanges move on
    to others.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_src = grouped(sorted(requests, key=_sent), lambda request: request.src)
        self._matched: dict[Request, RpcExchange] = {}
        self._windows: dict[RpcExchange, tuple[TimeWindow, Callable[[Request], int]]] = {}
        self.exchanges: list[RpcExchange] = []
        """The exchanges so far; also the calls that no log has."""

    def within(self, window: TimeWindow) -> list[Request]:
        return [each for each in self._all_within(window) if each not in self._matched]

    def match(
        self, exchange: RpcExchange, window: TimeWindow, mismatch: Callable[[Request], int] = _sent
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
        exchange = RpcExchange(request.src, request.dst, kind, known_by, cause=cause, context=context)
        self._assign(request, exchange)
        self.exchanges.append(exchange)
        return exchange

    def left(self) -> list[Request]:
        every = sorted(chain.from_iterable(self._by_src.values()), key=_sent)
        return [request for request in every if request not in self._matched]

    def _all_within(self, window: TimeWindow) -> list[Request]:
        sent, last_ns = self._by_src.get(window.src, []), window.last_ns
        last = len(sent) if last_ns is None else bisect_right(sent, last_ns, key=_sent)
        inside = sent[bisect_left(sent, window.first_ns, key=_sent) : last]
        return [request for request in inside if window.dst in (None, request.dst)]

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
    return TimeWindow(window.rank, window.start_ns, window.end_ns, dst)


def shortest_first(windows: Iterable[RpcWindow]) -> list[RpcWindow]:
    """Sort windows by their length, as the shorter one leaves less to choose from."""
    return sorted(windows, key=lambda window: (window.end_ns or 2**62) - window.start_ns)
