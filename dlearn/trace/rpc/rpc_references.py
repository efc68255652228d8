"""Which requests are the protocol of remote references: a copy is accepted, asked for, deleted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

from dlearn.trace.event import RpcWindow
from dlearn.trace.rpc.rpc_board import (
    ACCEPT,
    DELETE,
    FORK,
    Cause,
    RequestBoard,
    SentBetween,
    shortest_first,
    stretch_of,
)
from dlearn.trace.rpc.rpc_exchange import Request, RpcExchange, Seen, Workers


def references(saw: Seen, board: RequestBoard, known: Workers) -> None:
    asked: list[tuple[RpcExchange, int]] = []
    before = list(board.exchanges)
    causes = _Causes(before)
    for window in shortest_first(saw.windows["rref"]):
        owner, parent = known.rank(window.to), known.rank(window.parent_worker)
        if parent == owner:
            continue  # The owner took note of the copy when it sent it.
        cause = causes.of(window, parent)
        if owner == window.rank:
            board.claim(ACCEPT, "window", cause, stretch_of(window, parent))
            continue
        exchange = board.claim(FORK, "window", cause, stretch_of(window, owner), partial(_delay, parent, board))
        if exchange is not None:
            asked.append((exchange, parent))
    # What follows another message only when all that has a stretch of its own is claimed.
    for exchange, parent in sorted(asked, key=lambda each: each[0].reply_received_ns or 0):
        granted = _granted(exchange.request, parent, board)
        if granted is not None:
            board.take(granted, ACCEPT, "rule", (exchange.cause, exchange.context))
    for exchange in before:
        _unpacked_in_cpp(exchange, board)


def _granted(asked: Request | None, parent: int, board: RequestBoard) -> Request | None:
    """The acceptance that follows when the owner has answered a request for a copy."""
    if asked is None or asked.answered_ns is None:
        return None
    return next(iter(board.within(SentBetween(asked.src, asked.answered_ns, None, parent))), None)


def _delay(parent: int, board: RequestBoard, asked: Request) -> int:
    granted = _granted(asked, parent, board)
    if granted is None or granted.sending_ns is None or asked.answered_ns is None:
        return 2**62
    return granted.sending_ns - asked.answered_ns


def _unpacked_in_cpp(asked: RpcExchange, board: RequestBoard) -> None:
    """A TorchScript call unpacks its RRefs in C++: their owner accepts them while it works on the call."""
    call, request = asked.call, asked.request
    if call is None or request is None or call.flavour == "python" or request.received_ns is None:
        return
    mine = [rref for rref in call.rrefs if rref.owner == call.to]
    candidates = board.within(SentBetween(asked.dst, request.received_ns, request.replying_ns, asked.src))
    for each in candidates[: len(mine)]:
        board.take(each, ACCEPT, "rule", (call, asked.context))


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


def deletions(saw: Seen, board: RequestBoard, known: Workers) -> None:
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
            board.take(request, DELETE, "rule")
