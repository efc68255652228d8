"""RPC on real workers: every message at both ends, and what torch's C++ sends by itself."""

import dataclasses
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial

import msgspec
import pytest
import rpc_jobs
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from installed_torch import SCRIPTED_OPTIMIZERS, own_words
from torch.jit import _builtins

from dlearn import Cluster, Trace, draw, explain, export, messages, record, span
from dlearn.analysis import iteration, iterations, reconcile, traffic
from dlearn.analysis.telling.words import message_sentence
from dlearn.analysis.volume.message_lines import csv_lines
from dlearn.analysis.walking import walkthrough
from dlearn.play.packing import columns
from dlearn.trace.event import Counters, RpcCall, RpcWindow

WORKERS = ["ps", "trainer1", "trainer2"]

ONE_ITERATION = Counter(
    {
        ("trainer", "FORWARD_AUTOGRAD_REQ"): 2,  # the input, and the optimizer's step
        ("ps", "RREF_CHILD_ACCEPT"): 2,
        ("trainer", "RREF_ACK"): 2,
        ("ps", "FORWARD_AUTOGRAD_RESP"): 1,
        ("ps", "SCRIPT_RET" if SCRIPTED_OPTIMIZERS else "PYTHON_RET"): 1,
        ("trainer", "BACKWARD_AUTOGRAD_REQ"): 1,
        ("ps", "BACKWARD_AUTOGRAD_RESP"): 1,
        ("trainer", "CLEANUP_AUTOGRAD_CONTEXT_REQ"): 1,
        ("ps", "CLEANUP_AUTOGRAD_CONTEXT_REQ"): 1,
        ("trainer", "CLEANUP_AUTOGRAD_CONTEXT_RESP"): 1,
        ("ps", "CLEANUP_AUTOGRAD_CONTEXT_RESP"): 1,
    }
)
"""facts of one server and one trainer: who sends what, how often; 14 in all."""


def by_sender(found, trainer):
    """How many messages of each kind go between the server and this trainer, and from which of the two."""
    mine = [each for each in found if trainer in (each.src, each.dst)]
    return Counter(("ps" if each.src == 0 else "trainer", each.op) for each in mine)


@pytest.fixture(scope="module")
def run():
    return Cluster(WORKERS, rpc=True).run({"trainer1": rpc_jobs.train, "trainer2": rpc_jobs.train}, timeout=60)


def test_one_iteration_is_14_messages_for_each_trainer(run):
    found = messages(run.trace.within("step 2"))
    assert len(found) == 28
    for trainer in (1, 2):
        assert by_sender(found, trainer) == ONE_ITERATION


def test_a_request_of_an_unknown_kind_stays_with_its_iteration(run, tmp_path):
    """The server's file without what its Python told of remote references: 28 messages all the same."""
    shutil.copytree(run.folder / "trace", tmp_path / "trace")
    (server,) = [each.path.name for each in run.trace.processes if each.label == "ps"]
    path = tmp_path / "trace" / server
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"op":"rref"' not in line))
    trace = Trace.load(tmp_path / "trace")
    unknown = [each for each in trace.rpc.exchanges if each.kind == ""]
    assert len(unknown) == trace.rpc.logged - trace.rpc.explained > 0
    assert all(each.known_by == "unknown" for each in unknown)
    assert [len(messages(trace.within(f"step {step}"))) for step in range(3)] == [28, 28, 28]
    # A request and its reply for each trainer; and of the optimizer's RRef too, where Python packs its step.
    unknown = 4 if SCRIPTED_OPTIMIZERS else 8
    assert sum(each.op == "unknown" for each in iteration(trace, 1).messages) == unknown


def own_loss():
    with dist_autograd.context() as context:
        x = torch.ones(5, 8, requires_grad=True)
        rpc.RRef(rpc.rpc_sync("ps", torch.mul, (x, 2)).sum()).backward(context)


def test_the_backward_pass_of_an_rref_at_its_owner_is_a_backward_pass():
    trace = Cluster(["ps", "trainer"], rpc=True).run({"trainer": own_loss}, timeout=60).trace
    (window,) = [each for each in trace.events if isinstance(each, RpcWindow) and each.op == "backward"]
    assert (window.site.split(":")[0], window.phase) == ("tests/test_rpc.py", "backward")
    assert trace.rpc.explained == trace.rpc.logged
    # The product and its result, the gradient of the result, and that of x on its way back.
    assert [step.phase for step in iteration(trace).story] == ["forward", "forward", "backward", "backward"]


def test_every_message_of_the_agents_is_explained(run):
    rpc = run.trace.rpc
    assert rpc.complete
    assert rpc.explained == rpc.logged == 80
    for each in rpc.exchanges:
        request = each.request
        ends = request.sending_ns, request.received_ns, request.replying_ns, request.answered_ns
        assert None not in ends


def test_four_messages_carry_information(run):
    data = [each for each in messages(run.trace.within("step 1")) if not each.control and 1 in (each.src, each.dst)]
    assert [each.what for each in data] == [
        "forward(float32[8, 3, 16, 16])",
        "result of forward: float32[8, 4, 16, 16]",
        "gradient float32[8, 4, 16, 16]",
        "_script_local_optimizer_step()" if SCRIPTED_OPTIMIZERS else "_functional_local_optimizer_step()",
    ]
    # The C++ agent's own payloads.
    assert [each.packed_bytes for each in data[:3]] == [376, 217, 67]
    tensors = [sum(tensor.payload_bytes for tensor in each.tensors) for each in data[:3]]
    assert tensors == [24576, 32768, 32768]


def test_an_iteration_is_told_where_messages_are_missing_or_of_an_unknown_kind(run):
    """Trainer 2's end of the context is not there, and of two of ps's messages to both trainers the kind is unknown."""
    whole = iteration(run.trace, 1)
    steps = []
    for step in whole.steps:
        if step.op == "CLEANUP_AUTOGRAD_CONTEXT_REQ" and step.from_driver:
            step = msgspec.structs.replace(step, messages=(step.messages[0], None))
        if step.op == "RREF_CHILD_ACCEPT":
            step = msgspec.structs.replace(step, op="unknown", what="unknown")
        steps.append(step)
    told = msgspec.structs.replace(whole, steps=tuple(steps)).sentences()
    assert told[0] == (
        "Iteration 1: 27 messages, 14 for trainer1 and 13 for trainer2. At least 4 of 14 carry what was asked for:"
    )
    assert "The other 8 are what the runtime adds:" in told
    assert "1 x CLEANUP_AUTOGRAD_CONTEXT_REQ (trainer1 -> ps): the autograd context ends" in told
    assert told[-1] == "Of 2 the kind is not known: 2 x ps -> each trainer"


def test_each_call_is_seen_from_its_sending_to_the_arrival_of_its_reply(run):
    calls = [each for each in run.trace.rpc.exchanges if each.run is not None and each.call.op != "remote"]
    assert len(calls) >= 14
    for each in calls:
        times = [
            each.call.start_ns,
            each.sent_ns,
            each.received_ns,
            each.run.arrived_ns,
            each.run.start_ns,
            each.run.end_ns,
            each.reply.start_ns,
            each.reply_sent_ns,
            each.reply_received_ns,
            each.call.end_ns,
        ]
        assert times == sorted(times)


def test_training_is_not_changed(run):
    bare = Cluster(WORKERS, rpc=True, record=False).run({"trainer1": rpc_jobs.train}, timeout=60)
    alone = Cluster(WORKERS, rpc=True).run({"trainer1": rpc_jobs.train}, timeout=60)
    assert alone.results["trainer1"] == bare.results["trainer1"]
    assert own_words(bare.output["ps"]) == own_words(alone.output["ps"]) == ""


def backward_in_torchscript(context: int, loss: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    dist_autograd.backward(context, [loss])
    return dist_autograd.get_gradients(context)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_torchscript_compiles_what_it_compiles_without_a_recording(tmp_path):
    def operators():
        functions = (*vars(dist_autograd).items(), *vars(rpc.api).items())
        return {name: _builtins._find_builtin(value) for name, value in functions}

    before = operators()
    with record(tmp_path / "trace"):
        during = operators()
        compiled = torch.jit.script(backward_in_torchscript)
    assert "aten::dist_backward" in str(compiled.graph)
    assert before == during
    assert list(_builtins._get_builtin_table().values()).count("aten::dist_backward") == 1


# One iteration --------------------------------------------------------------------------------------------------------


def test_the_iteration_of_two_trainers_stands_in_two_columns_and_is_told(run):
    told = iteration(run.trace)
    assert iterations(run.trace) == 3
    assert (told.number, told.drivers, len(told.messages), len(told.steps)) == (2, (1, 2), 28, 14)
    assert all(None not in step.messages for step in told.steps)
    assert [step.phase for step in told.story] == ["forward", "forward", "backward", "optimizer"]
    told = str(explain(run.trace))
    assert "RPC: 80 of 80 requests of the agents' logs explained" in told
    assert "Iteration 2: 28 messages, 14 for each of 2. 4 of 14 carry what was asked for:" in told
    assert "3. backward: each trainer sends ps 32,768 B of tensors: gradient float32[8, 4, 16, 16]" in told
    assert "The other 10 are what the runtime adds:" in told


STEP = (583 if SCRIPTED_OPTIMIZERS else 613, 269)
MEASURED = {
    1: {"forward": (3892, 4767), "backward": (4478, 127), "optimizer": STEP, "cleanup": (267, 267)},
    8: {"forward": (25396, 33439), "backward": (33150, 127), "optimizer": STEP, "cleanup": (267, 267)},
    32: {"forward": (99126, 131745), "backward": (131456, 127), "optimizer": STEP, "cleanup": (267, 267)},
}
"""Batch -> phase -> bytes on the wire from the trainer, and to it: TCP_INFO, without our own ids."""


@pytest.mark.parametrize("batch", MEASURED)
def test_the_kernel_counts_what_is_predicted_in_every_phase(batch):
    run = Cluster(["ps", "trainer1"], rpc=True, measure="phase").run({"trainer1": rpc_jobs.train}, batch, timeout=60)
    told = iteration(run.trace)
    assert len(told.phases) == 8
    for each in told.phases:
        assert each.measured_bytes - each.observer_bytes == MEASURED[batch][each.phase][each.src == 0]
        assert abs(each.residue_bytes) <= 4 * each.message_count


def test_a_whole_job_adds_up_to_the_counters(run):
    for pair in reconcile(run.trace).whole.pairs:
        messages_sent = sum(pair.src == each.src and pair.dst == each.dst for each in messages(run.trace))
        assert abs(pair.residue_bytes) <= 4 * messages_sent
        assert pair.observer_bytes > 0


def test_ranks_that_are_kept_stay_workers_and_each_run_is_whole():
    with Cluster(["ps", "trainer1"], rpc=True) as cluster:
        first, second = (cluster.run({"trainer1": rpc_jobs.train}, timeout=60) for _ in range(2))
    assert first.results == second.results
    assert second.trace.rpc.complete
    assert second.trace.rpc.explained == second.trace.rpc.logged == 33  # Without setting up and shutting down.
    assert len(iteration(second.trace).messages) == 14
    assert all(abs(pair.residue_bytes) <= 4 * 33 for pair in reconcile(second.trace).whole.pairs)


def same(*tensors):
    return tensors


SHAPES = {
    "no dimension": lambda: [torch.ones(())],
    "one dimension": lambda: [torch.ones(4)],
    "many dimensions": lambda: [torch.ones(2, 3, 4, 5, 6)],
    "large": lambda: [torch.ones(1000, 100)],
    "expanded": lambda: [torch.ones(1).expand(100)],
    "a small part": lambda: [torch.ones(10_000)[:10]],
    "most of it": lambda: [torch.ones(100)[:60]],
    "transposed": lambda: [torch.ones(5, 300).t()],
    "other type": lambda: [torch.ones(4, dtype=torch.float64)],
    "empty": lambda: [torch.empty(0)],
    "two": lambda: [torch.ones(4), torch.ones(4, 4)],
    "four": lambda: [torch.ones(2, 2) for _ in range(4)],
    "two types": lambda: [torch.ones(4), torch.arange(4)],
    "whole numbers": lambda: [torch.arange(128), torch.arange(16)],
}


def send_shapes():
    """There and back: how many bytes the shape of a tensor takes differs."""
    rpc.rpc_sync("ps", same)
    for name, make in SHAPES.items():
        with span(name):
            rpc.rpc_sync("ps", same, tuple(make()))


def test_tensors_of_all_shapes_are_predicted_within_four_bytes():
    run = Cluster(["ps", "trainer"], rpc=True, measure="phase").run({"trainer": send_shapes}, timeout=60)
    found = reconcile(run.trace)
    parts = {part.what: part for part in found.parts if part.what in SHAPES}
    residues = {name: sum(pair.residue_bytes for pair in parts[name].pairs if pair.src == 1) for name in SHAPES}
    assert {name: residue for name, residue in residues.items() if abs(residue) > 4} == {}
    assert [(pair.src, pair.dst) for pair in found.whole.pairs] == [(0, 1), (1, 0)]
    assert all(abs(pair.residue_bytes) <= 4 * (1 + len(SHAPES)) for pair in found.whole.pairs)


# What comes back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", [True, False])
def test_the_gradient_of_an_argument_is_seen_on_its_way_back(needs_grad):
    cluster = Cluster(["ps", "trainer1"], rpc=True, measure="phase")
    run = cluster.run({"trainer1": partial(rpc_jobs.run_conv, needs_grad=needs_grad)}, timeout=60)
    told = iteration(run.trace)
    back = [each for each in told.messages if each.op == "BACKWARD_AUTOGRAD_REQ" and each.src == 0]
    # 8 x 3 x 16 x 16 numbers of 4 bytes; and what was not asked for is not sent.
    assert [each.payload_bytes - each.packed_bytes for each in back] == ([24_576] if needs_grad else [])
    assert [each.what for each in back] == (["gradient float32[8, 3, 16, 16]"] if needs_grad else [])
    (phase,) = [each for each in told.phases if each.phase == "backward" and each.src == 0]
    assert abs(phase.residue_bytes) <= 4 * phase.message_count


def call_builtins():
    """Results, fetched values, errors and gradients that no Python ever packs."""
    x, y = torch.ones(100_000), torch.ones(10_000)
    z = torch.ones(10_000, requires_grad=True)
    with span("a large result"):
        rpc.rpc_sync("b", torch.add, (x, 1))
    with span("two tensors"):
        rpc.rpc_sync("b", torch.dot, (y, y.clone()))
    with span("one tensor twice"):
        rpc.rpc_sync("b", torch.dot, (y, y))
    with span("no tensor"):
        rpc.rpc_sync("b", torch.equal, (y, y))
    with span("a value fetched"):
        rpc.remote("b", torch.neg, (torch.ones(3_000),)).to_here()
    with span("an error"), pytest.raises(RuntimeError):
        rpc.rpc_sync("b", torch.mm, (y, y))
    with dist_autograd.context() as context:
        with span("in a context"):
            loss = rpc.rpc_sync("b", torch.mul, (z, y)).sum()
        with span("a gradient"):
            dist_autograd.backward(context, [loss])


BUILTINS = {
    "a large result": (400_000, 400_000),
    "two tensors": (80_000, 4),
    "one tensor twice": (40_000, 4),
    "no tensor": (40_000, 0),
    "a value fetched": (12_000, 12_000),
    "an error": (40_000, 0),
    "in a context": (80_000, 40_000),
    "a gradient": (4, 40_000),  # The way there: a sum's gradient is one number for all.
}
"""Bytes of tensors from the caller, and back to it."""


@pytest.fixture(scope="module")
def builtins():
    return Cluster(["a", "b"], rpc=True, measure="phase").run({"a": call_builtins}, timeout=60)


@pytest.mark.parametrize("part", BUILTINS)
def test_what_cpp_packs_is_known_as_the_kernel_counts_it(builtins, part):
    found = messages(builtins.trace.within(part))
    tensors = [sum(info.payload_bytes for m in found if m.src == src for info in m.tensors) for src in (0, 1)]
    assert tuple(tensors) == BUILTINS[part]
    assert None not in [each.payload_bytes for each in found]
    (measured,) = [each for each in reconcile(builtins.trace).parts if each.what == part]
    assert measured.measured
    assert {pair.why for pair in measured.pairs} <= {"", "framing"}
    for pair in measured.pairs:
        assert abs(pair.residue_bytes) <= 4 * sum(pair.src == each.src for each in found)


def late(seconds):
    time.sleep(seconds)
    return 1


def wait_for_late_replies():
    with span("late"):
        reply = rpc.rpc_async("b", late, (0.1,))
    with span("later"):
        assert reply.wait() == 1


def test_a_sample_of_the_counters_waits_for_the_replies_of_calls():
    """Else what is on its way, on a busy machine at least, is counted in what comes next."""
    run = Cluster(["a", "b"], rpc=True, measure="phase").run({"a": wait_for_late_replies}, timeout=60)
    for part, replies in (("late", 1), ("later", 0)):
        samples = [each for each in run.trace.within(part).events if isinstance(each, Counters) and each.rank == 0]
        before, after = (sum(each.received_bytes) for each in samples)
        assert (after > before) == replies


def sample_in_a_call():
    for _ in range(5):
        with span("inside"):
            pass


def test_a_call_that_samples_inside_itself_is_waited_for_once():
    run = Cluster(["a", "b"], rpc=True, measure="phase").run(
        {"a": lambda: rpc.rpc_sync("b", sample_in_a_call)}, timeout=60
    )
    samples = [event.still for event in run.trace.events if isinstance(event, Counters) and event.rank == 1]
    assert samples.count(False) == 1
    assert len(samples) > 10


def test_a_size_that_is_not_known_is_said_and_is_never_0(builtins):
    def forget(event):
        facts = {"result": None} if isinstance(event, RpcCall | RpcWindow) else {}
        return msgspec.structs.replace(event, **facts)

    whole = builtins.trace
    trace = dataclasses.replace(whole, events=tuple(map(forget, whole.events)))
    unknown = [each for each in messages(trace) if each.payload_bytes is None]
    assert {each.op for each in unknown} == {"SCRIPT_RET", "RREF_FETCH_RET", "EXCEPTION", "FORWARD_AUTOGRAD_RESP"}
    sent, before = traffic(trace), traffic(whole)
    assert (before.unsized, sent.unsized) == (0, len(unknown))
    assert sent.bytes_from(rank=1) < 50_000 < before.bytes_from(rank=1)
    told = str(explain(trace))
    assert f"{len(unknown)} messages of unknown size not counted" in told
    assert f"not counted: {len(unknown)} messages whose size is not known" in told
    assert sum(",," in line for line in csv_lines(messages(trace))) >= len(unknown)
    assert message_sentence(unknown[0], trace).startswith("b sends a data of unknown size for SCRIPT_RET")
    assert "data of unknown size" in "".join(export.mermaid(trace))
    assert any(text.get_text().endswith(" ? B") for text in draw.sequence(trace).texts)
    assert None in columns(walkthrough(trace))["steps"]["bytes"]


def relay(x):
    """On the first worker: asks the second."""
    return rpc.rpc_sync("second", torch.neg, (x,))


def one_span_of_two():
    with dist_autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        with span("there"):
            y = rpc.rpc_sync("first", relay, (x,))
        with span("back"):
            dist_autograd.backward(context, [y.sum()])
        with span("after"):
            rpc.rpc_sync("first", torch.add, (torch.ones(2), 1))


def test_a_span_holds_what_it_caused_and_no_more_of_the_context():
    run = Cluster(["first", "second", "driver"], rpc=True).run({"driver": one_span_of_two}, timeout=60)
    there, back, after = (messages(run.trace.within(name)) for name in ("there", "back", "after"))
    assert [(each.src, each.dst, each.control) for each in there] == [
        (2, 0, False),
        (0, 1, False),
        (1, 0, False),
        (0, 2, False),
    ]
    assert {each.op for each in back} == {"BACKWARD_AUTOGRAD_REQ", "BACKWARD_AUTOGRAD_RESP"}
    assert len(back) == 8  # Four crossings, each with its reply.
    assert [(each.op, each.operation.ends[0].phase) for each in after] == [
        ("SCRIPT_CALL", "optimizer"),
        ("SCRIPT_RET", "optimizer"),
    ]


@pytest.mark.slow
def test_what_a_later_run_brings_can_be_called_everywhere(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch.distributed.rpc as rpc\n"
        "from dlearn import Cluster\n"
        "def first(): return 1\n"
        "def second(): return 2\n"
        "def call_first(): return rpc.rpc_sync('ps', first)\n"
        "def call_second(): return rpc.rpc_sync('ps', second)\n"
        "def call(given): return rpc.rpc_sync('ps', given), call_first()\n"
        "if __name__ == '__main__':\n"
        "    with Cluster(['ps', 'trainer1'], rpc=True) as cluster:\n"
        "        for job in ((call_first,), (call_second,), (call, first), (call, first)):\n"
        "            print(cluster.run({'trainer1': job[0]}, *job[1:], timeout=60).results['trainer1'])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.stdout.splitlines() == ["1", "2", "(1, 1)", "(1, 1)"], done.stderr


def test_connections_of_rpc_keep_their_name_when_groups_were_made_before():
    jobs = dict.fromkeys(("trainer1", "trainer2"), rpc_jobs.in_a_group_of_trainers)
    with Cluster(WORKERS, rpc=True) as cluster:
        cluster.run(jobs, timeout=60)
        run = cluster.run({"trainer1": rpc_jobs.run_conv}, timeout=60)
    assert {pair.group for pair in reconcile(run.trace).whole.pairs if pair.src == 1} == {"rpc"}


def two_sessions(folder, rank):
    for name in "first", "second":
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/{name}")
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1))
        rpc.shutdown()


def test_an_agent_that_is_made_again_counts_its_requests_from_0_again(tmp_path):
    """Request 0 of the second session is not request 0 of the first one."""
    run = Cluster(2, init=False).run({rank: partial(two_sessions, tmp_path, rank) for rank in (0, 1)}, timeout=60)
    assert run.trace.all_problems == ()
    assert [each.op for each in messages(run.trace)].count("SCRIPT_CALL") == 2
    assert "Problem" not in str(explain(run.trace))
