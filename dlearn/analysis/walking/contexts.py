"""Distributed autograd: which contexts each worker holds, and whether gradients are in them.

A worker knows of a context from the first call that comes with its number; a backward pass leaves the gradients there,
never in `param.grad`; the optimizer's step uses them; at the context's end they are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.analysis.walking.steps import Board, Change, WalkSource
from dlearn.join.rpc_messages import phase_of
from dlearn.trace.message import Message
from dlearn.trace.rpc.rpc_board import BACKWARD
from dlearn.trace.rpc.rpc_exchange import RpcExchange
from dlearn.trace.trace import Trace

BOARD = "Contexts of distributed autograd (what is in them is inferred)"


def contexts(trace: Trace, messages: Sequence[Message]) -> WalkSource:
    source = WalkSource()
    begun = _from_the_first_on(trace, messages)
    numbers = list(
        dict.fromkeys(
            message.operation.exchange.context
            for message in messages
            if message.operation.exchange is not None and message.operation.exchange.context is not None
        )
    )
    held: dict[tuple[int, int], str] = {}
    for place, message in enumerate(messages):
        exchange = message.operation.exchange
        if exchange is None or exchange.context not in begun or message.how == "missing":
            continue
        index = numbers.index(exchange.context)
        for rank, text in _after(message, held.get((message.dst, index), ""), held.get((message.src, index), "")):
            if held.get((rank, index), "") == text:
                continue
            held[rank, index] = text
            share = {"open": 0.3, "has gradients": 1.0, "step is done": 0.6}.get(text, 0.0)
            told = f"context {index}: {text}" if text else ""
            source.changes.setdefault(place, []).append(Change(BOARD, rank, index, told, share))
    if source.changes:
        source.boards.append(Board(BOARD, lasting=True))
        source.notes.append(
            "Contexts are numbered in the order of their first message; what is in them is inferred from the messages."
        )
    return source


def _from_the_first_on(trace: Trace, messages: Sequence[Message]) -> set[int]:
    """The contexts whose first request is among these: from the middle on nobody can say what was there already."""
    first: dict[int, RpcExchange] = {}
    for exchange in sorted(trace.whole.rpc.exchanges, key=lambda each: each.sent_ns or 0):
        if exchange.context is not None and exchange.sent_ns is not None:
            first.setdefault(exchange.context, exchange)
    here = {
        id(message.operation.exchange) for message in messages if not message.step
    }  # its request, not its reply alone
    return {context for context, exchange in first.items() if id(exchange) in here}


def _after(message: Message, at_receiver: str, at_sender: str) -> list[tuple[int, str]]:
    """What the message leaves at its two ends."""
    exchange = message.operation.exchange
    assert exchange is not None
    phase, reply = phase_of(exchange), message.step > 0
    if phase == "cleanup":
        return [(message.src, "")] if reply else []
    if exchange.kind == BACKWARD:
        return [(message.dst, "has gradients")] if not reply else [(message.src, "has gradients")]
    if phase == "optimizer":
        return [(message.src, "step is done")] if reply and exchange.call is not None and at_sender else []
    if phase == "forward" and not message.control:
        sides = [(message.src, at_sender), (message.dst, at_receiver)]
        return [(rank, "open") for rank, now in sides if not now]
    return []
