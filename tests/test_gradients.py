"""Was each gradient reduced, and where did ranks part before one of them waits? (../cases: kinds 3 and 4.)"""

import gradient_programs as programs
import pytest
from hanging import end_when, in_calls

from dlearn import Cluster, explain
from dlearn.analysis import gradients


@pytest.mark.parametrize("program", programs.RIGHT, ids=lambda program: program.__name__)
def test_nothing_is_said_of_what_is_right(recorded, program):
    trace = recorded(program)
    told = gradients(trace)
    assert told.sentences == (), trace.path
    assert not [each for each in explain(trace).sentences if "reduc" in each and "optimizer" in each]


WRONG = {
    programs.past_ddp_in_step_2: "step 2 of optimizer 0 (SGD) used gradients that no rank reduced: DDP's forward was "
    "not called before",
    programs.never_synchronised: "2 steps of optimizer 0 (SGD) follow backward passes inside no_sync on each rank",
    programs.accumulation_for_nothing: "Note: 3 reductions of the same parameters before one step, in 2 steps of "
    "optimizer 0 (SGD)",
}


@pytest.mark.parametrize(("program", "told"), WRONG.items())
def test_what_was_not_reduced_or_too_often_is_said(recorded, program, told):
    sentences = [each for each in explain(recorded(program)).sentences if "optimizer" in each and "(SGD)" in each]
    assert len(sentences) == 1
    assert told in sentences[0]
    assert "gradient_programs.py:" in sentences[0], "the line"


def test_every_step_has_a_row_that_says_by_what(recorded):
    def by_what(program):
        return [row[3:] for row in gradients(recorded(program)).rows() if row[0] == "rank 0"]

    assert by_what(programs.accumulation_with_a_remainder) == [("3", "1", "DDP"), ("3", "1", "DDP"), ("1", "1", "DDP")]
    assert by_what(programs.fsdp2_reduces_the_last_batch_only) == [("1", "1", "FSDP2")] * 2
    rows = by_what(programs.averaged_by_hand)
    assert [row[:2] for row in rows] == [("1", "0")] * 3
    assert all(row[2].startswith("perhaps all_reduce by hand (") for row in rows)
    rows = by_what(programs.local_sgd)
    assert [row[2] for row in rows[:3]] == ["none: DDP's forward was not called"] * 2 + ["none: inside no_sync"]


def test_the_layer_whose_gradients_never_came_is_named(own_folder):
    run = Cluster(2).run(programs.layer_left_out, check=False)
    told = "rank 0 and rank 1 never produced the gradients of 0.weight and 0.bias in backward pass 2, so DDP never sent"
    assert told in str(explain(run.trace))


def hung(calls, program, *args):
    return str(explain(end_when(in_calls(*calls), Cluster(1 + len(calls)), program, *args).trace))


# The sums of an extra pass: of pass 1; of pass 2, before step 2 on rank 0 and before step 2 on rank 1 too, but for
# another batch.
PARTED = {
    ((9,), programs.extra_pass_on_rank_1): [
        "from all_reduce #8 on, rank 0 was 1 optimizer step ahead; 1 all-reduce before this one mixed"
    ],
    ((8, 8), programs.no_sync_on_rank_1, 3): [
        "on, rank 1 was 1 backward pass ahead: it made backward pass 2 inside no_sync (",
        "step 2 of optimizer 0 (SGD) follows a backward pass inside no_sync on rank 1 only",
    ],
    ((9,), programs.step_skipped_on_rank_0): [
        "on, rank 0 was 1 forward pass ahead: it skipped backward after forward pass 3 (",
        "1 all-reduce before this one mixed different passes",
    ],
    ((7,), programs.no_sync_on_rank_1, 2): ["; rank 1 made backward pass 2 inside no_sync ("],
}


@pytest.mark.parametrize(("run", "told"), PARTED.items())
def test_where_ranks_parted_is_named(own_folder, run, told):
    said = hung(*run)
    assert [each for each in told if each not in said] == []


@pytest.mark.parametrize(("steps", "told"), [((3, 2), "LookupError"), ((2, 3), "rank 1 waits for rank 0")])
def test_uneven_batches_are_not_blamed(own_folder, steps, told):
    said = hung((9,), programs.uneven_batches, *steps)
    assert told in said
    assert "ahead" not in said
    assert "no_sync" not in said
