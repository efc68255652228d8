"""DDP's buckets over time, as values and as a picture."""

from __future__ import annotations

from programs import mlp
from traces import Job, tensor

from dlearn import Cluster, analysis, draw
from dlearn.trace.event import Gradient


def two_steps(tmp_path, *, unused=False):
    """Two ranks. Step 1: one bucket of 100 B. Step 2: rebuilt, "b" (40 B) goes before "a" (60 B). Times in µs.

    In step 2 rank 1 launches bucket 0 30 µs after rank 0; `unused`: rank 1 never has "a" ready.
    """
    job = Job(tmp_path, ranks=2)
    us = 1000
    for rank in range(2):
        job.bucket(rank, 0, {"a": 60, "b": 40})
        job.gradient(rank, "b", at_ns=110 * us)
        job.gradient(rank, "a", at_ns=140 * us)
    reduce(job, 100, 0, {0: 150 * us, 1: 150 * us}, 190 * us)
    for rank in range(2):
        job.stretch(rank, "backward", 100 * us, 200 * us)
        job.bucket(rank, 0, {"b": 40}, count=2, built="rebuilt", start_ns=210 * us)
        job.bucket(rank, 1, {"a": 60}, count=2, built="rebuilt", start_ns=210 * us)
        job.gradient(rank, "b", at_ns=(310 + 30 * rank) * us, backward=1)
    reduce(job, 40, 1, {0: 312 * us, 1: 342 * us}, 362 * us)
    for rank in range(1 if unused else 2):
        job.gradient(rank, "a", at_ns=380 * us, backward=1)
    reduce(job, 60, 1, 381 * us, None if unused else 391 * us, ranks=[0] if unused else None)
    for rank in range(2):
        job.stretch(rank, "backward", 300 * us, 400 * us)
    return job.load()


def reduce(job, size, backward, start_ns, end_ns, ranks=None):
    facts = {"launcher": "reducer", "backward": backward, "phase": "backward", "inputs": (tensor(size),)}
    job.collective("all_reduce", ranks=ranks, start_ns=start_ns, end_ns=end_ns, **facts)


def test_ready_launched_waited_done(tmp_path):
    found = analysis.bucket_times(two_steps(tmp_path))
    assert [(each.backward, each.rank, each.index) for each in found.items] == [
        *[(0, 0, 0), (0, 1, 0)],
        *[(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)],
    ]
    first = found.items[0]
    assert (first.begins_ns, first.ready) == (100_000, (("b", 110_000), ("a", 140_000)))
    assert (first.launched_ns, first.waited_ns, first.done_ns) == (150_000, 0, 190_000)
    late = found.items[2]
    # Rank 0 launches at 312 µs, rank 1 at 342 µs.
    assert (late.waited_ns, late.last_rank, late.done_ns) == (30_000, 1, 362_000)
    assert found.items[4].waited_ns == 0


def test_the_tables_before_and_after_the_rebuild(tmp_path):
    found = analysis.bucket_times(two_steps(tmp_path))
    assert [[each.parameters for each in table] for table in found.tables] == [[("a", "b")], [("b",), ("a",)]]
    assert [[each.bytes for each in table] for table in found.tables] == [[100], [40, 60]]
    lines = str(found).splitlines()
    assert lines[:2] == ["the first buckets: 1, 100 B", "  bucket 0: 100 B: a, b"]
    assert "  bucket 1: 60 B: a" in lines
    # The last gradient at 380 µs, the first launch on rank 0 at 312 µs.
    assert found.finding == (
        "Backward pass 1: the first of 2 buckets is launched 68.0 µs before the last gradient is ready (rank 0)"
    )


def test_a_gradient_that_never_comes_is_named_and_the_bucket_that_waits_for_it(tmp_path):
    trace = two_steps(tmp_path, unused=True)
    found = analysis.bucket_times(trace)
    late = found.items[-1]
    assert (late.rank, late.index, late.never_ready) == (1, 1, ("a",))
    assert (late.launched_ns, late.waited_ns, late.done_ns) == (None, None, None)
    (stuck,) = found.stuck
    assert (stuck.rank, stuck.index, stuck.missing, stuck.waited_ns) == (0, 1, (1,), None)
    assert found.finding == "Rank 0 waits for rank 1 in bucket 1 of backward pass 1: there a is never ready"
    ax = draw.buckets(trace)
    assert "never ready: a" in [text.get_text() for text in ax.texts]
    (red,) = (each for each in ax.collections if each.get_gid() == "stuck")
    assert len(red.get_segments()) == 1


def test_a_selection_keeps_the_numbers_of_the_whole(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.bucket(0, 0, {"a": 60})
    for step in range(3):
        span = job.span(0, f"step {step}", start_ns=100 * step, end_ns=100 * step + 90)
        facts = {"model": 0, "parameter": "a", "bytes": 60, "backward": step, "parent": span}
        job.event(Gradient, 0, start_ns=100 * step + 10, **facts)
    (only,) = analysis.bucket_times(job.load().within("step 1")).items
    assert (only.backward, only.title, only.launched_ns) == (1, "step 1", None)


def test_nothing_to_show(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=100)
    trace = job.load()
    assert str(analysis.bucket_times(trace)) == "no backward pass through a DDP model"
    assert draw.buckets(trace).get_title(loc="left") == "Nothing to draw"


def parts(ax, gid):
    return [patch for patch in ax.patches if patch.get_gid() == gid]


def test_the_picture_has_a_row_for_each_rank_below_each_bucket(tmp_path):
    ax = draw.buckets(two_steps(tmp_path))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"] * 3
    assert len(parts(ax, "transfer")) == 6
    (waiting,) = parts(ax, "waiting")
    # From 312 to 342 µs, 300 µs being the begin of the pass.
    assert [round(x, 6) for x in (waiting.get_x(), waiting.get_x() + waiting.get_width())] == [0.012, 0.042]
    gradients = [each for each in ax.collections if each.get_gid() == "gradients"]
    assert [len(each.get_segments()) for each in gradients] == [2, 2, 1, 1, 1, 1]
    texts = [text.get_text() for text in ax.texts]
    assert texts[:5] == [
        "backward pass 0: 1 bucket, as first built",
        "bucket 0, 100 B: b, a",
        "backward pass 1: 2 buckets, rebuilt in the order in which gradients came",
        "bucket 0, 40 B: b",
        "bucket 1, 60 B: a",
    ]


def test_a_bucket_has_one_colour_on_all_ranks_and_another_one_another(tmp_path):
    ax = draw.buckets(two_steps(tmp_path))
    colours = [patch.get_facecolor() for patch in parts(ax, "transfer")]
    assert len(set(colours[:4])) == 1, "bucket 0 of both passes"
    assert len(set(colours)) == 2


def test_of_many_ranks_the_first_and_those_that_come_last_are_drawn(tmp_path):
    """Rank 11 launches last of 16 and nobody waits for another one."""
    job = Job(tmp_path, ranks=16)
    late = {rank: (60 if rank == 11 else 20) * 1000 for rank in range(16)}
    for rank in range(16):
        job.bucket(rank, 0, {"a": 60})
        job.gradient(rank, "a", at_ns=late[rank] - 1000)
    reduce(job, 60, 0, late, 90_000)
    ax = draw.buckets(job.load())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 11"]
    assert any(text.get_text().startswith("14 more rows are not drawn") for text in ax.texts)


def test_a_real_run_has_every_gradient_in_a_bucket_that_was_sent_and_done(own_folder):

    def train():
        import torch

        model = torch.nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()

    trace = Cluster(2).run(train, timeout=60).trace
    found = analysis.bucket_times(trace)
    # 17,290 parameters: one bucket, then two of 35,880 and 33,280 B, on 2 ranks.
    assert [[each.bytes for each in table] for table in found.tables] == [[69160], [35880, 33280]]
    assert len(found.items) == 2 * 1 + 2 * 2
    for each in found.items:
        assert each.never_ready == ()
        assert each.begins_ns <= min(at for _, at in each.ready)
        assert max(at for _, at in each.ready) <= each.launched_ns <= each.transfer_ns <= each.done_ns
    assert draw.buckets(trace).get_title(loc="left").startswith("Backward pass 1: the first of 2 buckets is launched ")
