"""The exercise `five_hangs`: five recorded jobs that hang, and who waits for whom in each. No code is asked for."""

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import hangs
from dlearn.analysis.findings import hang_finding
from dlearn.cluster import Cluster
from dlearn.course.exercise import Exercise
from dlearn.errors import DlearnError
from dlearn.events.event import Collective, PointToPoint
from dlearn.trace import Trace

RANKS = 3
SECONDS = (1.5, 3, 6, 12, 24, 48)
"""How long a job is recorded: the next where a rank, on a busy machine, had not come to its end."""

Wait = tuple[int, int, str]  # Who waits, for whom, the call: (0, 2, "all_reduce").


def left_out(one: int, other: int) -> None:
    for step in range(4):
        if dist.get_rank() != one or step != other:
            dist.all_reduce(torch.ones(10))


def never_sent(one: int, other: int) -> None:
    if dist.get_rank() == one:
        dist.recv(torch.zeros(10), src=other)


def another_tag(one: int, other: int) -> None:
    if dist.get_rank() == one:
        dist.send(torch.ones(10), dst=other, tag=1)
    elif dist.get_rank() == other:
        dist.recv(torch.zeros(10), src=one, tag=2)


def other_order(one: int, other: int) -> None:
    if dist.get_rank() == one:
        dist.send(torch.ones(10), dst=other)
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == other:
        dist.recv(torch.zeros(10), src=one)


def all_send_first(one: int, other: int) -> None:
    step = other - one
    dist.send(torch.ones(10), dst=(dist.get_rank() + step) % RANKS)
    dist.recv(torch.zeros(10), src=(dist.get_rank() - step) % RANKS)


JOBS: tuple[Callable[[int, int], None], ...] = (left_out, never_sent, another_tag, other_order, all_send_first)


@cache
def _recorded(seed: int) -> tuple[Trace, ...]:
    one = seed % RANKS
    other = (one + 1 + seed // RANKS % (RANKS - 1)) % RANKS
    return tuple(_until_stuck(job, one, other) for job in JOBS)


def _until_stuck(job: Callable[[int, int], None], one: int, other: int) -> Trace:
    """Record a job until each rank waits or has returned. DlearnError if that never comes."""
    for seconds in SECONDS:
        trace = Cluster(RANKS).run(job, one, other, timeout=seconds, check=False).trace
        done = {rank for hang in hangs(trace) for rank in hang.waiting}
        beats = {process.rank: process.heartbeat for process in trace.processes}
        done |= {rank for rank, beat in beats.items() if beat is not None and beat.ended}
        if done == set(range(RANKS)):
            return trace
    raise DlearnError(f"{job.__name__} does not hang within {SECONDS[-1]} s here; try again later")


def five_hangs(student: str = "") -> tuple[Trace, ...]:
    """Record five jobs of three ranks; `student` chooses which rank does what, as in `check`."""
    return _recorded(zlib.crc32(student.encode()))


def waits(trace: Trace) -> set[Wait]:
    found: set[Wait] = set()
    for hang in hangs(trace):
        for end in hang.operation.ends:
            if end.rank in hang.waiting and isinstance(end, Collective | PointToPoint):
                found |= {(end.rank, missing, end.op) for missing in hang.operation.missing}
    return found


def judge(answers: Any, seed: int) -> tuple[str, str] | None:
    """Return the finding and its key in tasks.toml, of the first wrong answer, or None."""
    if not isinstance(answers, list | tuple) or len(answers) != len(JOBS):
        return "there are not five answers", "form"
    for number, (answer, trace) in enumerate(zip(answers, _recorded(seed), strict=True), start=1):
        if answer is None:
            return f"job {number} has no answer yet", "form"
        if not isinstance(answer, list | tuple) or len(answer) != 3:
            return f"job {number}: {answer!r} is not (rank, for which rank, call)", "form"
        problem = _problem(tuple(answer), waits(trace))
        if problem:
            finding, key = problem
            return f"job {number}: {finding}", key
    return None


def _problem(answer: Wait, right: set[Wait]) -> tuple[str, str] | None:
    who, whom, call = answer
    if answer in right:
        return None
    if who not in {each[0] for each in right}:
        return f"rank {who} does not wait", "awake"
    if call not in {each[2] for each in right if each[0] == who}:
        return f"rank {who} does not wait in {call}", "call"
    return f"rank {who} waits in {call}, and not for rank {whom}", "whom"


def explained(seed: int) -> str:
    """Return the finding of each job, which its picture has above it outside of the exercise."""
    found = map(hang_finding, _recorded(seed))
    return "\n".join(f"job {number}: {finding}." for number, finding in enumerate(found, start=1))


FIVE_HANGS = Exercise("five_hangs", None, {}, ranks=(RANKS,), judge=judge, explained=explained)
