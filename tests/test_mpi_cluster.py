"""Ranks of a real MPI job from a cell: results, faults, interrupts; and never an orphan."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from hanging import all_of, end_when, in_calls, said
from waiting import comes_true

from dlearn import Cluster
from dlearn.analysis import reconcile
from dlearn.cluster import crew, mpi_launch, spares
from dlearn.errors import Interrupted, RankError

pytestmark = pytest.mark.usefixtures("own_folder")

pytest.importorskip("mpi4py")


@pytest.fixture(autouse=True)
def _no_orphans():
    """After each test no rank of its MPI jobs is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    spares.close()
    # What may stay are the fork server and its tracker.
    assert comes_true(lambda: all(each.pid in before for each in below(os.getpid())))


def below(pid: int) -> list[psutil.Process]:
    """The ranks that live below this process: each leads a group of its own."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        try:
            if each.status() != psutil.STATUS_ZOMBIE and os.getpgid(each.pid) == each.pid:
                found.append(each)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


# What a function finds ------------------------------------------------------------------------------------------------


def look_around() -> tuple[int, int, int, str, int]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    print("hello from", world.rank)
    return world.rank, world.size, world.allreduce(1), os.environ["PMI_RANK"], int(os.environ["RANK"])


def test_a_program_of_mpi4py_as_it_is():
    run = Cluster(3, backend="mpi", init=False).run(look_around, timeout=60)
    assert run.results == {rank: (rank, 3, 3, str(rank), rank) for rank in range(3)}
    assert run.output == {rank: f"hello from {rank}\n" for rank in range(3)}
    assert [process.header.rank for process in run.trace.processes] == [0, 1, 2]
    assert [process.header.world_size for process in run.trace.processes] == [3, 3, 3]
    assert run.trace.problems == ()


def serve() -> str:
    from mpi4py import MPI

    status = MPI.Status()
    told = MPI.COMM_WORLD.recv(source=MPI.ANY_SOURCE, status=status)
    return f"{told} from {status.Get_source()}"


def greet() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.send("hello", dest=0)


def in_shared_memory() -> set[str]:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    return {line.split()[5] for line in open("/proc/self/maps") if "/mpich_shm_" in line}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/shm")
def test_nothing_that_a_job_shares_is_left_or_taken_for_anothers():
    with Cluster(2, backend="mpi", init=False) as cluster:
        found = cluster.run(in_shared_memory).results
        job = cluster._crew.ranks[0].job
        own = f"/dev/shm/mpich_shm_{mpi_launch.memory_name(job.name)}_0"
        assert found[0] == found[1] == {own}  # MPICH names it as we think.
        Path(own).touch()  # As a rank that is killed while MPI begins would leave it.
    assert not Path(own).exists()


def test_names_and_a_function_for_each():
    run = Cluster(["server", "w1", "w2"], backend="mpi", init=False).run({"server": serve, "w2": greet}, timeout=60)
    assert run.results == {"server": "hello from 2", "w2": None}


def both_of_torch_and_mpi() -> tuple[float, float, str]:
    from mpi4py import MPI

    dist.all_reduce(tensor := torch.ones(1))
    return tensor.item(), MPI.COMM_WORLD.allreduce(2.0), dist.get_backend()


def count() -> int:
    globals()["calls"] = globals().get("calls", 0) + 1
    return globals()["calls"]


def finalize() -> None:
    from mpi4py import MPI

    MPI.Finalize()


def test_kept_ranks_stay_in_their_job():
    with Cluster(2, backend="mpi") as kept:
        assert kept.run(both_of_torch_and_mpi, timeout=60).results == dict.fromkeys(range(2), (2.0, 4.0, "mpi4py"))
        pids = kept.run(os.getpid).results
        assert [kept.run(count).results[0] for _ in range(2)] == [1, 2]
        assert kept.run(both_of_torch_and_mpi).results[1] == (2.0, 4.0, "mpi4py")
        assert kept.run(os.getpid).results == pids


@pytest.mark.slow
def test_finalize_in_a_function_is_told():
    with Cluster(2, backend="mpi", init=False) as kept:
        kept.run(finalize, timeout=60)
        with pytest.raises(RankError, match=r"has called MPI.Finalize, and MPI cannot begin again in a process"):
            kept.run(count)


def start_a_child() -> str:
    """It is no member of the job, and may use MPI by itself."""
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.slow
def test_a_ranks_own_child_is_no_rank():
    assert Cluster(2, backend="mpi", init=False).run(start_a_child, timeout=60).results == {0: "1\n", 1: "1\n"}


def ask_the_other() -> int:
    import torch.distributed.rpc as rpc
    from mpi4py import MPI

    # Of objects the first collective duplicates the communicator, and holds Python's lock until all ranks have come:
    # a rank that is there already could not answer the other's call.
    MPI.COMM_WORLD.allreduce(1)
    return rpc.rpc_sync(f"worker{1 - MPI.COMM_WORLD.rank}", os.getpid) + 0 * MPI.COMM_WORLD.allreduce(1)


@pytest.mark.slow
def test_rpc_works_beside_mpi():
    run = Cluster(2, backend="mpi", rpc=True).run(lambda: (os.getpid(), ask_the_other()), timeout=60)
    assert run.results[0] == run.results[1][::-1]
    assert {pair.group for pair in reconcile(run.trace).whole.pairs if pair.measured_bytes} == {"rpc"}


def listening() -> list[str]:
    """Addresses at which this rank listens, with all that MPI may have opened."""
    both_of_torch_and_mpi()
    found = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]


def test_nothing_listens_off_loopback():
    with Cluster(2, backend="mpi") as kept:
        for addresses in kept.run(listening, timeout=60).results.values():
            assert set(addresses) <= {"127.0.0.1"}


@pytest.mark.slow
def test_more_ranks_than_cores_run_and_it_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(mpi_launch, "_told", False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    for _ in range(2):
        assert Cluster(2, backend="mpi", init=False).run(count, timeout=60).results == {0: 1, 1: 1}
    assert capsys.readouterr().err.count("dlearn: 2 MPI ranks on 1 cores. MPICH waits by asking again and again") == 1


# Faults ---------------------------------------------------------------------------------------------------------------


class Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("held a lock")
        self.lock = threading.Lock()


def meet(fault: str) -> object:
    """One collective; then rank 1 meets its fault while rank 0 sends it a large message, and rank 2 waits for one."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    dist.all_reduce(torch.ones(3))
    if world.rank == 0:
        world.Send(torch.zeros(10_000_000).numpy(), dest=1)
    if world.rank == 2:
        world.recv(source=1)
    match fault:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("not today")
        case "unsendable":
            raise Unsendable
        case "abort":
            world.Abort(7)
            time.sleep(60)
        case "mpi":
            world.send(1, dest=99)
    return threading.Lock()


def slow(*args: str) -> object:
    return pytest.param(*args, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exit", "rank 1 died: it exited with code 3 inside its function"),
        slow("unsendable", "rank 1 failed first: Unsendable: held a lock"),
        ("abort", "rank 1 ended the MPI job. Its last line: Abort(7) on node 1 (rank 1 in comm 0): "),
        slow("kill", "rank 1 was killed by SIGKILL"),
        slow("raise", "rank 1 failed first: ValueError: not today"),
        slow("mpi", "rank 1 failed first: Exception: Invalid rank, error stack:"),
        slow("result", "rank 1 failed first: TypeError: the result, a lock, cannot be sent back"),
    ],
)
def test_a_fault_is_named_and_the_trace_so_far_is_kept(monkeypatch, fault, said):
    # Ranks that wait in MPI ask without a pause: on fewer cores than ranks they look as if they had no time to fail.
    monkeypatch.setattr(crew, "MOST_GRACE_SECONDS", 1.0)
    with pytest.raises(RankError) as caught:
        Cluster(3, backend="mpi").run(meet, fault, timeout=60)
    assert caught.value.what.startswith(said)
    assert caught.value.rank == 1
    assert len(caught.value.run.trace.where(op="all_reduce").events) == 3


def send_what_nobody_takes(large: int) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(large), 1)
    print("has called")


def send_by_mpi4py() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.Send(torch.zeros(1_000_000).numpy(), dest=1)
    print("has called")


def test_a_send_that_nobody_receives():
    """Through torch or by mpi4py itself."""
    told = r"rank 0 waits for rank 1 in send #1 \(.*test_mpi_cluster.py:\d+\); rank 1 never received it, it (is|has)"
    stuck = all_of(said("has called", 1), in_calls(1))
    run = end_when(stuck, Cluster(2, backend="mpi"), send_what_nobody_takes, 1_000_000)
    assert re.search(told, run.error.what)
    run = end_when(stuck, Cluster(2, backend="mpi", init=False), send_by_mpi4py)
    assert re.search(told, run.error.what)


def at_work(folder: Path) -> None:
    (folder / f"{os.getpid()}").touch()
    time.sleep(60)


def test_an_interrupt_ends_the_job(tmp_path):
    def interrupt() -> None:
        if comes_true(lambda: len(list(folder.iterdir())) == 2):
            os.kill(os.getpid(), signal.SIGINT)

    folder = tmp_path / "at work"
    folder.mkdir()
    with ThreadPoolExecutor(1) as beside:
        beside.submit(interrupt)
        with pytest.raises(Interrupted, match="the ranks were ended"):
            Cluster(2, backend="mpi").run(at_work, folder)
    assert Cluster(2, backend="mpi", init=False).run(count, timeout=60).results == {0: 1, 1: 1}


NOTEBOOK = """
import os, time
from dlearn import Cluster

def wait():
    print("at work", os.getpid(), flush=True)
    time.sleep(60)

print("kernel", os.getpid(), flush=True)
Cluster(2, backend="mpi", init=False).run(wait)
"""


@pytest.mark.slow
def test_nobody_survives_a_kernel_that_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as kernel:
        seen: list[str] = []
        assert kernel.stdout is not None
        while sum("at work" in line for line in seen) < 2:
            seen.append(kernel.stdout.readline())
            assert seen[-1], seen
        ranks = [psutil.Process(int(line.split()[-1])) for line in seen if "at work" in line]
        kernel.kill()
    _, left = psutil.wait_procs(ranks, timeout=10)
    assert left == []


@pytest.mark.slow
def test_ranks_that_are_spawned():
    for _ in range(2):
        run = Cluster(2, backend="mpi", start="spawn").run(both_of_torch_and_mpi, timeout=100)
        assert run.results == dict.fromkeys(range(2), (2.0, 4.0, "mpi4py"))
