"""What programs that this project did not write have found in `dlearn run`, each as a small program of its own."""

from __future__ import annotations

import pytest
from test_run import SPAWN, dlearn_run, free_port, script

from dlearn.trace.trace import Trace

pytestmark = pytest.mark.slow

RPC = """
import os, sys, torch, torch.distributed.rpc as rpc, torch.multiprocessing as mp

def work(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist())
    rpc.shutdown()

if __name__ == "__main__":
    mp.start_processes(work, (2,), nprocs=2, start_method=sys.argv[2])
"""

ENGINE = """
import sys, torch, torch.distributed as dist, torch.distributed.autograd as autograd, torch.distributed.rpc as rpc
where = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[2]}")
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
with autograd.context() as context:
    autograd.backward(context, [model(torch.ones(2, 3)).sum()])
rpc.shutdown()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_each_rpc_worker_that_a_script_starts_has_its_agents_log(tmp_path, how):
    """The agent begins to tell before anything is recorded; a forked worker's agent is not its parent's."""
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, RPC), free_port(), how)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert trace.problems == ()
    assert trace.rpc.complete, trace.rpc.problems
    assert len(list((tmp_path / "t").glob("*.agent.log"))) == 2
    assert "requests of the agents' logs explained" in done.stderr


def test_a_launcher_that_waits_for_its_ranks_is_none_of_them(tmp_path):
    """It is quiet for as long as they need to import torch."""
    done = dlearn_run(tmp_path, "--hang-after", "0.5", "--trace", "t", script(tmp_path, SPAWN), free_port(), "spawn")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1, 2), ())


def test_what_a_thread_without_python_sends_is_recorded(tmp_path):
    """DDP's reducer below distributed autograd: its engine's thread has no Python frame."""
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, ENGINE), free_port(), free_port())
    assert done.returncode == 0, done.stderr
    assert "could not record" not in done.stderr
    trace = Trace.load(tmp_path / "t")
    assert trace.problems == ()
    (reduced,) = trace.where(op="all_reduce").events
    assert (reduced.launcher, reduced.phase) == ("reducer", "backward")
