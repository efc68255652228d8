"""RPC on real workers: every message at both ends, and what torch's C++ sends by itself. The agent's own log: taken out
of a rank's stderr, where nothing else is lost. (Damaged logs are in test_damaged_files.py.)"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import programs
import pytest
import rpc_jobs
import torch
import torch.distributed.rpc as rpc
from installed_torch import SCRIPTED_OPTIMIZERS, own_words
from waiting import free_port

from dlearn import Cluster, Trace, draw, explain, messages, operations
from dlearn.analysis import iteration, iterations, reconcile
from dlearn.errors import RankError
from dlearn.events.event import RpcWindow

WORKERS = ["ps", "trainer1", "trainer2"]


@pytest.fixture
def trained(recorded):
    return recorded(rpc_jobs.serve_and_train, WORKERS, rpc=True, measure="phase")


def test_every_message_is_explained_and_one_iteration_is_14_for_each_trainer(trained):
    assert trained.rpc.complete
    assert trained.rpc.explained == trained.rpc.logged == 80
    assert iterations(trained) == 3
    for step in range(3):
        found = messages(trained.within(f"step {step}"))
        assert Counter(each.src or each.dst for each in found) == {1: 14, 2: 14}
    told = iteration(trained)
    assert (told.number, told.drivers, len(told.messages), len(told.steps)) == (2, (1, 2), 28, 14)
    assert all(None not in step.messages for step in told.steps)


def test_each_call_is_seen_from_its_sending_to_the_arrival_of_its_reply(trained):
    calls = [each for each in trained.rpc.exchanges if each.run is not None and each.call.op != "remote"]
    assert len(calls) >= 14
    for each in calls:
        there = [each.call.start_ns, each.sent_ns, each.received_ns, each.run.arrived_ns, each.run.start_ns]
        back = [each.run.end_ns, each.reply.start_ns, each.reply_sent_ns, each.reply_received_ns, each.call.end_ns]
        assert there + back == sorted(there + back)
    found = operations(trained)
    assert [(each.start_ns, each.end_ns) for each in found] == list(zip(found.start_ns, found.end_ns, strict=True))
    assert len(found.groups()) < len(found), "calls that differ in nothing but times are one group"


STEP = (583 if SCRIPTED_OPTIMIZERS else 613, 269)
MEASURED = {"forward": (25396, 33439), "backward": (33150, 127), "optimizer": STEP, "cleanup": (267, 267)}
"""Phase -> bytes on the wire from the trainer, and to it, of a batch of 8: TCP_INFO, without our own ids."""


def test_the_kernel_counts_what_is_predicted_in_every_phase(trained):
    told = iteration(trained)
    assert len(told.phases) == 2 * 8
    for each in told.phases:
        assert each.measured_bytes - each.observer_bytes == MEASURED[each.phase][each.src == 0]
        assert each.not_predicted == (SCRIPTED_OPTIMIZERS and each.phase == "optimizer")
        assert each.not_predicted or abs(each.residue_bytes) <= 4 * each.message_count
    assert_as_predicted(trained, reconcile(trained).whole.pairs)
    assert all(pair.observer_bytes > 0 for pair in reconcile(trained).whole.pairs)


def assert_as_predicted(trace, pairs):
    """Within 4 B a message; of one that C++ packed the tensors are known, and 700 B more are possible."""
    for pair in pairs:
        ours = [each for each in messages(trace) if (each.src, each.dst) == (pair.src, pair.dst)]
        unknown = [each for each in ours if each.packed_bytes is None or any(info.sparse for info in each.tensors)]
        tensors = sum(info.payload_bytes for each in unknown for info in each.tensors)
        assert -4 * len(ours) <= pair.residue_bytes - tensors <= 4 * len(ours) + 700 * len(unknown)


def test_four_messages_carry_information_and_the_iteration_tells_them(trained):
    data = [each for each in messages(trained.within("step 1")) if not each.control and 1 in (each.src, each.dst)]
    assert [each.what for each in data] == [
        "forward(float32[8, 3, 16, 16])",
        "result of forward: float32[8, 4, 16, 16]",
        "gradient float32[8, 4, 16, 16]",
        "_script_local_optimizer_step()" if SCRIPTED_OPTIMIZERS else "_functional_local_optimizer_step()",
    ]
    # The C++ agent's own payloads.
    assert [each.packed_bytes for each in data[:3]] == [376, 217, 67]
    assert [sum(tensor.payload_bytes for tensor in each.tensors) for each in data[:3]] == [24576, 32768, 32768]
    told = str(explain(trained))
    assert "RPC: 80 of 80 requests of the agents' logs explained" in told
    assert "Iteration 2: 28 messages, 14 for each of 2. 4 of 14 carry what was asked for:" in told
    assert "3. backward: each trainer sends ps 32,768 B of tensors: gradient float32[8, 4, 16, 16]" in told


def test_a_request_of_an_unknown_kind_stays_with_its_iteration_and_is_said(trained, tmp_path):
    """The server's file without what its Python told of remote references: 28 messages all the same."""
    from pictures import words  # Not above: the ranks load this file, too.

    shutil.copytree(trained.path, tmp_path / "trace")
    (server,) = [each.path.name for each in trained.processes if each.label == "ps"]
    path = tmp_path / "trace" / server
    lines = [line for line in path.read_text().splitlines(True) if '"op":"rref"' not in line]
    firsts = {json.loads(line).get("number") for line in lines if line[0] == "{"}
    # A short line names the event that it repeats; one of three numbers is an end.
    kept = [line for line in lines if line[0] == "{" or line.count(",") < 3 or json.loads(line)[0] in firsts]
    path.write_text("".join(kept))
    trace = Trace.load(tmp_path / "trace")
    unknown = [each for each in trace.rpc.exchanges if each.kind == ""]
    assert len(unknown) == trace.rpc.logged - trace.rpc.explained > 0
    assert all(each.known_by == "unknown" for each in unknown)
    assert [len(messages(trace.within(f"step {step}"))) for step in range(3)] == [28, 28, 28]
    # A request and its reply for each trainer; and of the optimizer's RRef too, where Python packs its step.
    assert sum(each.op == "unknown" for each in iteration(trace, 1).messages) == (4 if SCRIPTED_OPTIMIZERS else 8)
    assert any("the kind is not known" in sentence for sentence in iteration(trace, 1).sentences())
    sentence = f"of {len(unknown)} of {trace.rpc.logged} requests over RPC the kind is unknown"
    assert trace.rpc.complete
    assert trace.rpc.problems == (sentence,)
    assert sentence in str(explain(trace))
    assert sentence in words(draw.sequence(trace))
    assert sentence in words(draw.timeline(trace))
    # Trainers wait for ps, which calls nobody.
    assert " for ps, " in words(draw.timeline(trace)).partition("Longest wait: trainer")[2]


def test_a_log_that_cannot_be_read_is_said_and_calls_are_kept(trained, tmp_path):
    shutil.copytree(trained.path, tmp_path / "trace")
    for log in (tmp_path / "trace").glob("*.agent.log"):
        log.write_bytes(log.read_bytes().replace(b"is sending request", b"dispatches request"))
    trace = Trace.load(tmp_path / "trace")
    assert (trace.rpc.complete, trace.labels) == (False, trained.labels)
    assert "incomplete: " in str(explain(trace))
    assert "do not stand in the agents' logs" in str(explain(trace))
    calls = [message for message in messages(trace) if message.what.startswith("forward(") and not message.control]
    assert [(call.src, call.dst, call.how) for call in calls].count((1, 0, "observed")) == 3


@pytest.fixture
def asked(recorded):
    return recorded(rpc_jobs.ask_everything, ["a", "b", "c"], rpc=True, measure="phase")


TENSOR_BYTES = {
    "no dimension": (4, 4),
    "expanded": (4, 4),
    "a small part": (40, 40),
    "half": (20_000, 20_000),
    "transposed": (6000, 6000),
    "empty": (0, 0),
    "two types": (1040, 1040),
    "sparse": (2 * 8 + 2 * 4,) * 2,
    "parameter": (12, 12),
    "a large result": (400_000, 400_000),
    "a value fetched": (12_000, 12_000),
    "an error": (40_000, 0),
    "in a context": (80_000, 40_000),
    "a gradient": (4, 40_000),  # The way there: a sum's gradient is one number for all.
    "own loss": (160 + 4, 160 + 160),
}
"""Bytes of tensors from the caller, and back to it: those that travel, whatever the tensor looks like."""
NOT_PREDICTED = {"sparse", "a large result", "a value fetched", "an error", "in a context", "own loss"}


@pytest.mark.parametrize("part", TENSOR_BYTES)
def test_what_travels_is_known_as_the_kernel_counts_it(asked, part):
    found = messages(asked.within(part))
    tensors = [sum(info.payload_bytes for m in found if m.src == src for info in m.tensors) for src in (0, 1)]
    assert tuple(tensors) == TENSOR_BYTES[part]
    assert None not in [each.payload_bytes for each in found]
    if part == "parameter":
        assert found[0].what.endswith("(Parameter[3] arrives as a plain tensor, without its gradient)")
    (measured,) = [each for each in reconcile(asked).parts if each.what == part]
    assert [(pair.src, pair.dst) for pair in measured.pairs] == [(0, 1)]
    (pair,) = measured.pairs
    assert (pair.why == "not predicted") == (part in NOT_PREDICTED)
    assert_as_predicted(asked.within(part), measured.pairs)


def test_a_span_holds_what_it_caused_and_no_more_of_the_context(asked):
    there, back, after = (messages(asked.within(name)) for name in ("there", "back", "after"))
    crossings = [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert [(each.src, each.dst) for each in there if not each.control] == crossings
    assert len(there) == 4
    gradients = [each for each in back if each.op == "BACKWARD_AUTOGRAD_REQ"]
    assert {(each.src, each.dst) for each in gradients} == {*crossings}
    assert [each.op for each in back].count("BACKWARD_AUTOGRAD_RESP") == 4 == len(back) / 2
    assert [each.op for each in after] == ["SCRIPT_CALL", "SCRIPT_RET"]
    assert {each.operation.ends[0].phase for each in after} == {"optimizer"}


def test_the_backward_pass_of_an_rref_at_its_owner_is_a_backward_pass(asked):
    windows = [each for each in asked.events if isinstance(each, RpcWindow) and each.op == "backward"]
    assert {(window.site.split(":")[0], window.phase) for window in windows} == {("tests/rpc_jobs.py", "backward")}
    assert asked.rpc.explained == asked.rpc.logged
    assert [step.phase for step in iteration(asked).story] == ["forward", "forward", "backward", "backward"]


def test_training_is_not_changed_and_ranks_that_are_kept_stay_workers():
    """With one trainer: two would draw the weights of their layers from one generator, that of the server."""
    job, workers = {"trainer1": rpc_jobs.train}, ["ps", "trainer1"]
    bare = Cluster(workers, rpc=True, record=False).run(job, timeout=60)
    with Cluster(workers, rpc=True) as cluster:
        first, second = (cluster.run(job, timeout=60) for _ in range(2))
        for addresses in cluster.run(programs.listening_addresses, timeout=60).results.values():
            assert addresses
            assert set(addresses) <= {"127.0.0.1", "::1"}
    assert bare.results == first.results == second.results
    assert own_words(bare.output["ps"]) == own_words(first.output["ps"]) == ""
    assert second.trace.rpc.complete
    assert second.trace.rpc.explained == second.trace.rpc.logged == 33  # Without setting up and shutting down.
    assert_as_predicted(second.trace, reconcile(second.trace).whole.pairs)


def die():
    os._exit(3)


def divide(x):
    return 1 // x


def call(function, *args):
    return rpc.rpc_sync("ps", function, args)


def failed(*args):
    with pytest.raises(RankError) as caught:
        Cluster(["ps", "trainer"], rpc=True).run({"trainer": call}, *args, timeout=60)
    return caught.value


def calls_of(trace):
    observed = [each.what for each in messages(trace) if each.how == "observed" and each.src == 1]
    return [what for what in observed if "_to_" not in what]


def test_a_worker_that_dies_in_a_call_is_named_and_the_call_is_kept():
    error = failed(die)
    assert error.what.startswith("ps died: it exited with code 3")
    assert calls_of(error.run.trace) == ["die()"]


def test_an_exception_of_the_callee_is_told_without_its_walls():
    error = failed(divide, 0)
    assert error.what.startswith(
        "trainer failed first: ZeroDivisionError('integer division or modulo by zero'), raised on ps in a call by RPC"
    )
    trace = error.run.trace
    assert any(each.what == "ZeroDivisionError, raised by divide" for each in messages(trace))
    (told,) = [sentence for sentence in explain(trace).sentences if "divide()" in sentence]
    assert "; it raised ZeroDivisionError; trainer→ps: " in told
    assert told.endswith(" B (observed).")
    assert len(failed(threading.Lock).what) < 400  # It cannot be packed: C++ adds a line for each of its frames.


OWN_SCRIPT = """
import os, sys, time
import torch, torch.distributed.rpc as rpc
import dlearn

def double(x):
    return 2 * x

rank = int(os.environ["RANK"])
init_backend = rpc.backend_registry.init_backend
# The recorder of rank 0, which hosts the store, is late: that of rank 1 has opened its own connection to the store.
rpc.backend_registry.init_backend = lambda *a, **k: (init_backend(*a, **k), time.sleep(0.5 * (1 - rank)))[0]
with dlearn.record("trace"):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 1:
        print("mine, from Python", file=sys.stderr)
        os.write(2, b"[V no log line, without an end")
        rpc.rpc_sync("worker0", double, (torch.ones(4),))
        time.sleep(1)
        os.write(2, b", and here it is\\n")
        os.system("echo from a child >&2")
print("after the recording", file=sys.stderr)
rpc.rpc_sync(f"worker{1 - rank}", double, (torch.ones(4),))  # The agent tells nobody of it.
rpc.shutdown()
"""


@pytest.mark.slow
def test_a_script_of_the_users_own_is_recorded_and_keeps_its_stderr(tmp_path):
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "PYTHONWARNINGS": "ignore"}
    here = {**os.environ, **shared, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command, told = [sys.executable, "-c", OWN_SCRIPT], {"cwd": tmp_path, "stderr": subprocess.PIPE}
    jobs = [subprocess.Popen(command, env={**here, "RANK": rank}, **told) for rank in "01"]
    told = [job.communicate(timeout=60)[1].decode() for job in jobs]
    assert told[0] == "after the recording\n"
    said = "mine, from Python\n[V no log line, without an end, and here it is\nfrom a child\nafter the recording\n"
    assert told[1] == said
    trace = Trace.load(tmp_path / "trace")
    assert calls_of(trace) == ["double(float32[4])"]
    assert "RPC's own transports on one host go past the sockets" in str(explain(trace))
    assert [trace.label(rank) for rank in trace.ranks] == ["worker0", "worker1"]


INFO = b"[I1121 15:47:36.741144657 socket.cpp:1] torch does not show this by itself\n"
WARNING = b"[W1121 15:47:36.741144657 tensorpipe_agent.cpp:723] encountered error when reading\n"
OWN = [b"mine\n", b"half a line ", b"and its end\n", WARNING, b"[", b"[V1121 15:47", b"\n", b"[1/3] done\n", b"[rank"]
OWN += [b"0]: x\n", b"\xff\x00\n", b"y" * 5000 + b"\n", b"no end"]


def speak_between_calls() -> int:
    """Torch writes each line of the log with one call, wherever the program's own line is."""
    calls = 0
    for each in OWN:
        os.write(2, each)
        if not each.startswith(b"[") or each.endswith(b"\n"):
            os.write(2, INFO)
            rpc.rpc_sync("callee", torch.add, args=(torch.ones(1), 1))
            calls += 1
    return calls


def test_the_agents_lines_are_taken_out_and_all_else_passes(own_folder):
    run = Cluster(["caller", "callee"], rpc=True).run({"caller": speak_between_calls}, timeout=100)
    assert b"".join(OWN).decode(errors="replace") in run.output["caller"]
    assert "torch does not show this" not in run.output["caller"]
    sent = [each for each in messages(run.trace) if each.op.startswith("SCRIPT_")]
    assert [(each.src, each.dst) for each in sent] == [(0, 1), (1, 0)] * run.results["caller"]
    assert all(each.sent_ns < each.received_ns for each in sent)
