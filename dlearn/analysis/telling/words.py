"""Every sentence that dlearn prints about a trace."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from dlearn.analysis.ddp.step_times import step_times
from dlearn.analysis.ddp.training_steps import last_step
from dlearn.analysis.hanging.hang_words import listed, missing_text, pace_text, tell, whereabouts
from dlearn.analysis.hanging.mismatches import mismatch_sentences, mismatches
from dlearn.analysis.hanging.roots import root_sentences
from dlearn.analysis.hanging.stuck import exit_text, hangs, pace
from dlearn.analysis.hanging.victims import victim_sentences
from dlearn.analysis.rpc.iteration import Iteration, iteration, iterations
from dlearn.analysis.volume.reconcile import reconcile
from dlearn.analysis.volume.topology import topologies
from dlearn.analysis.volume.traffic import Traffic, traffic_of
from dlearn.events.event import Collective
from dlearn.events.process import Process
from dlearn.events.source import ServiceCall
from dlearn.join.ends import payload_bytes
from dlearn.join.joining import operations
from dlearn.join.message_evidence import confirmed
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Answer, Paragraph, count_text, first_few
from dlearn.trace import Trace

NAMES_SHOWN = 4
"""Parameters of a bucket in one sentence."""
_SIZES_SHOWN = 8
"""Different sizes of messages in one sentence."""
_KINDS_SHOWN = 40
"""Sentences about kinds of operations, for one part of a trace."""
_WIRINGS_TOLD = 3
"""Groups of which is told how NCCL has wired them."""


_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}
_HOW = {"derived": "derived from the backend's algorithm", "missing": "missing: expected, never came"}


class Explanation(Answer, frozen=True):
    """Who sent what to whom, in words and as a table. `part` is what was explained: a step, or the whole trace."""

    part: str
    sentences: tuple[str, ...]
    traffic: Traffic
    iteration: Iteration | None = None
    """Of a job with distributed autograd: its last iteration, message by message."""

    def paragraphs(self) -> Iterator[Paragraph]:
        yield from (*self.sentences, "")
        if self.iteration is not None:
            yield from (*self.iteration.paragraphs(), "")
        yield from self.traffic.paragraphs()


def explain(trace: Trace) -> Explanation:
    """What was sent to whom, in words: in the last step (the last span whose name begins with "step"), or in all."""
    step, everything = last_step(trace), operations(trace)
    last = operations(trace.within(step)) if step else everything
    part = step or ("the whole trace" if trace.selected_from is None else "this part of the trace")
    sentences = [overview(trace)]
    if trace.rpc.exchanges:
        sentences.append(rpc_overview(trace))
    sentences += [sentence for each in topologies(trace)[:_WIRINGS_TOLD] for sentence in each.sentences]
    told = iteration(trace) if iterations(trace) else None
    asked = [(one, times) for one, times in last.counted() if told is None or one.exchange is None]
    if step:
        before = [(one, times) for one, times in everything.counted() if all(end.phase == "setup" for end in one.ends)]
        sentences += _told("Before training", before, trace)
    sentences += _told(f"In {part}" if step else "In all", asked, trace)
    sent = traffic_of(last, trace)
    # A service answers its own process over a connection, too.
    over = "" if any(isinstance(one.ends[0], ServiceCall) for one, _ in last.counted()) else ", over no wire"
    sentences.append(totals(part, sent, over))
    on_the_wire = reconcile(trace)
    if on_the_wire.whole.pairs:
        sentences.append(on_the_wire.sentence)
    odd = step_times(trace).odd_sentence
    more = (f"{odd}." if odd else "", clock_sentence(trace), left_out_sentence(trace))
    sentences += [sentence for sentence in more if sentence]
    sentences += [*story(trace), *problem_sentences(trace)]
    return Explanation(part, tuple(sentences), sent, told)


def overview(trace: Trace) -> str:
    """How large the job was, and how much of it is explained."""
    everything = operations(trace)
    names = sorted({one.group.backend for one, _ in everything.alike()})
    # What another tool wrote need not tell all groups that were used.
    imported = any(process.imported is not None for process in trace.processes)
    backends = ", ".join(names) or ("no process group told of" if imported else "no process group used")
    explained = 0
    sent: list[tuple[int, int, int, int]] = []
    known: Counter[str] = Counter()
    for one, places in everything.alike():
        sums = sums_of(one)
        explained += len(places) * (bool(sums) or why_unknown(one) is None)
        for pair in sums:
            known[pair.how] += len(places) * pair.message_count
            sent += [(place, pair.src, pair.dst, pair.message_count) for place in places.tolist()]
    place, src, dst, times = np.array(sent, np.intp).reshape(-1, 4).T
    counted = int(times[confirmed(trace, place, src, dst)].sum())
    kinds = ", ".join(f"{count:,} {_HOW.get(how, how)}" for how, count in known.most_common()) or "none"
    if counted:
        kinds += f"; {'all' if counted == known.total() else f'{counted:,}'} confirmed by the kernel's counters"
    return (
        f"{count_text(len(trace.processes), 'rank')} ({backends}): {explained:,} of"
        f" {count_text(len(everything), 'operation')} explained by {count_text(known.total(), 'message')} ({kinds})."
        + "".join(f" {sentence}" for sentence in network_sentences(trace))
    )


def network_sentences(trace: Trace) -> list[str]:
    """ "Over a chosen network: 1 Gbit/s, 100 us."; nothing of any other."""
    asked = dict.fromkeys(process.network.asked for process in trace.processes if process.network is not None)
    return [f"Over a chosen network: {'; '.join(asked)}."] if asked else []


def problem_sentences(trace: Trace, most: int | None = None) -> list[str]:
    """What is damaged, missing or unknown: then more may have happened than is told. Beyond `most` they are counted."""
    told = [f"Problem: {problem}." for problem in trace.all_problems]
    more = 0 if most is None else len(told) - most
    return told if more <= 0 else [*told[:most], f"{count_text(more, 'more problem')}: see explain."]


def rpc_overview(trace: Trace) -> str:
    """How much of what the agents sent is explained, and how it is known."""
    rpc = trace.rpc
    if not rpc.complete:
        return f"RPC: {len(rpc.exchanges):,} calls seen by Python; incomplete: not all that C++ sent is known."
    by: Counter[str] = Counter(each.known_by for each in rpc.exchanges if each.request is not None)
    how = {"python": "seen by Python", "window": "by Python's stretch of time", "rule": "by torch's protocol"}
    known = ", ".join(f"{by[key]:,} {text}" for key, text in how.items() if by[key])
    own = sum(each.call is not None and each.call.observer for each in rpc.exchanges)
    ours = f"; {own:,} are the cluster's own, to open connections" if own else ""
    return f"RPC: {rpc.explained:,} of {rpc.logged:,} requests of the agents' logs explained ({known}){ours}."


def totals(part: str, sent: Traffic, over: str) -> str:
    """Tell the bytes that each rank sent; `over` says over what those went that a rank sent itself."""
    each: Counter[int] = Counter(dict.fromkeys(sent.ranks, 0))
    for (src, _), size in sent.payload_bytes.items():
        each[src] += size
    if sent.unexplained and not any(sent.by_how.values()):
        return (
            f"In {part} how much each rank sends is not known: {count_text(sent.unexplained, 'operation')} not counted."
        )
    if not sent.by_how and not sent.unexplained:
        return f"In {part} no rank was seen sending anything."
    if len(set(each.values())) == 1:
        told = f"every rank sends {next(iter(each.values())):,} B of payload"
    else:
        told = listed([f"{sent.labels[rank]} sends {size:,} B" for rank, size in each.items()]) + " of payload"
    missing = f"; {sent.by_how['missing']:,} B were expected and never came" if "missing" in sent.by_how else ""
    own = sum(size for (src, dst), size in sent.payload_bytes.items() if src == dst)
    itself = f", {own:,} B of it from a rank to itself{over}" if own else ""
    without = f"; {count_text(sent.unexplained, 'operation')} not counted" if sent.unexplained else ""
    without += f"; {count_text(sent.unsized, 'message')} of unknown size not counted" if sent.unsized else ""
    return f"In {part} {told}, {sent.total_bytes:,} B in all{itself}{missing}{without}."


def _told(when: str, told: Sequence[tuple[Operation, int]], trace: Trace) -> list[str]:
    """One sentence for each kind of operation, in the order of first call, with how many times it is there."""
    kinds: dict[Hashable, list[tuple[Operation, int]]] = defaultdict(list)
    for one, times in told:
        kinds[_kind(one)].append((one, times))
    groups = [([one for one, _ in kind], sum(times for _, times in kind)) for kind in kinds.values()]
    sentences = [f"{when}: {_sentence(group, count, trace)}" for group, count in groups[:_KINDS_SHOWN]]
    more = [count for _, count in groups[_KINDS_SHOWN:]]
    if more:
        others = f"{sum(more):,} more operations of {len(more):,} more kinds"
        sentences.append(f"{when}: {others}; operations(trace) lists them.")
    return sentences


def _kind(operation: Operation) -> Hashable:
    """All that a sentence tells of an operation: two of one kind are told by the same words.

    Who sends how much to whom has root, splits and algorithm in it. The sizes of an RPC are told from least to most.
    """
    sums = sums_of(operation)
    if operation.exchange is not None:
        sums = [pair if pair.payload_bytes is None else pair._replace(payload_bytes=0) for pair in sums]
    return (
        operation.op,
        operation.what,
        operation.group.name,
        operation.sender,
        operation.receiver,
        _phase(operation),
        _root(operation),
        _sizes(operation),
        operation.missing,
        operation.refused,
        _errors(operation),
        operation.misfit,
        frozenset(sums) or why_unknown(operation),
    )


def _phase(operation: Operation) -> str:
    """The sender's; of a collective, nothing where the ranks are in different ones."""
    phases = {end.phase for end in (operation.ends[:1] if operation.sender is not None else operation.ends)}
    return phases.pop() if len(phases) == 1 else "none"


def _root(operation: Operation) -> int | None:
    first, members = operation.ends[0], operation.group.members
    root = first.root if isinstance(first, Collective) else None
    return members[root] if root is not None and root < len(members) else None


def _sizes(operation: Operation) -> tuple[int, int]:
    """The least and the most that a rank hands to it."""
    calls = [end for end in operation.ends if not isinstance(end, Collective) or end.inputs]
    sizes = [payload_bytes(end) for end in (calls[:1] if operation.sender is not None else calls) or operation.ends]
    return min(sizes), max(sizes)


def _errors(operation: Operation) -> tuple[tuple[int, str], ...]:
    return tuple((end.rank, end.error) for end in operation.ends if end.failed)


def _sentence(group: Sequence[Operation], count: int, trace: Trace) -> str:
    first = group[0]
    times = f", {count:,} times" if count > 1 else ""
    phase = _phase(first)
    then = f" in {_PHASES.get(phase, phase)}{times}" if phase != "none" else times
    size, what = _size_text(*_sizes(first)), first.describe(most=NAMES_SHOWN)
    if first.sender is not None and first.receiver is not None and isinstance(first.ends[0], ServiceCall):
        asked = f"{first.op} {what} ({size}){then}"
        story = f"{trace.label(first.sender)} asks {trace.label(first.receiver)}: {asked}"
        told = [_outcome(first, trace)]
    elif first.sender is not None and first.receiver is not None:
        sends = "was to send" if first.refused else "sends"
        story = f"{trace.label(first.sender)} {sends} {trace.label(first.receiver)} {size} ({what}){then}"
        told = [_outcome(first, trace)]
    else:
        story = f"{first.op} of {size} ({what}){then}" if what else f"{first.op}{then}"
        # The request and the reply of a call that fails are known.
        raised = [f"it raised {error}" for _, error in _errors(first)[:1]] if first.exchange is not None else []
        told = [*raised, _routes(group, trace)] if raised else [_outcome(first, trace) or _routes(group, trace)]
    return "; ".join([story, *(each for each in told if each)]) + "."


def _outcome(operation: Operation, trace: Trace) -> str:
    """What became of an operation that did not go through; nothing of any other."""
    if operation.missing:
        return missing_text(operation, trace)
    errors, alone = _errors(operation), operation.sender is not None
    if not errors:
        return operation.problem if alone else ""
    everywhere = len(errors) == len(operation.group.members) > 1
    where = "on every rank" if everywhere else f"on {listed([trace.label(rank) for rank, _ in errors])}"
    why = ", ".join(dict.fromkeys(error for _, error in errors))
    if operation.refused:
        return f"refused at once {where} ({why}): nothing was sent"
    what_is_known = operation.problem or ("" if alone else "which of its messages have travelled is not known")
    return f"it failed {where} ({why})" + (f": {what_is_known}" if what_is_known else "")


def _routes(group: Sequence[Operation], trace: Trace) -> str:
    """Who sends how much to whom, the equal ones together: "0→2, 1→0, 2→1: 6,880 B each"."""
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    unsized: set[tuple[int, int]] = set()
    hows: set[str] = set()
    for operation in group if group[0].exchange is not None else group[:1]:
        sums = sums_of(operation)
        reason = None if sums else why_unknown(operation)
        if reason is not None:
            root = _root(operation)
            its_root = f" (its root is {trace.label(root)})" if root is not None else ""
            return f"who sends to whom inside it is not known{its_root}: {reason}"
        sent: Counter[tuple[int, int]] = Counter()
        for pair in sums:
            sent[pair.src, pair.dst] += pair.payload_bytes or 0
            unsized |= {(pair.src, pair.dst)} if pair.payload_bytes is None else set()
            hows.add(pair.how)
        for ends, size in sent.items():
            sizes[ends].append(size)
    by_size: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for ends, found in sizes.items():
        by_size[min(found), max(found), ends in unsized].append(ends)
    parts, name = [], trace.labels.short
    for (least, most, more), pairs in by_size.items():
        arrows = first_few([f"{name(src)}→{name(dst)}" for src, dst in sorted(pairs)], 8)
        each = " each" if len(pairs) > 1 else ""
        parts.append(f"{arrows}: {_size_text(least, most, more=more)}{each}")
    if len(parts) > _SIZES_SHOWN:
        parts[_SIZES_SHOWN:] = [f"and {len(parts) - _SIZES_SHOWN:,} more sizes"]
    return "; ".join(parts) + f" ({', '.join(sorted(hows))})" if parts else "nothing travels"


def _size_text(least: int, most: int, *, more: bool = False) -> str:
    """ "8 B"; of several sizes "8 to 1,000 B". `more`: and what is not known."""
    if more and not most:
        return "a size that is not known"
    return (f"{most:,} B" if least == most else f"{least:,} to {most:,} B") + (" and more" if more else "")


def payload_text(message: Message) -> str:
    """ "1,000 B", "no data", "data of unknown size"."""
    if message.payload_bytes is None:
        return "data of unknown size"
    return f"{message.payload_bytes:,} B" if message.payload_bytes else "no data"


def message_sentence(message: Message, trace: Trace) -> str:
    """ "ps sends trainer1 500 of 1,000 B for all_reduce: uint8[1000] (derived)"."""
    src = trace.label(message.src)
    dst = trace.label(message.dst) if message.dst != message.src else "itself"
    size = payload_text(message)
    if message.payload_bytes and message.payload_bytes < message.whole_bytes:
        size = f"{message.payload_bytes:,} of {message.whole_bytes:,} B"
    why = f" for {message.op}" if message.op != "send" else ""
    carried = message.describe(most=NAMES_SHOWN)
    what = f": {carried}" if carried else ""
    if message.how == "missing":
        return f"{src} was to send {dst} {size}{why}{what}; it never came (missing)."
    how = message.how + (", confirmed by the kernel's counters" if message.confirmed else "")
    return f"{src} sends {dst} {size}{why}{what} ({how})."


# What became of the processes of a job -------------------------------------------------------------------------------


_MISMATCHES_TOLD = 4
"""What went through and may be wrong: sentences about it."""


def story(trace: Trace) -> list[str]:
    """How each process that did not end well ended, what is stuck, what may be wrong; nothing where all is well."""
    # Status 0 without an end of the file is `os._exit(0)`: well, too.
    # Of what another tool wrote, no end was to be expected: the process was at work.
    ended = [
        each
        for each in trace.processes
        if (each.exit_status or (each.exit_status is None and not each.closed)) and each.imported is None
    ]
    # Those first that were not told to end, as torchrun tells the others of a rank that has failed.
    fates = [fate(process, trace) for process in sorted(ended, key=lambda each: each.exit_status == -signal.SIGTERM)]
    stuck = [*root_sentences(trace), *victim_sentences(trace)] or [each.sentence for each in tell(hangs(trace), trace)]
    went = pace(trace)
    if went is not None and went.slow:
        stuck.append(f"It was {pace_text(went)}")
    odd = [f"Observed: {each}" for each in mismatch_sentences(mismatches(trace), trace)]
    if len(odd) > _MISMATCHES_TOLD:
        odd[_MISMATCHES_TOLD:] = [f"Observed: {len(odd) - _MISMATCHES_TOLD:,} more of this kind"]
    return [f"{sentence}." for sentence in (*fates, *stuck, *odd)]


def fate(process: Process, trace: Trace) -> str:
    """ "rank 1 was killed by SIGKILL; it was in all_reduce #3 (train.py:14)"."""
    if process.exit_status is not None:
        told = exit_text(process.exit_status)
        if process.closed and process.exit_status == -signal.SIGABRT:
            # Shells say 134, and nothing in the trace shows why.
            told += " after its recording was complete: C++ aborted at the exit, as threads of torch may (status 134)"
    elif process.stopped_ns is not None:
        told = "was still at work when its cluster stopped it"
    else:
        told = "left a file without an end: it was killed, or still runs"
    where = whereabouts(trace, process.rank)
    if not where and process.place is not None and process.place.site:
        where = f"was at {process.place.site}"
    return f"{process.label} {told}" + (f"; it {where}" if where else "")


def clock_sentence(trace: Trace) -> str:
    """How the times of several hosts were put on one clock; nothing where all have the same."""
    moved = {process.clock.name: process for process in trace.processes if process.clock.name}
    told = []
    for process in moved.values():
        clock = process.clock
        if clock.error_ns is None:
            continue
        drift = "drift not measured"
        if clock.drift_error is not None:
            drift = f"drift {clock.drift * 1e6:+.1f} ppm, give or take {clock.drift_error * 1e6:.1f}"
        offset, error = f"{clock.offset_ns / 1e9:+,.6f} s", f"{clock.error_ns / 1000:,.1f} us"
        told.append(f"{process.header.host}'s is moved by {offset}, give or take {error} ({drift})")
    return f"{len(told) + 1} clocks: {'; '.join(told)}." if told else ""


def left_out_sentence(trace: Trace) -> str:
    """How much was not asked for; nothing where all was."""
    count = sum(process.footer.left_out for process in trace.processes if process.footer is not None)
    return f"Some steps only, as asked: {count:,} events outside them were not recorded." if count else ""
