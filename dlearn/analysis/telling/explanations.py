"""Every sentence about what a trace holds: how large the job was, and which rank sent what to which."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from dlearn.analysis.ddp.step_times import step_times
from dlearn.analysis.ddp.training_steps import last_step
from dlearn.analysis.rpc.iteration import Iteration, iteration, iterations
from dlearn.analysis.telling.sums import step_sentence, totals
from dlearn.analysis.volume.reconcile import reconcile
from dlearn.analysis.volume.topology import topologies
from dlearn.analysis.volume.traffic import Traffic, traffic, traffic_of
from dlearn.diagnosis.hang_report import missing_text
from dlearn.diagnosis.mismatch_report import mismatch_text
from dlearn.diagnosis.post_mortem import story
from dlearn.events.event import Collective
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.source import ServiceCall
from dlearn.join.columns import grouped
from dlearn.join.ends import payload_bytes
from dlearn.join.joining import operations
from dlearn.join.message_evidence import confirmed
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.tables.message_table import Message
from dlearn.join.tables.operation_table import Operation
from dlearn.join.wording import modules_text
from dlearn.shown import Paragraph, Result, count_text, first_few, listed
from dlearn.trace import Trace

NAMES_SHOWN = 4  # Parameters of a bucket in one sentence.
_SIZES_SHOWN = 8  # Different sizes of messages in one sentence.
_KINDS_SHOWN = 40  # Sentences about kinds of operations, for one part of a trace.
_WIRINGS_TOLD = 3  # Groups whose wiring by NCCL is described.
_PHASES = {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the optimizer's step"}
_HOW = {"derived": "derived from the backend's algorithm", "missing": "missing: expected, never came"}
Counted = tuple[Operation, int]
"""An operation, and how many there are that differ only in their times."""


class Explanation(Result, frozen=True):
    """The messages of `part` (a step, or the whole trace), in sentences and as a table."""

    part: str
    sentences: tuple[str, ...]
    traffic: Traffic
    iteration: Iteration | None = None
    """Of a job with distributed autograd: its last iteration, message by message."""

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each pair of ranks, with the bytes of `part`."""
        yield from self.traffic.records()

    def paragraphs(self) -> Iterator[Paragraph]:
        yield from (*self.sentences, "")
        if self.iteration is not None:
            yield from (*self.iteration.paragraphs(), "")
        yield from self.traffic.paragraphs()


def explain(trace: Trace) -> Explanation:
    """Explain the last step (the last span whose name begins with "step"), or all of the trace."""
    step, everything = last_step(trace), operations(trace)
    last = operations(trace.within(step)) if step else everything
    part = step or ("the whole trace" if trace.selected_from is None else "this part of the trace")
    sentences = [overview(trace)]
    if trace.rpc.exchanges:
        sentences.append(rpc_overview(trace))
    for wired in topologies(trace)[:_WIRINGS_TOLD]:
        sentences += wired.sentences
    over_rpc = iteration(trace) if iterations(trace) else None
    if step:
        counted = everything.group_sizes()
        setup = [each for each in counted if {end.phase for end in each[0].ends} == {"setup"}]
        sentences += _by_kind("Before training", setup, trace)
    asked = [each for each in last.group_sizes() if over_rpc is None or each[0].exchange is None]
    sentences += _by_kind(f"In {part}" if step else "In all", asked, trace)
    sent = traffic_of(last, trace)
    # A service answers its own process over a connection, too.
    by_service = any(isinstance(one.ends[0], ServiceCall) for one, _ in last.group_sizes())
    sentences.append(totals(part, sent, "" if by_service else ", over no wire"))
    on_the_wire = reconcile(trace)
    if on_the_wire.whole.pairs:
        sentences.append(on_the_wire.sentence)
    odd = step_times(trace).odd_sentence
    more = (f"{odd}." if odd else "", clock_sentence(trace), left_out_sentence(trace))
    sentences += filter(None, (step_sentence(trace), *more))
    sentences += [*story(trace), *problem_sentences(trace)]
    return Explanation(part, tuple(sentences), sent, over_rpc)


# The whole job ------------------------------------------------------------------------------------


def overview(trace: Trace) -> str:
    """Say how large the job was, and how much of it is explained."""
    everything = operations(trace)
    if not everything and trace.selected_from is not None:
        part = trace.span or "this part of the trace"
        return f"{count_text(len(trace.processes), 'rank')}: no message in {part}."
    names = sorted({one.group.backend for one, _ in everything.groups()})
    # What another tool wrote need not list all groups that were used.
    imported = any(process.imported is not None for process in trace.processes)
    none = "no process group told of" if imported else "no process group used"
    if not names and trace.of(Rendezvous):  # It has used torch.distributed, and come no further.
        groups = [group for process in trace.processes for group in process.groups.values()]
        names, none = sorted({group.backend for group in groups}), "no process group made"
    explained = 0
    sent = [np.empty((0, 4), np.intp)]
    known: Counter[str] = Counter()
    for one, indices in everything.groups():
        sums = sums_of(one)
        explained += len(indices) * (bool(sums) or why_unknown(one) is None)
        for pair in sums:
            known[pair.how] += len(indices) * pair.message_count
            of_pair = (pair.src, pair.dst, pair.message_count)
            sent.append(np.column_stack(np.broadcast_arrays(indices, *of_pair)))
    index, src, dst, times = np.concatenate(sent).T
    counted = int(times[confirmed(trace, index, src, dst)].sum())
    kinds = ", ".join(f"{count:,} {_HOW.get(how, how)}" for how, count in known.most_common()) or "none"
    if counted:
        how_many = "all" if counted == known.total() else f"{counted:,}"
        kinds += f"; {how_many} confirmed by the kernel's counters"
    ranks = f"{count_text(len(trace.processes), 'rank')} ({', '.join(names) or none})"
    asked, travelled = count_text(len(everything), "operation"), count_text(known.total(), "message")
    text = f"{ranks}: {explained:,} of {asked} explained by {travelled} ({kinds})."
    return " ".join([text, *network_sentences(trace)])


def network_sentences(trace: Trace) -> list[str]:
    """Write "Over a chosen network: 1 Gbit/s, 100 us."; nothing of any other."""
    networks = [process.network for process in trace.processes if process.network is not None]
    asked = dict.fromkeys(network.asked for network in networks)
    return [f"Over a chosen network: {'; '.join(asked)}."] if asked else []


def problem_sentences(trace: Trace, most: int | None = None) -> list[str]:
    """List what is damaged, missing or unknown; problems beyond `most` are counted."""
    texts = [f"Problem: {problem}." for problem in trace.all_problems]
    more = 0 if most is None else len(texts) - most
    return texts if more <= 0 else [*texts[:most], f"{count_text(more, 'more problem')}: see explain."]


def rpc_overview(trace: Trace) -> str:
    """Say how much of what the agents sent is explained, and how it is known."""
    rpc = trace.rpc
    if not rpc.complete:
        seen = f"{len(rpc.exchanges):,} calls seen by Python"
        return f"RPC: {seen}; incomplete: not all that C++ sent is known."
    by: Counter[str] = Counter(each.known_by for each in rpc.exchanges if each.request is not None)
    how = {"python": "seen by Python", "window": "by Python's stretch of time", "rule": "by torch's protocol"}
    known = ", ".join(f"{by[key]:,} {text}" for key, text in how.items() if by[key])
    own = sum(each.call is not None and each.call.observer for each in rpc.exchanges)
    ours = f"; {own:,} are the cluster's own, to open connections" if own else ""
    requests = f"{rpc.explained:,} of {rpc.logged:,} requests of the agents' logs"
    return f"RPC: {requests} explained ({known}){ours}."


def clock_sentence(trace: Trace) -> str:
    """Say how the times of several hosts were put on one clock; nothing of one clock."""
    named = (process for process in trace.processes if process.clock.name)
    texts = []
    for process in {process.clock.name: process for process in named}.values():
        clock = process.clock
        if clock.error_ns is None:
            continue
        drift = "drift not measured"
        if clock.drift_error is not None:
            error_ppm = f"{clock.drift_error * 1e6:.1f}"
            drift = f"drift {clock.drift * 1e6:+.1f} ppm, give or take {error_ppm}"
        offset, error = f"{clock.offset_ns / 1e9:+,.6f} s", f"{clock.error_ns / 1000:,.1f} us"
        texts.append(f"{process.header.host}'s is moved by {offset}, give or take {error} ({drift})")
    return f"{len(texts) + 1} clocks: {'; '.join(texts)}." if texts else ""


def left_out_sentence(trace: Trace) -> str:
    """Count the events of steps that were not asked for; nothing where all were."""
    footers = (process.footer for process in trace.processes if process.footer is not None)
    count = sum(footer.left_out for footer in footers)
    if not count:
        return ""
    some = f"Some steps only, as asked: {count_text(count, 'event')} outside them not recorded."
    names = [name for name in trace.spans if name.startswith("step ")]
    if len(names) < 2:
        return some
    return f"{some} {totals(f'{listed(names)} together', traffic(trace), '')}"


# A kind of operations -----------------------------------------------------------------------------


def _by_kind(when: str, counted: Sequence[Counted], trace: Trace) -> Iterator[str]:
    """Yield a sentence for each kind of operation, by first call, with how many there are."""
    kinds = [*grouped(counted, lambda each: _kind(each[0])).values()]
    shown, more = kinds[:_KINDS_SHOWN], kinds[_KINDS_SHOWN:]
    for kind in shown:
        same, counts = zip(*kind, strict=True)
        yield f"{when}: {_sentence(same, sum(counts), trace)}"
    if more:
        count = sum(times for kind in more for _, times in kind)
        others = f"{count_text(count, 'more operation')} of {count_text(len(more), 'more kind')}"
        yield f"{when}: {others}; operations(trace) lists them."


def _kind(operation: Operation) -> Hashable:
    """Return all that a sentence says of an operation: two of one kind get the same words.

    The pairs of ranks follow from root, splits and algorithm. The sizes of RPC make a range.
    """
    sums = sums_of(operation)
    if operation.exchange is not None:
        known = [pair for pair in sums if pair.payload_bytes is not None]
        unknown = [pair for pair in sums if pair.payload_bytes is None]
        sums = [*unknown, *(pair._replace(payload_bytes=0) for pair in known)]
    what = operation.describe(tagged=operation.micro_batch is None)
    return (
        operation.op,
        "" if _fsdp2_calls([operation]) else what,  # Modules of one size are listed.
        operation.group.name,
        operation.sender,
        operation.receiver,
        _phase(operation),
        _root(operation),
        _sizes(operation),
        operation.missing,
        operation.refused,
        _errors(operation),
        operation.mismatch,
        frozenset(sums) or why_unknown(operation),
    )


def _fsdp2_calls(group: Sequence[Operation]) -> list[Collective]:
    """Return the first end of each operation whose module FSDP2 has named."""
    firsts = [operation.ends[0] for operation in group]
    return [first for first in firsts if isinstance(first, Collective) and first.module]


def _phase(operation: Operation) -> str:
    """Return the sender's phase; of a collective, "none" where the ranks are in different ones."""
    ends = operation.ends if operation.sender is None else operation.ends[:1]
    phases = {end.phase for end in ends}
    return phases.pop() if len(phases) == 1 else "none"


def _root(operation: Operation) -> int | None:
    first, members = operation.ends[0], operation.group.members
    root = first.root if isinstance(first, Collective) else None
    return members[root] if root is not None and root < len(members) else None


def _sizes(operation: Operation) -> tuple[int, int]:
    """Return the least and the most bytes that a rank hands to it."""
    calls = [end for end in operation.ends if not isinstance(end, Collective) or end.inputs]
    if operation.sender is not None:
        calls = calls[:1]
    sizes = [payload_bytes(end) for end in calls or operation.ends]
    return min(sizes), max(sizes)


def _errors(operation: Operation) -> tuple[tuple[int, str], ...]:
    return tuple((end.rank, end.error) for end in operation.ends if end.failed)


def _sentence(group: Sequence[Operation], count: int, trace: Trace) -> str:
    """Write "In all: all_reduce of 8 B (int64[1]), 3 times; 0→1: 8 B (derived)."."""
    first, phase, src, dst = group[0], _phase(group[0]), group[0].sender, group[0].receiver
    then = f" over {named}" if (named := first.group.named(trace.labels)) else ""
    then += f" in {_PHASES.get(phase, phase)}" if phase != "none" else ""
    batches = {each.micro_batch for each in group}
    then += f" of {len(batches):,} micro-batches" if len(batches) > 1 else ""
    then += f", {count:,} times" if count > 1 else ""
    size = _size_text(*_sizes(first))
    own = first.describe(most=NAMES_SHOWN, tagged=len(batches) == 1)
    what = modules_text(_fsdp2_calls(group)) or own
    if src is not None and dst is not None:
        sends = "was to send" if first.refused else "sends"
        sent = f"{size} ({what})" if what else "a message of unknown size"  # An object of mpi4py.
        text = f"{trace.label(src)} {sends} {trace.label(dst)} {sent}{then}"
        if isinstance(first.ends[0], ServiceCall):
            asked = f"{first.op} {what} ({size}){then}"
            text = f"{trace.label(src)} asks {trace.label(dst)}: {asked}"
        parts = [text, _outcome(first, trace)]
    else:
        text = f"{first.op} of {size} ({what}){then}" if what else f"{first.op}{then}"
        errors = _errors(first)
        if first.exchange is not None and errors:
            # The request and the reply of a call that fails are known.
            parts = [text, f"it raised {errors[0][1]}", _routes(group, trace)]
        else:
            parts = [text, _outcome(first, trace) or _routes(group, trace)]
    return "; ".join(filter(None, parts)) + "."


def _outcome(operation: Operation, trace: Trace) -> str:
    """Say what became of an operation that did not go through; nothing of any other."""
    if operation.missing:
        return missing_text(operation, trace)
    errors, alone = _errors(operation), operation.sender is not None
    if not errors:
        return mismatch_text(operation, trace) if alone else ""
    where = f"on {trace.labels.listed(rank for rank, _ in errors)}"
    if len(errors) == len(operation.group.members) > 1:
        where = "on every rank"
    why = ", ".join(dict.fromkeys(error for _, error in errors))
    if operation.refused:
        return f"refused at once {where} ({why}): nothing was sent"
    unknown = "" if alone else "which of its messages have travelled is not known"
    known = mismatch_text(operation, trace) or unknown
    text = f"it failed {where} ({why})"
    return f"{text}: {known}" if known else text


def _routes(group: Sequence[Operation], trace: Trace) -> str:
    """List the pairs of ranks by their bytes: "0→2, 1→0, 2→1: 6,880 B each (derived)"."""
    shown = group if group[0].exchange is not None else group[:1]
    for operation in shown:
        reason = None if sums_of(operation) else why_unknown(operation)
        if reason is not None:
            root = _root(operation)
            its_root = f" (its root is {trace.label(root)})" if root is not None else ""
            why = mismatch_text(operation, trace) or str(reason)
            return f"who sends to whom inside it is not known{its_root}: {why}"
    return _known_routes(shown, trace)


def _known_routes(group: Sequence[Operation], trace: Trace) -> str:
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    unsized: set[tuple[int, int]] = set()
    hows: set[str] = set()
    for operation in group:
        sent: Counter[tuple[int, int]] = Counter()
        for src, dst, how, size, _ in sums_of(operation):
            sent[src, dst] += size or 0
            hows.add(how)
            if size is None:
                unsized.add((src, dst))
        for ends, total in sent.items():
            sizes[ends].append(total)
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
    """Return "8 B"; of several sizes "8 to 1,000 B". `more`: and bytes that are not known."""
    if more and not most:
        return "a size that is not known"
    known = f"{most:,} B" if least == most else f"{least:,} to {most:,} B"
    return f"{known} and more" if more else known


def payload_text(message: Message) -> str:
    """Return "1,000 B", "no data", "data of unknown size"."""
    if message.payload_bytes is None:
        return "data of unknown size"
    return f"{message.payload_bytes:,} B" if message.payload_bytes else "no data"


def message_sentence(message: Message, trace: Trace) -> str:
    """Write "ps sends trainer1 500 of 1,000 B for all_reduce: uint8[1000] (derived)"."""
    src = trace.label(message.src)
    dst = trace.label(message.dst) if message.dst != message.src else "itself"
    size = payload_text(message)
    if message.payload_bytes and message.payload_bytes < message.whole_bytes:
        size = f"{message.payload_bytes:,} of {message.whole_bytes:,} B"
    why = f" for {message.op}{message.operation.group.over}" if message.op != "send" else ""
    carried = message.describe(most=NAMES_SHOWN)
    what = f"{why}: {carried}" if carried else why
    if message.how == "missing":
        return f"{src} was to send {dst} {size}{what}; it never came (missing)."
    confirmed_by = ", confirmed by the kernel's counters" if message.confirmed else ""
    return f"{src} sends {dst} {size}{what} ({message.how}{confirmed_by})."
