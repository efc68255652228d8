"""Pipelines: the passes of torch's schedules, of which the program says nothing, and the bubble in steps by hand."""

import torch
from pictures import pipeline, recorded_job, title, words
from text_boxes import faults

import dlearn
from dlearn import Cluster, analysis, draw, explain, messages, play


def train(name: str, *, stages: int = 1, own: str = "own") -> None:
    """Make two steps with four micro-batches, on two ranks."""
    from torch.distributed import pipelining

    rank, loss, data, cpu = torch.distributed.get_rank(), torch.nn.MSELoss(), torch.ones(8, 4), torch.device("cpu")
    indices, count = [rank, 3 - rank][:stages], 2 * stages
    made = [pipelining.PipelineStage(torch.nn.Linear(4, 4), index, count, cpu) for index in indices]
    schedule = getattr(pipelining, name)(made if stages > 1 else made[0], n_microbatches=4, loss_fn=loss)
    for _ in range(2):
        with dlearn.span(own):
            schedule.step(*[data] * (0 in indices), target=data if count - 1 in indices else None)


def test_passes_of_torch_s_schedules():
    with Cluster(2) as cluster:
        runs = {name: cluster.run(train, f"Schedule{name}").trace for name in ("GPipe", "1F1B")}
        of_two = cluster.run(train, "ScheduleZBVZeroBubble", stages=2).trace
        own = cluster.run(train, "ScheduleGPipe", own="F2").trace
    for name, order in (("GPipe", "F0 F1 F2 F3 B0 B1 B2 B3"), ("1F1B", "F0 F1 B0 F2 B1 F3 B2 B3")):
        passes = [each for each in analysis.pipeline(runs[name]).passes if each.rank == 0]
        assert [f"{each.kind}{each.micro_batch}" for each in passes] == order.split()
        sent = messages(runs[name]).to_frame().sort_values("sent_ns")
        for src, phase in (("rank 0", "forward"), ("rank 1", "backward")):
            mine = sent[(sent.phase == phase) & (sent.src == src)]
            assert mine.what.tolist() == 2 * [f"micro-batch {n}: float32[2, 4]" for n in range(4)]
        assert {*sent.phase} == {"forward", "backward", "none"}  # They agree on shapes first.
        assert "32 B (float32[2, 4]) in the forward pass of 4 micro-batches, 8 times." in str(explain(runs[name]))
    assert title(draw.pipeline(runs)).endswith("; the same 8 messages, 256 B in all")  # 2 x 4 float32 each
    found = {(each.rank, each.stage, each.kind) for each in analysis.pipeline(of_two).passes}
    assert found == {(rank, stage, kind) for rank, stage in ((0, 0), (0, 3), (1, 1), (1, 2)) for kind in "FBW"}
    assert "rank 0, stages 0 and 3" in words(draw.pipeline(of_two))
    # A pass in a span of its name is not reported again.
    assert [span.name for span in own.where(kind="span", rank=0).events][:4] == ["F2", "F0", "F1", "F3"]


def test_the_bubble_of_equal_stages(tmp_path):
    trace = pipeline(tmp_path / "equal", stages=8, micro_batches=16)
    with draw.small():
        ax = draw.pipeline({"one": trace, "two": trace})
    assert faults(ax.figure) == []
    assert "one: 690 ms, 30% of it bubble" in words(ax)  # (16 + 7) x 30 ms, and 7 of 23


def test_the_slowest_stage_is_named_and_what_is_no_pipeline_is_said_so(tmp_path):
    ax = draw.pipeline({"GPipe": pipeline(tmp_path / "slow", stages=3, micro_batches=4, slow=3)})
    assert title(ax).startswith("GPipe: a step of 420 ms, 52% of it bubble")
    assert title(ax).endswith(": rank 2 computes 360 ms, the others at most 120 ms")  # 4 x (30 + 60) and 4 x (10 + 20)
    assert [label.get_fontweight() for label in ax.get_yticklabels()] == ["normal", "normal", "bold"]
    assert "No pipeline was recorded" in words(draw.pipeline(recorded_job("DDP", tmp_path)))


def test_a_strip_is_titled_with_the_bubble_of_a_pipeline_that_ended(job, tmp_path):
    equal = pipeline(tmp_path / "equal", stages=3, micro_batches=4)
    assert play.strip(equal).title == "A step of 180 ms, 33% of it bubble"  # (4 + 2) x 30 ms, and 2 of 6
    job.span((0, 1), "F0", start_ns=0, end_ns=9)
    job.collective("all_reduce", ranks=[0], end_ns=None)
    assert play.strip(job.load()).title == "Rank 0 waits for rank 1 in all_reduce #1"
