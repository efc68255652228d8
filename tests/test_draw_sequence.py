"""What a sequence diagram folds, and what it says at its arrows: by hand, and of real steps."""

import pytest
import torch
import torch.distributed as dist
from text_boxes import faults
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from traces import Job

import dlearn
from dlearn import Cluster, draw
from dlearn.draw import rows

MS = 1_000_000
STEPS = 10


def texts(ax):
    return [text.get_text() for text in ax.texts]


def arrows_of(ax):
    return [patch.get_gid().removeprefix("message ") for patch in ax.patches if "message" in (patch.get_gid() or "")]


def folded(ax):
    """The numbers of times that stand at brackets; the picture can be read."""
    assert faults(ax.figure) == []
    return [text for text in texts(ax) if text.startswith("×")]


# By hand --------------------------------------------------------------------------------------------------------------


def send(job, src, dst, at, *, posted=0, parents=(None, None), **facts):
    """One message that is sent at `at` ms; its receive is posted `posted` ms before."""
    inside = [{} if parent is None else {"parent": parent} for parent in parents]
    job.send(src, dst, start_ns=at * MS, end_ns=(at + 1) * MS, **inside[0], **facts)
    job.recv(dst, src, start_ns=(at - posted) * MS, end_ns=(at + 1) * MS, **inside[1], **facts)


def test_the_order_is_that_of_sending_however_early_a_receive_was_posted(tmp_path):
    job = Job(tmp_path, ranks=3)
    send(job, 0, 1, 1)
    send(job, 2, 1, 5, posted=5)
    assert arrows_of(draw.sequence(job.load())) == ["0 to 1", "2 to 1"]


def test_equal_steps_are_folded_though_their_messages_change_places(tmp_path):
    """A server and two workers, who answer now in this, now in that order."""
    job = Job(tmp_path, ranks=3)
    for step in range(STEPS):
        first, second = (1, 2) if step % 3 else (2, 1)
        for i, (src, dst) in enumerate([(0, 1), (0, 2), (first, 0), (second, 0)]):
            send(job, src, dst, 10 * step + 2 * i, posted=2 * i)
    ax = draw.sequence(job.load())
    assert folded(ax) == ["× 10"], "nobody has said that these are steps"
    assert arrows_of(ax) == ["0 to 1", "0 to 2", "2 to 0", "1 to 0"]
    assert "What is repeated is drawn as it was the first time; who sends first may change." in texts(ax)


def test_steps_of_ranks_that_do_not_wait_for_each_other_are_folded_by_their_spans(tmp_path):
    """Rank 1 is quick, rank 2 is slow: its step 0 ends when the other's step 6 does."""
    job = Job(tmp_path, ranks=3)
    for rank in (1, 2):
        for step in range(STEPS):
            at = (7 if rank == 2 else 1) * 4 * step + rank
            span = job.span(rank, f"step {step}", start_ns=at * MS, end_ns=(at + 4) * MS)
            send(job, rank, 0, at, parents=(span, None), size=8)
            send(job, rank, 0, at + 2, parents=(span, None), size=16)
    ax = draw.sequence(job.load())
    assert folded(ax) == ["× 10 steps"]
    assert arrows_of(ax) == ["1 to 0", "2 to 0", "1 to 0", "2 to 0"]


def test_where_not_all_fits_the_steps_are_shown_and_what_comes_before_is_counted(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(rows.MOST_ROWS):
        send(job, 0, 1, i, size=100 + i)
    for step in range(STEPS):
        span = job.span(0, f"step {step}", start_ns=(100 + step) * MS, end_ns=(101 + step) * MS)
        send(job, 0, 1, 100 + step, parents=(span, None))
    ax = draw.sequence(job.load())
    assert folded(ax) == ["× 10"], "a bracket of one row has no room for more"
    assert any(text.startswith("40 earlier operations not drawn") for text in texts(ax))


def test_a_few_messages_are_drawn_as_often_as_they_were_sent(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(20):
        send(job, 0, 1, i)
    ax = draw.sequence(job.load())
    assert folded(ax) == []
    assert len(arrows_of(ax)) == 20


def test_tags_stand_at_the_arrows_where_they_tell_messages_apart(tmp_path):
    job = Job(tmp_path / "two", ranks=2)
    send(job, 0, 1, 1, tag=1)
    send(job, 1, 0, 3, tag=2)
    shown = texts(draw.sequence(job.load()))
    assert [text for text in shown if "tag" in text] == ["4 B, tag 1", "4 B, tag 2"]
    assert "uint8[4]" in shown, "and not a second time at the left"
    alike = Job(tmp_path / "one", ranks=2)
    for at in (1, 3):
        send(alike, 0, 1, at, tag=7)
    assert [text for text in texts(draw.sequence(alike.load())) if "tag" in text] == ["uint8[4], tag 7"] * 2


# Real steps -----------------------------------------------------------------------------------------------------------


def train():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 10)), bucket_cap_mb=0.002)
    for step in range(1 + STEPS):
        with dlearn.span(f"step {step}"):
            model(torch.ones(8, 64)).sum().backward()


def serve():
    """Rank 0 sends the parameters to each worker, and each answers with a gradient."""
    numbers = torch.ones(1000)
    workers = range(1, dist.get_world_size())
    for step in range(STEPS):
        with dlearn.span(f"step {step}"):
            if dist.get_rank() == 0:
                for worker in workers:
                    dist.send(numbers, worker)
                for worker in workers:
                    dist.recv(numbers, worker)
            else:
                dist.recv(numbers, 0)
                dist.send(numbers, 0)


def pipe():
    """Four micro-batches there, and their gradients back."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    batch = torch.ones(8, 32)
    for step in range(STEPS):
        with dlearn.span(f"step {step}"):
            for before, after in [(rank - 1, rank + 1)] * 4 + [(rank + 1, rank - 1)] * 4:
                if 0 <= before <= last:
                    dist.recv(batch, before)
                if 0 <= after <= last:
                    dist.send(batch, after)


def test_ten_steps_of_ddp_are_one_after_the_first_whose_buckets_are_others():
    run = Cluster(2).run(train)
    ax = draw.sequence(run.trace)
    assert folded(ax) == ["× 10 steps"]
    assert faults(draw.timeline(run.trace).figure) == []


@pytest.mark.parametrize(("program", "messages"), [(serve, 4), (pipe, 16)])
def test_ten_steps_of_a_server_and_of_a_pipeline_are_one(program, messages):
    run = Cluster(3).run(program)
    ax = draw.sequence(run.trace)
    assert folded(ax) == ["× 10 steps"]
    assert len(arrows_of(ax)) == messages
    assert faults(draw.timeline(run.trace).figure) == []
