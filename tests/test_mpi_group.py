"""torch's collectives over MPI: the results of gloo, each call recorded, and nothing claimed that MPI does not tell."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi_jobs
import pytest
import torch
import workloads
from installed_torch import gloo_finds_maxima_in_reduce_scatter, gloo_takes_complex_numbers
from test_mpi_recorder import mpiexec

from dlearn import Cluster, Trace, explain, messages, operations
from dlearn.analysis import reconcile, traffic
from dlearn.trace.event import NOT_OBSERVED, PointToPoint

pytest.importorskip("mpi4py")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Iterator[tuple[Cluster, Cluster]]:
    """Three ranks over gloo and three over MPI, kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("both"))
        with Cluster(3) as gloo, Cluster(3, backend="mpi") as mpi:
            yield gloo, mpi


@pytest.fixture
def mpi(both) -> Cluster:
    return both[1]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def jobs() -> list[Any]:
    """All, but for those in which the gloo of this torch is no measure."""
    lacks = {
        "broadcast": (gloo_takes_complex_numbers, "gloo of this torch broadcasts no complex numbers"),
        "reduce_scatter": (gloo_finds_maxima_in_reduce_scatter, "gloo of this torch finds no maxima in reduce_scatter"),
    }
    marks = {name: pytest.mark.skipif(not can(), reason=reason) for name, (can, reason) in lacks.items()}
    return [
        pytest.param(job, id=name, marks=[marks[name]] if name in marks else []) for name, job in mpi_jobs.JOBS.items()
    ]


@pytest.mark.parametrize("job", jobs())
def test_the_results_are_gloos(both, job):
    gloo, mpi = (cluster.run(job, timeout=60) for cluster in both)
    for rank in range(3):
        assert same(gloo.results[rank], mpi.results[rank]), rank
    assert mpi.trace.problems == ()


@pytest.mark.parametrize(
    "train",
    [
        mpi_jobs.train,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (mpi_jobs.zero, mpi_jobs.power_sgd, mpi_jobs.sharded)),
    ],
)
def test_training_is_gloos_up_to_the_order_of_sums(both, train):
    gloo, mpi = (cluster.run(train, timeout=60).results for cluster in both)
    for rank in range(3):
        for one, other in zip(gloo[rank], mpi[rank], strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_buckets_of_ddp_are_known_and_the_messages_inside_are_not(mpi):
    trace = mpi.run(mpi_jobs.train, timeout=60).trace
    reduced = [each for each in operations(trace) if each.op == "all_reduce"]
    assert {each.group.backend for each in reduced} == {"mpi4py"}
    assert all(each.what.startswith("gradient of bucket") for each in reduced)
    assert {(end.launcher, end.phase) for each in reduced for end in each.ends} == {("reducer", "backward")}
    assert all(end.end_ns is not None for each in operations(trace) for end in each.ends)
    found = messages(trace)
    assert len(found) == 0
    assert len(found.unexplained) == len(operations(trace))
    text = str(explain(trace))
    assert "MPI's library chooses how, and does not say" in text
    assert f"how much each rank sends is not known: {len(operations(trace))} operations not counted" in text


def test_wire_bytes_are_not_measured_and_never_zero(mpi):
    found = reconcile(mpi.run(mpi_jobs.train, timeout=60).trace)
    assert (found.whole.measured_bytes, found.whole.residue_bytes, found.exact) == (None, None, False)
    assert found.not_measured.startswith("MPI moves its bytes by itself, on one host through shared memory")
    assert found.rows()[-1] == ["in all", "", "0", "0", "not measured", "not measured"]


def test_sends_and_receives_are_observed_messages(mpi):
    """40 B from each rank to its right, then 8 B from rank 2 to rank 0, who did not know from whom."""
    trace = mpi.run(mpi_jobs.point_to_point).trace
    found = {(m.src, m.dst, m.payload_bytes, m.how) for m in messages(trace)}
    assert found == {(0, 1, 40, "observed"), (1, 2, 40, "observed"), (2, 0, 40, "observed"), (2, 0, 8, "observed")}
    assert {(m.offset_bytes, m.whole_bytes) for m in messages(trace) if m.payload_bytes == 40} == {(40, 400)}
    assert traffic(trace).payload_bytes == {(0, 1): 40, (1, 2): 40, (2, 0): 48}
    received = [event for event in trace.events if isinstance(event, PointToPoint) and event.tag == 6]
    assert {(event.rank, event.op, event.peer, event.ended_by) for event in received} == {
        (2, "send", 0, "wait"),
        (0, "recv", 2, "wait"),
    }
    assert {Path(event.site.split(":")[0]).name for event in trace.events} == {"mpi_jobs.py"}


def test_what_nobody_waits_for_has_no_observed_end(mpi):
    trace = mpi.run(mpi_jobs.nobody_waits).trace
    ends = {(event.rank, event.op): event.ended_by for event in trace.events if isinstance(event, PointToPoint)}
    assert ends == {(0, "send"): NOT_OBSERVED, (0, "recv"): NOT_OBSERVED, (1, "recv"): "wait"}


def test_a_tensor_need_not_lie_in_one_row(mpi):
    results = mpi.run(mpi_jobs.not_in_one_row).results
    # 7 * each % 5 + 1 of 0 to 11 in rows of four, turned.
    assert results[1] == [[1.0, 4.0, 2.0], [3.0, 1.0, 4.0], [5.0, 3.0, 1.0], [2.0, 5.0, 3.0]]
    assert results[0] == [[0.0] * 3] * 4


def test_types_that_mpi_does_not_know(mpi):
    """Halves are 2^-9 apart from 2 on: 3 + 3/1024, summed in float32, becomes 3 + 4/1024. Truth: the sum is "or"."""
    expected = [[3.0, 6.0, 9.0], [True, False, True], [True, False, True], 3 + 4 / 1024, 2**63]
    assert mpi.run(mpi_jobs.types).results == dict.fromkeys(range(3), expected)


def test_what_cannot_be_carried_is_refused_in_words(mpi):
    assert mpi.run(mpi_jobs.refused).results[1] == {
        "sparse": "SetupError: collectives over mpi4py carry dense tensors on the CPU, not a torch.sparse_coo one on"
        " cpu; use torch's own collective.",
        "mean of integers": "SetupError: collectives over mpi4py know no AVG of torch.int64.",
        "bits of floats": "SetupError: collectives over mpi4py know no BAND of torch.float32.",
        "premultiplied": "SetupError: collectives over mpi4py know no PREMUL_SUM of torch.float32.",
    }


def test_a_group_gives_up_after_its_timeout(mpi):
    said = mpi.run(mpi_jobs.wait_in_vain, timeout=30).results[0]
    assert said.startswith("PeerError: mpi4py barrier: Timed out waiting 0.3 s for another rank.")


@pytest.mark.slow
def test_destroy_leaves_no_thread_and_init_works_again(own_folder):
    run = Cluster(2, backend="mpi", init=False).run(mpi_jobs.groups_again, timeout=60)
    assert run.results == {0: [], 1: []}
    assert [each.op for each in operations(run.trace)] == ["all_reduce"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    # torch itself refuses a monitored barrier on any backend but gloo.
    [each for each in workloads.truth if each.__name__ != "monitored_barrier"],
    ids=lambda workload: workload.__name__,
)
def test_every_workload_runs(workload, tmp_path, monkeypatch):
    def quiet() -> object:
        warnings.simplefilter("ignore")
        return workload()

    monkeypatch.chdir(tmp_path)
    run = Cluster(2, backend="mpi").run(quiet, timeout=60)
    assert run.trace.problems == ()
    assert not any(event.pending for event in run.trace.events)


# A program of its own under mpiexec -----------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch, torch.distributed as dist
import dlearn, dlearn.collectives
from mpi4py import MPI

dist.init_process_group("mpi4py", init_method="mpi4py://")
assert (dist.get_rank(), dist.get_world_size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
with dlearn.record(sys.argv[1]):
    dist.all_reduce(tensor := torch.ones(3) * dist.get_rank())
    assert tensor.tolist() == [3.0] * 3
dist.destroy_process_group()
"""

WRONG_RANKS = """
import torch.distributed as dist
import dlearn.collectives
from mpi4py import MPI

dist.init_process_group("mpi4py", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.slow
def test_a_program_under_mpiexec(tmp_path):
    done = mpiexec(tmp_path, 3, PROGRAM)
    assert done.returncode == 0, done.stderr
    [operation] = operations(Trace.load(tmp_path / "trace"))
    assert (operation.op, len(operation.ends), operation.group.backend) == ("all_reduce", 3, "mpi4py")


@pytest.mark.slow
def test_torchs_ranks_must_be_mpis(tmp_path):
    done = mpiexec(tmp_path, 2, WRONG_RANKS)
    assert done.returncode != 0
    assert "SetupError: torch's rank 0 is rank 1 of 2 in MPI, and they must be the same" in done.stderr
