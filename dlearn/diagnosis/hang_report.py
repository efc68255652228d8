"""Every sentence about a hang: who waits for whom, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlearn.diagnosis.hang_detection import Hang, Pace, came_out, inside, last_seen, refusals
from dlearn.diagnosis.meetings import open_rendezvous
from dlearn.diagnosis.mismatch_report import called_at, makers_text, mismatch_text, tags_text
from dlearn.diagnosis.roots import ring_from, waits_of
from dlearn.diagnosis.training_report import parting_text
from dlearn.events.event import Collective
from dlearn.events.mpi_facts import OtherMpiCall
from dlearn.join.ends import End, Group, RpcEnd
from dlearn.join.gradients import unready
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wording import modules_text
from dlearn.shown import first_few, listed, waits
from dlearn.trace import Trace

NAMES_LISTED = 8  # Ranks in one sentence.
_PARAMETERS_LISTED = 4
Notes = Mapping[int, str] | None
"""What the trace does not know of a rank: {1: "has returned from its function"}."""


class HangReport(NamedTuple):
    """A sentence about a cause, who reports it, and its first hang; `brief`: for a title."""

    speaker: int | None
    sentence: str
    hang: Hang
    brief: str = ""


def report(found: Sequence[Hang], trace: Trace, notes: Notes = None) -> list[HangReport]:
    """Write one sentence for each cause, with the hangs that follow from it."""
    reports: list[HangReport] = []
    rest = _without_outer_calls(found)
    while rest:
        hang = rest.pop(0)
        behind = [later for later in rest if _is_behind(later.operation, hang)]
        rest = [later for later in rest if later not in behind]
        circle = _circle(hang, rest)
        if circle:  # It is sorted: the first waits on the lowest rank.
            rest = [later for later in rest if later not in circle]
            brief, where = _circle_texts(circle, trace)
            sentence = f"{brief}: {where}{tags_text(circle[0].operation, trace)}"
            reports.append(HangReport(circle[0].waiting[0], sentence, circle[0], brief))
            continue
        sentence, exchange = hang_sentence(hang, trace, notes), hang.operation.exchange
        if behind:
            calls = [f"{later.operation.op} #{later.operation.seq}" for later in behind]
            sentence += f"; behind it {waits(len(calls))} {listed(calls)}"
        sentence += parting_text(hang.operation, trace)
        speaker = exchange.src if exchange is not None else min(hang.waiting, default=None)
        reports.append(HangReport(speaker, sentence, hang, _brief(hang, trace)))
    return reports


def _brief(hang: Hang, trace: Trace) -> str:
    operation, labels, exchange = hang.operation, trace.labels, hang.operation.exchange
    if exchange is not None and exchange.call is not None:
        return f"{labels[exchange.src]} waits for {labels[exchange.dst]} in {exchange.call.function}()"
    if exchange is not None or operation.missing in ((), hang.waiting):
        return ""
    end = next(end for end in operation.ends if end.rank in hang.waiting)
    call = f"{end.op} #{operation.seq}"
    whom, count = labels.together(operation.missing), len(hang.waiting)
    who = f"{count} ranks" if count > NAMES_LISTED else labels.together(hang.waiting, NAMES_LISTED)
    where = call if operation.bucket is None else f"bucket {operation.bucket.index} ({call})"
    return f"{who} {waits(count)} for {whom} in {where}"


# What hangs because of something else -------------------------------------------------------------


def _is_behind(later: Operation, hang: Hang) -> bool:
    """Return whether a later call of the group misses only ranks that hang in, or before, the first."""
    first = hang.operation
    if first.group != later.group or first.seq >= later.seq:
        return False
    if not all(isinstance(each.ends[0], Collective) for each in (first, later)):
        return False
    return bool(later.missing) and {*first.missing, *hang.waiting}.issuperset(later.missing)


def _without_outer_calls(found: Sequence[Hang]) -> list[Hang]:
    """Leave out a call by RPC whose function itself hangs in a call that it made."""
    exchanges = [hang.operation.exchange for hang in found]
    calls = [each.call for each in exchanges if each is not None and each.call is not None]
    makers = {(call.rank, call.parent) for call in calls}
    runs = [None if each is None else each.run for each in exchanges]
    made = zip(found, runs, strict=True)
    return [hang for hang, run in made if run is None or (run.rank, run.number) not in makers]


def _circle(first: Hang, rest: Sequence[Hang]) -> list[Hang]:
    """Return hangs of one rank each, every one waiting for the next, the last for the first."""
    every = (first, *rest)
    single = [each for each in every if len(each.waiting) == len(each.operation.missing) == 1]
    if not single or single[0] is not first:
        return []
    calls = {id(wait.operation) for wait in ring_from(first.waiting[0], waits_of(single))}
    circle = [each for each in single if id(each.operation) in calls]
    is_circle = len(circle) > 1 and id(first.operation) in calls
    return sorted(circle, key=lambda hang: hang.waiting) if is_circle else []


def _circle_texts(circle: Sequence[Hang], trace: Trace) -> tuple[str, str]:
    """Return "rank 0 and rank 1 wait for each other", and in which calls."""
    labels, calls = trace.labels, []
    for hang in circle[:NAMES_LISTED]:
        whom = f" for {labels[hang.operation.missing[0]]}" if len(circle) > 2 else ""
        calls.append(f"{labels[hang.waiting[0]]}{whom} in {_stuck_text(hang, trace)}")
    how = "for each other" if len(circle) == 2 else "in a circle"
    who = labels.listed(hang.waiting[0] for hang in circle)
    return f"{who} wait {how}", ", ".join(calls)


def _stuck_text(hang: Hang, trace: Trace) -> str:
    """Return "all_reduce #10 (bucket 0: b.weight, b.bias; train.py:14)", with the ranks of a group."""
    operation = hang.operation
    end = next((end for end in operation.ends if end.rank in hang.waiting), operation.ends[0])
    # Where hooks called it for several buckets, that is why it is stuck.
    calls = [each for each in operation.ends if isinstance(each, Collective)]
    hooks = {each.bucket_index for each in calls}
    bucket, text = operation.bucket, modules_text(calls)
    if bucket is not None and len(hooks) == 1:
        text = f"bucket {bucket.index}: {first_few(bucket.parameters, _PARAMETERS_LISTED)}"
    return call_text(end, _group_text(operation.group, None, trace), text)


def hang_sentence(hang: Hang, trace: Trace, notes: Notes = None) -> str:
    """Write "rank 0 waits for rank 1 in all_reduce #3 (train.py:14); rank 1 never called it"."""
    operation, count = hang.operation, len(hang.waiting)
    if operation.exchange is not None:
        return _rpc_sentence(operation, trace)
    # Of many it is enough how many they are: the ranks that they wait for are named.
    who = f"{count} ranks" if count > NAMES_LISTED else trace.labels.listed(hang.waiting)
    call = _stuck_text(hang, trace)
    if not operation.missing:
        failed = operation.is_message and not operation.pending
        does = "failed" if failed else waits(count)
        return f"{who} {does} in {call}; {why_stuck(operation, trace)}"
    if operation.missing == hang.waiting:
        return f"{who} waits for itself in {call}: it never {_verb(operation)}"
    missing = trace.labels.listed(operation.missing)
    why = why_missing(operation, trace, notes) + tags_text(operation, trace)
    return f"{who} {waits(count)} for {missing} in {call}; {why}"


def _rpc_sentence(operation: Operation, trace: Trace) -> str:
    """Write "trainer waits for ps in rpc_sync train_step() (train.py:14); ps is inside train_step"."""
    exchange = operation.exchange
    assert exchange is not None
    caller, callee = trace.label(exchange.src), trace.label(exchange.dst)
    text = f"{caller} waits for {callee} in {call_text(operation.ends[0])}"
    run, call = exchange.run, exchange.call
    if run is not None and run.pending:
        return f"{text}; {callee} is inside {run.function}"
    if call is not None and call.failed:
        return f"{text}; it failed: {call.error}"
    if run is not None:
        return f"{text}; {callee} has run it, and no reply has come"
    busy = _busy_text(exchange.dst, trace)
    if exchange.received_ns is not None:
        return f"{text}; {callee} has it and has not begun{busy}"
    return f"{text}; {callee} has not begun it{busy}" if busy else f"{text}; it has not arrived there"


def _busy_text(rank: int, trace: Trace) -> str:
    """Name the functions on this worker's threads, if each has made a call and waits for the answer."""
    runs, makers = [], set()
    for exchange in trace.whole.rpc.exchanges:
        run, call = exchange.run, exchange.call
        if run is not None and run.pending and run.rank == rank:
            runs.append(run)
        if call is not None and call.pending and call.rank == rank:
            makers.add(call.parent)
    if not runs or not all(run.number in makers for run in runs):
        return ""
    counts = Counter(run.function for run in runs).most_common()
    what = listed([f"{count:,} x {name}" for name, count in counts])
    taken = f"{len(runs):,} of its threads are taken ({what})"
    return f": {taken}, and each waits for a call that it made itself"


class Never(NamedTuple):
    """Why a rank never made a call: what it never `did` before, `but` what is known of it."""

    but: str
    did: str = ""
    brief: str = ""


def never(operation: Operation, rank: int, trace: Trace, notes: Notes = None) -> Never:
    """Find what is known of a rank that never called this; of DDP which gradients it never had."""
    note = {**last_seen(trace), **(notes or {})}.get(rank, "")
    call = inside(trace).get(rank)
    if call is not None and not (call.failed and note):
        unusual = trace.whole.matches.unusual()
        group = next((each.group for each in unusual if call in each.ends), None)
        note = f"is in {call_text(call, _group_text(group, operation.group, trace))}"
    but = f"it {note}" if note else ""
    refused = refusals(trace).get((rank, operation.group))
    if call is None and refused is not None and refused.op == operation.op:
        but = f"its {call_text(refused)} was refused at once: {refused.error}"
        return Never(but, "came to it", "came to it")
    gradients = unready(operation, rank, trace)
    if gradients is None:
        return Never(but)
    if not gradients.begun:
        began = f"began backward pass {gradients.backward_pass}"
        return Never(but, began, began)
    names = first_few(gradients.parameters, _PARAMETERS_LISTED)
    did = f"produced the gradients of {names} in backward pass {gradients.backward_pass}"
    return Never(but, did, f"produced {names}")


def why_missing(
    operation: Operation,
    trace: Trace,
    notes: Notes = None,
    *,
    brief: bool = False,
) -> str:
    """Write "rank 1 never called it, it was killed by SIGKILL; rank 3 never called it"."""
    missing = operation.missing
    texts = []
    for rank in missing[:NAMES_LISTED]:
        reason = never(operation, rank, trace, notes)
        did = (reason.brief if brief else reason.did) or _verb(operation)
        but = f", {reason.but}" if reason.but and not brief else ""
        texts.append(f"{trace.label(rank)} never {did}{but}")
    if len(missing) > NAMES_LISTED:
        texts.append(f"and {len(missing) - NAMES_LISTED:,} more")
    return "; ".join(texts)


def why_stuck(operation: Operation, trace: Trace) -> str:
    """Say why a call does not end that no rank is known to have missed."""
    if operation.mismatch is not None:
        texts = (text(operation, trace) for text in (mismatch_text, called_at, makers_text))
        return "; ".join(filter(None, texts))
    if out := came_out(operation, trace):
        return f"{trace.labels.listed(out)} came out of it"
    if operation.unseen:
        return _why_unseen(operation, trace)
    if operation.sender is None and operation.op == "recv":
        return "no message has come for it, from any rank"
    all_came = "all ranks called it, and it does not end"
    return "; ".join(filter(None, (all_came, makers_text(operation, trace))))


def _why_unseen(operation: Operation, trace: Trace) -> str:
    """Say why it is not known whether ranks came: calls of MPI were not read, or lines are lost."""
    whole = {process.rank for process in trace.processes if process.complete}
    others = {call.rank for call in trace.whole.of(OtherMpiCall)} & whole
    lost = [rank for rank in operation.unseen if rank not in others]
    if lost:
        who = trace.labels.listed(lost)
        return f"the file of {who} is not here or not whole, so whether it came is not known"
    who = trace.labels.listed(operation.unseen)
    return f"{who} made other MPI calls, which are not read: one of them may be the call to match"


def whereabouts(trace: Trace, rank: int) -> str:
    """Return "was in all_reduce #3 (train.py:14)", or nothing if this rank was inside no call."""
    call, rendezvous = inside(trace).get(rank), open_rendezvous(trace).get(rank)
    if call is None and rendezvous is not None:
        return f"was in {rendezvous.op} ({rendezvous.site})"
    return f"was in {call_text(call)}" if call is not None else ""


def pace_text(pace: Pace) -> str:
    """Write "slow, not hung: 36,224 operations in 60 s, 604 a second; the last ended 2 ms before ..."."""
    seconds, silent_ms = pace.duration_ns / 1e9, pace.silence_ns / 1e6
    rate, slow = pace.ended / seconds, "slow, not hung: " if pace.slow else ""
    silent = f"{silent_ms:.0f} ms" if silent_ms < 1000 else f"{silent_ms / 1000:.3g} s"
    each_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:,.1f}"
    text = f"{slow}{pace.ended:,} operations in {seconds:.3g} s, {each_second} a second"
    return f"{text}; the last ended {silent} before the end"


def call_text(call: End, group: str = "", bucket: str = "") -> str:
    """Return "all_reduce #3 (train.py:14)": the op, its number in the group, the line of code."""
    aside = "; ".join(each for each in (bucket, call.site) if each)
    aside = f" ({aside})" if aside else ""
    number = call.what if isinstance(call, RpcEnd) else f"#{call.seq}{group}"
    return f"{call.op} {number}{aside}"


def _group_text(group: Group | None, other: Group | None, trace: Trace) -> str:
    """Return " of shard (ranks 0 and 1)"; nothing of the default group, or of `other`."""
    if group is None or group == other or not group.members:
        return ""
    if named := group.named(trace.labels):
        return f" of {named}"
    if group.default:
        return " of the default group" if other is not None else ""
    return f" of the group of {trace.labels.listed(group.members)}"


def missing_text(operation: Operation, trace: Trace) -> str:
    """Return "rank 1 and rank 2 never called it"."""
    return f"{trace.labels.listed(operation.missing)} never {_verb(operation)}"


def _verb(operation: Operation) -> str:
    if not operation.is_message:
        return "called it"
    return "sent it" if operation.ends[0].op == "recv" else "received it"
