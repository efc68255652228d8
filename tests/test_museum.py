"""What hangs, and what is wrong and does not. All exhibits: tests/frozen, and the notebook museum_of_hangs."""

import pytest

from dlearn import Cluster, explain
from dlearn.lessons import museum


def check_visit(seen: museum.Visit) -> None:
    """One sentence: while it hangs, in the run's error, from the files. (The notebook does the same with all.)"""
    shown = seen.exhibit
    assert shown.expects(seen.sentence), seen.files
    assert shown.ends == "wrong" or seen.sentence in seen.error
    if seen.hung:
        assert seen.sentence in seen.live, "the same, while it hung"
    else:
        assert shown.ends != "hangs" or "SIGABRT" in seen.error
        assert seen.live == ()


def test_an_exhibit_is_told_in_its_sentence_while_it_hangs_in_the_error_and_from_the_files():
    check_visit(museum.visit(museum.exhibit("unused_parameter"), timeout=4))
    assert Cluster(2, record=False).run(abs, -1).results == {0: 1, 1: 1}, "and the next run works"


@pytest.mark.parametrize(
    "calls",
    [
        [("broadcast", rank, {"site": f"a.py:{5 + rank}", "root": 0}) for rank in (0, 1)],
        [("all_reduce", rank, {"site": "a.py:5", "checksum": 7}) for _ in range(2) for rank in (0, 1)],
        [("all_reduce", rank, {"size": 4 + rank, "end_ns": None}) for rank in (0, 1)],
    ],
    ids=["a root in a branch of its own", "a count that is equal from the beginning", "a hang only"],
)
def test_nothing_is_observed_of_what_may_be_meant(job, calls):
    for op, rank, facts in calls:
        job.collective(op, ranks=[rank], **{"size": 4} | facts)
    assert "Observed: " not in str(explain(job.load()))
