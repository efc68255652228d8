"""How long steps took, which one is odd, and the strip that shows them all."""

import re

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.text import Text
from traces import Job, tensor

from dlearn import draw, explain
from dlearn.analysis import step_times
from dlearn.draw import step_strip
from dlearn.draw.palette import MISSING
from dlearn.draw.step_strip import MOST_COLUMNS, columns_of

US = 1000
MS = 1000 * US


def named(folder, lengths, *, ranks=2, name="step", never=()):
    """Spans of so many ms each; `never` are (rank, step) without an end."""
    job = Job(folder, ranks=ranks)
    at = 0
    for step, length in enumerate(lengths):
        for rank in range(ranks):
            end = None if (rank, step) in never else at + length * MS
            job.span(rank, f"{name} {step}", start_ns=at, end_ns=end)
        at += length * MS
    return job.load()


def trained(folder, late_ms=100, steps=8, odd=6):
    """Steps of DDP on two ranks; in one of them rank 1 comes late to bucket 1."""
    job = Job(folder, ranks=2)
    for rank in range(2):
        for index, size in enumerate((40, 60)):
            job.bucket(rank, index, {f"p{index}": size}, count=2)
    for step in range(steps):
        at = step * 1000 * MS
        late = late_ms * MS if step == odd else 0
        for rank in range(2):
            job.stretch(rank, "forward", at, at + 10 * MS)
            for index in range(2):
                job.gradient(rank, f"p{index}", at_ns=at + (12 + 4 * index) * MS + late * rank * index)
        for index, size in enumerate((40, 60)):
            starts = {rank: at + (13 + 4 * index) * MS + late * rank * index for rank in range(2)}
            facts = {"launcher": "reducer", "backward": step, "phase": "backward", "inputs": (tensor(size),)}
            job.collective("all_reduce", start_ns=starts, end_ns=max(starts.values()) + 2 * MS, **facts)
        for rank in range(2):
            job.stretch(rank, "backward", at + 11 * MS, at + 22 * MS + late)
            job.stretch(rank, "optimizer", at + 23 * MS + late, at + 25 * MS + late)
    return job.load()


def test_the_odd_step_is_named_with_the_rank_and_the_bucket_that_the_others_waited_for(tmp_path):
    trace = trained(tmp_path)
    found = step_times(trace)
    said = "Training step 6 took 125 ms, the median is 25.0 ms: rank 1 came late to bucket 1"
    assert found.finding == said
    assert f"{said}." in explain(trace).sentences
    assert found.cells[6][0].waited_ns == 100 * MS
    assert found.cells[6][1].waited_ns == 0
    assert draw.steps(trace).get_title(loc="left").replace("\u00a0", " ") == said


def test_no_step_is_odd_where_all_take_as_long(tmp_path):
    trace = trained(tmp_path, late_ms=0)
    assert step_times(trace).finding == "8 steps of 25.0 ms each"
    assert step_times(trace).odd_sentence == ""


def test_one_step_names_the_rank_that_needed_longest(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank, length in enumerate((20, 30)):
        job.span(rank, "step 0", start_ns=0, end_ns=length * MS)
    assert step_times(job.load()).finding == "Step 0 took 30.0 ms on rank 1, the longest; the shortest 20.0 ms"


def test_one_step_names_the_rank_of_a_short_wait_too(tmp_path):
    # Rank 1 comes 1 ms late to bucket 1 of a step of 26 ms.
    found = step_times(trained(tmp_path, late_ms=1, steps=1, odd=0))
    assert found.finding == "Training step 0 took 26.0 ms; the longest wait is 1.00 ms, for rank 1"


def test_the_key_of_a_single_step_and_of_one_that_never_ended(tmp_path):
    def key(trace):
        return [text.get_text() for text in draw.steps(trace).get_legend().get_texts()]

    assert "26.0 ms: the whole step, or more" in key(trained(tmp_path / "one", late_ms=1, steps=1, odd=0))
    assert key(named(tmp_path / "never", [5] * 6, never=[(1, 5)]))[-2:] == ["5.00 ms: the longest", "never finished"]


def test_one_step_that_took_as_long_everywhere_names_no_rank(tmp_path):
    assert step_times(named(tmp_path, [5])).finding == "Step 0 took 5.00 ms on every rank"


@given(st.lists(st.integers(1, 50), min_size=6, max_size=12), st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_a_step_of_three_times_the_longest_other_is_always_found(tmp_path_factory, lengths, place):
    lengths[place] = 3 * max(lengths)
    found = step_times(named(tmp_path_factory.mktemp("steps"), lengths))
    assert found.odd == place
    assert f"Step {place} took" in found.finding


def test_spans_of_the_user_are_steps_and_parts_of_steps_are_none(tmp_path):
    assert step_times(named(tmp_path / "a", [5] * 6, name="iteration")).titles[0] == "iteration 0"
    assert step_times(named(tmp_path / "b", [5] * 6, name="F")).titles == ()


def test_a_step_that_was_never_finished_is_red_and_in_the_title(tmp_path):
    ax = draw.steps(named(tmp_path, [5] * 6, never=[(1, 5)]))
    assert ax.get_title(loc="left") == "Step 5 was never finished by rank 1"
    faces = {each.get_gid(): each.get_facecolors() for each in ax.collections}
    red = tuple(plt.matplotlib.colors.to_rgba(MISSING))
    assert [tuple(face) for face in faces["cells"]].count(red) == 1
    assert len(faces["lengths"]) == 5, "only what was measured has a height"
    [unfinished] = [each for each in ax.lines if each.get_gid() == "never finished"]
    assert list(unfinished.get_xdata()) == [5]
    assert unfinished.get_color() == MISSING


def test_ranks_that_come_last_at_the_same_time_are_named_together(tmp_path):
    job = Job(tmp_path, ranks=3)
    for rank in range(3):
        job.stretch(rank, "forward", 0, 10 * MS)
        job.stretch(rank, "backward", 11 * MS, 40 * MS)
        job.stretch(rank, "optimizer", 41 * MS, 50 * MS)
    starts = {0: 12 * MS, 1: 32 * MS, 2: 32 * MS}
    facts = {"launcher": "reducer", "backward": 0, "phase": "backward", "inputs": (tensor(40),), "by": "wait"}
    job.collective("all_reduce", start_ns=starts, end_ns=39 * MS, **facts)
    trace = job.load()
    assert step_times(trace).late[0].ranks == (1, 2)
    assert step_times(trace).finding == "Training step 0 took 50.0 ms: ranks 1 and 2 came late"
    [dots] = [each for each in draw.steps(trace).lines if each.get_gid() == "waited for"]
    assert len(dots.get_xdata()) == 2
    texts = [text.get_text() for text in draw.breakdown(trace).texts]
    assert "the longest wait ends: ranks 1 and 2 have come to all_reduce #1" in texts


def test_a_shade_is_a_share_of_the_median_step_and_the_key_tells_it(tmp_path):
    """Steps of 25 ms; in one of them 5 ms are waited, in another a whole second."""
    found = step_times(trained(tmp_path / "short", late_ms=5))
    assert found.shades[6] == {0: pytest.approx(5 / 25), 1: 0}
    assert found.longest_sentence == "The longest is training step 6: 30.0 ms"
    assert step_times(trained(tmp_path / "long", late_ms=1000)).shades[6] == {0: 1, 1: 0}
    ax = draw.steps(trained(tmp_path / "drawn", late_ms=5))
    key = [text.get_text() for text in ax.get_legend().get_texts()]
    assert key[1:4] == ["waits 6.25 ms", "12.5 ms", "25.0 ms: a median step, or more"]
    cells = next(each for each in ax.collections if each.get_gid() == "cells")
    dark = min(cells.get_facecolors(), key=sum)
    assert tuple(dark) == step_strip._SHADES(5 / 25)


def test_of_500_steps_the_odd_one_is_never_averaged_away(tmp_path):
    lengths = [10] * 500
    lengths[321] = 90
    trace = named(tmp_path, lengths, ranks=3)
    columns = columns_of(step_times(trace))
    assert len(columns) <= MOST_COLUMNS
    assert 321 in [column.place for column in columns]
    assert sum(column.steps for column in columns) == 500
    ax = draw.steps(trace)
    assert "Step 321 took 90.0 ms" in ax.get_title(loc="left").replace("\u00a0", " ")
    assert "step 321" in [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(("ranks", "steps"), [(3, 1), (16, 80), (64, 12)])
def test_a_cell_for_each_rank_and_step(tmp_path, ranks, steps):
    ax = draw.steps(named(tmp_path, [5] * steps, ranks=ranks))
    [cells] = [each for each in ax.collections if each.get_gid() == "cells"]
    assert len(cells.get_paths()) == ranks * steps


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_hang_after_many_steps_is_a_red_step_that_names_who_never_came(tmp_path, ranks):
    """The forward pass of the last step has ended, its backward pass has not; rank 1 never began the step."""
    job = Job(tmp_path, ranks=ranks)
    for step in range(14):
        at, stuck = step * 30 * MS, step == 13
        here = [rank for rank in range(ranks) if not (stuck and rank == 1)]
        for rank in here:
            job.stretch(rank, "forward", at, at + 8 * MS)
        job.collective(
            "all_reduce", ranks=here, start_ns=at + 10 * MS, end_ns=None if stuck else at + 12 * MS,
            launcher="reducer", backward=step, phase="backward", inputs=(tensor(40),),
        )  # fmt: skip
        for rank in here:
            job.stretch(rank, "backward", at + 9 * MS, None if stuck else at + 13 * MS)
            if not stuck:
                job.stretch(rank, "optimizer", at + 14 * MS, at + 15 * MS)
    trace = job.load()
    found = step_times(trace)
    who = "rank 0 waits" if ranks == 2 else "63 ranks wait"
    assert found.finding == f"Training step 13 was never finished: {who} for rank 1"
    assert [rank for rank, cell in found.cells[13].items() if cell.length_ns is None] == [0, *range(2, ranks)]
    assert all(found.length_ns(place) == 15 * MS for place in range(13))
    ax = draw.timeline(trace)
    assert " ".join(ax.get_title(loc="left").split()) == found.finding
    assert "rank 1" in [label.get_text() for label in ax.get_yticklabels()]
    cells = next(each for each in ax.collections if each.get_gid() == "cells")
    red = [color for color in cells.get_facecolors() if tuple(color) == to_rgba(MISSING)]
    assert len(red) == ranks - 1


VIEWS = (draw.timeline, draw.steps, draw.sequence, draw.traffic, draw.traffic_graph, draw.breakdown, draw.buckets)


@pytest.mark.parametrize("ranks", [3, 30])
def test_the_rank_that_a_title_says_is_waited_for_is_red_in_its_picture(tmp_path, ranks):
    """Rank 1 never begins the last backward pass: it has no gradient there, and no call."""
    job = Job(tmp_path, ranks=ranks)
    for rank in range(ranks):
        job.bucket(rank, 0, {"p0": 40}, count=1)
    for step in range(2):
        at, facts = step * 30 * MS, {"launcher": "reducer", "backward": step, "phase": "backward"}
        here = [rank for rank in range(ranks) if rank != 1 or not step]
        for rank in here:
            job.stretch(rank, "forward", at, at + 8 * MS)
            job.gradient(rank, "p0", at_ns=at + 9 * MS, backward=step)
        end = None if step else at + 12 * MS
        job.collective("all_reduce", ranks=here, start_ns=at + 10 * MS, end_ns=end, inputs=(tensor(40),), **facts)
        for rank in here:
            job.stretch(rank, "backward", at + 8 * MS, None if step else at + 13 * MS)
    trace = job.load()
    told = {}
    for view in VIEWS:
        ax = view(trace)
        told[view] = " ".join(ax.get_title(loc="left").split())
        red = {text.get_text() for text in ax.figure.findobj(Text) if to_rgba(text.get_color()) == to_rgba(MISSING)}
        assert {*re.findall(r"for (rank \d+)", told[view])} <= red, told[view]
    assert told[draw.buckets].endswith(" wait for rank 1 in bucket 0 of backward pass 1")
    assert all("for rank 1" in told[view] for view in VIEWS if view is not draw.breakdown)


def test_a_hang_before_the_forward_pass_is_a_step_of_its_own(tmp_path):
    """DDP's broadcast of the buffers never ended: nothing else was seen of the step."""
    job = Job(tmp_path, ranks=2)
    for rank in range(2):
        job.stretch(rank, "forward", 0, 8 * MS)
        job.stretch(rank, "backward", 9 * MS, 12 * MS)
        job.stretch(rank, "optimizer", 13 * MS, 14 * MS)
    job.collective("broadcast", ranks=[0], start_ns=20 * MS, end_ns=None, phase="forward", inputs=(tensor(4),))
    found = step_times(job.load())
    assert found.titles == ("training step 0", "training step 1")
    assert found.finding == "Training step 1 was never finished: rank 0 waits for rank 1"


def test_one_step_names_who_came_late_to_it(tmp_path):
    found = step_times(trained(tmp_path).between(5990, 6200))
    assert found.finding == "Training step 6 took 125 ms: rank 1 came late to bucket 1"


def test_no_steps_says_what_to_do(tmp_path):
    trace = Job(tmp_path, ranks=2).load()
    assert "dlearn.span" in draw.steps(trace).texts[0].get_text()
