"""What the clocks of several hosts have got wrong: operations that end before they can."""

from __future__ import annotations

from collections.abc import Sequence

from dlearn.trace.clocks import Clock
from dlearn.trace.event import Event
from dlearn.trace.message import Operation
from dlearn.trace.process import Process
from dlearn.trace.store import printable


def clock_problems(processes: Sequence[Process], matches: Sequence[Operation]) -> list[str]:
    """What keeps the times of several clocks from being compared, in words; nothing where all is well."""
    never = sorted({process.header.host for process in processes if process.clock.error_ns is None})
    if never:
        who = f"{', '.join(never[:8])}{', ...' if len(never) > 8 else ''}"
        return [
            printable(f"the clock of host {who} was never compared with that of the others: compare no times with it")
        ]
    clocks = {process.rank: process.clock for process in processes}
    wrong = [by for each in matches if (by := _backwards_by(each, clocks)) is not None]
    if not wrong:
        return []
    return [
        f"{len(wrong):,} of {len(matches):,} operations end before they can, by up to {max(wrong) / 1000:,.1f} us"
        " beyond the bound of the clocks' error: one of the hosts' clocks was set, or did not run evenly"
    ]


_ALL_WAIT = {
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
}
"""Collectives that end on no rank before they have begun on all."""


def _backwards_by(match: Operation, clocks: dict[int, Clock]) -> int | None:
    """By how many nanoseconds an end lies before a start that it needs, beyond the bound of both clocks' errors."""
    ends = match.ends
    if match.missing or any(end.failed for end in ends):
        return None
    if match.sender is None and ends[0].op not in _ALL_WAIT:
        return None
    pairs = [(begun, done) for begun in ends for done in ends if begun.op != "recv" and done.op != "send"]
    found = [
        begun.start_ns - done.end_ns - _bound(begun, clocks) - _bound(done, clocks)
        for begun, done in pairs
        if done.end_ns is not None and clocks[begun.rank] is not clocks[done.rank]
    ]
    worst = max(found, default=0)
    return worst if worst > 0 else None


def _bound(end: Event, clocks: dict[int, Clock]) -> int:
    return clocks[end.rank].error_at(end.start_ns - clocks[end.rank].offset_ns)
