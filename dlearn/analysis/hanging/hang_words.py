"""Every sentence of a hang: who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlearn.analysis.hanging.stuck import Hang, Pace, came_out, group_of, inside, places, refusals
from dlearn.events.event import Collective
from dlearn.join.ends import End, Group, RpcEnd
from dlearn.join.gradients import unready
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import first_few
from dlearn.trace import Trace

_NAMES_LISTED = 8
"""Ranks in one sentence."""
_PARAMETERS_LISTED = 4


class Told(NamedTuple):
    """A sentence about a hang, and which of the ranks that wait says it for all: of an RPC the caller.

    `hang` is the first that it tells of.
    """

    speaker: int | None
    sentence: str
    hang: Hang


def tell(found: Sequence[Hang], trace: Trace, notes: Mapping[int, str] | None = None) -> list[Told]:
    """One sentence for each cause; what hangs because of it is told with it.

    `notes` says of ranks what the trace does not: {1: "has returned from its function"}.
    """
    told: list[Told] = []
    rest = _without_outer_calls(found)
    while rest:
        hang = rest.pop(0)
        behind = [each for each in rest if _is_behind(each.operation, hang)]
        rest = [each for each in rest if each not in behind]
        circle = _circle(hang, rest)
        if circle:
            rest = [each for each in rest if each not in circle]
            told.append(Told(min(each.waiting[0] for each in circle), _circle_sentence(circle, trace), circle[0]))
            continue
        sentence, exchange = hang_sentence(hang, trace, notes), hang.operation.exchange
        if behind:
            calls = [f"{each.operation.op} #{each.operation.seq}" for each in behind]
            sentence += f"; behind it {_wait(calls)} {listed(calls)}"
        speaker = exchange.src if exchange is not None else min(hang.waiting, default=None)
        told.append(Told(speaker, sentence, hang))
    return told


def _wait(who: Sequence[object]) -> str:
    return "waits" if len(who) == 1 else "wait"


# What hangs because of something else ---------------------------------------------------------------------------------


def _is_behind(later: Operation, hang: Hang) -> bool:
    """A later call of the same group, for which a rank is missing that never came to the first, or is stuck in it."""
    first = hang.operation
    if first.group != later.group or first.seq >= later.seq:
        return False
    if not all(isinstance(each.ends[0], Collective) for each in (first, later)):
        return False
    return bool(later.missing) and {*later.missing} <= {*first.missing, *hang.waiting}


def _without_outer_calls(found: Sequence[Hang]) -> list[Hang]:
    """Less the calls by RPC whose function has made a call of its own that does not return: that one is told."""
    exchanges = [hang.operation.exchange for hang in found]
    makers = {(each.call.rank, each.call.parent) for each in exchanges if each is not None and each.call is not None}
    return [
        hang
        for hang, each in zip(found, exchanges, strict=True)
        if each is None or each.run is None or (each.run.rank, each.run.number) not in makers
    ]


def _circle(first: Hang, rest: Sequence[Hang]) -> list[Hang]:
    """Hangs of one rank each, every one waiting for the next, the last for the first."""
    circle = [first]
    while len(circle) <= len(rest) + 1 and _is_for_one(circle[-1]):
        (missing,) = circle[-1].operation.missing
        if missing == first.waiting[0]:
            return sorted(circle, key=lambda hang: hang.waiting) if len(circle) > 1 else []
        following = next((each for each in rest if each.waiting == (missing,) and _is_for_one(each)), None)
        if following is None or following in circle:
            return []
        circle.append(following)
    return []


def _is_for_one(hang: Hang) -> bool:
    return len(hang.waiting) == 1 and len(hang.operation.missing) == 1


def _circle_sentence(circle: Sequence[Hang], trace: Trace) -> str:
    who = listed([trace.label(hang.waiting[0]) for hang in circle])
    if len(circle) == 2:
        calls = [f"{trace.label(hang.waiting[0])} in {_stuck_text(hang, trace)}" for hang in circle]
        return f"{who} wait for each other: {', '.join(calls)}"
    calls = [
        f"{trace.label(hang.waiting[0])} for {trace.label(hang.operation.missing[0])} in {_stuck_text(hang, trace)}"
        for hang in circle[:_NAMES_LISTED]
    ]
    return f"{who} wait in a circle: {', '.join(calls)}"


def _stuck_text(hang: Hang, trace: Trace) -> str:
    """ "all_reduce #10 (bucket 0: b.weight, b.bias; train.py:14)"; of a group that is not the default, its ranks."""
    operation = hang.operation
    end = next((end for end in operation.ends if end.rank in hang.waiting), operation.ends[0])
    # Where hooks called it for several buckets, that is why it is stuck.
    hooks = {each.bucket_index for each in operation.ends if isinstance(each, Collective)}
    bucket, text = operation.bucket, ""
    if bucket is not None and len(hooks) == 1:
        text = f"bucket {bucket.index}: {first_few(bucket.parameters, _PARAMETERS_LISTED)}"
    return call_text(end, _group_text(operation.group, None, trace), text)


# One hang -------------------------------------------------------------------------------------------------------------


def hang_sentence(hang: Hang, trace: Trace, notes: Mapping[int, str] | None = None) -> str:
    """ "rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it"."""
    operation = hang.operation
    if operation.exchange is not None:
        return rpc_hang_sentence(operation, trace)
    # Of many it is enough how many they are: whom they wait for is named.
    many = len(hang.waiting) > _NAMES_LISTED
    who = f"{len(hang.waiting)} ranks" if many else listed([trace.label(rank) for rank in hang.waiting])
    told = f"{who} {_wait(hang.waiting)}"
    call = _stuck_text(hang, trace)
    if operation.missing:
        missing = listed([trace.label(rank) for rank in operation.missing])
        return f"{told} for {missing} in {call}; {why_missing(operation, trace, notes)}"
    return f"{told} in {call}; {why_stuck(operation, trace)}"


def pace_text(pace: Pace) -> str:
    """ "slow, not hung: 36,224 operations in 60 s, 604 a second; the last ended 2 ms before the end"."""
    seconds, silent_ms = pace.duration_ns / 1e9, pace.silence_ns / 1e6
    rate = pace.ended / seconds
    told = f"{pace.ended:,} operations in {seconds:.3g} s, {rate:,.{0 if rate >= 10 else 1}f} a second"
    silent = f"{silent_ms:.0f} ms" if silent_ms < 1000 else f"{silent_ms / 1000:.3g} s"
    return f"{'slow, not hung: ' if pace.slow else ''}{told}; the last ended {silent} before the end"


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
    busy = _busy_text(exchange.dst, trace)
    if exchange.received_ns is not None:
        return f"{told}; {callee} has it and has not begun{busy}"
    return f"{told}; {callee} has not begun it{busy}" if busy else f"{told}; it has not arrived there"


def _busy_text(rank: int, trace: Trace) -> str:
    """Which functions hold this worker's threads, if each of them has called somebody and waits for the answer."""
    exchanges = trace.whole.rpc.exchanges
    runs = [each.run for each in exchanges if each.run is not None and each.run.pending and each.run.rank == rank]
    calls = [each.call for each in exchanges if each.call is not None and each.call.pending and each.call.rank == rank]
    makers = {call.parent for call in calls}
    if not runs or not all(run.number in makers for run in runs):
        return ""
    what = listed([f"{count:,} x {name}" for name, count in Counter(run.function for run in runs).most_common()])
    return f": {len(runs):,} of its threads are taken ({what}), and each waits for a call that it made itself"


class Never(NamedTuple):
    """`but` is what else is known of a rank that never called; `did` what it never did before, `brief` in few words."""

    but: str
    did: str = ""
    brief: str = ""


def never(operation: Operation, rank: int, trace: Trace, notes: Mapping[int, str] | None = None) -> Never:
    """Of a bucket of DDP: which gradients this rank never had."""
    note = {**places(trace), **(notes or {})}.get(rank, "")
    call = inside(trace, rank)
    if call is not None:
        note = f"is in {call_text(call, _group_text(group_of(trace, call), operation.group, trace))}"
    but = f"it {note}" if note else ""
    refused = refusals(trace).get((rank, operation.group))
    if call is None and refused is not None and refused.op == operation.op:
        return Never(f"its {call_text(refused)} was refused at once: {refused.error}", "came to it", "came to it")
    found = unready(operation, rank, trace)
    if found is None:
        return Never(but)
    if not found.begun:
        began = f"began backward pass {found.backward_pass}"
        return Never(but, began, began)
    names = first_few(found.parameters, _PARAMETERS_LISTED)
    return Never(but, f"produced the gradients of {names} in backward pass {found.backward_pass}", f"produced {names}")


def why_missing(
    operation: Operation, trace: Trace, notes: Mapping[int, str] | None = None, *, brief: bool = False
) -> str:
    """ "rank 1 never called it, it was killed by SIGKILL; rank 3 never called it". `brief`: in few words."""
    missing = operation.missing
    told = []
    for rank in missing[:_NAMES_LISTED]:
        found = never(operation, rank, trace, notes)
        did = (found.brief if brief else found.did) or verb(operation)
        but = f", {found.but}" if found.but and not brief else ""
        told.append(f"{trace.label(rank)} never {did}{but}")
    if len(missing) > _NAMES_LISTED:
        told.append(f"and {len(missing) - _NAMES_LISTED:,} more")
    return "; ".join(told)


def why_stuck(operation: Operation, trace: Trace) -> str:
    if operation.misfit is not None:
        return operation.problem + sites_text(operation, trace) + _makers_text(operation, trace)
    if out := came_out(operation, trace):
        return f"{listed([trace.label(rank) for rank in out])} came out of it"
    if operation.unseen:
        who = listed([trace.label(rank) for rank in operation.unseen])
        return f"the file of {who} is not here or not whole, so nobody knows whether it came"
    if operation.sender is None and operation.op == "recv":
        return "no message has come for it, from any rank"
    return "all ranks called it, and it does not end" + _makers_text(operation, trace)


def sites_text(operation: Operation, trace: Trace) -> str:
    """ "; rank 0 called broadcast at a.py:5, rank 1 all_reduce at a.py:7", or nothing."""
    told = called_at(operation, trace)
    return f"; {told}" if told else ""


def called_at(operation: Operation, trace: Trace, call: str = "") -> str:
    """Say which rank called it at which line, if at different ones. `call` names the call; else its op does."""
    ends = [end for end in operation.ends if end.site]
    if len({end.site for end in ends}) < 2:
        return ""
    one_op = len({end.op for end in ends}) == 1
    calls = []
    for i, end in enumerate(ends):
        called = f"called {call or end.op} " if i == 0 else "" if one_op else f"{end.op} "
        calls.append(f"{trace.label(end.rank)} {called}at {end.site}")
    return first_few(calls, _NAMES_LISTED)


def _makers_text(operation: Operation, trace: Trace) -> str:
    """ "; rank 0 called it in a communication hook for bucket 1, rank 1 on thread Dummy-1", where others than the
    program's own line made the call."""
    ends = [end for end in operation.ends if isinstance(end, Collective)]
    if not any(end.thread or end.launcher == "comm hook" for end in ends):
        return ""
    told = [f"{trace.label(end.rank)} {'' if i else 'called it '}{_maker(end)}" for i, end in enumerate(ends)]
    return f"; {first_few(told, _NAMES_LISTED)}"


def _maker(end: Collective) -> str:
    thread = f"on thread {end.thread}" if end.thread else "on the program's own thread"
    if end.launcher != "comm hook":
        return thread
    hook = "in a communication hook" + (f" for bucket {end.bucket_index}" if end.bucket_index is not None else "")
    return f"{hook}, {thread}" if end.thread else hook


def whereabouts(trace: Trace, rank: int) -> str:
    """ "was in all_reduce #3 (quickstart.py:14)", or nothing if this rank was inside no call."""
    call = inside(trace, rank)
    return f"was in {call_text(call)}" if call is not None else ""


# Calls ----------------------------------------------------------------------------------------------------------------


def call_text(call: End, group: str = "", bucket: str = "") -> str:
    """ "all_reduce #3 (quickstart.py:14)": the operation, its number in the group, and the line of code."""
    aside = "; ".join(each for each in (bucket, call.site) if each)
    aside = f" ({aside})" if aside else ""
    return f"{call.op} {call.what}{aside}" if isinstance(call, RpcEnd) else f"{call.op} #{call.seq}{group}{aside}"


def _group_text(group: Group | None, other: Group | None, trace: Trace) -> str:
    """ " of the group of rank 0 and rank 1"; nothing for the default group, or for the one that is spoken of."""
    if group is None or group == other or not group.members:
        return ""
    if group.default:
        return " of the default group" if other is not None else ""
    return f" of the group of {listed([trace.label(rank) for rank in group.members])}"


def missing_text(operation: Operation, trace: Trace) -> str:
    return f"{listed([trace.label(rank) for rank in operation.missing])} never {verb(operation)}"


def verb(operation: Operation) -> str:
    if not operation.is_message:
        return "called it"
    return "sent it" if operation.sender in operation.missing else "received it"


def listed(names: Sequence[str]) -> str:
    if len(names) > _NAMES_LISTED:
        return first_few(names, _NAMES_LISTED)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"
