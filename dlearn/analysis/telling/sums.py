"""Sentences about sums: how much is sent, in a part or a step, and how long ranks waited."""

from collections import Counter
from collections.abc import Hashable

from dlearn.analysis.ddp.training_steps import last_step
from dlearn.analysis.volume.traffic import Traffic, traffic_of
from dlearn.events.event import Span
from dlearn.events.event_table import NONE
from dlearn.join.joining import operations
from dlearn.join.operation_messages import sums_of
from dlearn.join.tables.operations import Operations
from dlearn.join.training_phases import numbered_steps, steps_of
from dlearn.join.wait_times import waiting
from dlearn.shown import count_text, listed, time_text
from dlearn.trace import Trace

_WORTH_SAYING = 0.1  # A rank that was waited for this share of the time is worth a look.


def totals(part: str, sent: Traffic, over: str) -> str:
    """Sum up the bytes that each rank sent; `over` says how those to itself went."""
    operations_left = count_text(sent.unexplained, "operation")
    if sent.unexplained and not any(sent.by_how.values()):
        return f"In {part} how much each rank sends is not known: {operations_left} not counted."
    if not sent.by_how and not sent.unexplained:
        return f"In {part} no rank was seen sending anything."
    from_each = {rank: sent.bytes_from(rank=rank) for rank in sent.ranks}
    text = listed([f"{sent.labels[rank]} sends {size:,} B" for rank, size in from_each.items()])
    if len(set(from_each.values())) == 1:
        text = f"every rank sends {from_each[sent.ranks[0]]:,} B"
    text = f"In {part} {text} of payload, {sent.total_bytes:,} B in all"
    own = sum(size for (src, dst), size in sent.payload_bytes.items() if src == dst)
    if own:
        text += f", {own:,} B of it from a rank to itself{over}"
    if "missing" in sent.by_how:
        text += f"; {sent.by_how['missing']:,} B were expected and never came"
    if sent.unexplained:
        text += f"; {operations_left} not counted"
    if sent.unsized:
        text += f"; {count_text(sent.unsized, 'message')} of unknown size not counted"
    return f"{text}."


def step_sentence(trace: Trace) -> str:
    """Write "In one training step (step 19: 1 all_reduce of 80 B) ..."; "" of named ones."""
    titles, asked = [*numbered_steps(trace.whole).values()], operations(trace)
    step = steps_of(asked, trace.whole)
    outside = int((step == NONE).sum())
    if trace is not trace.whole or last_step(trace) or len(titles) < 2 or outside == len(asked):
        return ""
    calls = [Counter[Hashable]() for _ in titles]
    for one, places in asked.groups():
        kind = one.op, one.given_bytes, one.missing, frozenset(sums_of(one))
        for number in step[places[step[places] != NONE]].tolist():
            calls[number][kind] += 1
    sent = [frozenset(each.items()) for each in calls]
    usual, alike = Counter(filter(None, sent)).most_common(1)[0]
    last = max(number for number, each in enumerate(sent) if each == usual)
    differs = next((titles[number] for number, each in enumerate(sent) if each != usual), "")
    mine = Operations(asked.table, asked.rows[step == last], trace.labels)
    title, other = (each.removeprefix("training ") for each in (titles[last], differs))
    part = f"one training step ({title}: {_calls_text(mine)})"
    same = f"All {len(titles):,} steps are alike."
    if other:
        some = f"{alike:,} of {len(titles):,} steps are alike; the" if alike > 1 else "The"
        same = f"{some} first that differs is {other}."
    more = f" Outside of the steps: {count_text(outside, 'operation')}." * (outside > 0)
    return f"{totals(part, traffic_of(mine, trace), '')} {same}{more}"


def _calls_text(asked: Operations) -> str:
    counts, sizes = Counter[str](), Counter[str]()
    for one, times in asked.group_sizes():
        counts[one.op] += times
        sizes[one.op] += times * one.given_bytes
    calls = []
    for op, count in counts.items():
        size = f" of {sizes[op]:,} B{' in all' * (count > 1)}" * (sizes[op] > 0)
        calls.append(f"{count_text(count, op)}{size}")
    return listed(calls)


def late_text(trace: Trace) -> str:
    """Write "the others waited 3.7 s of 5.7 s for rank 1"; "" if that is little, or goes on.

    Ranks start one after the other: waits before all have met count nothing. Nor does a held job's.
    """
    whole, ranks = operations(trace.whole), {*trace.whole.ranks}
    met = [int(places[0]) for one, places in whole.groups() if {*one.ranks} == ranks]
    since_ns = whole[min(met)].last_arrival_ns if met else trace.first_ns
    later = trace.between((since_ns - trace.first_ns) / 1e6)
    table, rows = later.table, later.rows.rows
    since_ns = max([since_ns, *table.start_ns[rows[:1]]])
    lasted = table.end_ns[rows].max(initial=since_ns) - since_ns
    rank, waited = max(waiting(later).items(), key=lambda pair: pair[1], default=(0, 0))
    goes_on = table.pending[trace.rows.rows].any() or any(span.held for span in trace.of(Span))
    if waited <= _WORTH_SAYING * lasted or goes_on:
        return ""
    others = [trace.label(each) for each in trace.ranks if each != rank]
    who = others[0] if len(others) == 1 else "the others"
    return f"{who} waited {time_text(waited)} of {time_text(lasted)} for {trace.label(rank)}"
