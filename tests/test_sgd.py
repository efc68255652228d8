"""The family of distributed SGD on real ranks: what equals what, who sends how much, and which layers mix."""

from collections import Counter
from functools import partial

import pytest
import torch

from dlearn import Cluster, analysis, messages
from dlearn.lessons import handshake, sgd
from dlearn.lessons.handshake import BYE, GRAD, HELLO, PARAMS, READY, mixed
from dlearn.lessons.sgd import BATCH, LAYERS, BareList, P

NUMBER = 8
"""Bytes of a float64."""


@pytest.fixture(scope="module")
def three():
    with Cluster(3) as cluster:
        yield cluster


def apart(a, b):
    return (a - b).abs().max().item()


def payload(run, kind):
    return analysis.traffic(run.trace.within(kind)).total_bytes


def sent(run):
    return [row for worker in sorted(run.results) for row in run.results[worker].sent]


def test_the_model_has_three_layers_and_2400_parameters():
    assert [each.numel() for each in sgd.new_model().parameters()] == list(LAYERS)
    assert P == 2400
    assert P % 24 == 0  # gloo cuts an all-reduce of n ranks into 2 n segments: even ones for 2, 3 and 4


def test_workers_pass_over_their_shares_again_and_again():
    steps_of_a_pass = 500 // BATCH
    first, again = (sgd.batch(1, 3, step) for step in (0, steps_of_a_pass))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], sgd.batch(1, 3, 1)[0])
    assert not torch.equal(first[0], sgd.batch(0, 3, 0)[0])


# Synchronous ----------------------------------------------------------------------------------------------------------


def test_all_reduce_trains_as_one_device_with_all_batches(three):
    run = three.run(sgd.all_reduced, 6)
    expected = sgd.alone(6, 3)
    assert apart(expected, sgd.first_numbers()) > 0.01
    for rank, told in run.results.items():
        assert apart(told.numbers, expected) < 1e-6
        assert torch.equal(told.numbers, run.results[0].numbers)
        assert [(each.worker, each.staleness) for each in told.updates] == [(rank + 1, 0)] * 6
    assert payload(run, "gradients") == 6 * 2 * (3 - 1) * NUMBER * P  # a ring


@pytest.mark.parametrize("keeper", [sgd.WholeModel, BareList])
def test_a_server_with_a_model_or_a_bare_list_trains_as_one_device(three, keeper):
    run = three.run(sgd.gathered, 6, keeper)
    assert apart(run.results[0].numbers, sgd.alone(6, 2)) < 1e-6
    assert [(each.worker, each.staleness) for each in run.results[0].updates] == [(1, 0), (2, 0)] * 6
    assert [run.results[worker].numbers for worker in (1, 2)] == [None, None]
    filled = NUMBER * P if keeper is BareList else 0  # by worker 1, once
    assert payload(run, "parameters") == 6 * 2 * NUMBER * (P + 1) + filled
    assert payload(run, "gradients") == 6 * 2 * NUMBER * (P + 2)


def test_an_average_after_every_step_is_an_all_reduce_of_gradients(three):
    together, each_step, each_third = (
        three.run(sgd.all_reduced, 6),
        three.run(sgd.local, 6, 1),
        three.run(sgd.local, 6, 3),
    )
    assert apart(each_step.results[1].numbers, together.results[1].numbers) < 1e-6
    assert apart(each_third.results[1].numbers, together.results[1].numbers) > 1e-6
    assert payload(each_step, "average") == payload(together, "gradients") == 3 * payload(each_third, "average")
    assert [each.staleness for each in each_third.results[2].updates] == [0, 1, 2, 0, 1, 2]


# Asynchronous ---------------------------------------------------------------------------------------------------------


def test_every_gradient_is_an_update_when_it_comes(three):
    run = three.run(sgd.asynchronous, 60)
    updates = run.results[0].updates
    assert len(updates) == 60
    assert {each.worker for each in updates} == {1, 2}
    assert all(each.staleness >= 0 for each in updates)
    # Each worker always has one gradient on its way, so an update makes n - 1 others older: (n - 1) U, less the start.
    assert sum(each.staleness for each in updates) == (2 - 1) * 60 - 2 * (2 - 1) // 2
    assert sum(each.loss for each in updates[-10:]) < sum(each.loss for each in updates[:10])
    assert payload(run, "gradients") == 60 * NUMBER * (P + 2)
    assert payload(run, "parameters") == (60 + 2) * NUMBER * (P + 1)  # the last one of each worker says stop
    received = run.trace.where(op="recv", rank=0).events
    assert [each.peer for each in received] == [each.worker for each in updates]  # the source was any


@pytest.mark.slow
def test_with_one_worker_asynchronous_is_training_on_one_device():
    with Cluster(2) as cluster:
        run = cluster.run(sgd.asynchronous, 9)
        shaken = cluster.run(handshake.with_handshake, 9)
    assert apart(run.results[0].numbers, sgd.alone(9, 1)) < 1e-6
    assert apart(shaken.results[0].numbers, sgd.alone(9, 1)) < 1e-6
    assert [each.staleness for each in run.results[0].updates] == [0] * 9


@pytest.mark.slow
def test_every_push_of_hogwild_is_an_update():
    workers = ["worker1", "worker2"]
    run = Cluster(["server", *workers], rpc=True).run(dict.fromkeys(workers, partial(sgd.hogwild, 60)))
    told = run.results["worker1"]
    assert len(told.updates) == 60
    assert all(each.staleness >= 0 for each in told.updates)
    assert told.threads >= 1
    pushed, pulled = (
        [message for message in messages(run.trace.within(kind)) if message.tensors]
        for kind in ("gradients", "parameters")
    )
    assert [message.tensors[0].payload_bytes for message in pushed] == [NUMBER * P] * 60
    assert [message.tensors[0].payload_bytes for message in pulled] == [NUMBER * P] * (60 + 2)


# The handshake --------------------------------------------------------------------------------------------------------


def test_the_handshake_is_counted_exactly_and_nothing_mixes(three):
    updates = 2 * 5
    run = three.run(handshake.with_handshake, 5)
    tags = Counter(each.tag for each in run.trace.where(op="send").events)
    layers = {GRAD + layer: updates for layer in range(3)}
    assert tags == {HELLO: 2 * updates, READY: 2 * updates, PARAMS: updates, BYE: 2, **layers}
    server = run.results[0]
    assert mixed(server.taken, sent(run)) == []
    assert sorted(each.checksums for each in server.taken) == sorted(sent(run))
    assert all(each.staleness >= 0 for each in server.updates)


def test_without_it_layers_of_two_workers_mix_and_checksums_tell(three):
    run = three.run(handshake.interleaved, timeout=20)
    taken = run.results[0].taken
    assert [each.workers for each in taken] == [(1, 2, 2), (2, 1, 1)]
    assert mixed(taken, sent(run)) == [0, 1]
    (one,), (two,) = (run.results[worker].sent for worker in (1, 2))
    assert [each.checksums for each in taken] == [(one[0], *two[1:]), (two[0], *one[1:])]


def test_the_first_layer_from_anyone_and_the_rest_from_that_one_is_safe(three):
    run = three.run(handshake.interleaved, handshake.from_one, timeout=20)
    assert [each.workers for each in run.results[0].taken] == [(1, 1, 1), (2, 2, 2)]
    assert mixed(run.results[0].taken, sent(run)) == []


@pytest.mark.slow
@pytest.mark.parametrize("take", [handshake.from_anyone, handshake.from_one])
def test_without_a_handshake_checksums_and_sources_agree(three, take):
    run = three.run(handshake.without_handshake, 20, take, timeout=60)
    taken = run.results[0].taken
    of_two = [number for number, each in enumerate(taken) if len(set(each.workers)) > 1]
    assert mixed(taken, sent(run)) == of_two
    assert take is handshake.from_anyone or of_two == []
    for layer in range(3):  # mixed or not, each layer of each gradient is in one update
        assert Counter(each.checksums[layer] for each in taken) == Counter(row[layer] for row in sent(run))
        assert Counter(each.workers[layer] for each in taken) == {1: 20, 2: 20}


# On MPI ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_on_mpi():
    pytest.importorskip("mpi4py")
    with Cluster(3, backend="mpi") as cluster:
        yield cluster


@pytest.mark.slow
def test_on_mpi_the_members_train_as_one_device(three_on_mpi):
    everyone, two = sgd.alone(6, 3), sgd.alone(6, 2)
    for job, args, expected in (
        (sgd.all_reduced, (), everyone),
        (sgd.local, (1,), everyone),
        (sgd.gathered, (), two),
        (sgd.gathered, (BareList,), two),
    ):
        assert apart(three_on_mpi.run(job, 6, *args, timeout=60).results[0].numbers, expected) < 1e-6
    run = three_on_mpi.run(sgd.asynchronous, 60, timeout=60)
    assert sum(each.staleness for each in run.results[0].updates) == 60 - 1
    assert payload(run, "gradients") == 60 * NUMBER * (P + 2)


@pytest.mark.slow
def test_on_mpi_the_handshake_is_counted_and_layers_mix_without_it(three_on_mpi):
    run = three_on_mpi.run(handshake.with_handshake, 5, timeout=60)
    tags = Counter(each.tag for each in run.trace.where(op="send").events)
    assert (tags[HELLO], tags[READY], tags[PARAMS], tags[GRAD], tags[BYE]) == (20, 20, 10, 10, 2)
    assert mixed(run.results[0].taken, sent(run)) == []
    for take, updates in ((handshake.from_anyone, [0, 1]), (handshake.from_one, [])):
        run = three_on_mpi.run(handshake.interleaved, take, timeout=60)
        assert mixed(run.results[0].taken, sent(run)) == updates
