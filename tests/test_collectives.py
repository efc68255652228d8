"""The four algorithms: right to the bit, in the steps and bytes of theory, and clear about what they cannot do."""

from __future__ import annotations

from collections import Counter

import glass_box
import pytest
import torch

from dlearn import Cluster, messages, operations
from dlearn.analysis import reconcile
from dlearn.errors import RankError
from dlearn.lessons.trees_and_rings import cost, cost_seen

pytestmark = pytest.mark.usefixtures("own_folder")

RANKS = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce(ranks):
    """Twice: the results of all ranks and of both runs are equal in every bit; the ring's are gloo's."""
    once, again = (Cluster(ranks).run(glass_box.all_reduce_everything, glass_box.SIZES).results for _ in range(2))
    for (name, size), (equal, close, result) in once[0].items():
        assert close, (name, size)
        if name == "ring" and ranks <= 4:
            assert equal, (name, size)
        for results in (once, again):
            assert all(torch.equal(results[rank][name, size][2], result) for rank in range(ranks)), (name, size)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_is_gloos_to_the_bit_for_large_tensors(ranks):
    results = Cluster(ranks).run(glass_box.all_reduce_everything, [262_144, 6_553_600]).results
    assert {results[rank]["ring", size][0] for rank in range(ranks) for size in (262_144, 6_553_600)} == {True}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_other_collectives(ranks):
    run = Cluster(ranks).run(glass_box.the_others)
    assert run.results == {rank: [] for rank in range(ranks)}
    assert reconcile(run.trace).exact


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_type_shape_and_operation(ranks):
    assert Cluster(ranks).run(glass_box.any_tensor).results == {rank: [] for rank in range(ranks)}


def test_what_cannot_be_carried_is_refused_before_anything_is_sent():
    said = Cluster(3).run(glass_box.refused, timeout=60).results[1]
    assert said == {
        "sparse": "glass-box collectives carry dense tensors on the CPU, not a torch.sparse_coo one on cpu;"
        " use torch's own collective.",
        "expanded": "an expanded tensor has several items in one place of memory: call .contiguous() first.",
        "meta": "glass-box collectives carry dense tensors on the CPU, not a torch.strided one on meta;"
        " use torch's own collective.",
        "mean of integers": "glass-box collectives know no AVG of torch.int32.",
        "bits of floats": "glass-box collectives know no BAND of torch.float32.",
        "order of complex": "glass-box collectives know no MAX of torch.complex64.",
        "output": "with 3 ranks the large tensor has 3 times the items of the small one, not 13 and 4.",
        "input": "with 3 ranks the large tensor has 3 times the items of the small one, not 11 and 4.",
        "types": "all tensors of a collective have one type, not ['torch.float64', 'torch.float32'].",
        "root": "the root is a rank of the group, 0 to 2, not 3.",
    }


def test_a_group_that_leaves_a_rank_out():
    """1 + 3 = 4, then 4 + 4, and so on through four algorithms: 4 x 2 x 2 x 2."""
    assert Cluster(3).run(glass_box.in_a_part_of_the_ranks).results == {0: [32.0] * 3, 1: [2.0] * 3, 2: [32.0] * 3}


# What is seen of them -------------------------------------------------------------------------------------------------


def one_of_each(size: int) -> None:
    for algorithm in glass_box.ALGORITHMS.values():
        algorithm.all_reduce(torch.ones(size))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_steps_and_bytes_are_those_of_theory(ranks):
    """960 items of 4 B can be cut evenly by 2 to 6, and by gloo into 2 segments for each."""
    trace = Cluster(ranks).run(one_of_each, 960).trace
    for name, operation in zip(glass_box.ALGORITHMS, operations(trace), strict=True):
        assert cost_seen(operation) == cost(name, ranks, 3840), name
    assert reconcile(trace).exact


def test_each_step_says_which_part_it_carries():
    """Ring on 4 ranks, 16 items: chunks of 4 items. In step 0 rank r sends chunk r+1, in step 3 chunk r, complete."""
    run = Cluster(4).run(one_of_each, 16)
    [operation] = [each for each in operations(run.trace) if each.seq == 1]
    assert operation.op == "all_reduce"
    assert len(operation.steps) == 4 * 6
    sent = {
        (m.step, m.src): (m.dst, m.offset_bytes, m.payload_bytes, m.whole_bytes)
        for m in messages(run.trace)
        if m.operation.seq == 1
    }
    assert [sent[0, rank] for rank in range(4)] == [(3, 16, 16, 64), (0, 32, 16, 64), (1, 48, 16, 64), (2, 0, 16, 64)]
    assert [sent[3, rank] for rank in range(4)] == [(3, 0, 16, 64), (0, 16, 16, 64), (1, 32, 16, 64), (2, 48, 16, 64)]
    assert {message.how for message in messages(run.trace)} == {"observed"}


def test_a_step_is_counted_once():
    """The outer operation and its sends are one thing: 2 x 3/4 x 64 B for each rank of the ring."""
    run = Cluster(4).run(one_of_each, 16)
    by_operation = Counter()
    for message in messages(run.trace):
        by_operation[message.operation.seq] += message.payload_bytes
    assert by_operation[1] == 4 * 96
    assert len(operations(run.trace)) == 4


# A peer that is gone --------------------------------------------------------------------------------------------------


def test_a_peer_that_dies_in_the_middle_of_a_ring_is_named():
    with pytest.raises(RankError) as caught:
        Cluster(4).run(glass_box.die_in_the_middle, timeout=60)
    assert caught.value.rank == 2
    told = caught.value.what.splitlines()
    assert told[0] == "rank 2 died: it exited with code 7 inside its function"
    assert "PeerError: ring all_reduce, step 1: " in told[1]
    assert "rank 2" in told[1]
