"""Who waits for whom outside operations: in init_process_group, new_group, rpc.shutdown, ... (../cases: kind 1.)"""

import re
import time

import pytest
import torch.distributed as dist
from test_run import hanging
from traces import Job, header
from waiting import comes_true

from dlearn import Cluster, Trace, explain
from dlearn.events.event import Worker
from dlearn.events.job_facts import Exit, Heartbeat, Rendezvous


@pytest.fixture
def job(tmp_path):
    """Four ranks that have died, and whose groups are known."""
    job = Job(tmp_path, ranks=4)
    job.died = range(4)
    yield job
    assert "no process group used" not in str(explain(Trace.load(tmp_path)))


NAMES = {0: "w0", 1: "w1", 2: "w2", 3: "w3"}


def come(job, who, op="init_process_group", *, end_ns=None, start_ns=10, **facts):
    """These ranks call `op`; with `end_ns` they come out."""
    given = {"site": "a.py:5", "as_rank": {rank: rank for rank in who}} | facts
    job.event(Rendezvous, who, op=op, start_ns=start_ns, end_ns=end_ns, **given)


def alone(job):
    """Processes that a script has started: which ranks they are, only their calls say."""
    job.headers[:] = [header(None, pid=rank) for rank in range(len(job.files))]
    for lines in job.files:
        lines.clear()


def test_a_rank_that_never_began(job):
    alone(job)
    come(job, range(4), size=5)
    job.says(
        "rank 0, rank 1, rank 2 and rank 3 wait in init_process_group (a.py:5) for rank 4: no process with this rank"
    )


def test_a_call_that_timed_out(job):
    come(job, [0], size=4, end_ns=90, error="DistStoreError")
    job.files[1].append(Heartbeat(at_ns=50, ended="exited"))
    job.says(
        "rank 0 waits in init_process_group (a.py:5) for rank 1, rank 2 and rank 3; rank 1 has ended; rank 2 has not"
    )


def test_a_second_time(job):
    come(job, range(4), size=4, end_ns=20)
    come(job, (1, 2, 3), size=4, start_ns=30)
    job.says("rank 1, rank 2 and rank 3 wait in init_process_group (a.py:5) for rank 0, which has not called it.")


def test_ranks_that_ended_before(job):
    come(job, (0, 1), "new_group", ranks=(0, 1, 2, 3), group="1")
    job.files[2].append(Exit(status=3))
    job.files[3].append(Heartbeat(at_ns=50, site="b.py:2", ended="KeyError"))
    job.says(
        "wait in new_group (a.py:5) for rank 2 and rank 3; rank 2 ended with status 3; rank 3 has raised KeyError at"
        " b.py:2."
    )


def test_a_call_by_one_rank_only(job):
    """Rank 1 has made its group, and waits in an operation that rank 0 comes to later."""
    come(job, [0], "new_group", ranks=(0, 2), group="2")
    job.collective("all_reduce", ranks=[1, 2, 3], end_ns=None, site="a.py:9")
    told = "wait for rank 0 in all_reduce #1 (a.py:9); rank 0 never called it, it is in new_group (a.py:5)."
    assert "waits in new_group" not in job.says(told), "it follows"


def test_a_part_of_a_mesh(job):
    come(job, (0, 1), "init_device_mesh", ranks=(0, 1), group="1", end_ns=20)
    come(job, [2], "init_device_mesh", ranks=(2, 3), group="2")
    come(job, [3], "new_group", ranks=(1, 3), group="3", site="b.py:2")
    job.says(
        "rank 2 waits in init_device_mesh of ranks 2 and 3 (a.py:5) for rank 3, which is in new_group (b.py:2).",
        "rank 3 waits in new_group of ranks 1 and 3 (b.py:2) for rank 1, which has not called it.",
    )


def test_different_names(job):
    job.group("0,3", [0, 3])
    come(job, (0, 1), "new_group", ranks=(0, 1), group={0: "x", 1: "y"})
    job.says(
        "rank 0 and rank 1 wait in new_group of ranks 0 and 1 (a.py:5) and do not meet: torch names such a group by"
        " how many groups its process has made, and rank 0 had made 2, rank 1 had made 1."
    )


def test_another_size(job):
    """Rank 2 believes that there is one more; the others have come out of it, and wait for rank 2."""
    come(job, (0, 1, 3), size=4, end_ns=20)
    come(job, [2], size=5)
    job.says("in init_process_group (a.py:5) for rank 0, rank 1 and rank 3; rank 0 called it for 4 ranks and has")


def test_groups_of_one_name(job):
    """Ranks 0 and 2 were luckier than ranks 1 and 3, whose pair has the same name in the same store."""
    come(job, (0, 2), "new_group", ranks=(0, 2), group="1", end_ns=20)
    come(job, (1, 3), "new_group", ranks=(1, 3), group="1")
    job.says(
        "rank 1 and rank 3 wait in new_group of ranks 1 and 3 (a.py:5); rank 0 and rank 2 made another group of the"
        " same name: new_group must be called by all ranks for every group."
    )


def test_a_call_that_was_interrupted(job):
    """What a call sends by RPC while it lasts is no sign that its rank came out of it."""
    come(job, [1], "Split", ranks=(1, 2), end_ns=90, error="KeyboardInterrupt")
    job.message(1, 2, start_ns=20, end_ns=30)
    job.says("rank 1 waits in Split of ranks 1 and 2 (a.py:5) for rank 2, which has not called it.")


def test_a_rank_on_another_host(job):
    come(job, range(4), size=5)
    job.says("wait in init_process_group (a.py:5); the file of rank 4 is not here, so whether it came is not known.")


def test_a_missing_worker(job):
    alone(job)
    come(job, range(4), "rpc.init_rpc", size=6, name=NAMES)
    job.says("w0, w1, w2 and w3 wait in rpc.init_rpc (a.py:5) for rank 4 and rank 5: no process with these ranks has")


def test_a_worker_that_works_on(job):
    alone(job)
    for rank, name in NAMES.items():
        job.files[rank].append(Worker(name=name, id=rank, wall_ns=0))
    come(job, (1, 3), "rpc.shutdown", names=tuple(NAMES.values()), name=NAMES)
    job.files[0].append(Heartbeat(at_ns=50, site="a.py:2"))
    job.files[2].append(Exit(status=1))
    job.says("w1 and w3 wait in rpc.shutdown (a.py:5) for w0 and w2; w0 is at a.py:2; w2 ended with status 1.")


def test_mpi(job):
    come(job, (0, 1, 3), "Split", ranks=(0, 1, 2, 3), group="COMM_WORLD", as_rank=None)
    job.files[2].append(Exit(status=-9))
    job.says("rank 0, rank 1 and rank 3 wait in Split (a.py:5) for rank 2, which was killed by SIGKILL.")


def test_a_job_whose_ranks_came_says_nothing(tmp_path):
    job = Job(tmp_path, ranks=2)
    come(job, [0], size=2, end_ns=5, start_ns=1, error="DistStoreError")  # It tried again.
    come(job, (0, 1), size=2, end_ns=20)
    come(job, (0, 1), "new_group", ranks=(0, 1), group="1", end_ns=20)
    come(job, [0], size=2, end_ns=30, error="ValueError")  # A second init, which torch refuses.
    assert " wait" not in job.says("2 ranks (gloo): 0 of 0 operations")


LATE = """
import os, time, torch.distributed as dist, torch.distributed.rpc as rpc
rank = int(os.environ["RANK"])
def late(who, file):
    while rank == who and not os.path.exists(file): time.sleep(0.05)
late(1, "init")
dist.init_process_group("gloo")
late(0, "group")
if rank < 2: dist.new_group([0, 1], use_local_synchronization=True)
late(1, "subgroups")
dist.new_subgroups(2)
dist.destroy_process_group()
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
late(0, "rpc")
rpc.shutdown()
"""
SAID = {
    "init": "rank 0 waits in init_process_group (train.py:7) for rank 1, which is at train.py:5.",
    "group": "rank 1 waits in new_group (train.py:9) for rank 0, which is at train.py:5.",
    "subgroups": "rank 0 waits in new_subgroups (train.py:11) for rank 1, which is at train.py:5.",
    "rpc": "w1 waits in rpc.shutdown (train.py:15) for w0, which is at train.py:5.",
}


@pytest.mark.slow
def test_each_wait_is_told_while_it_lasts_and_none_after_it(tmp_path):
    process, sentence = hanging(tmp_path, LATE)
    for file, told in SAID.items():
        assert told in sentence
        (tmp_path / file).touch()
        if file != "rpc":
            sentence = next(line for line in process.stderr if "nothing has happened" in line)
    _, rest = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    assert " waits in " not in rest
    met = [event.op for event in Trace.load(tmp_path / "t").of(Rendezvous) if event.rank == 1]
    assert met == ["init_process_group", "new_group", "new_subgroups", "rpc.init_rpc", "rpc.shutdown"]


def group_of_one():
    if dist.get_rank() == 0:
        dist.new_group([0, 1])
    while True:
        time.sleep(0.05)


def test_the_error_of_a_cluster_names_the_wait():
    told = r"rank 0 waits in new_group \(.*test_rendezvous.py:\d+\) for rank 1, which is at .*test_rendezvous.py"
    with Cluster(2) as cluster:  # Ranks that have not begun by then have another try.
        assert comes_true(lambda: re.search(told, cluster.run(group_of_one, timeout=5, check=False).error.what))
