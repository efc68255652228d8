"""What a sequence diagram folds, and what it says at its arrows: by hand, and of real steps."""

import zipfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from matplotlib.colors import to_rgb
from text_boxes import faults
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from traces import Job

import dlearn
from dlearn import Cluster, Trace, draw
from dlearn.analysis.findings import time_text
from dlearn.draw import rows
from dlearn.draw.bars import function_of
from dlearn.draw.scene import set_scene
from dlearn.join.unrolling import messages_of

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
            send(job, src, dst, 10 * step + 2 * i, posted=2 * i, size=4 * src + 4)
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
            send(job, rank, 0, at, parents=(span, None), size=8 + rank)
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
    assert any(text.startswith(f"{rows.MOST_ROWS} earlier operations not drawn") for text in texts(ax))


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
    assert [text for text in shown if "tag" in text] == ["uint8[4] 4 B, tag 1", "uint8[4] 4 B, tag 2"]
    alike = Job(tmp_path / "one", ranks=2)
    for at in (1, 3):
        send(alike, 0, 1, at, tag=7)
    assert "uint8[4] 4 B" in texts(draw.sequence(alike.load()))


# Many ranks -----------------------------------------------------------------------------------------------------------


def ring(folder, ranks):
    """A step of training with one bucket, on so many ranks."""
    job = Job(folder, ranks=ranks)
    job.collective("all_reduce", size=64_000, phase="backward", end_ns=MS)
    return job.load()


def test_a_ring_of_64_is_a_few_of_its_arrows_and_the_number_of_the_others(tmp_path):
    ax = draw.sequence(ring(tmp_path, 64))
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "rank 0", "rank 1", "rank 2", "… 59 more", "rank 62", "rank 63",
    ]  # fmt: skip
    assert {*arrows_of(ax)} == {"1 to 0", "2 to 1", "63 to 62", "0 to 63"}
    told = next(text for text in texts(ax) if text.startswith("Not drawn: "))
    assert told.startswith("Not drawn: 15,120 messages of ranks without a lifeline"), "60 * 4 * 63"
    assert faults(ax.figure) == []


@pytest.mark.parametrize("ranks", [3, 16, 64])
def test_every_arrow_of_a_ring_goes_to_the_rank_before_as_its_title_says(tmp_path, ranks):
    ax = draw.sequence(ring(tmp_path, ranks))
    assert "to the rank before it" in ax.get_title(loc="left")
    drawn = [[int(rank) for rank in arrow.split(" to ")] for arrow in arrows_of(ax)]
    assert drawn
    assert all(dst == (src - 1) % ranks for src, dst in drawn)


@pytest.mark.parametrize("ranks", [16, 64])
def test_an_all_to_all_on_many_ranks_is_one_row(tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    job.collective("all_to_all_single", size=100 * ranks, end_ns=MS)
    ax = draw.sequence(job.load())
    assert arrows_of(ax) == []
    [told] = [text for text in texts(ax) if text.startswith("all_to_all_single")]
    assert told.endswith(f": each of {ranks} to each other, 100 B (derived)")
    assert ax.figure.get_figheight() < 3


def test_a_rank_that_never_came_has_its_lifeline_among_64(tmp_path):
    job = Job(tmp_path, ranks=64)
    job.collective("all_reduce", size=64_000, ranks=[rank for rank in range(64) if rank != 40], end_ns=None)
    ax = draw.sequence(job.load())
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names[:6] == ["rank 0", "rank 1", "rank 2", "… 36 more", "rank 39", "rank 40"]
    assert names[6:] == ["rank 41", "… 20 more", "rank 62", "rank 63"]
    assert {"40 to 39", "41 to 40"} <= {*arrows_of(ax)}
    assert faults(ax.figure) == []


def test_messages_between_ranks_without_a_lifeline_are_counted(tmp_path):
    """Through 20 ranks, and back: 38 messages, of which 32 begin or end at ranks 3 to 17."""
    job = Job(tmp_path, ranks=20)
    for at in range(19):
        send(job, at, at + 1, at, size=1000)
        send(job, at + 1, at, 100 - at, size=1000)
    ax = draw.sequence(job.load())
    assert len(arrows_of(ax)) == 6
    assert "Not drawn: 32 messages of ranks without a lifeline, 32.0 kB." in [
        text.replace("\xa0", " ") for text in texts(ax)
    ]
    assert faults(ax.figure) == []


def test_workers_that_do_the_same_are_drawn_once_and_the_ends_of_a_pipeline_are_not(tmp_path):
    """Rank 0 serves two workers, 13 times; or sends rank 1 what that sends on to rank 2, and back."""
    ways = {"served": [(0, 1), (0, 2), (1, 0), (2, 0)], "piped": [(0, 1), (1, 2), (2, 1), (1, 0)]}
    names = {}
    for name, way in ways.items():
        job = Job(tmp_path / name, ranks=3)
        for step in range(13):
            for i, (src, dst) in enumerate(way):
                send(job, src, dst, 100 * step + 10 * i)
        ax = draw.sequence(job.load())
        assert folded(ax) == ["× 13"]
        names[name] = [label.get_text() for label in ax.get_xticklabels()]
    assert names == {"served": ["rank 0", "each of 2: rank 1, rank 2"], "piped": ["rank 0", "rank 1", "rank 2"]}


# Phases and bytes -----------------------------------------------------------------------------------------------------


def test_a_phase_is_a_band_and_more_bytes_are_a_thicker_arrow(tmp_path):
    job = Job(tmp_path, ranks=2)
    for at, (size, phase) in enumerate([(100, "forward"), (10_000, "forward"), (1_000_000, "backward")]):
        send(job, 0, 1, 10 * at, size=size, phase=phase)
    ax = draw.sequence(job.load())
    assert [text for text in texts(ax) if text in ("forward", "backward")] == ["forward", "backward"]
    assert sum(part.get_gid() == "lanes" for part in ax.collections) == 2
    widths = [part.get_linewidth() for part in ax.patches if "message" in (part.get_gid() or "")]
    assert widths == pytest.approx([1.2, 2.2, 3.2]), "half a point for each ten times as many"


def test_what_waits_for_ever_says_so_over_its_red_arrow(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=100, end_ns=None)
    ax = draw.sequence(job.load())
    assert [text for text in texts(ax) if "never" in text] == [
        "rank 1 never received it",
        "never came: uint8[100] 100 B",
    ]


@pytest.mark.parametrize("op", ["broadcast", "barrier", "reduce"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_travels_at_the_same_time_is_one_row(tmp_path, op, ranks):
    job = Job(tmp_path, ranks=ranks)
    job.collective(op, size=64, root=0)
    trace, rounds = job.load(), defaultdict(set)
    for message in dlearn.messages(trace):
        rounds[message.step].add((message.src, message.dst))
    found = rows.rows_of(trace, 600.0)
    drawn = [{arrow.ends for arrow in row} for cycle in found.cycles for block in cycle.blocks for row in block.rows]
    assert drawn == list(rounds.values())
    assert op != "broadcast" or 2 ** len(drawn) == ranks


def test_a_message_from_one_to_another_is_no_ring(tmp_path):
    """From rank 2 to rank 0 is the way that closes a ring of three, but there is no ring."""
    job = Job(tmp_path, ranks=3)
    job.collective("broadcast", size=100, ranks=[0, 1, 2], root=2)
    ax = draw.sequence(job.load())
    assert {*arrows_of(ax)} == {"2 to 0", "2 to 1"}
    assert not any("ring" in text for text in texts(ax))


@pytest.mark.parametrize("ranks", [2, 3, 6, 16])
def test_what_stands_above_arrows_is_cut_between_its_parts(tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    for rank in range(ranks):
        job.bucket(rank, 0, {"a.long.name.of.a.weight": 40_000, "another.long.name.of.a.bias": 40})
    job.collective("all_reduce", launcher="reducer", backward=0, phase="backward", size=40_040)
    job.collective("all_reduce", size=40_040, ranks=range(1, ranks), start_ns=100, end_ns=None)
    with draw.small():
        told = [text for text in texts(draw.sequence(job.load())) if text.startswith("all_reduce")]
    assert len(told) == 2
    assert not any("…" in text for text in told)
    assert told[1].endswith("rank 0 never called it")


def test_a_job_with_a_parameter_server_is_one_picture(tmp_path):
    """As it was recorded: three iterations of two trainers, 168 messages."""
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-parameter_server.zip") as archive:
        archive.extractall(tmp_path)
    ax = draw.sequence(Trace.load(tmp_path / "00"))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["ps", "each of 2: trainer1, trainer2"]
    assert ax.get_title(loc="left") == "trainer1 and trainer2 send 17.9\xa0kB each, ps 6.92\xa0kB; 168 messages in all"
    phases = [text for text in texts(ax) if text in ("forward", "backward", "optimizer", "cleanup")]
    assert phases[:3] == ["forward", "backward", "optimizer"]
    assert "forward(float32[16, 1, 8, 8]) 4.47 kB" in texts(ax)
    [told] = [text for text in texts(ax) if "RPC sends for itself" in text]
    assert told.startswith("Not drawn: ")
    assert folded(ax) == ["× 3"]


def test_a_timeline_counts_what_rpc_does_for_itself_and_draws_the_rest(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-parameter_server.zip") as archive:
        archive.extractall(tmp_path)
    trace = Trace.load(tmp_path / "00")
    control = [each for each in dlearn.operations(trace) if all(m.control for m in messages_of(each))]
    ax = draw.timeline(trace)
    assert f"{len(control)} control calls that RPC makes for itself, not drawn." in texts(ax)
    assert 0 < len(control) < len(dlearn.operations(trace))
    assert not any("RREF" in text for text in texts(ax))
    # Of the start-up, in which the workers meet, there is a sentence; the axis begins with the program's own calls.
    called = [each for each in dlearn.operations(trace) if function_of(each)]
    first = next(each.start_ns for each in called if not function_of(each).startswith("_"))
    assert trace.events[0].start_ns < set_scene(trace, derived=False).start_ns <= first
    [told] = [text for text in texts(ax) if "start-up" in text]
    assert told.startswith("Before the program's first call: ")
    assert not any(
        bar.start_ns < set_scene(trace, derived=False).start_ns for bar in set_scene(trace, derived=False).bars
    )


def test_in_a_narrow_column_what_is_cut_is_never_the_bytes(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-parameter_server.zip") as archive:
        archive.extractall(tmp_path)
    with draw.small():
        told = [text for text in texts(draw.sequence(Trace.load(tmp_path / "00"))) if "(" in text or "result" in text]
    assert len(told) > 5
    assert all(text.endswith(" B") or text.endswith("kB") for text in told)


def test_an_arrow_for_several_messages_lies_behind_the_bars_in_the_colour_of_its_own(tmp_path):
    """Three buckets of a step over glass boxes, which travel at the same time."""
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-ring_all_reduce.zip") as archive:
        archive.extractall(tmp_path)
    trace = Trace.load(tmp_path / "06")
    step = trace.within("step 1")
    bars = {bar.look.line for bar in set_scene(step, derived=False).bars if bar.operation.bucket}
    ax = draw.timeline(step)
    arrows = [patch for patch in ax.patches if str(patch.get_gid()).startswith("message")]
    assert len(arrows) == 3 * 3
    assert {to_rgb(arrow.get_edgecolor()) for arrow in arrows} == {to_rgb(color) for color in bars}
    boxes = [each for each in ax.collections if str(each.get_gid()).startswith("transfer")]
    assert max(arrow.get_zorder() for arrow in arrows) < min(each.get_zorder() for each in boxes)


def test_arrows_of_a_collective_are_all_there_or_one_for_each_pair(tmp_path):
    """Rings of glass boxes, as they were recorded: none is broken, none is left out for want of room."""
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-ring_all_reduce.zip") as archive:
        archive.extractall(tmp_path)
    seen = 0
    for folder in sorted(path for path in tmp_path.iterdir() if path.is_dir()):
        trace = Trace.load(folder)
        for one in dlearn.operations(trace):
            if one.op != "all_reduce" or not one.steps:
                continue
            scene = set_scene(trace.where(op="all_reduce"), derived=False)
            flows = [flow for flow in scene.arrows.flows if flow.operation.seq == one.seq]
            sent = {(message.src, message.dst) for message in messages_of(one)}
            assert not flows or {(flow.src, flow.dst) for flow in flows} == sent
            assert not flows or sum(flow.count for flow in flows) == len(messages_of(one))
            seen += bool(flows)
    assert seen


def test_a_call_by_rpc_waits_while_its_callee_works(tmp_path):
    """The first iteration of two trainers: each calls forward, sends its gradient back and asks for a step."""
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-parameter_server.zip") as archive:
        archive.extractall(tmp_path)
    trace = Trace.load(tmp_path / "00").within("iteration 1")
    scene = set_scene(trace, derived=False)
    served = defaultdict(set)
    for bar, row in zip(scene.bars, scene.rows, strict=True):
        if bar.operation.exchange is None:
            continue
        caller = bar.operation.exchange.src
        assert bar.waited_ns == (bar.end_ns - bar.start_ns if bar.rank == caller else 0)
        served[bar.rank, caller].add(row)
    assert {key: len(rows) for key, rows in served.items()} == {(0, 1): 1, (0, 2): 1, (1, 1): 1, (2, 2): 1}
    assert served[0, 1] != served[0, 2], "a row for each that it serves"
    ax = draw.timeline(trace)
    longest = max(scene.bars, key=lambda bar: bar.waited_ns)
    said = f"Longest wait: trainer1 for ps, {time_text(longest.waited_ns)} in _script_local_optimizer_step"
    assert " ".join(ax.get_title(loc="left").split()) == said
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "thin: waits for an answer or the last rank" in told


def test_a_timeline_names_what_is_called_by_rpc_and_leaves_out_arrows_without_room(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / "lesson-parameter_server.zip") as archive:
        archive.extractall(tmp_path)
    trace = Trace.load(tmp_path / "00")
    for part in (trace, trace.within(trace.spans[-1])):
        ax = draw.timeline(part)
        assert any(handle.get_text() == "call of forward" for handle in ax.get_legend().get_texts())
        assert not any(text.startswith("rpc_sync") for text in texts(ax))
        tips = defaultdict(list)
        for arrow in ax.patches:
            if arrow.get_gid().startswith("message"):
                (x0, y0), (x1, y1) = (ax.transData.transform(at) * 72 / ax.figure.dpi for at in arrow._posA_posB)
                _, src, _, dst = arrow.get_gid().split()
                tips[src, y0 > y1].append(x0)
                tips[dst, y0 < y1].append(x1)
        assert tips
        assert all(after - before > 8 for each in tips.values() for before, after in pairwise(sorted(each)))
        scene = set_scene(part, derived=False)
        arrows, drawn = scene.arrows, [m for m in dlearn.messages(part) if m.operation.start_ns >= scene.start_ns]
        asked = sum(not m.control and m.how != "derived" for m in drawn)
        assert sum(flow.count for flow in arrows.flows) + arrows.crowded == asked
        left_out = [text for text in texts(ax) if "without room for an arrow" in text]
        assert sum(int(text.split()[0]) for text in left_out) == arrows.crowded


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


@pytest.mark.parametrize(("program", "messages"), [(serve, 2), (pipe, 16)])
def test_ten_steps_of_a_server_and_of_a_pipeline_are_one(program, messages):
    run = Cluster(3).run(program)
    ax = draw.sequence(run.trace)
    assert folded(ax) == ["× 10 steps"]
    assert len(arrows_of(ax)) == messages
    assert faults(draw.timeline(run.trace).figure) == []
