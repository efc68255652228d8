"""What became of the processes of a job, in sentences, from its files alone: who died where, and who waits for whom."""

from __future__ import annotations

import signal

from dlearn.analysis.hanging.hang_words import pace_text, tell, whereabouts
from dlearn.analysis.hanging.mismatches import mismatch_sentences, mismatches
from dlearn.analysis.hanging.stuck import exit_text, hangs, pace
from dlearn.trace.process import Process
from dlearn.trace.trace import Trace

_MISMATCHES_TOLD = 4
"""What went through and may be wrong: sentences about it."""


def story(trace: Trace) -> list[str]:
    """How each process that did not end well ended, what is stuck, what may be wrong; nothing where all is well."""
    # Status 0 without an end of the file is `os._exit(0)`: well, too.
    ended = [each for each in trace.processes if each.exit_status or (each.exit_status is None and not each.closed)]
    # Those first that nobody told to end, as torchrun tells the others of a rank that has failed.
    fates = [fate(process, trace) for process in sorted(ended, key=lambda each: each.exit_status == -signal.SIGTERM)]
    stuck = [each.sentence for each in tell(hangs(trace), trace)]
    went = pace(trace)
    if went is not None and went.slow:
        stuck.append(f"It was {pace_text(went)}")
    odd = mismatch_sentences(mismatches(trace), trace)
    more = [f"Observed: {len(odd) - _MISMATCHES_TOLD:,} more of this kind"] if len(odd) > _MISMATCHES_TOLD else []
    return [
        f"{sentence}."
        for sentence in (*fates, *stuck, *[f"Observed: {each}" for each in odd[:_MISMATCHES_TOLD]], *more)
    ]


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
        told.append(
            f"{process.header.host}'s is moved by {clock.offset_ns / 1e9:+,.6f} s, give or take"
            f" {clock.error_ns / 1000:,.1f} us ({drift})"
        )
    return f"{len(told) + 1} clocks: {'; '.join(told)}." if told else ""


def left_out_sentence(trace: Trace) -> str:
    """How much was not asked for; nothing where all was."""
    count = sum(process.footer.left_out for process in trace.processes if process.footer is not None)
    return f"Some steps only, as asked: {count:,} events outside them were not recorded." if count else ""
