"""All exercises, by the name that `lessons.check` takes, and the check."""

import zlib
from collections import Counter

from dlearn.course.by_sends import HIERARCHICAL, RING, TOKEN, TREE
from dlearn.course.causal_chunks import ZIG_ZAG
from dlearn.course.diagnosis import FIVE_HANGS
from dlearn.course.exercise import SECONDS, Exercise, Grade, first_failure
from dlearn.course.half_the_bytes import BFLOAT16_SUM
from dlearn.course.planned_bytes import PLAN_BYTES
from dlearn.course.routed_tokens import EXPERTS, TOP_TWO
from dlearn.course.split_layers import ATTENTION, FSDP, ONE_F_ONE_B
from dlearn.course.tensor_parallel import COLUMN_ROW, SEQUENCE
from dlearn.course.training_loops import ACCUMULATION, CHECKPOINT, DDP, SERVER, SHARDED, TOP_K
from dlearn.errors import DlearnError

_ALL = (
    *(TOKEN, RING, TREE, HIERARCHICAL, DDP, ACCUMULATION, SERVER, TOP_K),
    *(SHARDED, FSDP, COLUMN_ROW, SEQUENCE, EXPERTS, TOP_TWO, ATTENTION, ZIG_ZAG),
    *(ONE_F_ONE_B, PLAN_BYTES, BFLOAT16_SUM, CHECKPOINT, FIVE_HANGS),
)
EXERCISES = {each.id: each for each in _ALL}


def check(id: str, submission: object, *, student: str = "", seconds: float = SECONDS) -> Grade:
    """Run a submission on each number of ranks that its exercise names, and grade it by result and traffic.

    `student` chooses the random data, so that students cannot share an answer. Grading ends at the
    first number of ranks that fails. The grade says what is right and what went wrong, also where the
    submission hangs or raises; the hint is another one when the same is found again.
    """
    exercise = find(id)
    seed = zlib.crc32(student.encode())
    for count, ranks in enumerate(exercise.ranks, 1):
        failed = first_failure(exercise, submission, ranks=ranks, seed=seed, seconds=seconds)
        if failed is not None:
            before = _failures[id, student, failed.key]
            _failures[id, student, failed.key] += 1
            hints = tuple(exercise.hints[failed.key].splitlines())
            phrases = exercise.holds
            right = "; ".join(phrases[name] for name in failed.holds if name in phrases)
            tried = exercise.ranks[:count] if failed.key not in ("call", "form") else ()
            return Grade(id, False, tried, failed.finding, hints, right, before > 0)
    return Grade(id, passed=True, tried=exercise.ranks, right=exercise.explained(seed))


_failures: Counter[tuple[str, str, str]] = Counter()
"""How often this process has found the same: (exercise, student, finding) -> times."""


def find(id: str) -> Exercise:
    """Return the exercise of that name. Raises DlearnError with all names where there is none."""
    if id not in EXERCISES:
        raise DlearnError(f"there is no exercise {id!r}; there are: {', '.join(EXERCISES)}")
    return EXERCISES[id]
