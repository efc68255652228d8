"""What of DDP's communication is hidden, for whom the rest waits, and where a training step's time goes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import mlp
from traces import Job, tensor

from dlearn import Cluster, analysis, draw
from dlearn.analysis.ddp.intervals import length_ns, union
from dlearn.analysis.ddp.overlap import Times, share_of
from dlearn.analysis.ddp.training_steps import training_steps
from dlearn.trace.event import NOT_OBSERVED

US = 1000


def one_step(job, at=0, *, late=0, backward=0, end=True):
    """A step on two ranks, in µs from `at`; rank 1's backward pass begins `late` later, its forward does, too.

    forward 0-100, backward 110-300, optimizer 310-330. Gradients "b" at 150, "a" at 250. Bucket 0 (40 B) is launched
    at 151 and done at 211, bucket 1 (60 B) at 251 and 291: on rank 0 with `late=0` 60 µs hidden, 40 µs exposed.
    """
    for rank in range(2):
        shift = at + late * rank
        job.stretch(rank, "forward", shift * US, (shift + 100) * US)
        for name, ready in (("b", 150), ("a", 250)):
            job.gradient(rank, name, at_ns=(shift + ready) * US, backward=backward)
    for size, launched, took in ((40, 151, 60), (60, 251, 40)):
        reduce(job, size, {0: at + launched, 1: at + launched + late}, at + launched + late + took, backward, end)
    for rank in range(2):
        job.stretch(rank, "backward", (at + 110 + late * rank) * US, (at + 300 + late) * US)
        job.stretch(rank, "optimizer", (at + 310 + late) * US, (at + 330 + late) * US)


def reduce(job, size, start, end, backward, seen):
    facts = {"launcher": "reducer", "backward": backward, "phase": "backward", "inputs": (tensor(size),)}
    facts |= {} if seen else {"by": NOT_OBSERVED}
    start_ns = {rank: at * US for rank, at in start.items()}
    job.collective("all_reduce", start_ns=start_ns, end_ns=end * US if seen else None, **facts)


def test_hidden_is_what_happens_while_gradients_are_still_to_come(tmp_path):
    job = Job(tmp_path, ranks=2)
    one_step(job)
    (step,) = analysis.overlap(job.load()).steps
    for share in step.shares:
        # Bucket 0 travels 151-211, the last gradient comes at 250; bucket 1 travels 251-291.
        assert share.times == Times(60 * US, 0, 40 * US, 0)
        assert share.hidden == 0.6
        assert share.waits == {}


def test_waiting_for_a_late_rank_is_told_apart_from_transfer(tmp_path):
    job = Job(tmp_path, ranks=2)
    one_step(job, late=80)
    found = analysis.overlap(job.load())
    first, second = found.steps[0].shares
    # Rank 0 waits 151-231 for bucket 0, which travels until 291; from 251 to 331 for bucket 1, which travels to 371.
    # It computes until 250. Hidden: 80 waiting, 19 (231-250) transfer. After that bucket 0 travels 250-291, bucket 1
    # waits until 331 (291-331 nothing travels), and travels 40.
    assert first.times == Times(19 * US, 80 * US, 41 * US + 40 * US, 40 * US)
    assert first.waits == {1: 40 * US}
    # Rank 1 computes until 330: bucket 0 (231-291) is hidden, bucket 1 (331-371) is not.
    assert second.times == Times(60 * US, 0, 40 * US, 0)
    assert found.finding.endswith("ranks stand waiting longest for rank 1: 40.0 µs")


def test_the_critical_path_goes_through_the_rank_that_launched_last(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank in range(2):
        job.bucket(rank, 0, {"b": 40}, count=2)
        job.bucket(rank, 1, {"a": 60}, count=2)
    one_step(job, late=80)
    trace = job.load()
    found = analysis.overlap(trace)
    # Both end at 410; rank 0 is looked at. Its last transfer is bucket 1's, launched by rank 1 at 331, done at 371.
    path = [(leg.rank, leg.what, leg.start_ns // US, leg.end_ns // US) for leg in found.steps[0].path]
    assert path == [
        *[(1, "forward", 80, 180), (1, "between", 180, 190), (1, "backward", 190, 331)],
        *[(0, "bucket 1 travels", 331, 371)],
        *[(0, "backward", 371, 380), (0, "between", 380, 390), (0, "optimizer", 390, 410)],
    ]
    alone = analysis.overlap(trace.where(rank=0)).steps[0].path
    assert alone == found.steps[0].path[3:]  # what rank 1 did is not asked for
    told = found.path_sentence(found.steps[0])
    assert told.startswith(
        "training step 0, 330 µs: rank 1 forward 100 µs, between 10.0 µs, backward 141 µs; bucket 1 "
    )


def test_an_end_that_was_not_observed_is_said_and_not_guessed(tmp_path):
    job = Job(tmp_path, ranks=2, backend="nccl")
    one_step(job, end=False)
    trace = job.load()
    found = analysis.overlap(trace)
    assert found.finding == "Not observed: nobody saw when the operations ended"
    assert [share.hidden for share in found.steps[0].shares] == [None, None]
    assert "what it waited for was not observed" in str(found)
    parts = analysis.breakdown(trace)
    assert not parts.items[0].observed
    # The whole backward, with whatever it waited for.
    assert parts.items[0].length_ns("backward") == 190 * US
    assert str(parts).count("not observed") == 3 * 2
    ax = draw.breakdown(trace)
    assert {patch.get_gid() for patch in ax.patches} == {"forward", "backward", "optimizer", "between"}


def test_steps_end_with_the_optimizer_or_without_one_with_a_backward_that_sends(tmp_path):
    accumulated, bare = Job(tmp_path / "a", ranks=1), Job(tmp_path / "b", ranks=1)
    for at in (0, 100, 200, 300):
        accumulated.stretch(0, "forward", at, at + 10)
        accumulated.stretch(0, "backward", at + 20, at + 50)
        if at in (100, 300):
            accumulated.stretch(0, "optimizer", at + 60, at + 70)
    steps = training_steps(accumulated.load())
    assert [[each.phase for each in step.stretches] for step in steps] == [
        ["forward", "backward", "forward", "backward", "optimizer"]
    ] * 2
    for at, sends in ((0, False), (100, True), (200, True)):
        bare.stretch(0, "forward", at, at + 10)
        if sends:
            facts = {"launcher": "reducer", "phase": "backward"}
            bare.collective("all_reduce", size=4, start_ns=at + 30, end_ns=at + 40, **facts)
        bare.stretch(0, "backward", at + 20, at + 50)
    assert [(step.start_ns, step.end_ns) for step in training_steps(bare.load())] == [(0, 150), (200, 250)]


def test_calls_that_are_not_ddps_are_counted_apart_and_an_end_reported_late_is_the_pass_s(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.stretch(0, "forward", 0, 100)
    job.collective("all_reduce", size=4, start_ns=110, end_ns=120, phase="forward")  # between: in no stretch
    job.collective("all_reduce", size=4, start_ns=50, end_ns=60, phase="forward")  # the user's own, in the forward
    job.collective(
        "broadcast", size=4, root=0, start_ns=10, end_ns=30, phase="forward", role="DDP sends rank 0's buffers"
    )
    job.gradient(0, "a", at_ns=250)
    late = {"launcher": "reducer", "phase": "backward", "backward": 0}
    job.collective("all_reduce", size=4, start_ns=260, end_ns=900, **late)
    job.stretch(0, "backward", 200, 300)
    trace = job.load()
    (step,) = training_steps(trace)
    assert step.others == 1
    # 20 ns of buffers in the forward; 40 ns from the launch until the pass returned.
    assert share_of(step).times == Times(0, 0, 60, 0)
    (parts,) = analysis.breakdown(trace).items
    assert (parts.length_ns("forward"), parts.length_ns("backward")) == (100 - 20, 100 - 40)


def test_a_call_that_waits_hides_nothing(tmp_path):
    """A communication hook that all-reduces and waits: the gradient "a" comes later, but nothing is computed."""
    job = Job(tmp_path, ranks=2)
    facts = {"launcher": "comm hook", "backward": 0, "phase": "backward", "by": "wait"}
    job.collective("all_reduce", size=4, start_ns={0: 150, 1: 170}, end_ns=200, **facts)
    for rank in range(2):
        job.gradient(rank, "b", at_ns=140)
        job.gradient(rank, "a", at_ns=250)
        job.stretch(rank, "backward", 100, 300)
    trace = job.load()
    first, second = analysis.overlap(trace).steps[0].shares
    assert (first.times, second.times) == (Times(0, 0, 30, 20), Times(0, 0, 30, 0))
    assert [each.length_ns("backward") for each in analysis.breakdown(trace).items] == [200 - 50, 200 - 30]


def test_the_parts_of_the_step(tmp_path):
    job = Job(tmp_path, ranks=2)
    one_step(job, late=80)
    found = analysis.breakdown(job.load())
    first, second = found.items
    # Rank 0: 0-410. Backward 110-380, less 250-371, in which it waits or sends without computing.
    phases = ("forward", "backward", "optimizer", "between")
    assert [first.length_ns(phase) // US for phase in phases] == [100, 270 - 121, 20, 20]
    assert (first.total_ns, first.exposed_ns) == (410 * US, 121 * US)
    # Rank 1: 80-410; its backward 190-380 less the transfer of 331-371.
    assert (second.total_ns, second.length_ns("backward"), second.exposed_ns) == (330 * US, 150 * US, 40 * US)


def test_the_step_of_median_length_is_shown(tmp_path):
    job = Job(tmp_path, ranks=2)
    for number, (at, late) in enumerate([(0, 300), (1000, 10), (2000, 80)]):
        one_step(job, at, late=late, backward=number)
    trace = job.load()
    found = analysis.breakdown(trace)
    assert [(each.number, each.rank) for each in found.middle] == [(2, 0), (2, 1)]
    # 410 + 330 µs in all, of which 121 and 40 were not hidden: 22 %.
    assert found.finding.startswith(
        "Training step 2 (the median of 3 by length), 410 µs: of 2 ranks' time together, 27% forward, "
    )
    assert found.finding.endswith(" 22% communication that is not hidden")
    ax = draw.breakdown(trace)
    # Each begins where it began, and what happened in two parts is drawn in two.
    assert drawn(ax, "forward") == pytest.approx([0, 0.1, 0.08, 0.1])
    assert drawn(ax, "transfer") == pytest.approx([0.25, 0.041, 0.331, 0.040, 0.331, 0.040])
    assert drawn(ax, "waiting") == pytest.approx([0.291, 0.040])
    assert drawn(ax, "hidden") == pytest.approx([0.151, 0.099, 0.231, 0.060])
    lines = [each.get_segments()[0] for each in ax.collections if each.get_gid() == "last rank"]
    assert [line[0][0] for line in lines] == pytest.approx([0.331] * 2)
    texts = [text.get_text() for text in ax.texts]
    assert "the longest wait ends: rank 1 has come to all_reduce #6" in texts
    assert "forward 100 µs, backward 149 µs, waits 40.0 µs, transfer 81.0 µs" in " ".join(texts).replace("\u00a0", " ")
    assert " ".join(ax.get_title(loc="left").split()) == ("Training step 2, 410 µs: 40% is backward")
    assert "In all: 27% forward, 40% backward, 22% communication that is not hidden." in texts

    both = draw.breakdown({"ConvNet": trace, "MLP": trace})
    assert [label.get_text() for label in both.get_yticklabels()] == [
        "ConvNet: rank 0", "ConvNet: rank 1", "MLP: rank 0", "MLP: rank 1",
    ]  # fmt: skip
    assert both.get_title(loc="left") == "Communication that is not hidden: ConvNet 22%, MLP 22%"
    assert drawn(both, "transfer") == pytest.approx([0.25, 0.041, 0.331, 0.040, 0.331, 0.040] * 2)


def drawn(ax, phase):
    """Begin and length of each box, in ms, one after the other."""
    return [each for patch in ax.patches if patch.get_gid() == phase for each in (patch.get_x(), patch.get_width())]


def test_of_many_ranks_those_that_wait_least_and_longest_are_drawn(tmp_path):
    """Bucket 0 is launched at 20 + rank µs: rank 15 never waits, rank 0 waits 15 µs."""
    job = Job(tmp_path, ranks=16)
    facts = {"launcher": "reducer", "backward": 0, "phase": "backward"}
    job.collective(
        "all_reduce", size=4, start_ns={rank: (20 + rank) * US for rank in range(16)}, end_ns=50 * US, **facts
    )
    for rank in range(16):
        job.gradient(rank, "a", at_ns=(19 + rank) * US)
        job.stretch(rank, "backward", rank * US, 60 * US)
    ax = draw.breakdown(job.load())
    shown = [label.get_text() for label in ax.get_yticklabels()]
    assert shown == [f"rank {rank}" for rank in (0, 1, 2, 3, 12, 13, 14, 15)]
    assert "8 more ranks are not drawn: these wait least and longest." in [text.get_text() for text in ax.texts]


def test_a_trace_without_training_steps(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=100)
    trace = job.load()
    assert str(analysis.overlap(trace)) == str(analysis.breakdown(trace)) == "No training step of a DDP model"
    assert draw.breakdown(trace).get_title(loc="left") == "Nothing to draw"


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 40), st.integers(0, 60)), max_size=5), st.integers(0, 99))
def test_hidden_and_exposed_are_all_of_the_communication(tmp_path_factory, calls, last_gradient):
    """Calls: rank 0's launch, how much later rank 1's is, how long the transfer takes; the pass lasts 0-200."""
    job = Job(tmp_path_factory.mktemp("job"), ranks=2)
    for start, later, took in calls:
        ends = start + later + took
        facts = {"launcher": "reducer", "backward": 0, "phase": "backward"}
        job.collective("all_reduce", size=4, start_ns={0: start, 1: start + later}, end_ns=ends, **facts)
    for rank in range(2):
        job.gradient(rank, "a", at_ns=last_gradient)
        job.stretch(rank, "backward", 0, 200)
    for step in training_steps(job.load()):
        share = share_of(step)
        busy = union((part.start_ns, part.end_ns) for part in step.parts)
        assert share.times.total_ns == length_ns(busy)
        assert all(each >= 0 for each in share.times)
        assert share.hidden is None if not busy else 0 <= share.hidden <= 1
        assert sum(share.waits.values()) >= share.times.exposed_waiting_ns


def test_a_real_run(own_folder):

    def train():
        import torch

        model = torch.nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            with model.no_sync():
                model(torch.ones(2, 64)).sum().backward()
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()

    trace = Cluster(2).run(train, timeout=60).trace
    found = analysis.overlap(trace)
    assert [step.number for step in found.steps] == [0, 1, 2, 3]
    for step in found.steps:
        assert step.others == 0
        assert len(step.shares) == 2
        for share in step.shares:
            assert share.times.total_ns > 0
            assert 0 <= share.hidden <= 1
        assert all(leg.end_ns == following.start_ns for leg, following in pairwise(step.path))
    for each in analysis.breakdown(trace).items:
        parts = each.length_ns("forward", "backward", "optimizer", "between")
        assert parts + each.exposed_ns == each.total_ns
        moments = sorted((part.start_ns, part.end_ns) for part in each.parts if part.phase != "hidden")
        assert length_ns(moments) == each.total_ns
        assert all(before[1] == after[0] for before, after in pairwise(moments))
    # One pass of two sends: of 17,290 parameters of 4 B once, then in two buckets.
    assert {len(step.parts) for step in training_steps(trace) if step.number > 1} == {2}


def test_a_hook_that_waits_is_seen_to_hide_nothing(own_folder):

    def train():
        import torch
        import torch.distributed as dist

        def hook(state, bucket):
            dist.all_reduce(bucket.buffer())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model = torch.nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
        model.register_comm_hook(None, hook)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()

    found = analysis.overlap(Cluster(2).run(train, timeout=60).trace)
    assert [share.hidden for step in found.steps for share in step.shares] == [0.0] * 6
