"""What one GPU can show of our own NCCL and CUDA path: `make gpu`. Without one, every test here says so and skips."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, Trace, analysis, draw, operations
from dlearn.events.event import Bucket, Collective, PhaseSpan

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: not run"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL: not run"),
]
SECONDS = 120
PROFILER_NS = 2_000
"""How far its clock may be off, beside the error that is told of ours."""


def train(folder):
    """Three steps of DDP on one rank of NCCL, with torch's profiler and Flight Recorder beside."""
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(256, 256).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(8, 256, device="cuda")).sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(1000, device="cuda"))
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(Path(folder) / "profile_0.json"))
    dump = torch._C._distributed_c10d._dump_nccl_trace_json(True, False)
    (Path(folder) / "dump_0.json").write_text(dump if isinstance(dump, str) else dump.decode())
    return min(time.time_ns() - time.monotonic_ns() for _ in range(100))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run, and the folder with what torch wrote about it."""
    folder = tmp_path_factory.mktemp("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
        done = Cluster(1, init=False).run(train, str(folder), timeout=SECONDS)
    return done, folder


def calls(trace):
    """(op, bytes given) of each collective, in order."""
    return [(call.op, sum(each.logical_bytes for each in call.inputs)) for call in trace.of(Collective)]


def test_every_collective_has_an_end_that_the_gpu_told_and_steps_their_overlap(run):
    trace = run[0].trace
    assert trace.problems == ()
    on_gpu = [call for call in trace.of(Collective) if call.inputs and call.inputs[0].device != "cpu"]
    assert on_gpu
    assert {call.number for call in on_gpu} <= trace.processes[0].device_spans.keys()
    assert trace.of(Bucket)
    assert len([one for one in operations(trace) if one.bucket is not None]) >= 3
    found = analysis.overlap(trace)
    assert found.note.startswith("Times of the GPUs, by CUDA events")
    assert all(share.observed for step in found.steps for share in step.shares)
    for each in analysis.bucket_times(trace).items:
        assert max(at for _, at in each.ready) <= each.launched_ns <= each.done_ns
    assert draw.breakdown(trace).get_title(loc="left")


def test_the_stretches_hold_the_kernels_that_the_profiler_saw_in_them(run):
    """The optimizer's, which have names of their own, are all in its steps. The profiler tells wall-clock time."""
    done, folder = run
    profile = json.loads((folder / "profile_0.json").read_text())
    kernels = [each for each in profile["traceEvents"] if each.get("cat") == "kernel"]
    begin_ns, held = int(profile["baseTimeNanoseconds"]) - done.results[0], []
    for phase_span in done.trace.of(PhaseSpan):
        start, end, error, _ = done.trace.processes[0].device_spans[phase_span.number]
        for kernel in kernels:
            begun, lasted = begin_ns + 1000 * kernel["ts"], 1000 * kernel["dur"]
            if start <= begun + lasted / 2 <= end:
                assert start - error - PROFILER_NS <= begun <= begun + lasted <= end + error + PROFILER_NS
                held.append((phase_span.phase, "multi_tensor_apply" in kernel["name"]))
    assert {phase for phase, _ in held} == {"forward", "backward", "optimizer"}
    of_optimizer = sum("multi_tensor_apply" in kernel["name"] for kernel in kernels)
    assert [phase for phase, its_own in held if its_own] == ["optimizer"] * of_optimizer
    assert of_optimizer >= 3


def test_the_flight_recorder_and_the_profiler_of_the_same_run_have_the_same_calls(run):
    """A collective of a single rank may be a copy, which is no kernel of NCCL's: the profiler may have fewer."""
    done, folder = run
    assert json.loads((folder / "dump_0.json").read_text())["entries"]
    assert calls(Trace.load(folder / "dump_0.json")) == calls(done.trace)
    assert set(calls(Trace.load(folder / "profile_0.json"))) <= set(calls(done.trace))
