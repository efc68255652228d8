"""Which rank failed first, and the sentences that say so."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dlearn.cluster.answers import Raised, Returned
from dlearn.cluster.payload import notebook_cells
from dlearn.cluster.rank_pool import DEFAULT_SECONDS, Died, Ended, Outcome
from dlearn.diagnosis.hang_detection import Hang, exit_text, hangs, pace
from dlearn.diagnosis.hang_report import pace_text, report, whereabouts
from dlearn.diagnosis.meeting_report import meeting_report
from dlearn.errors import RankError, TraceError
from dlearn.events.site import file_label
from dlearn.live.gate_server import Name, rank_text

if TYPE_CHECKING:
    from dlearn.cluster.run import Run
    from dlearn.trace import Trace

_BROKEN_CONNECTION = (
    "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting", "DistNetworkError",
    "EOF: end of file (this error originated at tensorpipe",
)  # fmt: skip
"""What gloo and the store say on the ranks that were left behind. Never the cause."""
_REMOTE = re.compile(r"On WorkerInfo\(id=\d+, name=(\S+)\):\n(.*?)\nTraceback", re.DOTALL)
"""What torch says of an exception that another worker raised, between stacks."""
_STACKS = re.compile(r"\n+(?:At:|Exception raised from)")
_NO_WAY_OUT = ("Network is unreachable", "Temporary failure in name resolution", "Name or service not known")


def rank_error(
    names: Sequence[Name], outcomes: Sequence[Outcome], run: Run, timeout: float | None
) -> RankError | None:  # fmt: skip
    """Return the error of a run in which a rank failed, or was still at work at the timeout."""
    failed = [index for index, outcome in enumerate(outcomes) if not isinstance(outcome, Returned)]
    if not failed:
        return None
    trace = _trace(run)
    first = min(failed, key=lambda index: _order(outcomes[index]))
    outcome = outcomes[first]
    if isinstance(outcome, Ended):
        return _hang(names, outcomes, run, trace, timeout)
    if isinstance(outcome, Raised) and len(names) > 1 and _all_the_same(outcomes):
        what = f"all {len(names)} ranks failed: {_exception_text(outcome)}"
    else:
        what = f"{rank_text(names[first])} {_what(outcome)}"
        failed = [index for index in failed if index != first]
        then = [_then(names[index], index, outcomes[index], trace) for index in failed]
        if any(then):
            what += "\nthen: " + "; ".join(filter(None, then))
    if trace is not None:
        related = [hang for hang in hangs(trace) if _is_part(hang, outcome, first)]
        what += "".join(f"\n{hang.sentence}." for hang in report(related, trace))
    details = _without_stacks(outcome.traceback) if isinstance(outcome, Raised) else ""
    return RankError(rank=names[first], what=what, hint=_hint(outcome, run), details=details, run=run)


def _is_part(hang: Hang, outcome: Outcome, first: int) -> bool:
    """Return whether a hang is part of the fault of the rank that failed first."""
    if isinstance(outcome, Died):
        # gloo ends a process whose peer sends more than it has room for: whose calls do not fit?
        aborted = outcome.exit_code == -signal.SIGABRT and hang.operation.mismatch is not None
        return aborted or first in hang.operation.missing
    # A connection broke or timed out, and no rank failed before: which one was waited for?
    return _is_broken(outcome)


def _order(outcome: Outcome) -> tuple[int, int]:
    """Return a sort key: a rank's own death or exception, the earliest first; lost ranks; broken connections."""
    match outcome:
        case Died():
            return (2 if outcome.lost and not outcome.aborted_mpi else 1, outcome.at_ns)
        case Raised():
            return (3 if _is_broken(outcome) else 1, outcome.at_ns)
        case _:
            return (4, 0)


def _is_broken(outcome: Outcome) -> bool:
    return isinstance(outcome, Raised) and any(text in outcome.message for text in _BROKEN_CONNECTION)


def _all_the_same(outcomes: Sequence[Outcome]) -> bool:
    raised = [(outcome.type, outcome.message) for outcome in outcomes if isinstance(outcome, Raised)]
    return len(raised) == len(outcomes) and len(set(raised)) == 1


def _what(outcome: Outcome) -> str:
    match outcome:
        case Raised():
            return f"failed first: {_exception_text(outcome)}"
        case Died(exit_code=code) if code == -signal.SIGABRT:
            return "aborted in C++ (SIGABRT)" + _last_line(outcome)
        case Died(exit_code=int(code)) if code < 0:
            return exit_text(code)
        case Died(aborted_mpi=True):
            return outcome.lost + _last_line(outcome)
        case Died() if outcome.lost:
            return outcome.lost
        case Died(exit_code=None):
            return "closed its connection to the notebook, and cannot say what became of its function"
        case Died():
            return f"died: it exited with code {outcome.exit_code} inside its function"
    return ""


def _last_line(outcome: Died) -> str:
    return f". Its last line: {outcome.last_line}" if outcome.last_line else ""


def _exception_text(outcome: Raised) -> str:
    """Return class and message, without the stacks that torch's RPC puts into it."""
    remote = list(_REMOTE.finditer(outcome.message))
    if remote:
        return f"{remote[-1][2]}, raised on {remote[-1][1]} in a call by RPC"
    message = _without_stacks(outcome.message)
    return f"{outcome.type}: {message}" if message else outcome.type


def _without_stacks(text: str) -> str:
    return _STACKS.split(text)[0]


def _then(name: Name, index: int, outcome: Outcome, trace: Trace | None) -> str:
    match outcome:
        case Raised():
            line = next(iter(_exception_text(outcome).splitlines()), "")
            return f"{rank_text(name)}: {line[:200]}"
        case Died():
            return f"{rank_text(name)} {_what(outcome)}"
    if outcome == Ended(begun=False):
        return ""
    where = whereabouts(trace, index) if trace is not None else ""
    return f"{rank_text(name)} {where or 'was still at work'} and was stopped"


def _hang(
    names: Sequence[Name], outcomes: Sequence[Outcome], run: Run, trace: Trace | None,
    timeout: float | None,
) -> RankError:  # fmt: skip
    hung = hangs(trace) if trace is not None else ()
    notes = {index: note for index, outcome in enumerate(outcomes) if (note := _note(outcome))}
    hint = "a longer run(..., timeout=...), if the ranks were only slow."
    sentences = []
    if trace is not None:
        sentences += [hang.sentence for hang in report(hung, trace, notes)]
        sentences += [sentence for _, sentence in meeting_report(trace, hung, notes)]
    if sentences:
        reason = ". ".join(sentences)
        slow = f" Or {hint}" if timeout is DEFAULT_SECONDS else ""
        hint = "run(..., check=False) returns what was recorded; draw.timeline(its .trace) draws the hang."
        hint += slow
    elif trace is not None and (went := pace(trace)) is not None and went.slow:
        reason = pace_text(went)
    else:
        pairs = zip(names, outcomes, strict=True)
        late = [rank_text(name) for name, outcome in pairs if isinstance(outcome, Ended)]
        are = "is" if len(late) == 1 else "are"
        idle = ", inside no recorded call" if trace is not None else ""
        where = "; ".join(f"{rank_text(names[index])} {note}" for index, note in notes.items())
        reason = f"{', '.join(late)} {are} still at work{idle}" + (f" ({where})" if where else "")
    limit = f"{timeout:g} s, the default limit" if timeout is DEFAULT_SECONDS else f"{timeout:g} s"
    return RankError(rank=None, what=f"not done after {limit}: {reason}.", hint=hint, run=run)


def _note(outcome: Outcome) -> str:
    """Return what a rank that is waited for does now, as in "is at train.py:31"."""
    match outcome:
        case Returned():
            return "has called sys.exit" if outcome.exited else "has returned from its function"
        case Ended(halted=True):
            return "is stopped (SIGSTOP or a debugger: state T)"
        case Ended(stack=(innermost, *_)):
            cells = {file: name for file, (name, _) in notebook_cells().items()}
            return f"is at {file_label(innermost.file, cells, os.getcwd())}:{innermost.line}"
    return ""


def _hint(outcome: Outcome, run: Run) -> str:
    if isinstance(outcome, Died) and outcome.lost and outcome.beside_engine:
        return "a new Cluster(engine=...) takes the engines that are left; error.run holds what was recorded."
    if isinstance(outcome, Died) and outcome.exit_code == -signal.SIGKILL:
        return "the system may have run out of memory (fewer ranks, smaller batches)."
    if isinstance(outcome, Died):
        return "error.run.output holds what each rank printed, error.run.trace what it sent."
    if isinstance(outcome, Raised) and run.private and any(words in outcome.message for words in _NO_WAY_OUT):
        return "these ranks reach each other and nothing else; Cluster(..., private=False) gives them a way out."
    return ""


def _trace(run: Run) -> Trace | None:
    with suppress(TraceError):  # A rank may have died before it could write its first line.
        return run.trace if run.recorded else None
    return None
