"""Exercises that are graded by what crossed the wire, and predictions that are kept until the answer is known.

    from dlearn import lessons
    lessons.check("ring", my_ring)                 # in a notebook: passed, or the finding and one hint
    lessons.answer("fsdp2.bytes_of_fsdp", 24)      # right, or not yet and a hint
    lessons.predict("ring.bytes", 24_000)          # keeps what you expect, in a file beside your notebook

For pytest: `dlearn.course.pytest_plugin`. Solutions, right and wrong ones, stand apart in the
repository, in `course/solutions`.
"""

from dlearn.course.catalogue import check
from dlearn.course.criteria import assert_one_device
from dlearn.course.diagnosis import five_hangs
from dlearn.course.exercise import Exercise, Grade, ResultError
from dlearn.course.predictions import predict, report, stats
from dlearn.course.questions import Verdict, answer
from dlearn.course.submissions import grade

__all__ = ["Exercise", "Grade", "ResultError", "Verdict", "answer", "assert_one_device", "check"]
__all__ += ["five_hangs", "grade", "predict", "report", "stats"]
