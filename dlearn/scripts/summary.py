"""What `dlearn run` says at the end: where the trace is, how much it holds, and what to look at first."""

from __future__ import annotations

import shlex
from pathlib import Path

from dlearn.analysis.telling.explanations import overview, problem_sentences, rpc_overview
from dlearn.analysis.volume.reconcile import reconcile
from dlearn.diagnosis.post_mortem import story
from dlearn.errors import TraceError
from dlearn.join.wait_times import waiting
from dlearn.shown import count_text, time_text
from dlearn.trace import Trace

SENTENCES = 4
"""About what went wrong; the rest is in the trace."""
WORTH_SAYING = 0.1
"""A rank that was waited for this share of the time is worth a look."""


def summary(folder: Path, *, alone: bool = True) -> str:
    """Return a few lines for stderr. A script that ran `alone` may have wanted torchrun."""
    if not folder.is_dir() or not any(folder.glob("*.jsonl")):
        nothing = "dlearn: nothing was recorded: no process of this script used torch.distributed."
        wanted = "If it wants to be started by torchrun, say with how many ranks: dlearn run --nproc-per-node 2 ..."
        return f"{nothing} {wanted}" if alone else nothing
    try:
        trace = Trace.load(folder)
    except TraceError as error:
        return f"dlearn: what was recorded is in {folder}, and cannot be read: {error}"
    here = Path.cwd()
    shown = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    lines = [f"the trace is in {shown}", overview(trace)]
    lines += [rpc_overview(trace)] if trace.rpc.exchanges else []
    not_seen = reconcile(trace).whole.not_seen_bytes
    lines += [f"not seen: {not_seen:,} B were written that no recorded call accounts for"] if not_seen else []
    lines += _look_at(trace, shown)
    lines += problem_sentences(trace, SENTENCES)
    return "\n".join(f"dlearn: {line}" for line in lines)


def _look_at(trace: Trace, shown: str) -> list[str]:
    sentences = list(story(trace))
    if len(sentences) > SENTENCES:
        more = count_text(len(sentences) - SENTENCES, "more sentence")
        sentences[SENTENCES:] = [f"and {more} in dlearn.explain"]
    if sentences or not trace.events:
        return sentences
    where = shlex.quote(shown)
    draw = f"in words: dlearn explain {where}; as a picture: dlearn draw timeline {where} -o timeline.svg"
    lasted = max(event.end_ns or event.start_ns for event in trace.events) - trace.events[0].start_ns
    rank, waited = max(waiting(trace).items(), key=lambda pair: pair[1], default=(0, 0))
    if waited <= WORTH_SAYING * lasted:
        return [draw]
    of = f"{time_text(waited)} of {time_text(lasted)}"
    return [f"the others waited {of} for {trace.label(rank)}; {draw}"]
