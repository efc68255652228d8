"""A trace step by step: the order, what each rank holds after each step, and what is said of it."""

from functools import partial
from itertools import product

import pytest
import torch
import wrong_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from rpc_jobs import train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from traces import Job, header, tensor

from dlearn import Cluster, Trace, analysis, messages, span
from dlearn.analysis.walking import walkthrough
from dlearn.analysis.walking.pieces import merge
from dlearn.trace.event import RpcCall, RpcReply, RpcRun, Worker


def at_the_end(walk, board):
    return {change.text for change in walk.held(board, len(walk.steps)).values()}


def ever(walk):
    return {change.text for step in walk.steps for change in step.changes}


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 9), words=st.integers(1, 5000), op=st.sampled_from(["all_reduce", "reduce", "broadcast"]))
def test_gloos_own_schedules_end_as_they_should(tmp_path_factory, ranks, words, op):
    job = Job(tmp_path_factory.mktemp("job"), ranks=ranks)
    job.collective(op, size=4 * words, **({} if op == "all_reduce" else {"root": 1}))
    walk = walkthrough(job.load())
    (board,) = walk.boards
    assert "?" not in ever(walk)
    assert op == "broadcast" or walk.notes[-1].startswith("The sum may be a maximum or another reduction")
    if op == "reduce":
        assert {each.text for key, each in walk.held(board, len(walk.steps)).items() if key[0] == 1} == {"sum"}
    else:
        assert at_the_end(walk, board) == ({"sum"} if op == "all_reduce" else {"1"})


def test_what_ranks_hold_is_not_shown_without_the_messages_before(tmp_path):
    """Of 24 messages of a ring in 8 steps: from the first on, from the middle on, and those of one rank only."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1200)
    trace = job.load()
    every = messages(trace)
    walks = [
        walkthrough(trace, messages=some)
        for some in (every[:7], every[12:], [message for message in every if message.src == 0])
    ]
    assert [len(walk.boards) for walk in walks] == [1, 0, 0]
    assert "not shown for 1 of the collectives: not all that was sent is here." in walks[1].notes[-1]
    assert not any(" Then " in step.sentence for walk in walks[1:] for step in walk.steps)


def test_what_would_be_counted_twice_is_not_told():
    assert merge(0b01, 0b10) == 0b11  # a sum
    assert merge(0b01, 0b11) == 0b11  # what comes has mine in it
    assert merge(0b11, 0b10) == -1  # added again, or taken instead?
    assert merge(-1, 0b11) == -1


def test_the_pieces_of_every_glass_box_collective_move_and_sum():
    """Each rank ends with what the collective promises it; what it has of the rest is left over on the way."""
    trace = Cluster(4).run(wrong_rings.glass_boxes, timeout=60).trace
    assert len(trace.spans) == 8
    for name in trace.spans:
        walk = walkthrough(trace.within(name))
        (board,) = walk.boards
        held = {key: change.text for key, change in walk.held(board, len(walk.steps)).items()}
        promised = {
            "all_reduce": dict.fromkeys(held, "sum"),
            "all_gather": {(rank, piece): str(piece) for rank in range(4) for piece in range(4)},
            "reduce_scatter": {(rank, rank): "sum" for rank in range(4)},
            "broadcast": dict.fromkeys(held, "0"),
            "reduce": {(0, piece): "sum" for rank, piece in held if rank == 0},
        }[name.split()[1]]
        assert promised.items() <= held.items(), name
        assert "?" not in ever(walk)
        assert all(step.message.how == "observed" for step in walk.steps)
        assert all(" Then rank " in step.sentence for step in walk.steps)


def test_gradients_fill_buckets_and_these_travel():
    def job():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        with span("only step"):
            model(torch.ones(1, 4)).sum().backward()

    walk = walkthrough(Cluster(2).run(job, timeout=60).trace)
    board = next(each for each in walk.boards if each.lasting)
    assert at_the_end(walk, board) == {"bucket 0: averaged"}
    ready = [step for step in walk.steps if step.op == "gradient"]
    assert len(ready) == 8  # four parameters on each of two ranks
    assert ready[-1].sentence.endswith("4 of 4 in bucket 0, which is full (observed).")
    assert {step.part for step in ready} == {"only step · backward"}
    order = [step for step in walk.steps if step.rank == ready[-1].rank]
    first_send = next(i for i, step in enumerate(order) if step.message and step.message.operation.bucket)
    assert order.index(ready[-1]) < first_send
    assert {step.mark for step in walk.steps if step.op == "work"} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("called", "part", "shown", "state"),
    [
        ([0, 1], {}, 8, "averaged"),
        ([0, 1], {}, 7, "travels"),
        ([0, 1], {"kind": "collective"}, 8, "averaged"),
        ([0, 1], {"kind": "collective"}, 7, "travels"),
        ([0], {}, 8, "1 of 1 ready"),
    ],
)
def test_a_bucket_is_averaged_only_if_all_its_messages_came(tmp_path, called, part, shown, state):
    """Also where the gradients are not in the part of the trace that is played."""
    job = Job(tmp_path, ranks=2)
    for rank in called:
        job.bucket(rank, 0, {"weight": 40})
        job.stretch(rank, "forward", 0, 10)
        job.gradient(rank, "weight", at_ns=20)
        job.stretch(rank, "backward", 15, 90)
    launched = {"launcher": "reducer", "backward": 0, "phase": "backward", "inputs": (tensor(40),)}
    job.collective("all_reduce", ranks=called, start_ns=30, end_ns=60 if len(called) == 2 else None, **launched)
    trace = job.load().where(**part)
    assert len(messages(trace)) == 8
    walk = walkthrough(trace, messages=messages(trace)[:shown])
    board = next(each for each in walk.boards if each.lasting)
    assert at_the_end(walk, board) == {f"bucket 0: {state}"}


def test_a_context_opens_gets_gradients_and_ends():
    """One iteration with a parameter server: 14 messages, the graph's nodes between them, one context at both ends."""
    trace = Cluster(["ps", "trainer"], rpc=True, graph=True).run({"trainer": train}, timeout=60).trace
    one = analysis.iteration(trace)
    around = {(event.rank, event.number): event for event in trace.events}
    ends = [end for operation in analysis.operations(trace) for end in operation.ends if end.parent is not None]
    assert all(around[end.rank, end.parent].start_ns <= end.start_ns for end in ends)
    walk = walkthrough(trace, messages=one.messages)
    assert [step.message for step in walk.steps if step.message] == list(one.messages)
    # From the middle on, nobody can say what was there already.
    assert walkthrough(trace, messages=one.messages[3:]).boards == ()
    (board,) = walk.boards
    of_server = [each.text for step in walk.steps for each in step.changes if each.rank == 0]
    assert of_server == [f"context 0: {text}" for text in ("open", "has gradients", "step is done")] + [""]
    assert at_the_end(walk, board) == {""}
    (graph,) = walk.graphs
    lit = [graph.nodes[step.lit[1]] for step in walk.steps if step.lit]
    assert {node.key for node in lit} == {node.key for node in graph.nodes if node.start_ns is not None}
    assert walk.steps[0].part == "step 2 · forward"
    assert {step.span for step in walk.steps} == {"step 2"}
    assert {step.phase for step in walk.steps} == {"forward", "backward", "optimizer", "cleanup"}
    assert {step.phase for step in walk.steps if step.lit} == {"backward"}


def test_a_reply_and_what_a_call_sets_going_are_in_the_callers_span(tmp_path):
    """Two trainers call a server at the same time, each in a step of its own; then one of them outside of any."""
    job = Job(tmp_path, ranks=3)
    for rank in range(3):
        job.files[rank].append(Worker(name=f"worker{rank}", id=rank, wall_ns=0))
    calls = [(1, 1, "step 7", 100), (2, 1, "step 3", 101), (1, 2, "", 900)]
    for caller, call, name, at_ns in calls:
        own = {"function": "f", "call": call}
        step = job.span(caller, name, start_ns=at_ns - 50, end_ns=at_ns + 600) if name else None
        facts = {"op": "rpc_sync", "flavour": "python", "to": 0, "handed_ns": at_ns + 1, "parent": step}
        job.event(RpcCall, caller, start_ns=at_ns, end_ns=at_ns + 50, ended_by="reply", **own, **facts)
        run = job.event(RpcRun, 0, caller=caller, arrived_ns=at_ns + 10, start_ns=at_ns + 20, end_ns=at_ns + 30, **own)
        job.event(RpcReply, 0, caller=caller, call=call, run=run, start_ns=at_ns + 31, pickled_bytes=3)
    walk = walkthrough(job.load())
    seen = [("work" if step.message is None else "message", step.rank, step.span) for step in walk.steps]
    assert sorted(seen[:6]) == [
        ("message", 0, "step 3"), ("message", 0, "step 7"), ("message", 1, "step 7"), ("message", 2, "step 3"),
        ("work", 0, "step 3"), ("work", 0, "step 7"),
    ]  # fmt: skip
    assert seen[6:] == [("message", 1, ""), ("work", 0, ""), ("message", 0, "")]


def test_a_pipelines_works_and_messages_in_order_and_what_is_kept(tmp_path):
    """1F1B of two stages and two micro-batches: rank 0 does F0 F1 B0 B1, and rank 1 F0 B0 F1 B1."""
    job = Job(tmp_path, ranks=2)
    begins = {0: {"F0": 0, "F1": 10, "B0": 32, "B1": 54}, 1: {"F0": 11, "B0": 21, "F1": 33, "B1": 43}}
    for rank, works in begins.items():
        outer = job.span(rank, "step 0", start_ns=0, end_ns=90)
        for name, at_ns in works.items():
            job.span(rank, name, start_ns=at_ns, end_ns=at_ns + 8, parent=outer)
            if name[0] == "FB"[rank]:
                job.send(rank, 1 - rank, start_ns=at_ns + 9, end_ns=at_ns + 10, parent=outer)
                job.recv(1 - rank, rank, start_ns=at_ns + 9, end_ns=at_ns + 10)
    walk = walkthrough(job.load())
    told = " ".join(f"{step.mark or 'sends'}({step.rank})" for step in walk.steps)
    assert told == ("F0(0) sends(0) F1(0) F0(1) sends(0) B0(1) sends(1) B0(0) F1(1) B1(1) sends(1) B1(0)")
    assert {step.part for step in walk.steps} == {"step 0"}
    (board,) = walk.boards
    kept = [[change.text for key, change in walk.held(board, step).items() if key[0] == 0] for step in (3, 8, 12)]
    assert kept == [["micro-batch 0", "micro-batch 1"], ["", "micro-batch 1"], ["", ""]]
    assert walk.steps[2].sentence == "rank 0 begins F1 (observed). Kept for backward passes to come: 2 (inferred)."


def test_beside_some_messages_only_what_lies_between_them(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(3):
        job.span(0, f"work {i}", start_ns=100 * i + 10, end_ns=100 * i + 20)
        job.send(0, 1, start_ns=100 * i, end_ns=100 * i + 50)
        job.recv(1, 0, start_ns=100 * i, end_ns=100 * i + 50)
    trace = job.load()
    walk = walkthrough(trace, messages=[messages(trace)[1]])
    assert [step.mark for step in walk.steps] == ["", "work 1"]


@pytest.mark.parametrize(
    ("tags", "names", "marks"),
    [
        ((0, 1, 7), {1: "HELLO"}, ["tag 0", "HELLO", "tag 7"]),
        ((7,), {}, [""]),
        ((7,), {7: "HELLO"}, ["HELLO"]),
    ],
)
def test_tags_tell_messages_apart_and_one_that_all_have_does_not(tmp_path, tags, names, marks):
    job = Job(tmp_path, ranks=2)
    for tag in tags:
        job.send(0, 1, tag=tag, size=8, start_ns=10 * tag)
        job.recv(1, 0, tag=tag, size=8, start_ns=10 * tag)
    walk = walkthrough(job.load(), tags=names)
    assert [step.mark for step in walk.steps] == marks
    for step in walk.steps:
        assert step.sentence.startswith("HELLO: rank 0 sends rank 1 8 B") is (step.mark == "HELLO")


# What is played -------------------------------------------------------------------------------------------------------


def test_a_hang_is_one_step_that_names_who_waits_and_who_never_came(tmp_path):
    """And before it the last collective to which all came: 24 messages of four ranks each."""
    job = Job(tmp_path, ranks=4)
    for number in range(10):
        job.collective("all_reduce", size=4000, start_ns=100 * number, end_ns=100 * number + 50)
    for start_ns in (2000, 2100):
        job.collective("all_reduce", ranks=[0, 1, 3], size=8, start_ns=start_ns, end_ns=None)
    walk = walkthrough(job.load())
    *before, stuck = walk.steps
    told = "Rank 0, rank 1 and rank 3 wait for rank 2 in all_reduce #11; rank 2 never called it"
    told += "; behind it waits all_reduce #12"
    assert (walk.title, stuck.sentence) == (told, f"{told} (missing).")
    assert (stuck.waiting, stuck.absent, stuck.message) == ((0, 1, 3), (2,), None)
    assert {step.message.operation.seq for step in before} == {10}
    assert len(before) == 48


def two_ranks_in_steps(folder, *, named=True, count=60):
    """Eight messages of 250 B a step, which has a span or only the stretches of DDP."""
    job = Job(folder, ranks=2)
    for step in range(count):
        begin = 1000 * step
        for rank in range(2):
            outer = job.span(rank, f"step {step}", start_ns=begin, end_ns=begin + 900) if named else None
            job.stretch(rank, "forward", begin + 10, begin + 90, parent=outer)
            job.stretch(rank, "backward", begin + 100, begin + 800, parent=outer)
            job.stretch(rank, "optimizer", begin + 810, begin + 880, parent=outer)
        facts = {"launcher": "reducer", "backward": step, "phase": "backward", "parent": outer}
        job.collective("all_reduce", size=1000, start_ns=begin + 200, end_ns=begin + 700, **facts)
    return job.load()


@pytest.mark.parametrize(("named", "name"), [(True, "step"), (False, "Training step")])
def test_of_a_long_run_the_last_step_is_played_and_the_title_says_so(tmp_path, named, name):
    walk = walkthrough(two_ranks_in_steps(tmp_path, named=named))
    assert walk.title == f"{name} 59 of 60: 8 of 480 messages, 2.00 kB"
    assert len(walk.messages) == 8
    assert min(step.at_ns for step in walk.steps) >= 59_000
    assert any(note.startswith("472 messages of other steps are not played") for note in walk.notes)


def test_of_a_short_run_all_steps_are_played(tmp_path):
    assert len(walkthrough(two_ranks_in_steps(tmp_path, count=3)).messages) == 24


# What is not known is not claimed -------------------------------------------------------------------------------------


def test_two_groups_with_the_same_number_have_a_board_each(tmp_path):
    job = Job(tmp_path, ranks=4)
    for name, members in (("1", (0, 1)), ("2", (2, 3))):
        job.group(name, members)
        job.collective("all_reduce", size=16, group=name)
    walk = walkthrough(job.load())
    first, second = walk.boards
    assert first.title == "all_reduce #1 of group 1, 16 B: whose part is in which piece (inferred)"
    assert second.title == "all_reduce #1 of group 2, 16 B: whose part is in which piece (inferred)"
    assert {rank for rank, _ in walk.held(first, len(walk.steps))} == {0, 1}


def test_who_never_came_has_no_share_to_give(tmp_path):
    job = Job(tmp_path, ranks=3)
    outer = job.collective("all_reduce", size=8, ranks=[0, 1], end_ns=None)
    job.send(0, 1, parent=outer[0], size=8, step=1)
    job.recv(1, 0, parent=outer[1], size=8, step=1)
    walk = walkthrough(job.load())
    (board,) = walk.boards
    assert {rank: each.text for (rank, _), each in walk.held(board, 1).items()} == {0: "0", 1: "0+1", 2: ""}


def test_of_a_sparse_tensor_nothing_is_summed_on_the_way(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", inputs=(tensor(10, payload=60, indices=40),))
    walk = walkthrough(job.load())
    assert len(walk.messages) == 24
    assert walk.boards == ()


def test_the_steps_of_a_lost_file_say_not_which_piece_they_carried(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank, outer in job.collective("reduce_scatter", size=8, start_ns=0, end_ns=50).items():
        peer = 1 - rank
        job.send(rank, peer, parent=outer, start_ns=1, end_ns=5, offset_bytes=4 * peer, whole_bytes=8, step=1)
        job.recv(rank, peer, parent=outer, start_ns=1, end_ns=6)
    whole = walkthrough(job.load())
    assert [step.sentence.partition(" Then ")[2] for step in whole.steps] == [
        "rank 1 has the whole sum in piece 2 of 2.",
        "rank 0 has the whole sum in piece 1 of 2.",
    ]
    for file in tmp_path.glob("*-1001.jsonl"):
        file.unlink()
    rest = walkthrough(Trace.load(tmp_path))
    assert len(rest.messages) == 2
    assert rest.boards == ()
    assert rest.notes[-1].startswith("Problem: 1 of 2 processes left a file")


@pytest.mark.parametrize("ahead_ns", [0, 15, -15, 1000, -1000])
def test_what_is_held_follows_from_each_ranks_own_clock(tmp_path, ahead_ns):
    """Along a chain and back: rank 2's share to rank 1, both to rank 0, the sum back to 1 and to 2. What the steps show
    in another order than they had may be "?", but nothing else."""
    job = Job(tmp_path, ranks=3)
    job.headers = [header(rank, world_size=3, host=f"host{rank}") for rank in range(3)]
    ahead = {rank: rank * ahead_ns for rank in range(3)}
    outer = job.collective("all_reduce", size=8, start_ns=ahead, end_ns={rank: at + 60 for rank, at in ahead.items()})
    for step, (src, dst) in enumerate(((2, 1), (1, 0), (0, 1), (1, 2))):
        for rank, call in ((src, partial(job.send, src, dst)), (dst, partial(job.recv, dst, src))):
            start = 10 * step + 1 + ahead[rank]
            call(parent=outer[rank], start_ns=start, end_ns=start + 8, size=8, step=step)
    walk = walkthrough(job.load())
    told = {step.message.step: step.changes[-1].text for step in walk.steps}
    assert all(told[step] in (text, "?") for step, text in enumerate(("1+2", "sum", "sum", "sum")))
    assert told[2] == told[3] == "sum"
    if not ahead_ns:
        assert told == {0: "1+2", 1: "sum", 2: "sum", 3: "sum"}


def test_the_buckets_of_two_models_stand_beside_each_other(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank, model in product(range(2), range(2)):
        job.bucket(rank, 0, {f"{model}.w": 16}, model=model)
        job.gradient(rank, f"{model}.w", model=model, at_ns=10 + model, size=16)
    walk = walkthrough(job.load())
    (board,) = walk.boards
    held = {key: each.text for key, each in walk.held(board, len(walk.steps)).items() if key[0] == 0}
    assert held == {(0, 0): "model 0, bucket 0: 1 of 1 ready", (0, 1): "model 1, bucket 0: 1 of 1 ready"}
