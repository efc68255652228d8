"""An exercise, an attempt at it on real ranks, and its grade: what is right, a finding, a hint."""

import inspect
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist

from dlearn.cluster import Cluster
from dlearn.errors import DlearnError, RankError, TrafficError
from dlearn.join.message_evidence import messages
from dlearn.recorder import span
from dlearn.shown import Shown
from dlearn.trace import Trace

TASKS = files("dlearn.course") / "tasks.toml"
SECONDS = 20.0  # Limit for one run: a submission that takes longer hangs.
SPAN = "exercise"  # The span around a submission's own calls; what the grader does is not in it.
ITEMS = 1_200  # Of a tensor; 2, 3 and 4 divide it. 8 B each.


class ResultError(DlearnError, AssertionError):
    """A wrong result of a rank, how far off; `finding`: a known mistake's key in tasks.toml."""

    def __init__(self, text: str, finding: str = "") -> None:
        super().__init__(text)
        self.finding = finding


class KnownTraffic(ResultError, TrafficError):
    """Wrong traffic, and the known mistake's key in tasks.toml."""


@dataclass(frozen=True)
class Attempt:
    """One run of a submission: what `drive` returned on each rank, and the trace of its span."""

    ranks: int
    seed: int
    results: Mapping[int, Any]
    trace: Trace


Drive = Callable[[Any, int], Any]  # Runs on every rank: calls the submission, inside `SPAN`.
Criterion = Callable[[Attempt], None]  # Raises a DlearnError where the attempt is wrong.


def submit(submission: Callable[..., Any], *arguments: Any) -> Any:
    """Call the submission on this rank, inside `SPAN`, and return what it returns."""
    with span(SPAN):
        return submission(*arguments)


def left_in(tensor: torch.Tensor, submission: Callable[..., Any], *more: Any) -> torch.Tensor:
    """Call the submission on a tensor, and more, and return the tensor as it leaves it."""
    submit(submission, tensor, *more)
    return tensor


def numbers(count: int, *seed: int) -> torch.Tensor:
    """Return random float64 numbers from 0 to 1, [count]: the same on every rank for one seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.rand(count, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Exercise:
    """An exercise: what runs on each rank, the criteria in their order, and the numbers of ranks."""

    id: str
    drive: Drive | None
    criteria: Mapping[str, Criterion]
    """Name of the hint in tasks.toml -> criterion."""
    ranks: tuple[int, ...] = (2, 3, 4)
    judge: Callable[[Any, int], tuple[str, str] | None] | None = None
    """Replaces a run where answers are no code: (answers, seed) -> finding and its key, or None."""
    explained: Callable[[int], str] = lambda seed: ""  # What to say of right answers.
    silent: bool = False
    """Whether a right submission sends nothing."""

    @property
    def asks(self) -> str:
        """Return the task as students read it."""
        return str(_tasks()[self.id]["asks"])

    @property
    def hints(self) -> dict[str, str]:
        """Return two lines for each finding: its own, else the general ones."""
        tasks = _tasks()
        return {**tasks["findings"], **tasks[self.id]}

    @property
    def holds(self) -> dict[str, str]:
        """Return what to say where a criterion holds: its own words, else the general ones."""
        tasks = _tasks()
        return {**tasks["holds"], **tasks[self.id].get("holds", {})}


def _tasks() -> dict[str, Any]:
    return tomllib.loads(TASKS.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Failure:
    """The first criterion that fails, or the mistake recognised, and which criteria hold."""

    key: str
    finding: str
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Grade(Shown):
    """The outcome of `check`: passed, or where it failed, what is right, what not, and a hint."""

    exercise: str
    passed: bool
    tried: tuple[int, ...]
    finding: str = ""
    hints: tuple[str, ...] = ()
    """The first, and one for the next time that the same is found."""
    right: str = ""
    again: bool = False

    @property
    def hint(self) -> str:
        """Return the second hint if the same was found before, else the first."""
        return self.hints[-1 if self.again else 0] if self.hints else ""

    def paragraphs(self) -> Iterator[str]:
        ranks = ", ".join(map(str, self.tried))
        if self.passed:
            by = f", by its result and by what crossed the wire, on {ranks} ranks"
            yield f"{self.exercise}: passed" + ("" if self.right else by)
            yield from self.right.splitlines()
            return
        before, _, last = ranks.rpartition(", ")
        passed = f" Passed on {before} ranks." if before else ""
        failed = f" On {last} ranks:" if last else ""
        yield f"{self.exercise}: not yet.{passed}{failed}"
        if self.right:
            yield f"Right: {self.right}."
        yield self.finding
        yield f"Hint: {self.hint}"


def first_failure(
    exercise: Exercise, submission: Any, *, ranks: int, seed: int, seconds: float = SECONDS
) -> Failure | None:
    """Return what is wrong on so many ranks, and what is right there; None if all criteria hold."""
    if exercise.judge is not None:
        judged = exercise.judge(submission, seed)
        return judged and Failure(judged[1], judged[0])
    if problem := _wrong_call(exercise, submission):
        return Failure("call", problem)
    assert exercise.drive is not None
    try:
        cluster = Cluster(ranks, backend="dlearn_ring", checksums=True)
        run = cluster.run(_run_on_rank, exercise.drive, submission, seed, timeout=seconds)
    except RankError as error:
        finding = "\n".join(part for part in (error.what, error.details.rstrip()) if part)
        return Failure("hang" if error.rank is None else "error", finding)
    return _judged(exercise, Attempt(ranks, seed, run.results, run.trace.within(SPAN)))


def _judged(exercise: Exercise, tried: Attempt) -> Failure | None:
    """Try all criteria: the first that fails is the finding, and those that hold are right."""
    first: Failure | None = None
    holds, known = [], exercise.hints
    for name, criterion in exercise.criteria.items():
        try:
            criterion(tried)
            holds.append(name)
        except DlearnError as error:
            finding = getattr(error, "finding", "")
            first = first or Failure(finding if finding in known else name, str(error))
    if first is None:
        return None
    if not exercise.silent and not messages(tried.trace):
        return Failure("nothing_sent", "no rank has sent anything to another")
    return replace(first, holds=tuple(holds))


def _run_on_rank(drive: Drive, submission: Any, seed: int) -> Any:
    if dist.get_rank():  # One rank is enough to say which of torch's names are deprecated.
        warnings.simplefilter("ignore", FutureWarning)
    return drive(submission, seed)


def _wrong_call(exercise: Exercise, submission: Any) -> str:
    """Return why a submission cannot be called as the task says; "" if it can."""
    calls = re.findall(r"`(f|save|load)\((.*?)\)`", exercise.asks)
    functions = submission if len(calls) > 1 else (submission,)
    if not isinstance(functions, tuple | list) or len(functions) != len(calls):
        wanted = ", ".join(name for name, _ in calls)
        return f"give the functions ({wanted}), and not {type(submission).__name__}"
    for (name, parameters), function in zip(calls, functions, strict=True):
        if not callable(function):
            return f"give a function, {name}({parameters}), and not {type(function).__name__}"
        try:
            inspect.signature(function).bind(*parameters.split(", "))
        except TypeError as error:
            called = getattr(function, "__name__", type(function).__name__)
            return f"{called} cannot be called as {name}({parameters}): {error}"
        except ValueError:  # some functions of C have no signature: the ranks try it
            continue
    return ""
