"""A timeline of many ranks: one lane for those that are alike, a lane of its own for whoever is odd."""

import pytest
from traces import Job

from dlearn import draw

MS = 10**6


def job(folder, *, ranks=64, late=None, never=None, odd=None):
    """Two all-reduces; to the second one rank comes 2 ms late, or never. One has a span of another name."""
    made = Job(folder, ranks=ranks)
    for rank in range(ranks):
        made.span(rank, "other" if rank == odd else "step 0", start_ns=0, end_ns=10 * MS)
    made.collective("all_reduce", size=64, start_ns={rank: MS + 1000 * rank for rank in range(ranks)}, end_ns=3 * MS)
    starts = {rank: 4 * MS + (2 * MS if rank == late else 0) for rank in range(ranks) if rank != never}
    made.collective("all_reduce", size=64, ranks=starts, start_ns=starts, end_ns=8 * MS if never is None else None)
    return made.load()


def lanes(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("ranks", "happened", "shown", "said"),
    [
        (64, {"late": 17}, ["rank 0", "rank 17", "61 alike"], "for rank 17, 2.00 ms"),
        (64, {"never": 5}, ["rank 5", "62 alike"], "wait for rank 5"),
        (24, {"late": 17}, [f"rank {rank}" for rank in range(24)], "for rank 17, 2.00 ms"),
    ],
)
def test_the_odd_rank_has_a_lane_of_its_own_and_the_others_share_one(tmp_path, ranks, happened, shown, said):
    ax = draw.timeline(job(tmp_path, ranks=ranks, **happened))
    assert [name.split("\nand ")[-1] for name in lanes(ax)] == shown
    assert said in " ".join(ax.get_title(loc="left").split())
    assert any("each call within 3% of the picture's width" in text for text in texts(ax)) == (ranks > 24)


@pytest.mark.parametrize(("ranks", "odd", "once"), [(3, None, False), (16, None, True), (16, 9, False)])
def test_spans_that_all_ranks_have_are_named_once(tmp_path, ranks, odd, once):
    ax = draw.timeline(job(tmp_path, ranks=ranks, odd=odd))
    assert len(lanes(ax)) == ranks
    assert (texts(ax).count("step 0") == 1) == once
    assert ("other" in texts(ax)) == (odd is not None)
    assert any("Spans are those of rank 0" in text for text in texts(ax)) == once
