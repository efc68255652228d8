"""Which rank gave what, where calls do not fit together; and at which line a script died. (../cases: kinds 2, 5, 6.)"""

import pytest
from test_run import dlearn_run, script
from traces import Job, header, tensor

from dlearn.analysis import mismatches
from dlearn.events.event import NOT_OBSERVED, REFUSED, Socket, TensorInfo, Worker
from dlearn.events.job_facts import Exit, Heartbeat

WAITS = {"end_ns": None}


def shaped(dtype, *shape):
    return (TensorInfo(shape, dtype, "cpu", 16, 16),)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, ranks=3)


def test_roots_are_group_ranks_and_the_sentence_names_ranks_of_the_job(job):
    job.group("pair", [2, 1])
    job.collective("reduce", size=4, group="pair", root={1: 0, 2: 1}, **WAITS)
    job.says("the ranks called it with different roots: root 2 on rank 1, root 1 on rank 2")


def test_parts_of_which_only_the_totals_agree(job):
    """Rank 1 has 8 B for rank 2, which takes 4 B from it, and 4 B more from rank 0."""
    splits, takes = [(4, 4, 4), (4, 4, 8), (4, 4, 4)], [(4, 4, 4), (4, 4, 4), (8, 4, 4)]
    for rank, (gives, gets) in enumerate(zip(splits, takes, strict=True)):
        own = {"inputs": (tensor(sum(gives)),), "outputs": (tensor(sum(gets)),)}
        job.collective("all_to_all_single", ranks=[rank], splits=gives, takes=gets, error="RuntimeError", **own)
    job.says(
        "all_to_all_single #1; rank 0 sends 4 B to rank 2, which takes 8 B from it; rank 1 sends 8 B to rank 2, which"
        " takes 4 B from it"
    )


def test_parts_that_are_tensors(job):
    given = {rank: tuple(map(tensor, (12 if rank == 2 else 4, 4, 4))) for rank in range(3)}
    job.collective("all_to_all", inputs=given, outputs=(tensor(4),) * 3, **WAITS)
    job.says("wait in all_to_all #1; rank 2 sends 12 B to rank 0, which takes 4 B from it")


def test_groups_of_one_name(tmp_path):
    """Ranks 0 and 2 name their pair, ranks 1 and 3 theirs: 2 has met 1."""
    job = Job(tmp_path, ranks=4)
    for members in ((0, 2), (1, 3)):
        job.group("1", members, made="word")
    job.files[1].append(Socket(id=0, group="1", local="127.0.0.1 5", remote="127.0.0.1 6"))
    job.files[2].append(Socket(id=0, group="1", local="127.0.0.1 6", remote="127.0.0.1 5"))
    job.says(
        "group 1 was made of ranks 0 and 2 and ranks 1 and 3 at once, in one store: which of them meet is chance, as"
        " new_group must be called by all ranks for every group; rank 1's connection goes to rank 2"
    )


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            {"tag": {1: 7, 0: 8}, **WAITS},
            "rank 0 in recv #1, rank 1 in send #1; rank 1 sends with tag 7, rank 0 waits for tag 8",
        ),
        ({"size": {1: 8, 0: 12}}, "rank 1 sends 8 B into a buffer of 12 B on rank 0: the rest of it stays as it was"),
        ({"size": {1: 8, 0: 4}}, "send #1 went through, and rank 1 sends 8 B into a buffer of 4 B on rank 0"),
        (
            {"tensors": {1: shaped("bfloat16", 8), 0: shaped("float16", 8)}},
            "rank 1 sends bfloat16[8], rank 0 receives it as float16[8]: the bits arrive, not the numbers",
        ),
        (
            {"tensors": {1: shaped("float32", 2, 4), 0: shaped("float32", 4, 2)}},
            "sends float32[2, 4], rank 0 receives it as float32[4, 2]: the numbers arrive in another order of"
            " dimensions",
        ),
    ],
    ids=["tag", "half a buffer", "small buffer", "bits", "transposed"],
)
def test_a_send_and_a_receive_that_do_not_fit(job, facts, told):
    job.message(1, 0, **facts)
    job.says(told)


def test_a_tag_beside_others(job):
    """The first message meets its receive; the second was sent with another tag, and not waited for."""
    job.message(2, 0, tag=1)
    job.send(2, 0, tag=3, end_ns=None, ended_by=NOT_OBSERVED)
    job.recv(0, 2, tag=2, start_ns=30, **WAITS)
    job.says("rank 2 never sent it; rank 2 sends with tag 3, rank 0 waits for tag 2")


def test_a_receive_that_failed(job):
    job.group("mpi", [0, 1, 2], backend="mpi4py")
    job.message(1, 0, size={1: 8, 0: 4}, group="mpi", site="a.py:6", error={1: "", 0: "MPI.Exception"})
    job.collective("barrier", ranks=[1, 2], group="mpi", **WAITS)
    job.files[0].append(Heartbeat(at_ns=50, site="a.py:6", ended="MPI.Exception"))
    job.says("rank 2 (a.py:6); rank 1 sends 8 B into a buffer of 4 B on rank 0")


def test_a_send_to_itself(job):
    job.send(2, 2, site="a.py:6", **WAITS)
    job.says("rank 2 waits for itself in send #1 (a.py:6): it never received it.")


def test_calls_of_two_threads(job):
    sites = {0: "train.py:9", 1: "save.py:3", 2: "train.py:9"}
    job.collective("all_reduce", size=4, site=sites, thread={0: "", 1: "saver", 2: ""})
    job.says(
        "rank 0 called all_reduce #1 at train.py:9, rank 1 at save.py:3, rank 2 at train.py:9; rank 0 called it on"
    )


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ([Heartbeat(at_ns=50, site="a.py:12", ended="KeyError"), Exit(status=1)], "rank 1 raised KeyError at a.py:12."),
        ([Exit(status=-9)], "rank 1 was killed by SIGKILL."),  # Of nothing that Python sees.
    ],
    ids=["exception", "killed"],
)
def test_a_rank_that_was_slow_at_line_7_went_on_and_died(job, end, told):
    job.files[1].append(Heartbeat(at_ns=5, site="a.py:7"))
    job.collective("barrier")
    job.files[1] += end
    job.says(told)


def test_a_call_that_was_refused_long_ago_is_not_told_of_a_rank_that_dies(job):
    job.collective("broadcast", ranks=[1], by=REFUSED, error="RuntimeError", site="a.py:5")
    job.collective("barrier", start_ns=30)
    job.files[1].append(Exit(status=-9))
    job.says("rank 1 was killed by SIGKILL.")


def test_what_fits_is_no_mismatch(tmp_path):
    """Bytes may stand for any dtype, a row for a column, and MPI says how much of a buffer it filled."""
    job = Job(tmp_path, ranks=2)
    job.group("mpi", [0, 1], backend="mpi4py")
    pairs = [("uint8", (16,), "float32", (4,)), ("float32", (4, 1), "float32", (1, 4)), ("int8", (4, 4), "int8", (16,))]
    for dtype, shape, as_dtype, as_shape in pairs:
        job.message(0, 1, tensors={0: shaped(dtype, *shape), 1: shaped(as_dtype, *as_shape)})
    job.message(0, 1, size={0: 8, 1: 12}, group="mpi")
    # Lines of two threads that C++ has started: whether they were to meet is not known.
    two = {"site": {0: "a.py:0", 1: "a.py:1"}, "thread": {0: "Dummy-1", 1: "Dummy-2"}}
    job.collective("all_reduce", size=4, **two)
    assert mismatches(job.load()) == ()


def test_a_member_of_a_group_keeps_its_name_beside_a_master_of_rpc_alone(job):
    """Workers 1 and 2 of RPC are ranks 0 and 1 of the group, worker 0 is in none."""
    job.headers[:] = [header(None, pid=1), header(None, pid=2), header(None, pid=3)]
    job.files[2] = [Worker(name="master", id=0, wall_ns=0)]
    for rank in (0, 1):
        job.files[rank].append(Worker(name=f"trainer{rank}", id=rank + 1, wall_ns=0))
    trace = job.load()
    assert trace.problems == ()
    assert {each.label: each.rank for each in trace.processes} == {"master": 0, "trainer0": 1, "trainer1": 2}


RAISES = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, sys, os
def work(rank, how):
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(how)}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1 and how == "raises":
        raise LookupError
    if rank == 1 and how == "handles":
        try:
            raise LookupError
        except LookupError:
            sys.exit(0)
    if rank == 1 and how == "exits":
        os._exit(7)
    dist.barrier()
if __name__ == "__main__":
    mp.start_processes(work, sys.argv[1:2], nprocs=2, start_method=sys.argv[2])
"""
INNER = """
import json, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    json.loads("no json")
"""


@pytest.mark.parametrize(
    ("how", "start_method", "told"),
    [
        ("raises", "spawn", "rank 1 raised LookupError at train.py:7."),
        ("raises", "fork", "rank 1 raised LookupError at train.py:7."),
        ("exits", "spawn", "dlearn: rank 1 ended with status 7.\n"),  # As its parent saw.
        ("handles", "spawn", "rank 0 raised"),
    ],
)
def test_how_a_child_ended_is_told_with_the_line_of_its_exception(tmp_path, how, start_method, told):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, RAISES), how, start_method)
    assert told in done.stderr
    assert how == "raises" or "LookupError" not in done.stderr.partition("dlearn: the trace is in")[2]


def test_the_line_is_the_users_and_not_that_of_a_library(tmp_path):
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--trace", "t", script(tmp_path, INNER))
    assert "rank 0 raised JSONDecodeError at train.py:6." in done.stderr
