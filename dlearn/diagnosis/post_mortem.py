"""Every sentence about what became of a job: how processes ended, which ranks held others up, and what may be wrong."""

import math
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from dlearn.diagnosis.hang_detection import (
    Mismatch,
    came_out,
    exit_text,
    hangs,
    mismatches,
    pace,
    place_of,
    raised_text,
    refusals,
)
from dlearn.diagnosis.hang_report import call_text, pace_text, report, whereabouts
from dlearn.diagnosis.meeting_report import meeting_report
from dlearn.diagnosis.meetings import GroupClash, group_clashes, meetings
from dlearn.diagnosis.mismatch_report import called_at, makers_text, mismatch_text
from dlearn.diagnosis.roots import Root, Victim, WaitsFor, deadlock, follows_from, roots, victims
from dlearn.diagnosis.training_report import training_sentences
from dlearn.events.event import NOT_OBSERVED, Collective, PointToPoint
from dlearn.events.event_table import NONE
from dlearn.events.process import Process
from dlearn.join.columns import grouped
from dlearn.join.joining import operations
from dlearn.shown import count_text, listed, waits
from dlearn.trace import Trace

_MOST_TOLD = 4  # Sentences about one kind of fault.
"""Of a group, behind what it is for: "PIPELINE_MODEL_PARALLEL_GROUP 43"."""


def story(trace: Trace) -> list[str]:
    """Say how each process that did not end well ended, what is stuck, and what may be wrong."""
    # Status 0 without an end of the file is `os._exit(0)`: well, too.
    # Of what another tool wrote, no end was to be expected: the process was at work.
    ended = []
    in_meetings = {rank for meeting in meetings(trace) for rank in meeting.inside}
    for process in trace.processes:
        # An exception that went through `with record():` may have been handled behind it.
        not_told = process.exit_status is None and (not process.closed or raised_text(process))
        # Of a process that was asked to end while it waited for others, the wait is told.
        asked = process.exit_status in (None, -signal.SIGTERM) and not raised_text(process)
        waited = asked and process.rank in in_meetings
        if (process.exit_status or not_told) and process.imported is None and not waited:
            ended.append(process)
    ended.sort(key=_order_of_ends)
    stuck = [*root_sentences(trace), *victim_sentences(trace)]
    stuck = stuck or [each.sentence for each in report(hangs(trace), trace)]
    stuck += [sentence for _, sentence in meeting_report(trace, hangs(trace))]
    went = pace(trace)
    if went is not None and went.slow:
        stuck.append(f"It was {pace_text(went)}")
    stuck += [_clash_sentence(clash, trace) for clash in group_clashes(trace)]
    seen = [*mismatch_sentences(mismatches(trace), trace), *_lost_sends(trace), *_failed_calls(trace)]
    odd = [f"Observed: {each}" for each in seen]
    if len(odd) > _MOST_TOLD:
        odd[_MOST_TOLD:] = [f"Observed: {len(odd) - _MOST_TOLD:,} more of this kind"]
    fates = [*_fates(ended, trace)]
    told = [f"{sentence}." for sentence in (*fates, *stuck, *odd)]
    told[len(fates) : len(fates)] = training_sentences(trace)
    return told


def _order_of_ends(process: Process) -> tuple[bool, float]:
    """Put ends without an exception first, then exceptions by time, then those asked to end."""
    beat = process.heartbeat
    if beat is not None and raised_text(process):
        return False, process.clock.to_reference(beat.at_ns)
    return process.exit_status == -signal.SIGTERM, -math.inf


def _fates(ended: Iterable[Process], trace: Trace) -> Iterator[str]:
    """Write "rank 2 raised OSError at train.py:9; likewise ranks 0, 1 and 3", each fate once."""
    alike = grouped(ended, lambda process: _fate(process, trace))
    for text, (first, *others) in alike.items():
        ranks = sorted(each.rank for each in others)
        again = f"; likewise {trace.labels.together(ranks)}" if ranks else ""
        yield f"{first.label} {text}{again}"


def _fate(process: Process, trace: Trace) -> str:
    """Write "was killed by SIGKILL; it was in all_reduce #3 (train.py:14)"."""
    if text := raised_text(process):
        # Python ends with status 1 then, if torchrun has not ended it before.
        return "; ".join(filter(None, (text, _refused_text(process.rank, trace))))
    if process.exit_status is not None:
        text = exit_text(process.exit_status)
        if process.closed and process.exit_status == -signal.SIGABRT:
            # Shells say 134, and nothing in the trace shows why.
            text += " after its recording was complete: C++ aborted at the exit, as threads of"
            text += " torch may (status 134)"
    elif process.stopped_ns is not None:
        text = "was still at work when its cluster stopped it"
    else:
        text = "left a file without an end: it was killed, or still runs"
    where = whereabouts(trace, process.rank)
    if not where and (place := place_of(process, trace)):
        where = f"was at {place}"
    did = f"it {where}" if where else ""
    return "; ".join(filter(None, (text, did, _refused_text(process.rank, trace))))


def _refused_text(rank: int, trace: Trace) -> str:
    """Write "its send #1 (a.py:8) was refused at once: ..."; "" if its last call was not."""
    table = trace.whole.table
    calls = np.flatnonzero((table.rank == rank) & table.is_a(Collective, PointToPoint))
    last_ns = table.start_ns[calls].max(initial=NONE)
    for (caller, _), end in refusals(trace).items():
        if caller == rank and end.start_ns >= last_ns:
            return f"its {call_text(end)} was refused at once: {end.error}"
    return ""


def _lost_sends(trace: Trace) -> Iterator[str]:
    """Write "rank 0 ended without waiting for its send #1 of 80 B, which rank 1 never received"."""
    for operation in operations(trace).unusual():
        send, receiver = operation.ends[0], operation.receiver
        unseen = send.op == "send" and send.ended_by == NOT_OBSERVED
        if unseen and receiver is not None and receiver in operation.missing:
            sent = f"its {call_text(send)} of {operation.payload_bytes:,} B"
            who, whom = trace.label(send.rank), trace.label(receiver)
            yield f"{who} ended without waiting for {sent}, which {whom} never received"


def _failed_calls(trace: Trace) -> Iterator[str]:
    """Write "update() raised IndexError on w1; w0 called it by rpc_async (a.py:19), 2 times".

    The exception of a rpc_sync is raised into the caller.
    """
    failed: Counter[tuple[str, str, int, int, str, str]] = Counter()
    for operation in operations(trace).unusual():
        call = operation.exchange.call if operation.exchange is not None else None
        error = next((end.error for end in operation.ends if end.failed), "")
        if call is not None and error and call.op != "rpc_sync":
            callee = operation.ends[-1].rank
            failed[call.function, error, callee, call.rank, call.op, call.site] += 1
    for (function, error, dst, caller, op, site), times in failed.items():
        by = f"{trace.label(caller)} called it by {op} ({site})"
        again = f", {times:,} times" if times > 1 else ""
        yield f"{function}() raised {error} on {trace.label(dst)}; {by}{again}"


def _clash_sentence(clash: GroupClash, trace: Trace) -> str:
    """Write "group 1 is made of ranks 0 and 1 by some, of ranks 2 and 3 by others: ..."."""
    names = [trace.labels.together(members) for members in clash.members]
    made = f"group {clash.name} was made of {listed(names)} at once, in one store"
    why = "which of them meet is chance, as new_group must be called by all ranks for every group"
    texts = [f"{made}: {why}"]
    for rank, other in clash.crossed[:_MOST_TOLD]:
        texts.append(f"{trace.label(rank)}'s connection goes to {trace.label(other)}")
    return "; ".join(texts)


def root_sentences(trace: Trace) -> list[str]:
    """Write "rank 12 is stuck in all_gather #42806 of TENSOR 41: rank 13 came out of it", each."""
    texts = [_root_sentence(root, trace) for root in roots(trace)]
    ring = deadlock(trace) if texts else ()
    if ring:
        links = [f"waits in {_call(wait)} for {trace.label(wait.other)}" for wait in ring]
        texts.insert(0, f"a deadlock: {trace.label(ring[0].rank)} {', which '.join(links)}")
    return texts


def _call(made: Root | WaitsFor, rank: int | None = None) -> str:
    """Return "all_reduce #5 (a.py:3) of B 1", as this rank called it, if it did."""
    operation = made.operation
    end = next((end for end in operation.ends if end.rank == rank), operation.ends[0])
    return f"{call_text(end)} of {operation.group.name}"


def _root_sentence(root: Root, trace: Trace) -> str:
    name, call = trace.label(root.rank), _call(root, root.rank)
    more = count_text(root.more, "more call")
    if root.how == "never":
        nor = f", nor {more}" if root.more else ""
        return f"{name} never called {call}{nor}; {trace.labels.listed(root.operation.ranks)} did"
    also = f", and in {more}" if root.more else ""
    out = trace.labels.listed(came_out(root.operation, trace))
    return f"{name} is stuck in {call}{also}; {out} came out of it"


def victim_sentences(trace: Trace) -> list[str]:
    """Write "rank 3 waits for rank 2 in send #4 of A 7, which waits for rank 1 in all_reduce #5 of B 1".

    Chains through the same kinds of calls share a sentence; beyond a few their ranks are counted.
    """
    chains: dict[tuple[tuple[str, str], ...], list[Victim]] = defaultdict(list)
    for victim in victims(trace):
        calls = [(wait.operation.op, wait.operation.group) for wait in victim.chain]
        kinds = tuple((op, group.dimension or group.name) for op, group in calls)
        chains[kinds].append(victim)
    # Long chains first: what is next to a root, the sentence of the root says already.
    groups = sorted(chains.values(), key=lambda group: (-len(group[0].chain), group[0].rank))
    texts = [_chain_sentence(group, trace) for group in groups[:_MOST_TOLD]]
    if more := sum(map(len, groups[_MOST_TOLD:])):
        texts.append(f"{count_text(more, 'more rank')} {waits(more)} by such chains")
    return texts + _unexplained(trace)


def _chain_sentence(group: list[Victim], trace: Trace) -> str:
    first, *others = group
    links = [f"for {trace.label(wait.other)} in {_call(wait)}" for wait in first.chain]
    text = f"{trace.label(first.rank)} waits {', which waits '.join(links)}"
    if others:
        names = trace.labels.listed(each.rank for each in others)
        text += f"; {names} {waits(len(others))} in the same way"
    seen = all(wait.other in wait.operation.missing for wait in first.chain)
    return text if seen else f"{text} (inferred from the order of calls)"


def _unexplained(trace: Trace) -> list[str]:
    """Count the other calls that did not end, of ranks of which no chain is known."""
    named = {root.rank for root in roots(trace)}
    known = named | {victim.rank for victim in victims(trace)}
    others, ranks = 0, set[int]()
    for hang in hangs(trace) if named else ():
        if not follows_from(hang, named, trace) and not known.issuperset(hang.waiting):
            others += 1
            ranks.update(hang.waiting)
    if not others:
        return []
    who = count_text(len(ranks - known), "more rank")
    calls = count_text(others, "more call")
    return [f"{calls} of {who} did not end; no rank is seen to hold those up"]


def mismatch_sentences(found: Iterable[Mismatch], trace: Trace) -> list[str]:
    """Write a sentence for each mismatch, one for those from the same lines."""

    def alike(each: Mismatch) -> tuple[object, ...]:
        one = each.operation
        return each.why, one.op, one.mismatch, *(end.site for end in one.ends)

    groups = grouped(found, alike).values()
    return [_mismatch_sentence(group[0], len(group), trace) for group in groups]


def _mismatch_sentence(mismatch: Mismatch, times: int, trace: Trace) -> str:
    """Write "rank 0 called all_reduce #3 at a.py:5, rank 1 at a.py:6; if these were not to meet, ..."."""
    operation = mismatch.operation
    again = f" (and {times - 1:,} more from there)" if times > 1 else ""
    call = f"{operation.op} #{operation.seq}{again}"
    if mismatch.why == "message":
        text = f"{call_text(operation.ends[0])}{again} went through"
        return f"{text}, and {mismatch_text(operation, trace)}"
    if mismatch.why == "calls":
        why = mismatch_text(operation, trace)
        text = f"{call} went through, and {why}: its results mean nothing"
        return "; ".join(filter(None, (text, called_at(operation, trace))))
    if mismatch.why == "sites":
        texts = (called_at(operation, trace, call), makers_text(operation, trace))
        where = "; ".join(filter(None, texts))
        return f"{where}; if these were not to meet, its result is wrong"
    who, count = trace.labels.listed(operation.ranks), len(operation.ends)
    text = f"{who} gave the same data, as if these had been summed before"
    return f"{call_text(operation.ends[0])}{again}: {text}; then they are now {count} times too large"
