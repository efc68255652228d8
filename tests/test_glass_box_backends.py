"""The ring as a backend of torch: programs run on it unchanged, and every step is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
import workloads
from hanging import end_when, in_calls
from installed_torch import on_gloo

import dlearn
from dlearn import Cluster, Trace, messages, operations
from dlearn.analysis import reconcile
from dlearn.errors import RankError, SetupError
from dlearn.trace.event import Collective

pytestmark = pytest.mark.usefixtures("own_folder")

BACKEND = "dlearn_ring"


def trained(steps: int) -> list[torch.Tensor]:
    return programs.train_ddp(steps)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ddp_on_the_ring_is_ddp_on_gloo_to_the_bit(ranks):
    gloos = Cluster(ranks).run(trained, 3).results
    ring = Cluster(ranks, backend=BACKEND).run(trained, 3).results
    for rank in range(ranks):
        assert all(torch.equal(*pair) for pair in zip(gloos[rank], ring[rank], strict=True))


@pytest.mark.parametrize(
    "workload",
    # torch itself refuses a monitored barrier on any backend but gloo.
    on_gloo(each for each in workloads.truth if each.__name__ != "monitored_barrier"),
)
def test_every_workload_runs_and_is_counted_to_the_byte(workload):
    """PowerSGD calls collectives from the callbacks of others; FSDP2, DTensor and ZeRO use most of torch."""

    def quiet() -> object:
        warnings.simplefilter("ignore")
        return workload()

    run = Cluster(2, backend=BACKEND).run(quiet, timeout=60)
    assert reconcile(run.trace).exact
    assert messages(run.trace).unexplained == ()
    assert run.trace.problems == ()


def test_steps_stand_inside_their_operation():
    run = Cluster(3, backend=BACKEND).run(trained, 1)
    first = next(each for each in operations(run.trace) if each.op == "all_reduce")
    assert first.group.backend == "dlearn_ring"
    assert first.what.startswith("gradient of bucket 0: ")
    assert {end.launcher for end in first.ends} == {"reducer"}
    assert {end.phase for end in first.ends} == {"backward"}
    assert {Path(end.site.split(":")[0]).name for end in first.ends if isinstance(end, Collective)} == {"programs.py"}
    # 2 (n-1) steps on each of 3 ranks, through an inner group over gloo.
    assert len(first.steps) == 12
    assert {step.group.backend for step in first.steps} == {"gloo"}
    assert {step.group.name for step in first.steps} == {"0 steps"}
    inner = [process.groups["0 steps"].within for process in run.trace.processes]
    assert inner == ["0", "0", "0"]
    assert {message.how for message in messages(run.trace) if message.op == "all_reduce"} == {"observed"}


def use_part_of_the_ranks() -> list[float]:
    group = dist.new_group([0, 2])
    tensor = torch.full((5,), dist.get_rank() + 1.0)
    if dist.get_rank() != 1:
        dist.all_reduce(tensor, group=group)
    dist.barrier()
    return tensor.tolist()


def test_a_group_that_leaves_a_rank_out():
    run = Cluster(3, backend=BACKEND).run(use_part_of_the_ranks)
    assert run.results == {0: [4.0] * 5, 1: [2.0] * 5, 2: [4.0] * 5}
    assert reconcile(run.trace).exact


def init_and_destroy(times: int) -> list[str]:
    import dlearn.collectives  # noqa: F401

    for _ in range(times):
        dist.init_process_group("dlearn_ring")
        dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
    return [thread.name for thread in threading.enumerate() if "dlearn_ring" in thread.name]


def test_destroy_leaves_no_thread_and_init_works_again():
    run = Cluster(2, init=False).run(init_and_destroy, 3)
    assert run.results == {0: [], 1: []}
    assert reconcile(run.trace).exact


def test_kept_ranks_run_twice():
    with Cluster(2, backend=BACKEND) as cluster:
        for _ in range(2):
            assert reconcile(cluster.run(trained, 1).trace).exact


def record_late(folder: str) -> None:
    dist.all_reduce(torch.ones(10))
    with dlearn.record(folder):
        dist.all_reduce(torch.ones(10))


def test_a_recording_that_begins_late_nests_as_well(tmp_path):
    Cluster(2, backend=BACKEND, record=False).run(record_late, str(tmp_path / "late"))
    trace = Trace.load(tmp_path / "late")
    [operation] = operations(trace)
    assert len(operation.steps) == 4
    assert reconcile(trace).exact


def futures_and_errors() -> list[object]:
    """What `wait`, the future and `is_completed` say of one that works and of one that cannot."""
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    done = [works[0].wait(), works[1].get_future().wait()[0].tolist(), works[2].wait() and works[2].is_completed()]
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)
    except SetupError as error:
        done.append(str(error))
    return done


def test_work_and_future():
    found = Cluster(2, backend=BACKEND).run(futures_and_errors).results[0]
    assert found == [True, [2.0] * 3, True, "glass-box collectives know no AVG of torch.int32."]


# Faults ---------------------------------------------------------------------------------------------------------------


def test_different_sizes_hang_and_are_named():
    """gloo would end the process: here such messages never meet."""
    run = end_when(in_calls(1, 1), Cluster(2, backend=BACKEND), programs.sum_of_different_sizes)
    assert "the ranks called it with different sizes: 200, 400 B" in run.error.what


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError) as caught:
        Cluster(3, backend=BACKEND).run(programs.all_reduce_then, "exit", timeout=60)
    assert caught.value.rank == 1
    assert "rank 1 died: it exited with code 3" in caught.value.what
    assert "PeerError: " in caught.value.what


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two plain processes, by torchrun."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(Path(__file__).with_name("glass_box.py")), *arguments),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["destroy", "just go"])
def test_a_script_ends_without_an_abort(leave):
    for _ in range(3):
        job = launch(BACKEND, leave)
        assert job.returncode == 0, job.stderr
        assert job.stdout.count("[2.0, 2.0, 2.0, 2.0]") == 2
        assert "terminate called" not in job.stderr
        assert "Traceback" not in job.stderr
