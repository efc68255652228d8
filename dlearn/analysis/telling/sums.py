"""Sentences about how much is sent: in a trace or a part of it, and in one training step."""

from __future__ import annotations

from collections import Counter

from dlearn.analysis.ddp.step_traffic import typical_step
from dlearn.analysis.volume.traffic import Traffic, traffic_of
from dlearn.shown import count_text, listed
from dlearn.trace import Trace


def totals(part: str, sent: Traffic, over: str) -> str:
    """Sum up the bytes that each rank sent; `over` says how those to itself went."""
    operations_left = count_text(sent.unexplained, "operation")
    if sent.unexplained and not any(sent.by_how.values()):
        return f"In {part} how much each rank sends is not known: {operations_left} not counted."
    if not sent.by_how and not sent.unexplained:
        return f"In {part} no rank was seen sending anything."
    from_each = {rank: sent.bytes_from(rank=rank) for rank in sent.ranks}
    text = listed([f"{sent.labels[rank]} sends {size:,} B" for rank, size in from_each.items()])
    text = f"{text} of payload"
    if len(set(from_each.values())) == 1:
        text = f"every rank sends {from_each[sent.ranks[0]]:,} B of payload"
    text = f"In {part} {text}, {sent.total_bytes:,} B in all"
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
    """Write "In one training step (step 19: 1 all_reduce of 80 B) ..."; "" without steps."""
    found = typical_step(trace)
    if found is None:
        return ""
    counts, sizes = Counter[str](), Counter[str]()
    for one, times in found.operations.group_sizes():
        counts[one.op] += times
        sizes[one.op] += times * one.given_bytes
    calls = []
    for op, count in counts.items():
        size = f" of {sizes[op]:,} B{' in all' * (count > 1)}" * (sizes[op] > 0)
        calls.append(f"{count_text(count, op)}{size}")
    title, other = (each.removeprefix("training ") for each in (found.title, found.differs))
    part = f"one training step ({title}: {listed(calls)})"
    sends = totals(part, traffic_of(found.operations, trace), "")
    alike = f"All {found.steps:,} steps are alike."
    if other:
        some = f"{found.alike:,} of {found.steps:,} steps are alike; the" if found.alike > 1 else "The"
        alike = f"{some} first that differs is {other}."
    outside = count_text(found.outside, "operation")
    return f"{sends} {alike}" + f" Outside of the steps: {outside}." * (found.outside > 0)
