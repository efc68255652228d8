"""Held and unheld jobs give the same bits: mpi4py, and torch over MPI. And whose waiting it was."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from traces import Job

from dlearn import Cluster
from dlearn.analysis import breakdown, overlap, step_times
from dlearn.analysis.ddp.gate_time import gate_note
from dlearn.errors import DlearnError, SetupError

over_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no MPI here: pip install dlearn-trace[mpi]")


def mpi_program():
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine, other = numpy.sin(numpy.arange(100.0)) * (world.rank + 1), numpy.empty(100)
    world.Allreduce(MPI.IN_PLACE, mine)
    world.Sendrecv(mine * world.rank, (world.rank + 1) % world.size, recvbuf=other)
    return other.tobytes(), world.bcast("said" if world.rank == 0 else None)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 1))
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(8, 32)).square().sum().backward()
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.empty(3), 0)
    return [parameter.grad.numpy().tobytes() for parameter in model.parameters()]


def both(program, **options):
    """What it gives freely, and what it gives held, with the ops that were let through."""
    free = Cluster(2, **options).run(program, timeout=60).results
    run = Cluster(2, hold=True, **options).run(program)
    ops = []
    while (call := run.step()) is not None:
        ops.append(call.op)
    assert run.ranks == {0: "has ended", 1: "has ended"}
    return free, run.join(60).results, ops


@over_mpi
@pytest.mark.slow
def test_a_held_program_of_mpi4py_is_bit_equal():
    free, held, ops = both(mpi_program, backend="mpi", init=False)
    assert held == free
    assert sorted(ops) == ["all_reduce"] * 2 + ["broadcast"] * 2 + ["recv"] * 2 + ["send"] * 2


@over_mpi
@pytest.mark.slow
def test_held_ddp_over_mpi_is_bit_equal():
    free, held, ops = both(train, backend="mpi")
    assert held == free
    assert ops.count("all_reduce") >= 2 * 2
    assert {"send", "recv"} <= set(ops)


def receive_first():
    import numpy
    from mpi4py import MPI

    MPI.COMM_WORLD.Recv(numpy.ones(1), 1 - MPI.COMM_WORLD.rank)


@over_mpi
@pytest.mark.slow
def test_ranks_that_spin_inside_mpi_do_not_compute():
    run = Cluster(2, backend="mpi", hold=True).run(receive_first)
    run.release(0)
    run.release(1)
    assert run.waiting == ()
    with pytest.raises(DlearnError, match=r"no call of rank 0 comes .* rank 0 and rank 1 wait for each other"):
        run.release(0)
    run.end()


def test_a_second_run_of_held_ranks_is_told():
    with Cluster(2, hold=True) as cluster:
        run = cluster.run(dist.barrier)
        with pytest.raises(SetupError, match="a held run of these ranks is under way"):
            cluster.run(dist.barrier)
        run.free().join(60)


def test_the_gates_waiting_is_told_apart_from_that_for_a_late_rank(tmp_path):
    """Rank 1 stood 6 of the 9 ms at the gate for which rank 0 waited."""
    job = Job(tmp_path, ranks=2)
    job.span(1, "held before all_reduce", held="all_reduce", start_ns=3_000_000, end_ns=9_000_000)
    for rank, start_ns in enumerate((0, 9_000_000)):
        job.collective("all_reduce", size=8, ranks=[rank], start_ns=start_ns, end_ns=9_500_000)
    trace = job.load()
    told = "Held: rank 1 stood 6.00 ms at the gate, and 6.00 ms of the waiting for it were the gate's."
    assert gate_note(trace) == told
    assert breakdown(trace).note.endswith(told)
    assert overlap(trace).note.endswith(told)
    assert step_times(trace).note == told


def test_of_a_job_that_was_not_held_nothing_is_told(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, start_ns=0, end_ns=5)
    assert gate_note(job.load()) == ""
