"""The exercise `five_hangs`: five recorded jobs that hang, and who waits for whom in each. No code is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import hangs
from dlearn.cluster import Cluster
from dlearn.course.exercise import Exercise
from dlearn.events.event import Collective, PointToPoint
from dlearn.trace import Trace

RANKS, SECONDS = 3, 1.5

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
    return tuple(Cluster(RANKS).run(job, one, other, timeout=SECONDS, check=False).trace for job in JOBS)


def five_hangs(student: str = "") -> tuple[Trace, ...]:
    """Record five jobs of three ranks; `student` chooses which rank does what, as in `check`."""
    return _recorded(zlib.crc32(student.encode()))


def waits(trace: Trace) -> set[Wait]:
    """Return all waits of a job that hangs."""
    found: set[Wait] = set()
    for hang in hangs(trace):
        for end in hang.operation.ends:
            if end.rank in hang.waiting and isinstance(end, Collective | PointToPoint):
                found |= {(end.rank, missing, end.op) for missing in hang.operation.missing}
    return found


def judge(answers: Any, seed: int) -> tuple[str, str] | None:
    """Return the finding and the hint of the first wrong answer, or None."""
    wanted = 'five answers, each (who, for whom, call), as in (0, 2, "all_reduce")'
    if not isinstance(answers, list | tuple) or len(answers) != len(JOBS):
        return f"there are not {wanted}", "One answer for each trace of `five_hangs(student)`, in their order."
    for number, (answer, trace) in enumerate(zip(answers, _recorded(seed), strict=True), start=1):
        if not isinstance(answer, list | tuple) or len(answer) != 3:
            return f"job {number}: {answer!r} is not (who, for whom, call)", f"Give {wanted}."
        problem = _problem(tuple(answer), waits(trace))
        if problem:
            finding, hint = problem
            return f"job {number}: {finding}", hint
    return None


def _problem(answer: Wait, right: set[Wait]) -> tuple[str, str] | None:
    who, whom, call = answer
    if answer in right:
        return None
    if who not in {each[0] for each in right}:
        return f"rank {who} does not wait", "Which call was begun and has not ended? Draw the timeline of this trace."
    if call not in {each[2] for each in right if each[0] == who}:
        return f"rank {who} does not wait in {call}", "What is the last call of that rank, the one without an end?"
    hint = "Which rank has to take part in that call, and has not begun it?"
    return f"rank {who} waits in {call}, and not for rank {whom}", hint


FIVE_HANGS = Exercise("five_hangs", drive=None, criteria={}, ranks=(RANKS,), judge=judge)
