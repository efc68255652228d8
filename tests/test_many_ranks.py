"""A timeline of many ranks: one lane for those that are alike, a lane of its own for whoever is odd."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn import draw, operations
from dlearn.analysis.findings import time_text
from dlearn.draw.layout.lanes import ALIKE, MOST_LANES, fold, rows_for
from dlearn.draw.scene import set_scene
from dlearn.trace.tables.operations import Calls

MS = 10**6


def job(folder, *, ranks=64, late=None, never=None):
    """Two all-reduces; to the second one rank comes 2 ms late, or never."""
    made = Job(folder, ranks=ranks)
    for rank in range(ranks):
        made.span(rank, "step 0", start_ns=0, end_ns=10 * MS)
    made.collective("all_reduce", size=64, start_ns={rank: MS + 1000 * rank for rank in range(ranks)}, end_ns=3 * MS)
    starts = {rank: 4 * MS + (2 * MS if rank == late else 0) for rank in range(ranks) if rank != never}
    made.collective("all_reduce", size=64, ranks=starts, start_ns=starts, end_ns=8 * MS if never is None else None)
    return made.load()


def lanes(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_the_late_rank_has_a_lane_of_its_own_and_the_others_share_one(tmp_path):
    ax = draw.timeline(job(tmp_path, late=17))
    assert [name.partition("\nand ")[2] for name in lanes(ax)] == ["", "", "61 alike"]
    assert lanes(ax)[:2] == ["rank 0", "rank 17"], "who waits, and who comes late"
    assert any("each call within 3% of the picture's width of their median" in text for text in texts(ax))
    assert "rank 17" in ax.get_title(loc="left")


@pytest.mark.parametrize("ranks", [25, 64])
def test_the_title_s_wait_is_the_longest_of_all_calls_and_its_ranks_have_bold_lanes(tmp_path, ranks):
    trace = job(tmp_path, ranks=ranks)
    waits = {(one.transfer_ns - end.start_ns, end.rank): one.last_rank for one in operations(trace) for end in one.ends}
    (longest_ns, who), whom = max(waits.items())
    ax = draw.timeline(trace)
    title = " ".join(ax.get_title(loc="left").split())
    assert title == f"Longest wait: rank {who} for rank {whom}, {time_text(longest_ns)} in all_reduce #1"
    bold = [label.get_text() for label in ax.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == [f"rank {who}", f"rank {whom}"]


def test_who_never_came_is_not_folded_with_those_who_wait(tmp_path):
    ax = draw.timeline(job(tmp_path, never=5))
    assert lanes(ax)[0] == "rank 5"
    assert lanes(ax)[1].endswith("and 62 alike")


def test_spans_that_all_ranks_have_are_named_once(tmp_path):
    for ranks, times in ((3, 3), (16, 1)):
        ax = draw.timeline(job(tmp_path / str(ranks), ranks=ranks))
        assert len(lanes(ax)) == ranks
        assert sum(text == "step 0" for text in texts(ax)) == times
        assert any("Spans are those of rank 0" in text for text in texts(ax)) == (times == 1)


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 60),
    late=st.dictionaries(st.integers(0, 59), st.integers(0, 1000), max_size=9),
    kinds=st.lists(st.integers(0, 2), min_size=60, max_size=60),
)
def test_every_rank_stands_in_one_lane_with_others_that_are_near(ranks, late, kinds):
    numbers = np.arange(ranks)
    start_ns = np.array([late.get(rank, 0) for rank in range(ranks)], np.int64)
    calls = Calls(
        operation=numbers, rank=numbers, start_ns=start_ns, end_ns=start_ns + 1, pending=np.zeros(ranks, bool),
        ops=("a", "b", "c"), op=np.array(kinds[:ranks]),
    )  # fmt: skip
    folded = fold(calls, range(ranks), 1000)
    assert sorted(rank for members in folded.values() for rank in members) == list(range(ranks))
    assert list(folded) == sorted(folded)
    for shown, members in folded.items():
        assert shown in members
        assert ranks > MOST_LANES or members == (shown,)
        assert all(kinds[rank] == kinds[shown] for rank in members)
        assert all(abs(start_ns[rank] - start_ns[shown]) <= 2 * ALIKE * 1000 for rank in members)


def test_a_bucket_has_one_row_on_all_ranks_and_in_all_steps(tmp_path):
    """In step 0 bucket 2 comes when bucket 0 is over, in step 1 all three overlap."""
    made = Job(tmp_path, ranks=3)
    for rank in range(3):
        for index in range(3):
            made.bucket(rank, index, {f"p{index}": 4}, count=3)
    facts = {"launcher": "reducer", "phase": "backward", "size": 4}
    for step, starts in enumerate(((10, 15, 30), (110, 112, 114))):
        for at in starts:
            late = {rank: (at + rank) * MS for rank in range(3)}
            made.collective("all_reduce", start_ns=late, end_ns=(at + 12) * MS, backward=step, **facts)
    scene = set_scene(made.load(), derived=False)
    rows = {(bar.operation.bucket.index, row) for bar, row in zip(scene.bars, scene.rows, strict=True)}
    assert len(scene.bars) == 18
    assert rows == {(0, 0), (1, 1), (2, 2)}


def test_the_critical_path_of_one_step_is_an_outline(tmp_path):
    """Rank 1 comes last to the last bucket, at 40 ms, which rank 0 leaves last, at 60 ms: both are outlined."""
    made = Job(tmp_path, ranks=2)
    for rank in range(2):
        made.bucket(rank, 0, {"a": 4})
        made.span(rank, "step 1", end_ns=100 * MS)
        made.stretch(rank, "forward", 0, 10 * MS)
        made.gradient(rank, "a", at_ns=(20 + 19 * rank) * MS)
    facts = {"launcher": "reducer", "backward": 0, "phase": "backward", "size": 4}
    made.collective("all_reduce", start_ns={0: 21 * MS, 1: 40 * MS}, end_ns={0: 60 * MS, 1: 50 * MS}, **facts)
    for rank in range(2):
        made.stretch(rank, "backward", 12 * MS, (62 - 2 * rank) * MS)
    trace = made.load()
    ax = draw.timeline(trace)
    [path] = [part for part in ax.collections if part.get_gid() == "critical path"]
    boxes = [outline.get_extents() for outline in path.get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(0, 40), (40, 60), (60, 62)]
    tops = [lane.get_extents().y0 for lane in next(p for p in ax.collections if p.get_gid() == "lanes").get_paths()]
    assert [box.y0 > tops[1] for box in boxes] == [True, False, False]
    assert "critical path of the step" in [text.get_text() for text in ax.get_legend().get_texts()]
    assert [leg.start_ns for leg in set_scene(trace.where(rank=0), derived=False).path] == [40 * MS, 60 * MS]


def test_ranks_that_call_nothing_are_alike(tmp_path):
    made = Job(tmp_path, ranks=30)
    made.send(0, 1)
    made.recv(1, 0)
    trace = made.load()
    assert len(operations(trace)) == 1
    assert [name.partition("\nand ")[2] for name in lanes(draw.timeline(trace))] == ["", "", "27 alike"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1), max_size=12
    )
)
def test_an_operation_has_one_row_on_all_ranks_and_no_bar_lies_on_another(operations):
    intervals = [(rank, at, at + long) for each in operations for rank, (at, long) in each.items()]
    same = [place for place, each in enumerate(operations) for _ in each]
    rows = rows_for(intervals, same)
    assert len(set(zip(same, rows, strict=True))) == len(operations)
    placed = sorted((rank, row, start, end) for (rank, start, end), row in zip(intervals, rows, strict=True))
    assert all(one[:2] != other[:2] or one[3] <= other[2] for one, other in pairwise(placed))
