"""RPC on real workers: every message at both ends, and what torch's C++ sends by itself."""

from collections import Counter

import pytest
import rpc_jobs

from dlearn import Cluster, messages

WORKERS = ["ps", "trainer1", "trainer2"]

ONE_ITERATION = Counter(
    {
        ("trainer", "FORWARD_AUTOGRAD_REQ"): 2,  # the input, and the optimizer's step
        ("ps", "RREF_CHILD_ACCEPT"): 2,
        ("trainer", "RREF_ACK"): 2,
        ("ps", "FORWARD_AUTOGRAD_RESP"): 1,
        ("ps", "SCRIPT_RET"): 1,
        ("trainer", "BACKWARD_AUTOGRAD_REQ"): 1,
        ("ps", "BACKWARD_AUTOGRAD_RESP"): 1,
        ("trainer", "CLEANUP_AUTOGRAD_CONTEXT_REQ"): 1,
        ("ps", "CLEANUP_AUTOGRAD_CONTEXT_REQ"): 1,
        ("trainer", "CLEANUP_AUTOGRAD_CONTEXT_RESP"): 1,
        ("ps", "CLEANUP_AUTOGRAD_CONTEXT_RESP"): 1,
    }
)
"""facts of one server and one trainer: who sends what, how often; 14 in all."""


@pytest.fixture(scope="module")
def run():
    return Cluster(WORKERS, rpc=True).run({"trainer1": rpc_jobs.train, "trainer2": rpc_jobs.train}, timeout=60)


def test_one_iteration_is_14_messages_for_each_trainer(run):
    found = messages(run.trace.within("step 2"))
    assert len(found) == 28
    for trainer in (1, 2):
        mine = [each for each in found if trainer in (each.src, each.dst)]
        assert Counter(("ps" if each.src == 0 else "trainer", each.op) for each in mine) == ONE_ITERATION


def test_every_message_of_the_agents_is_explained(run):
    rpc = run.trace.rpc
    assert rpc.complete
    assert rpc.explained == rpc.logged == 80
    assert all(each.request.complete for each in rpc.exchanges)


def test_four_messages_carry_information(run):
    data = [each for each in messages(run.trace.within("step 1")) if not each.control and 1 in (each.src, each.dst)]
    assert [each.what for each in data] == [
        "forward(float32[8, 3, 16, 16])",
        "result of forward: float32[8, 4, 16, 16]",
        "gradient float32[8, 4, 16, 16]",
        "_script_local_optimizer_step()",
    ]


def test_payloads_are_those_that_the_agent_sends(run):
    """The C++ agent's own: 376, 217 and 67 bytes with tensors of 24,576, 32,768 and 32,768."""
    data = [each for each in messages(run.trace.within("step 1")) if not each.control and 1 in (each.src, each.dst)]
    assert [each.packed_bytes for each in data[:3]] == [376, 217, 67]
    assert [sum(tensor.payload_bytes for tensor in each.tensors) for each in data[:3]] == [24576, 32768, 32768]


def test_training_is_not_changed(run):
    bare = Cluster(WORKERS, rpc=True, record=False).run({"trainer1": rpc_jobs.train}, timeout=60)
    alone = Cluster(WORKERS, rpc=True).run({"trainer1": rpc_jobs.train}, timeout=60)
    assert alone.results["trainer1"] == bare.results["trainer1"]
    assert bare.output["ps"] == alone.output["ps"] == ""
