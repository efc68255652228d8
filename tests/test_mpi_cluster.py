"""Ranks of a real MPI job from a cell: results, faults, interrupts; and never an orphan."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
from waiting import all_end

from dlearn import Cluster
from dlearn.errors import RankError, SetupError

pytestmark = pytest.mark.usefixtures("own_folder")


def in_shared_memory() -> set[str]:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    return {line.split()[5] for line in open("/proc/self/maps") if "/mpich_shm_" in line}


def both_of_torch_and_mpi() -> tuple[float, float, str]:
    from mpi4py import MPI

    print("hello from", MPI.COMM_WORLD.rank)
    dist.all_reduce(tensor := torch.ones(1))
    return tensor.item(), MPI.COMM_WORLD.allreduce(2.0), dist.get_backend()


BOTH = (2.0, 4.0, "mpi4py")


def refused() -> None:
    with pytest.raises(SetupError, match="do not calculate with"):
        dist.all_reduce(torch.ones(1) > 0)
    with pytest.raises(SetupError, match="take one tensor a call"):
        dist.all_reduce_coalesced([torch.ones(1)] * 2)


def start_a_child() -> str:
    """It is no member of the job, and may use MPI by itself."""
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout


def finalize() -> None:
    from mpi4py import MPI

    MPI.Finalize()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
def test_kept_ranks_stay_in_their_job_and_leave_nothing_behind():
    with Cluster(["server", "w1"], backend="mpi") as kept:
        run = kept.run(both_of_torch_and_mpi, timeout=60)
        assert run.results == {"server": BOTH, "w1": BOTH}
        assert run.output == {"server": "hello from 0\n", "w1": "hello from 1\n"}
        assert [process.header.world_size for process in run.trace.processes] == [2, 2]
        assert run.trace.problems == ()
        kept.run(refused)
        pids = kept.run(os.getpid).results
        assert [kept.run(programs.count).results["w1"] for _ in range(2)] == [1, 2]
        assert kept.run(both_of_torch_and_mpi).results["w1"] == BOTH
        for addresses in kept.run(programs.listening_addresses).results.values():
            assert set(addresses) <= {"127.0.0.1"}
        assert kept.run(start_a_child, timeout=60).results == {"server": "1\n", "w1": "1\n"}
        memory = kept.run(in_shared_memory).results
        assert kept.run(os.getpid).results == pids
        kept.run(finalize)
        with pytest.raises(RankError, match=r"has called MPI.Finalize, and MPI cannot begin again in a process"):
            kept.run(programs.count)
        (own,) = memory["server"] | memory["w1"]
        Path(own).touch()  # As a rank that is killed while MPI begins would leave it.
    assert all_end(pids.values())
    assert not Path(own).exists()


def meet(fault: str) -> None:
    """One collective; then rank 1 meets its fault while rank 0 sends it a large message, or waits for one.

    Who waits in MPI takes a whole core, and with more than one of them nobody is sure to be heard.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    dist.all_reduce(torch.ones(3))
    if world.rank == 1 and fault == "exit":
        os._exit(3)
    if world.rank == 1:
        world.Abort(7)
        time.sleep(60)
    if fault == "exit":
        world.Send(torch.zeros(10_000_000).numpy(), dest=1)
    world.recv(source=1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exit", "rank 1 died: it exited with code 3 inside its function"),
        ("abort", "rank 1 ended the MPI job. Its last line: Abort(7) on node 1 (rank 1 in comm 0): "),
    ],
)
def test_a_fault_is_named_the_trace_so_far_is_kept_and_no_rank_left(fault, said):
    with pytest.raises(RankError) as caught:
        Cluster(2, backend="mpi").run(meet, fault, timeout=60)
    assert caught.value.what.startswith(said)
    assert caught.value.rank == 1
    trace = caught.value.run.trace
    assert len(trace.where(op="all_reduce").events) == 2
    assert all_end(process.header.pid for process in trace.processes)


def test_what_cannot_begin_is_told(monkeypatch):
    with pytest.raises(SetupError, match="has its ranks on this machine, and not beside engines"):
        Cluster(2, backend="mpi", engine=object())
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(RankError, match=r"No such file or directory\): pip install mpich") as caught:
        Cluster(2, backend="mpi").run(programs.count, timeout=60)
    told = "SetupError: mpi4py cannot load MPI here (cannot load MPI library /nonexistent/libmpi.so: "
    assert told in caught.value.what


NOTEBOOK = """
import os, time
import dlearn.errors
from dlearn import Cluster

def wait(seconds):
    print("at work", os.getpid(), flush=True)
    time.sleep(seconds)

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
cluster = Cluster(2, backend="mpi", init=False)
cluster.run(wait, 0)
try:
    cluster.run(wait, 60)
except dlearn.errors.Interrupted:
    print("interrupted", flush=True)
cluster.run(wait, 60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_setaffinity")
def test_an_interrupt_ends_a_job_and_none_survives_a_kernel_that_is_killed(tmp_path):
    """And that there are more ranks than cores is said once."""
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], cwd=tmp_path, **told) as kernel:
        seen: list[str] = []

        def pids(count: int) -> list[int]:
            while sum("at work" in line for line in seen) < count:
                seen.append(kernel.stdout.readline())
                assert seen[-1], seen
            return [int(line.split()[-1]) for line in seen if "at work" in line]

        pids(4)
        kernel.send_signal(signal.SIGINT)
        interrupted = pids(6)[:4]
        assert "interrupted\n" in seen
        assert all_end(interrupted)
        kernel.kill()
        assert kernel.stderr.read().count("dlearn: 2 MPI ranks on 1 cores. MPICH waits by asking again and again") == 1
    assert all_end(pids(6))
