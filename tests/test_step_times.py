"""Training steps over time: how long they took, which one is odd, where their time goes, what of the communication is
hidden, when buckets went. (More odd jobs are frozen: tests/frozen/by_hand.zip, "step_times-...", "overlap-...".)"""

import re
from itertools import accumulate, pairwise

import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.text import Text
from pictures import MS, US, ddp_buckets, ddp_step, lanes, parts, texts, title, words
from traces import Job

from dlearn import analysis, draw, explain, operations
from dlearn.analysis import step_times
from dlearn.cli import main
from dlearn.draw.palette import MISSING
from dlearn.errors import TraceError
from dlearn.events.event import NOT_OBSERVED


def named(folder, lengths, *, never=()):
    """Spans of so many ms each; `never` are (rank, step) without an end."""
    job, ends = Job(folder, ranks=2), [*accumulate(lengths, initial=0)]
    for step, (start, end) in enumerate(pairwise(ends)):
        end_ns = {rank: None if (rank, step) in never else end * MS for rank in range(2)}
        job.span((0, 1), f"step {step}", start_ns=start * MS, end_ns=end_ns)
    return job.load()


def trained(folder, late_ms=100, steps=8):
    """Steps of DDP on two ranks; in step 6 rank 1 comes late to bucket 1."""
    job = Job(folder, ranks=2)
    ddp_buckets(job)
    for step in range(steps):
        at, late = step * 1000 * MS, late_ms * MS * (step == 6)
        facts = {"launcher": "reducer", "backward": step, "phase": "backward"}
        for name, size, ready, later in (("b", 40, at + 12 * MS, 0), ("a", 60, at + 16 * MS, late)):
            job.gradient((0, 1), name, at_ns={0: ready, 1: ready + later})
            starts = {0: ready + MS, 1: ready + MS + later}
            job.collective("all_reduce", size=size, start_ns=starts, end_ns=starts[1] + 2 * MS, **facts)
        layer = job.span((0, 1), "layer 1", of_profiler=True, start_ns=at, end_ns=at + 10 * MS)  # No step.
        job.stretch((0, 1), "forward", at, at + 10 * MS, parent=layer)
        job.stretch((0, 1), "backward", at + 11 * MS, at + 22 * MS + late)
        job.stretch((0, 1), "optimizer", at + 23 * MS + late, at + 25 * MS + late)
    return job.load()


def test_the_odd_step_is_named_with_the_rank_and_the_bucket_that_the_others_waited_for(tmp_path):
    trace = trained(tmp_path)
    found = step_times(trace)
    said = "Training step 6 took 125 ms, the median is 25.0 ms: rank 1 came late to bucket 1"
    assert found.finding == title(draw.steps(trace)) == said
    assert f"{said}." in explain(trace).sentences
    assert [cell.waited_ns for cell in found.steps[6].cells.values()] == [100 * MS, 0]
    for alone in (trace.between(5990, 6200), trace.step(6)):
        assert step_times(alone).finding == "Training step 6 took 125 ms: rank 1 came late to bucket 1"
    # 40 + 60 B, which two ranks send as they are.
    calls = "2 all_reduces of 100 B in all"
    sends = f"In one training step (step 7: {calls}) every rank sends 100 B of payload, 200 B in all."
    assert f"{sends} All 8 steps are alike." in explain(trace).sentences


def test_a_step_keeps_its_operations_whole_and_one_that_differs_is_named(job):
    """Between steps 2 and 3 the loss is averaged; in step 5, which never ends, rank 1 does not come to bucket 1."""
    for step in range(6):
        at, facts = step * 100 * MS, {"launcher": "reducer", "backward": step, "phase": "backward"}
        job.stretch((0, 1), "forward", {0: at, 1: at + 1}, at + 10 * MS)
        for index in range(2 if step else 3):
            ranks = [0] if (step, index) == (5, 1) else [0, 1]
            start, end = at + (20 + 10 * index) * MS, None if ranks == [0] else at + 60 * MS
            job.collective("all_reduce", ranks=ranks, start_ns=start, end_ns=end, size=40, **facts)
        job.stretch((0, 1), "backward", at + 11 * MS, None if step == 5 else at + 70 * MS)
        if step < 5:
            job.stretch((0, 1), "optimizer", at + 71 * MS, at + 80 * MS)
        if step == 2:
            job.collective("all_reduce", size=4, start_ns=at + 90 * MS, end_ns=at + 91 * MS)
    trace = job.load()
    assert [len(operations(trace.step(step))) for step in range(6)] == [3, 2, 2, 2, 2, 2]
    assert [one.missing for one in operations(trace.where(rank=0).step(5))] == [(), (1,)]
    assert [end.rank for one in operations(trace.where(rank=1).step(3)) for end in one.ends] == [0, 1, 0, 1]
    [told] = [each for each in explain(trace).sentences if "one training step" in each]
    assert told.endswith("4 of 6 steps are alike; the first that differs is step 0. Outside of the steps: 1 operation.")
    with pytest.raises(TraceError, match="there is no step 6; this trace has the steps 0 to 5"):
        trace.step(6)


def test_steps_by_spans_and_a_span_without_messages(tmp_path):
    job = Job(tmp_path / "spans", ranks=2)
    for number in (7, 3):
        job.message(0, 1, size=number, parent=job.span(0, f"iteration {number}"))
    job.span(0, "load")
    trace = job.load()
    assert [operations(trace.step(number))[0].payload_bytes for number in (3, 7)] == [3, 7]
    assert explain(trace.within("load")).sentences[0] == "2 ranks: no message in load."
    with pytest.raises(TraceError, match="has no steps: no training by DDP or FSDP, and no spans"):
        Job(tmp_path / "none", ranks=1).load().step(0)


@pytest.mark.parametrize("by", ["return", NOT_OBSERVED])
def test_steps_of_fsdp_by_its_first_optimizer_and_what_they_wait_for_gathers(tmp_path, by):
    """In each of three steps rank 0 waits for rank 1 from 1 to 4 ns, where the ends of calls were seen."""
    job, seen = Job(tmp_path, ranks=2), by == "return"
    for at in range(0, 60, 20):
        facts = {"phase": "forward", "module": "blocks.0", "by": by, "end_ns": at + 6 if seen else None}
        job.collective("all_gather_single", size=8, start_ns={0: at + 1, 1: at + 4}, **facts)
        for optimizer in (0, 1):
            job.stretch((0, 1), "optimizer", at + 10 + optimizer, at + 11 + optimizer, of=optimizer, site="a.py:1")
    trace = job.load()
    for step in range(3):
        assert [one.start_ns for one in operations(trace.step(step))] == [20 * step + 1]
    # From the first forward pass to 11, to 31 and to 51.
    found = step_times(trace)
    assert found.lengths_ns == [10, 19, 19]
    # Two ranks waited 3 of 2 * 10 and of 2 * 19 ns.
    shares = "8% of a step (the median of 3; 8% to 15%)" if seen else "not measured"
    assert found.note == f"Collectives waited for their last rank: {shares}."
    assert [step.late for step in found.steps] == [((1,), 3, None) if seen else None] * 3
    compared = str(analysis.compare(trace, trace.step(0)))
    said = f"Waiting for other ranks: a {shares}, b 15% of the one step seen"
    assert (said in compared, "Waiting" in compared) == (seen, seen)
    assert ("(blocks.0)" in title(draw.timeline(trace))) == seen


@pytest.mark.parametrize(
    ("late_ms", "why"), [(100, "6, in which ranks waited longest (100 ms for rank 1)"), (0, "13, the last")]
)
def test_of_a_long_run_the_timeline_draws_the_step_of_the_longest_wait_and_says_so(tmp_path, late_ms, why):
    trace = trained(tmp_path, late_ms, steps=14)
    ax, step = draw.timeline(trace), 6 if late_ms else 13
    assert f"One of 14 steps is drawn: training step {why}. Another:" in words(ax)
    assert title(ax) == title(draw.timeline(trace.step(step)))


@given(st.lists(st.integers(1, 50), min_size=6, max_size=12), st.integers(0, 5))
@settings(deadline=None, max_examples=20)
def test_a_step_of_three_times_the_longest_other_is_found_unless_it_is_the_first(tmp_path_factory, lengths, place):
    """In the first one much is made ready."""
    lengths[place] = 3 * max(lengths)
    found = step_times(named(tmp_path_factory.mktemp("steps"), lengths))
    assert (found.odd == place) is (place > 0)
    assert (f"Step {place} took" in found.finding) is (place > 0)


@pytest.mark.parametrize(("others", "odd"), [([10] * 6, 6), ([10, 10, 10, 11, 10, 12], None)])
def test_among_equal_steps_one_of_1_6_medians_is_odd_and_among_unequal_ones_none(tmp_path, others, odd):
    """Without the first: 12 ms is 1.5 from the median of 10.5, and 16 less than eight times as far."""
    assert step_times(named(tmp_path, [*others, 16])).odd == odd


def test_a_step_that_was_never_finished_is_hatched_and_has_no_length(tmp_path):
    """Of 500 steps many share a column, and another one is longest."""
    lengths = [10] * 500
    lengths[320] = 90
    trace = named(tmp_path, lengths, never=[(1, 321)])
    ax = draw.steps(trace)
    assert title(ax) == step_times(trace).finding == "Step 321 was never finished by rank 1"
    (cells,), (lengths,) = parts(ax, "cells"), parts(ax, "lengths")
    assert [len(part.get_paths()) for part in parts(ax, "never finished")] == [1]
    assert len(cells.get_paths()) == 2 * len(lengths.get_paths()) + 1, "only what was measured has a height"


VIEWS = (draw.timeline, draw.steps, draw.sequence, draw.traffic, draw.traffic_graph, draw.breakdown, draw.buckets)


def test_the_rank_that_a_title_says_is_waited_for_is_red_in_its_picture(tmp_path):
    """Of 30 ranks, rank 1 never begins the last backward pass: it has no gradient there, and no call."""
    job = Job(tmp_path, ranks=30)
    job.bucket(range(30), 0, {"p0": 40}, count=1)
    for step in range(4):
        at, facts = step * 30 * MS, {"launcher": "reducer", "backward": step, "phase": "backward"}
        here = [rank for rank in range(30) if rank != 1 or step < 3]
        job.stretch(here, "forward", at, at + 8 * MS)
        job.gradient(here, "p0", at_ns=at + 9 * MS, backward=step)
        end = None if step == 3 else at + 12 * MS
        job.collective("all_reduce", ranks=here, start_ns=at + 10 * MS, end_ns=end, size=40, **facts)
        job.stretch(here, "backward", at + 8 * MS, None if step == 3 else at + 13 * MS)
    trace = job.load()
    told = {}
    for view in VIEWS:
        ax = view(trace)
        told[view] = title(ax)
        shown = {text.get_text() for text in ax.figure.findobj(Text) if to_hex(text.get_color()) == MISSING}
        assert {*re.findall(r"for (rank \d+)", told[view])} <= shown, told[view]
    assert told[draw.buckets].endswith(" wait for rank 1 in bucket 0 of backward pass 4")
    assert all("for rank 1" in told[view] for view in VIEWS if view is not draw.breakdown)


def test_waiting_for_a_late_rank_is_told_apart_from_transfer(job):
    ddp_buckets(job)
    ddp_step(job, late=80)
    trace = job.load()
    found = analysis.overlap(trace)
    first, second = found.steps[0].shares
    # Rank 0 waits 151-231 for bucket 0, which travels until 291; from 251 to 331 for bucket 1, which travels to 371.
    # It computes until 250. Hidden: 80 waiting, 19 (231-250) transfer. After that bucket 0 travels 250-291, bucket 1
    # waits until 331 (291-331 nothing travels), and travels 40.
    phases = ("hidden", "transfer", "waiting")
    assert [first.length_ns(phase) // US for phase in phases] == [80 + 19, 41 + 40, 40]
    assert (first.waited_ns, first.waits) == (80 * US + 80 * US, {1: 40 * US})
    # Rank 1 computes until 330: bucket 0 (231-291) is hidden, bucket 1 (331-371) is not.
    assert [second.length_ns(phase) // US for phase in phases] == [60, 40, 0]
    assert second.hidden == 0.6
    assert found.finding.endswith("ranks stand waiting longest for rank 1: 40.0 µs")
    # Both end at 410; rank 0 is looked at. Its last transfer is bucket 1's, launched by rank 1 at 331, done at 371.
    path = [(leg.rank, leg.what, leg.start_ns // US, leg.end_ns // US) for leg in found.steps[0].path]
    assert path == [
        *[(1, "forward", 80, 180), (1, "between", 180, 190), (1, "backward", 190, 331)],
        *[(0, "bucket 1 travels", 331, 371)],
        *[(0, "backward", 371, 380), (0, "between", 380, 390), (0, "optimizer", 390, 410)],
    ]
    alone = analysis.overlap(trace.where(rank=0)).steps[0].path
    assert alone == found.steps[0].path[3:]  # what rank 1 did is not asked for


def test_the_parts_of_a_step_of_median_length(job):
    """Of two in the middle it is the shorter."""
    for number, (at, late) in enumerate([(0, 300), (1000, 10), (2000, 80), (3000, 200)]):
        ddp_step(job, at, late=late, backward=number)
    trace = job.load()
    found = analysis.breakdown(trace)
    first, second = found.middle
    steps = [(each.number, each.rank, each.total_ns // US) for each in found.middle]
    assert steps == [(2, 0, 410), (2, 1, 330)]
    # Rank 0: 0-410. Backward 110-380, less 250-371, in which it waits or sends without computing.
    phases = ("forward", "backward", "optimizer", "between")
    assert [first.length_ns(phase) // US for phase in phases] == [100, 270 - 121, 20, 20]
    # Rank 1: 80-410; its backward 190-380 less the transfer of 331-371.
    assert second.length_ns("backward") == 150 * US
    assert [each.length_ns("transfer", "waiting") // US for each in found.middle] == [121, 40]
    # 410 + 330 µs in all, of which 121 and 40 were not hidden: 22 %.
    assert found.finding.endswith(" 22% communication that is not hidden")
    ax = draw.breakdown(trace)
    assert title(ax) == "Training step 2, 410 µs: 40% of all ranks' time is backward"
    waits = [(box.get_x(), box.get_width()) for box in parts(ax, "waiting")]
    assert waits == [pytest.approx((0.291, 0.040))]
    assert "the longest wait ends: rank 1 has come to all_reduce #6" in texts(ax)


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 40), st.integers(0, 60)), max_size=5), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_hidden_and_exposed_are_all_of_the_communication(tmp_path_factory, calls, last_gradient):
    """Calls: rank 0's launch, how much later rank 1's is, how long the transfer takes; the pass lasts 0-200."""
    job = Job(tmp_path_factory.mktemp("job"), ranks=2)
    for start, later, took in calls:
        ends = start + later + took
        facts = {"launcher": "reducer", "backward": 0, "phase": "backward"}
        job.collective("all_reduce", size=4, start_ns={0: start, 1: start + later}, end_ns=ends, **facts)
    job.gradient((0, 1), "a", at_ns=last_gradient)
    job.stretch((0, 1), "backward", 0, 200)
    for step in analysis.overlap(job.load()).steps:
        for share in step.shares:
            busy = set()
            for start, later, took in calls:
                busy.update(range(start + later * share.rank, start + later + took))
            assert share.length_ns("hidden", "transfer", "waiting") == len(busy)
            assert sum(share.waits.values()) >= share.length_ns("waiting")


def test_a_real_run_has_every_gradient_in_a_bucket_that_was_sent_and_done(recorded):
    trace = recorded(programs.train_ddp, 2, arguments=(5,), measure="span")
    found = analysis.bucket_times(trace)
    # 17,290 parameters: one bucket, then two of 35,880 and 33,280 B, on 2 ranks.
    assert [[each.bytes for each in table] for table in found.tables] == [[69160], [35880, 33280]]
    assert len(found.items) == 2 * 1 + 2 * 2 * 4
    for each in found.items:
        assert each.never_ready == ()
        assert each.begins_ns <= min(at for _, at in each.ready)
        assert max(at for _, at in each.ready) <= each.launched_ns <= each.last_arrival_ns <= each.done_ns
    assert [step.shares[0].number for step in analysis.overlap(trace).steps] == [0, 1, 2, 3, 4]
    assert len(parts(draw.buckets(trace), "transfer")) >= 4


def test_the_picture_of_buckets_has_a_row_for_each_rank_below_each_bucket(job):
    ddp_buckets(job)
    for name in ("b", "a"):  # Inside no_sync: nothing is sent.
        job.gradient((0, 1), name, at_ns=5 * US, backward=0)
    ddp_step(job, late=80, backward=1)
    trace = job.load()
    found = analysis.bucket_times(trace)
    assert {each.backward for each in found.items} == {0, 1}
    assert "the first of 2 buckets is launched" in found.finding
    ax = draw.buckets(trace)
    assert lanes(ax) == ["rank 0", "rank 1"] * 2
    sent = parts(ax, "transfer")
    assert len(sent) == 4
    assert len({patch.get_facecolor() for patch in sent}) == 2, "a colour for each bucket"
    # Rank 0 waits for bucket 0 from 151 to 231 µs, and for bucket 1 from 251 to 331; its pass began at 110.
    waits = [(round(box.get_x() * 1000), round(box.get_width() * 1000)) for box in parts(ax, "waiting")]
    assert waits == [(41, 80), (141, 80)]
    assert any(text.endswith("bucket 0, 40 B: b") for text in texts(ax))


def test_a_rank_that_is_late_to_nearly_every_step_is_named(job):
    for number in range(6):
        ddp_step(job, 1000 * number, late=200, backward=number)
    assert analysis.step_times(job.load()).finding.endswith("; rank 1 came late to 6 of them")


@pytest.mark.parametrize(("late", "told"), [(0, ""), (1, "Rank 0 waited 500 ms of 1.51 s for rank 1.")])
def test_waits_count_from_when_all_ranks_have_met(job, capsys, late, told):
    """Rank 1 comes half a second late to the first of two calls, as it starts later; or to the second."""
    for call, at in enumerate((0, 1000)):
        starts = {0: at * MS, 1: (at + 500 * (call == late)) * MS}
        job.collective("all_reduce", start_ns=starts, end_ns=starts[1] + 10 * MS)  # 1,510 ms in all
    job.write()
    assert main(["explain", str(job.folder)]) == 0
    assert re.findall(".* waited .* for .*", capsys.readouterr().out) == [told] * bool(told)
