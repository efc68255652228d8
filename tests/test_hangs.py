"""Who waits for whom, and how it is told. (Most kinds of hangs are frozen: tests/frozen/by_hand.zip, "hangs-...".)"""

import pytest

from dlearn import Trace, explain
from dlearn.analysis import hangs
from dlearn.events.event import RpcCall, RpcRun, Worker
from dlearn.events.job_facts import OtherMpiCall, Stopped

MS = 1_000_000


@pytest.fixture
def job(job):
    """Both ranks have died, and one waited for the other."""
    job.died = (0, 1)
    yield job
    assert hangs(Trace.load(job.folder)) or "It was slow, not hung" in str(explain(Trace.load(job.folder)))


def test_a_rank_that_waits_elsewhere(job):
    """Rank 1 skipped the all_reduce, and waits in one of a group of its own."""
    job.group("own", [0, 1])
    job.collective("all_reduce", ranks=[0], start_ns=10, end_ns=None, site="a.py:1")
    job.recv(1, None, start_ns=20, end_ns=None, group="own", site="a.py:9")
    job.says(
        "rank 1 never called it, it is in recv #1 of the group of rank 0 and rank 1 (a.py:9)",
        "; no message has come for it, from any rank",
    )


def test_one_of_two_threads_waits_for_its_own_call(job):
    """Worker 1 runs two functions: one waits for a call of its own, the other computes, and may be done soon."""
    for rank in (0, 1):
        job.files[rank].append(Worker(name=f"worker{rank}", id=rank, wall_ns=0))
    call = {"op": "rpc_sync", "flavour": "python", "handed_ns": 10}
    for number, name in enumerate(["ask", "compute", "add"]):
        job.event(RpcCall, 0, function=name, to=1, call=number, **call)
    runs = [job.event(RpcRun, 1, function=f"f{number}", caller=0, call=number, arrived_ns=10) for number in (0, 1)]
    job.event(RpcCall, 1, function="answer", to=0, call=0, parent=runs[0], **call)
    job.says("worker0 waits for worker1 in rpc_sync add(); it has not arrived there")


def test_a_call_that_is_not_read(job):
    """Rank 1 made calls of MPI of which only the name is known."""
    job.event(OtherMpiCall, 1, op="Send_init")
    job.recv(0, 1, end_ns=None)
    job.says("rank 1 made other MPI calls, which are not read: one of them may be the call to match")


@pytest.mark.parametrize(
    ("last_ms", "told"),
    [
        (1, "It was slow, not hung: 20 operations in 0.022 s, 909 a second; the last ended 2 ms before the end."),
        (2000, "rank 0 waits for rank 1 in all_reduce #21; rank 1 never called it"),
    ],
)
def test_a_stopped_job_hangs_only_if_a_call_took_longer_than_all_before(job, last_ms, told):
    """20 calls of 1 ms each, and one that began `last_ms` before the job was stopped."""
    for number in range(20):
        job.collective("all_reduce", size=4, start_ns=number * MS, end_ns=(number + 1) * MS)
    job.collective("all_reduce", size=4, ranks=[0], start_ns=21 * MS, end_ns=None)
    for file in job.files:
        file.append(Stopped(at_ns=(21 + last_ms) * MS))
    job.says(told)
