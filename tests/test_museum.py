"""What hangs, and what is wrong and does not. All exhibits: tests/frozen, and the notebook museum_of_hangs."""

import pytest
from traces import Job

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


ANOTHER = "if these were not to meet, its result is wrong"


def sites(op, *pairs, root=None):
    """Rank 0 calls it at the first line of each pair, rank 1 at the second."""
    return [(op, rank, {"site": f"a.py:{pair[rank]}", "root": root}) for pair in pairs for rank in (0, 1)]


def sums(*pairs):
    """Both ranks call all_reduce at one line, with data of these checksums."""
    return [("all_reduce", rank, {"site": "a.py:5", "checksum": pair[rank]}) for pair in pairs for rank in (0, 1)]


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (
            sites("all_reduce", (5, 6), (6, 5), (9, 9)),
            [
                f"rank 0 called all_reduce #1 at a.py:5, rank 1 at a.py:6; {ANOTHER}",
                f"rank 0 called all_reduce #2 at a.py:6, rank 1 at a.py:5; {ANOTHER}",
            ],
        ),
        (sites("broadcast", (5, 6), root=0), []),  # A root may stand in a branch of its own.
        (
            sums((1, 2), (3, 3)),
            [
                "all_reduce #2 (a.py:5): rank 0 and rank 1 gave the same data, as if these had been summed before;"
                " then they are now 2 times too large"
            ],
        ),
        (sums((7, 7), (7, 7)), []),  # Equal from the beginning: a count, or a flag.
        ([("all_reduce", rank, {"size": 4 + rank, "end_ns": None}) for rank in (0, 1)], []),  # A hang, and that only.
    ],
)
def test_what_may_be_wrong_is_observed_once(tmp_path, calls, told):
    job = Job(tmp_path, ranks=2)
    for op, rank, facts in calls:
        job.collective(op, ranks=[rank], **{"size": 4} | facts)
    observed = [each for each in explain(job.load()).sentences if each.startswith("Observed: ")]
    assert observed == [f"Observed: {each}." for each in told]
