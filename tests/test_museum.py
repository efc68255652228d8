"""Every exhibit of the museum of hangs is told in its sentence: while it hangs, in the run's error, from the files."""

import pytest
from museum_visits import check_visit
from traces import Job

from dlearn import Cluster
from dlearn.analysis import mismatches
from dlearn.analysis.hanging.mismatches import mismatch_sentences
from dlearn.analysis.telling.words import story
from dlearn.lessons import hangs as halls
from dlearn.lessons import museum
from dlearn.lessons.museum import EXHIBITS, exhibit
from dlearn.trace.trace import Trace


@pytest.mark.parametrize("name", ["unused_parameter", "swapped_of_equal_shape", "dead_rank"])
def test_an_exhibit_is_told_in_its_sentence(name):
    """Three of them: the notebook museum_of_hangs visits all, and is checked by the same function."""
    check_visit(museum.visit(exhibit(name), timeout=4))
    assert Cluster(2, record=False).run(abs, -1).results == {0: 1, 1: 1}, "and the next run works"


def test_there_are_at_least_twelve_and_each_is_shown_in_a_few_lines():
    assert len(EXHIBITS) >= 12
    assert len({each.name for each in EXHIBITS}) == len(EXHIBITS)
    assert all(each.source.count("\n") <= 15 for each in EXHIBITS)


def test_a_rank_that_raised_says_so_in_its_file():
    def one_fails():
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == 1:
            raise ValueError("no such file")
        dist.barrier()

    run = Cluster(2).run(one_fails, check=False)
    assert run.error.rank == 1
    (told,) = (each for each in story(Trace.load(run.folder / "trace")) if "waits for" in each)
    assert told.startswith("rank 0 waits for rank 1 in barrier #2 (")
    assert told.endswith("rank 1 never called it, it has raised ValueError.")


def told(job: Job) -> list[str]:
    trace = job.load()
    return mismatch_sentences(mismatches(trace), trace)


def test_calls_of_different_lines_are_observed(tmp_path):
    job = Job(tmp_path, ranks=2)
    for first, second in (("a.py:5", "a.py:6"), ("a.py:6", "a.py:5"), ("a.py:9", "a.py:9")):
        job.collective("all_reduce", size=4, ranks=[0], site=first)
        job.collective("all_reduce", size=4, ranks=[1], site=second)
    assert told(job) == [
        "rank 0 called all_reduce #1 at a.py:5, rank 1 at a.py:6; if these were not to meet, its result is wrong",
        "rank 0 called all_reduce #2 at a.py:6, rank 1 at a.py:5; if these were not to meet, its result is wrong",
    ]


def test_a_root_may_stand_in_a_branch_of_its_own(tmp_path):
    job = Job(tmp_path, ranks=2)
    for op in ("broadcast", "barrier"):
        job.collective(op, size=4, ranks=[0], root=0, site="a.py:5")
        job.collective(op, size=4, ranks=[1], root=0, site="a.py:6")
    assert told(job) == []


def test_equal_observations_are_told_once_with_their_number(tmp_path):
    job = Job(tmp_path, ranks=2)
    for _ in range(3):
        job.collective("all_gather", size=4, ranks=[0], site="a.py:5")
        job.collective("all_gather", size=4, ranks=[1], site="a.py:6")
    (sentence,) = told(job)
    assert sentence.startswith("rank 0 called all_gather #1 (and 2 more from there) at a.py:5, rank 1 at a.py:6;")


def test_equal_data_after_a_sum_of_different_data_is_observed(tmp_path):
    job = Job(tmp_path, ranks=2)
    for sums in ((1, 2), (3, 3)):
        for rank in (0, 1):
            job.collective("all_reduce", size=4, ranks=[rank], checksum=sums[rank], site="a.py:5")
    assert told(job) == [
        "all_reduce #2 (a.py:5): rank 0 and rank 1 gave the same data, as if these had been summed before;"
        " then they are now 2 times too large"
    ]


def test_equal_data_from_the_beginning_are_a_count_or_a_flag(tmp_path):
    job = Job(tmp_path, ranks=2)
    for _ in range(2):
        job.collective("all_reduce", size=4, checksum=7, site="a.py:5")
    assert told(job) == []


def test_what_hangs_is_told_as_a_hang_only(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, ranks=[0], end_ns=None, site="a.py:5")
    job.collective("all_reduce", size=8, ranks=[1], end_ns=None, site="a.py:6")
    assert told(job) == []


def test_checksums_of_collectives_on_request_only():
    def sums():
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.tensor([float(dist.get_rank())]))
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))

    noted = Cluster(2, checksums=True).run(sums).trace.where(kind="collective").events
    found = {(each.rank, each.op): each.checksum for each in noted}
    assert found[0, "all_reduce"] != found[1, "all_reduce"]
    assert found[0, "all_gather"] == found[1, "all_gather"] is not None
    plain = Cluster(2).run(sums).trace.where(kind="collective").events
    assert [each.checksum for each in plain] == [None] * 4


def test_the_exhibits_of_ddp_have_a_bucket_for_each_layer():
    model = halls.TwoBranches()
    layer = sum(parameter.numel() * 4 for parameter in model.b.parameters())
    assert layer == 16_640 > 0.0158 * 2**20 > layer - model.b.bias.numel() * 4
