"""Which rank failed first, and what to tell the person at the keyboard."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlearn.analysis.hanging.hang_words import pace_text, tell, whereabouts
from dlearn.analysis.hanging.stuck import exit_text, hangs, pace
from dlearn.cluster.answers import Raised, Returned
from dlearn.cluster.payload import Environment
from dlearn.cluster.rank_pool import Died, Ended, Outcome
from dlearn.cluster.rank_process import StackLine
from dlearn.errors import RankError, TraceError
from dlearn.events.site import file_label

if TYPE_CHECKING:
    from dlearn.cluster.run import Run
    from dlearn.trace import Trace

_BROKEN_CONNECTION = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "DistNetworkError",
    "EOF: end of file (this error originated at tensorpipe",
)
"""What gloo and the store say on the ranks that were left behind. Never the cause."""
_NO_WAY_OUT = ("Network is unreachable", "Temporary failure in name resolution", "Name or service not known")


def rank_error(
    names: Sequence[int | str],
    outcomes: Sequence[Outcome],
    run: Run,
    timeout: float | None,
    around: Environment,
) -> RankError | None:
    failed = [index for index, outcome in enumerate(outcomes) if not isinstance(outcome, Returned)]
    if not failed:
        return None
    trace = _trace(run)
    first = min(failed, key=lambda index: _order(outcomes[index]))
    outcome = outcomes[first]
    if isinstance(outcome, Ended):
        return _hang(names, outcomes, run, trace, timeout, around)
    if isinstance(outcome, Raised) and len(names) > 1 and _all_the_same(outcomes):
        what = f"all {len(names)} ranks failed: {_told(outcome)}"
    else:
        what = f"{who(names[first])} {_what(outcome)}"
        others = [
            _then(names[index], index, outcomes[index], trace)
            for index in failed
            if index != first and outcomes[index] != Ended(begun=False)
        ]
        if others:
            what += "\nthen: " + "; ".join(others)
    if trace is not None:
        # A connection broke or timed out, and nobody failed before: the trace knows who was waited for. And gloo ends
        # a process whose peer sends more than it has room for: the trace knows whose calls do not fit together.
        # And of a rank that died, who waited for it.
        aborted = isinstance(outcome, Died) and outcome.exit_code == -signal.SIGABRT
        told = [
            each
            for each in hangs(trace)
            if _is_broken(outcome)
            or (aborted and each.operation.misfit is not None)
            or (isinstance(outcome, Died) and first in each.operation.missing)
        ]
        what += "".join(f"\n{each.sentence}." for each in tell(told, trace))
    details = _without_wall(outcome.traceback) if isinstance(outcome, Raised) else ""
    return RankError(rank=names[first], what=what, hint=_hint(outcome, run), details=details, run=run)


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
    told = [(outcome.type, outcome.message) for outcome in outcomes if isinstance(outcome, Raised)]
    return len(told) == len(outcomes) and len(set(told)) == 1


def _what(outcome: Outcome) -> str:
    match outcome:
        case Raised():
            return f"failed first: {_told(outcome)}"
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


_REMOTE = re.compile(r"On WorkerInfo\(id=\d+, name=(\S+)\):\n(.*?)\nTraceback", re.DOTALL)
"""What torch says of an exception that another worker raised: a wall, and who and what is in its midst."""


_WALL = re.compile(r"\n+(?:At:|Exception raised from)")


def _told(outcome: Raised) -> str:
    """Return class and message, without the stacks that torch's RPC puts into it."""
    remote = list(_REMOTE.finditer(outcome.message))
    if remote:
        last = remote[-1]
        return f"{last[2]}, raised on {last[1]} in a call by RPC"
    message = _without_wall(outcome.message)
    return f"{outcome.type}: {message}" if message else outcome.type


def _without_wall(text: str) -> str:
    return _WALL.split(text)[0]


def _then(name: int | str, index: int, outcome: Outcome, trace: Trace | None) -> str:
    match outcome:
        case Raised():
            line = next(iter(_told(outcome).splitlines()), "")
            return f"{who(name)}: {line[:200]}"
        case Died():
            return f"{who(name)} {_what(outcome)}"
    where = whereabouts(trace, index) if trace is not None else ""
    return f"{who(name)} {where or 'was still at work'} and was stopped"


def _hang(
    names: Sequence[int | str],
    outcomes: Sequence[Outcome],
    run: Run,
    trace: Trace | None,
    timeout: float | None,
    around: Environment,
) -> RankError:
    late = [names[index] for index, outcome in enumerate(outcomes) if isinstance(outcome, Ended)]
    names_of_late = ", ".join(who(name) for name in late)
    found = hangs(trace) if trace is not None else ()
    notes = {index: note for index, outcome in enumerate(outcomes) if (note := _note(outcome, around))}
    if trace is not None and found:
        reason = ". ".join(each.sentence for each in tell(found, trace, notes))
        hint = "run(..., check=False) returns what was recorded; draw.timeline(its .trace) draws the hang."
    else:
        went = pace(trace) if trace is not None else None
        if went is not None and went.slow:
            reason = pace_text(went)
        else:
            idle = ", inside no recorded call" if trace is not None else ""
            where = "; ".join(f"{who(names[index])} {note}" for index, note in notes.items())
            are = "is" if len(late) == 1 else "are"
            reason = f"{names_of_late} {are} still at work{idle}" + (f" ({where})" if where else "")
        hint = "a longer run(..., timeout=...), if the ranks were only slow."
    what = f"not done after {timeout:g} s: {reason}."
    return RankError(rank=None, what=what, hint=hint, run=run)


def _note(outcome: Outcome, around: Environment) -> str:
    match outcome:
        case Returned():
            return "has called sys.exit" if outcome.exited else "has returned from its function"
        case Ended(halted=True):
            return "is stopped (SIGSTOP or a debugger: state T)"
        case Ended():
            return _place(outcome.stack, around)
    return ""


def _place(stack: Sequence[StackLine], around: Environment) -> str:
    """Return the innermost line of the user's own code, as in "is at train.py:31"."""
    cells = {file: name for file, (name, _) in around.cells.items()}
    return f"is at {file_label(stack[0].file, cells, around.directory)}:{stack[0].line}" if stack else ""


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
    if not run.recorded:
        return None
    try:
        return run.trace
    except TraceError:
        return None  # A rank died before it could write its first line: there is no trace to ask.


def who(name: int | str) -> str:
    return f"rank {name}" if isinstance(name, int) else name
