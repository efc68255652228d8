"""All exercises, by the name that `lessons.check` takes, and the check."""

import zlib

from dlearn.course.by_sends import HIERARCHICAL, RING, TOKEN, TREE
from dlearn.course.diagnosis import FIVE_HANGS
from dlearn.course.exercise import SECONDS, Exercise, Grade, first_failure
from dlearn.course.split_layers import ATTENTION, COLUMN_ROW, EXPERTS, FSDP, ONE_F_ONE_B
from dlearn.course.training_loops import ACCUMULATION, CHECKPOINT, DDP, SERVER, SHARDED, TOP_K
from dlearn.errors import DlearnError

_ALL = (
    *(TOKEN, RING, TREE, HIERARCHICAL, DDP, ACCUMULATION, SERVER, TOP_K),
    *(SHARDED, FSDP, COLUMN_ROW, EXPERTS, ATTENTION, ONE_F_ONE_B, CHECKPOINT, FIVE_HANGS),
)
EXERCISES = {each.id: each for each in _ALL}


def check(id: str, submission: object, *, student: str = "", seconds: float = SECONDS) -> Grade:
    """Run a submission on each number of ranks that its exercise names, and grade it by result and traffic.

    `student` chooses the random data, so that students cannot share an answer. Grading ends at the first criterion
    that fails. The grade says what went wrong, also where the submission hangs or raises.
    """
    exercise = find(id)
    for count, ranks in enumerate(exercise.ranks, 1):
        failed = first_failure(exercise, submission, ranks=ranks, seed=zlib.crc32(student.encode()), seconds=seconds)
        if failed is not None:
            return Grade(id, False, exercise.ranks[:count], *failed)
    return Grade(id, passed=True, tried=exercise.ranks)


def find(id: str) -> Exercise:
    """Return the exercise of that name. Raises DlearnError with all names where there is none."""
    if id not in EXERCISES:
        raise DlearnError(f"there is no exercise {id!r}; there are: {', '.join(EXERCISES)}")
    return EXERCISES[id]
