"""What one GPU can show of our own NCCL and CUDA path: `make gpu`. Without one, every test here says so and skips."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, Trace, analysis, operations
from dlearn.trace.event import Bucket, Collective

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: not run"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL: not run"),
]
SECONDS = 120


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
    found = (event for event in trace.events if isinstance(event, Collective))
    return [(call.op, sum(each.logical_bytes for each in call.inputs)) for call in found]


def test_every_collective_has_an_end_that_the_gpu_told(run):
    trace = run[0].trace
    found = (event for event in trace.events if isinstance(event, Collective) and event.inputs)
    launched = [event for event in found if event.inputs[0].device != "cpu"]
    spans = trace.processes[0].device_spans
    assert launched
    assert all(event.number in spans for event in launched)


def test_buckets_and_overlap_of_ddp_are_found(run):
    trace = run[0].trace
    assert trace.of(Bucket)
    reduced = [one for one in operations(trace) if one.bucket is not None]
    assert len(reduced) >= 3
    assert analysis.overlap(trace).steps


def test_the_flight_recorder_of_the_same_run_has_the_same_calls(run):
    done, folder = run
    assert json.loads((folder / "dump_0.json").read_text())["entries"]
    assert calls(Trace.load(folder / "dump_0.json")) == calls(done.trace)


def test_the_profiler_of_the_same_run_has_the_same_bytes(run):
    """A collective of a single rank may be a copy, which is no kernel of NCCL's: what is there must agree."""
    done, folder = run
    seen = calls(Trace.load(folder / "profile_0.json"))
    ours = calls(done.trace)
    assert set(seen) <= set(ours)


def reduce_on_gloo():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(100_000, device="cuda"))


def test_gloo_with_cuda_tensors_puts_on_the_wire_what_its_schedule_says():
    trace = Cluster(4, init=False).run(reduce_on_gloo, timeout=SECONDS).trace
    found = analysis.reconcile(trace)
    assert found.whole.measured_bytes is not None
    assert found.whole.residue_bytes == 0
