"""A trace step by step: the order, what each rank holds after each step, and what is said of it. (In
test_every_trace.py the steps of recorded traces and of a pipeline are compared, and their order is checked.)"""

import pytest
import wrong_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_trace import check_order
from traces import Job, header

from dlearn import Trace, messages
from dlearn.play import player

OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "barrier")


def walk_of(trace, **options):
    return player(trace, **options).walk


def ever(walk):
    return {change.text for step in walk.steps for change in step.changes}


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(2, 9), words=st.integers(1, 5000), op=st.sampled_from(["all_reduce", "reduce", "broadcast"]))
def test_gloos_own_schedules_end_as_they_should(tmp_path_factory, ranks, words, op):
    job = Job(tmp_path_factory.mktemp("job"), ranks=ranks)
    job.collective(op, size=4 * words, **({} if op == "all_reduce" else {"root": 1}))
    walk = walk_of(job.load())
    (panel,) = walk.panels
    assert "?" not in ever(walk)
    assert op == "broadcast" or walk.notes[-1].startswith("The sum may be a maximum or another reduction")
    held = walk.held(panel, len(walk.steps)).items()
    promised = {each.text for (rank, _), each in held if op != "reduce" or rank == 1}
    assert promised == ({"1"} if op == "broadcast" else {"sum"})


CALLS = st.tuples(
    st.sampled_from(OPS),
    st.lists(st.integers(1, 40), min_size=5, max_size=5),
    st.lists(st.integers(10, 90), min_size=5, max_size=5),
)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 5), made=st.lists(CALLS, min_size=1, max_size=4), words=st.integers(1, 50))
def test_in_any_job_no_rank_acts_on_what_it_has_not_got(tmp_path_factory, ranks, made, words):
    """Each rank computes for a while, calls, and is done at any time after what it needs can have come."""
    job, now = Job(tmp_path_factory.mktemp("job"), ranks=ranks), dict.fromkeys(range(ranks), 0)
    for op, computed, took in made:
        starts = {rank: now[rank] + 1000 * computed[rank] for rank in now}
        job.stretch(now, "forward", now, starts)
        # A broadcast's tree leads from lower ranks to higher ones; a ring leads through all.
        needed = {rank: max(starts[each] for each in now if op != "broadcast" or each <= rank) for rank in now}
        ends = {rank: needed[rank] + 1000 * took[rank] for rank in now}
        root = {"root": 0} if op in ("broadcast", "reduce") else {}
        job.collective(op, size=0 if op == "barrier" else 8 * words, start_ns=starts, end_ns=ends, **root)
        now = ends
    job.stretch(now, "optimizer", now, {rank: at + 5 for rank, at in now.items()})
    check_order(walk_of(job.load()))


def test_the_pieces_of_every_glass_box_collective_move_and_sum(recorded):
    """Each rank ends with what the collective promises it; what it has of the rest is left over on the way."""
    trace = recorded(wrong_rings.glass_boxes, 4)
    assert len(trace.spans) == 8
    for name in trace.spans:
        walk = walk_of(trace.within(name))
        (panel,) = walk.panels
        held = {key: change.text for key, change in walk.held(panel, len(walk.steps)).items()}
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


def test_an_all_to_all_fills_a_matrix_of_who_has_what_from_whom(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("all_to_all_single", size=400)
    walk = walk_of(job.load())
    for count in (0, 5, 12):  # At first each has what it keeps.
        came = {(step.message.dst, step.message.src) for step in walk.steps[:count]}
        assert {*walk.held(walk.panels[0], count)} == came | {(rank, rank) for rank in range(4)}


def test_what_ranks_hold_is_not_shown_without_the_messages_before(tmp_path):
    """Of 24 messages of a ring in 8 steps: from the first on, from the middle on, and those of one rank only."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1200)
    trace = job.load()
    every = messages(trace)
    chosen = (every[:7], every[12:], [message for message in every if message.src == 0])
    walks = [walk_of(trace, messages=some) for some in chosen]
    assert [len(walk.panels) for walk in walks] == [1, 0, 0]
    assert "not shown for 1 of the collectives: not all that was sent is here." in walks[1].notes[-1]
    assert not any(" Then " in step.sentence for walk in walks[1:] for step in walk.steps)


def test_what_would_be_counted_twice_is_not_told(tmp_path):
    """An all_reduce of three ranks in which all send all that they have to rank 1, and rank 0 does so twice."""
    job = Job(tmp_path, ranks=3)
    outer = job.collective("all_reduce", size=8, start_ns=0, end_ns=90)
    for step, (src, dst) in enumerate([(0, 1), (1, 2), (0, 2), (0, 1)]):
        job.message(src, dst, parent=outer, start_ns=10 * step + 1, end_ns=10 * step + 9, size=8, step=step)
    walk = walk_of(job.load())
    assert [step.changes[-1].text for step in walk.steps] == ["0+1", "sum", "?", "?"]


def test_the_steps_of_a_lost_file_say_not_which_piece_they_carried(tmp_path, job):
    for rank, outer in job.collective("reduce_scatter", size=8, start_ns=0, end_ns=50).items():
        peer = 1 - rank
        job.send(rank, peer, parent=outer, start_ns=1, end_ns=5, offset_bytes=4 * peer, whole_bytes=8, step=1)
        job.recv(rank, peer, parent=outer, start_ns=1, end_ns=6)
    assert [step.sentence.partition(" Then ")[2] for step in walk_of(job.load()).steps] == [
        "rank 1 has the whole sum in piece 2 of 2.",
        "rank 0 has the whole sum in piece 1 of 2.",
    ]
    for file in tmp_path.glob("*-1001.jsonl"):
        file.unlink()
    rest = walk_of(Trace.load(tmp_path))
    assert len(rest.messages) == 2
    assert rest.panels == ()
    assert rest.notes[-1].startswith("Problem: 1 of 2 processes left a file")


@pytest.mark.parametrize("ahead_ns", [0, 15, -1000])
def test_what_is_held_follows_from_each_ranks_own_clock(tmp_path, ahead_ns):
    """Along a chain and back: rank 2's share to rank 1, both to rank 0, the sum back to 1 and to 2. What the steps show
    in another order than they had may be "?", but nothing else."""
    job = Job(tmp_path, ranks=3)
    job.headers = [header(rank, world_size=3, host=f"host{rank}") for rank in range(3)]
    ahead = {rank: rank * ahead_ns for rank in range(3)}
    outer = job.collective("all_reduce", size=8, start_ns=ahead, end_ns={rank: at + 60 for rank, at in ahead.items()})
    for step, (src, dst) in enumerate(((2, 1), (1, 0), (0, 1), (1, 2))):
        began = {rank: 10 * step + 1 + at for rank, at in ahead.items()}
        ended = {rank: at + 8 for rank, at in began.items()}
        job.message(src, dst, parent=outer, size=8, step=step, start_ns=began, end_ns=ended)
    told = {step.message.step: step.changes[-1].text for step in walk_of(job.load()).steps}
    assert all(told[step] in (text, "?") for step, text in enumerate(("1+2", "sum", "sum", "sum")))
    assert told[2] == told[3] == "sum"
    assert ahead_ns or "?" not in told.values()
