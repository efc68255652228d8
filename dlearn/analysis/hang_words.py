"""Every sentence about who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlearn.analysis.hangs import Hang, inside, places
from dlearn.trace.message import End, Operation, RpcEnd
from dlearn.trace.trace import Trace

_NAMES_LISTED = 8
"""Ranks in one sentence."""


def hang_sentences(found: Sequence[Hang], trace: Trace, notes: Mapping[int, str] | None = None) -> list[str]:
    """One sentence for each hang; two that wait for each other share one.

    `notes` says of ranks what the trace does not: {1: "has returned from its function"}.
    """
    notes = places(trace) | dict(notes or {})
    told: list[str] = []
    rest = list(found)
    while rest:
        hang = rest.pop(0)
        other = next((each for each in rest if _wait_for_each_other(hang, each)), None)
        if other is None:
            told.append(hang_sentence(hang, trace, notes))
            continue
        rest.remove(other)
        (a, call_a), (b, call_b) = sorted([_stuck_call(hang), _stuck_call(other)], key=lambda stuck: stuck[0])
        told.append(
            f"{trace.label(a)} and {trace.label(b)} wait for each other:"
            f" {trace.label(a)} in {call_text(call_a)}, {trace.label(b)} in {call_text(call_b)}"
        )
    return told


def _wait_for_each_other(one: Hang, other: Hang) -> bool:
    return len(one.waiting) == 1 and one.waiting == other.operation.missing and other.waiting == one.operation.missing


def _stuck_call(hang: Hang) -> tuple[int, End]:
    return next((end.rank, end) for end in hang.operation.ends if end.rank in hang.waiting)


def hang_sentence(hang: Hang, trace: Trace, notes: Mapping[int, str] | None = None) -> str:
    """ "rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it"."""
    operation = hang.operation
    if operation.exchange is not None:
        return rpc_hang_sentence(operation, trace)
    end = next((end for end in operation.ends if end.rank in hang.waiting), operation.ends[0])
    who = listed([trace.label(rank) for rank in hang.waiting])
    verb = "waits" if len(hang.waiting) == 1 else "wait"
    if operation.missing:
        missing = listed([trace.label(rank) for rank in operation.missing])
        never = [_never(operation, rank, call, trace, notes or {}) for rank, call in hang.elsewhere.items()]
        more = [f"and {len(never) - _NAMES_LISTED:,} more"] if len(never) > _NAMES_LISTED else []
        return "; ".join([f"{who} {verb} for {missing} in {call_text(end)}", *never[:_NAMES_LISTED], *more])
    return f"{who} {verb} in {call_text(end)}; {why_stuck(operation, trace)}"


def rpc_hang_sentence(operation: Operation, trace: Trace) -> str:
    """ "trainer waits for ps in rpc_sync train_step() (train.py:14); ps is inside train_step since 7.9 s"."""
    exchange = operation.exchange
    assert exchange is not None
    caller, callee = trace.label(exchange.src), trace.label(exchange.dst)
    told = f"{caller} waits for {callee} in {call_text(operation.ends[0])}"
    run, call = exchange.run, exchange.call
    if run is not None and run.pending:
        return f"{told}; {callee} is inside {run.function}"
    if call is not None and call.failed:
        return f"{told}; it failed: {call.error}"
    if run is not None:
        return f"{told}; {callee} has run it, and no reply has come"
    if exchange.received_ns is not None:
        return f"{told}; {callee} has it and has not begun"
    return f"{told}; it has not arrived there"


def _never(
    operation: Operation,
    rank: int,
    call: End | None,
    trace: Trace,
    notes: Mapping[int, str],
) -> str:
    note = f"is in {call_text(call)}" if call is not None else notes.get(rank, "")
    where = f", it {note}" if note else ""
    return f"{trace.label(rank)} never {verb(operation)}{where}"


def why_stuck(operation: Operation, trace: Trace) -> str:
    if operation.problem:
        return operation.problem
    if operation.unseen:
        who = listed([trace.label(rank) for rank in operation.unseen])
        return f"the file of {who} is not here or not whole, so nobody knows whether it came"
    if operation.sender is None and operation.op == "recv":
        return "no message has come for it, from any rank"
    return "all ranks called it, and it does not end"


def whereabouts(trace: Trace, rank: int) -> str:
    """ "was in all_reduce #3 (quickstart.py:14)", or nothing if this rank was inside no call."""
    call = inside(trace, rank)
    return f"was in {call_text(call)}" if call is not None else ""


def call_text(call: End) -> str:
    """ "all_reduce #3 (quickstart.py:14)": the operation, its number in the group, and the line of code."""
    site = f" ({call.site})" if call.site else ""
    return f"{call.op} {call.what}{site}" if isinstance(call, RpcEnd) else f"{call.op} #{call.seq}{site}"


def missing_text(operation: Operation, trace: Trace) -> str:
    return f"{listed([trace.label(rank) for rank in operation.missing])} never {verb(operation)}"


def verb(operation: Operation) -> str:
    if operation.sender is None and operation.receiver is None:
        return "called it"
    return "sent it" if operation.sender in operation.missing else "received it"


def listed(names: Sequence[str]) -> str:
    if len(names) > _NAMES_LISTED:
        return f"{', '.join(names[:_NAMES_LISTED])} and {len(names) - _NAMES_LISTED:,} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"
