"""Which rank gave what, where calls do not fit together; and at which line a script died. (../cases: kinds 2, 5, 6.)"""

import pytest
from test_run import dlearn_run, script
from traces import Job, header, tensor

from dlearn import explain
from dlearn.analysis import mismatches
from dlearn.events.event import NOT_OBSERVED, REFUSED, GroupFact, Socket, TensorInfo, Worker
from dlearn.events.job_facts import Exit, Heartbeat

WAITS = {"end_ns": None}


def shaped(dtype, *shape):
    return TensorInfo(shape, dtype, "cpu", 16, 16)


def sizes(job):
    for rank, size in enumerate([400, 400, 8]):
        job.collective("broadcast", size=size, ranks=[rank], root=0, **WAITS)
    return "the ranks called it with different sizes: 400 B on ranks 0 and 1, 8 B on rank 2"


def roots_of_a_group(job):
    """The roots are group ranks; the sentence names the ranks of the job."""
    job.group("pair", [2, 1])
    for root, rank in enumerate([1, 2]):
        job.collective("reduce", size=4, ranks=[rank], group="pair", root=root, **WAITS)
    return "the ranks called it with different roots: root 2 on rank 1, root 1 on rank 2"


def dtypes(job):
    for rank, dtype in enumerate(["bfloat16", "float32", "bfloat16"]):
        job.collective("all_reduce", ranks=[rank], inputs=(tensor(8, dtype=dtype),))
    return "different dtypes: bfloat16 on ranks 0 and 2, float32 on rank 1: its results mean nothing"


def parts(job):
    """The totals agree; rank 1 has 8 B for rank 2, which takes 4 B from it, and 4 B more from rank 0."""
    splits, takes = [(4, 4, 4), (4, 4, 8), (4, 4, 4)], [(4, 4, 4), (4, 4, 4), (8, 4, 4)]
    for rank, (gives, gets) in enumerate(zip(splits, takes, strict=True)):
        own = {"inputs": (tensor(sum(gives)),), "outputs": (tensor(sum(gets)),)}
        job.collective("all_to_all_single", ranks=[rank], splits=gives, takes=gets, error="RuntimeError", **own)
    return (
        "all_to_all_single #1; rank 0 sends 4 B to rank 2, which takes 8 B from it; rank 1 sends 8 B to rank 2, which"
        " takes 4 B from it"
    )


def parts_as_tensors(job):
    for rank, sizes in enumerate([(4, 4, 4), (4, 4, 4), (12, 4, 4)]):
        own = {"inputs": tuple(map(tensor, sizes)), "outputs": (tensor(4),) * 3}
        job.collective("all_to_all", ranks=[rank], **own, **WAITS)
    return "wait in all_to_all #1; rank 2 sends 12 B to rank 0, which takes 4 B from it"


def groups_of_one_name(job):
    """Ranks 0 and 2 name their pair, ranks 1 and 3 theirs: 2 has met 1."""
    for members in ((0, 2), (1, 3)):
        for index, rank in enumerate(members):
            own = {"name": "1", "backend": "gloo", "rank": index, "size": 2, "ranks": members}
            job.files[rank].append(GroupFact(**own, made="word"))
    job.files[1].append(Socket(id=0, group="1", local="127.0.0.1 5", remote="127.0.0.1 6"))
    job.files[2].append(Socket(id=0, group="1", local="127.0.0.1 6", remote="127.0.0.1 5"))
    return (
        "group 1 was made of ranks 0 and 2 and ranks 1 and 3 at once, in one store: which of them meet is chance, as"
        " new_group must be called by all ranks for every group; rank 1's connection goes to rank 2"
    )


def tags(job):
    job.send(0, 1, tag=7, **WAITS)
    job.recv(1, 0, tag=8, **WAITS)
    return "rank 0 in send #1, rank 1 in recv #1; rank 0 sends with tag 7, rank 1 waits for tag 8"


def tags_beside_others(job):
    """The first message meets its receive; the second was sent with another tag, and not waited for."""
    job.send(2, 0, tag=1)
    job.send(2, 0, tag=3, end_ns=None, ended_by=NOT_OBSERVED)
    job.recv(0, 2, tag=1)
    job.recv(0, 2, tag=2, start_ns=30, **WAITS)
    return "rank 2 never sent it; rank 2 sends with tag 3, rank 0 waits for tag 2"


def half_a_buffer(job):
    job.send(1, 0, size=8)
    job.recv(0, 1, size=12)
    return "rank 1 sends 8 B into a buffer of 12 B on rank 0: the rest of it stays as it was"


def small_buffer(job):
    job.send(1, 0, size=8)
    job.recv(0, 1, size=4)
    return "send #1 went through, and rank 1 sends 8 B into a buffer of 4 B on rank 0"


def failed_receive(job):
    job.group("mpi", [0, 1, 2], backend="mpi4py")
    job.send(1, 0, size=8, group="mpi", site="a.py:5")
    job.recv(0, 1, size=4, group="mpi", site="a.py:6", error="MPI.Exception")
    job.collective("barrier", ranks=[1, 2], group="mpi", **WAITS)
    job.files[0].append(Heartbeat(at_ns=50, site="a.py:6", ended="MPI.Exception"))
    return "rank 2 (a.py:6); rank 1 sends 8 B into a buffer of 4 B on rank 0"


def to_itself(job):
    job.send(2, 2, site="a.py:6", **WAITS)
    return "rank 2 waits for itself in send #1 (a.py:6): it never received it."


def bits(job):
    job.send(0, 1, tensors=(shaped("bfloat16", 8),))
    job.recv(1, 0, tensors=(shaped("float16", 8),))
    return "rank 0 sends bfloat16[8], rank 1 receives it as float16[8]: the bits arrive, not the numbers"


def transposed(job):
    job.send(0, 1, tensors=(shaped("float32", 2, 4),))
    job.recv(1, 0, tensors=(shaped("float32", 4, 2),))
    return "sends float32[2, 4], rank 1 receives it as float32[4, 2]: the numbers arrive in another order of dimensions"


def two_threads(job):
    job.collective("all_reduce", size=4, ranks=[0], site="train.py:9")
    job.collective("all_reduce", size=4, ranks=[1], site="save.py:3", thread="saver")
    job.collective("all_reduce", size=4, ranks=[2], site="train.py:9")
    return "rank 0 called all_reduce #1 at train.py:9, rank 1 at save.py:3, rank 2 at train.py:9; rank 0 called it on"


def lost_send(job):
    job.send(1, 2, size=80, end_ns=None, ended_by=NOT_OBSERVED, site="a.py:6")
    return "rank 1 ended without waiting for its send #1 (a.py:6) of 80 B, which rank 2 never received"


def old_place(job):
    """Rank 1 was slow at line 7, went on, and died of an exception."""
    job.files[1].append(Heartbeat(at_ns=5, site="a.py:7"))
    job.collective("barrier")
    job.files[1] += [Heartbeat(at_ns=50, site="a.py:12", ended="KeyError"), Exit(status=1)]
    return "rank 1 raised KeyError at a.py:12."


def no_place(job):
    """Rank 1 was slow at line 7, went on, and died of nothing that Python sees."""
    job.files[1].append(Heartbeat(at_ns=5, site="a.py:7"))
    job.collective("barrier")
    job.files[1].append(Exit(status=-9))
    return "rank 1 was killed by SIGKILL."


KINDS = [
    sizes, roots_of_a_group, dtypes, groups_of_one_name, parts, parts_as_tensors, tags,
    tags_beside_others, half_a_buffer, small_buffer, failed_receive, to_itself, bits, transposed,
    two_threads, lost_send, old_place, no_place,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_rank_is_named_with_what_it_gave(tmp_path, kind):
    job = Job(tmp_path, ranks=4 if kind is groups_of_one_name else 3)
    told = kind(job)
    assert told in "\n".join(explain(job.load()).sentences)


def test_what_fits_is_no_mismatch(tmp_path):
    """Bytes may stand for any dtype, a row for a column, and MPI says how much of a buffer it filled."""
    job = Job(tmp_path, ranks=2)
    job.group("mpi", [0, 1], backend="mpi4py")
    pairs = [("uint8", (16,), "float32", (4,)), ("float32", (4, 1), "float32", (1, 4)), ("int8", (4, 4), "int8", (16,))]
    for dtype, shape, as_dtype, as_shape in pairs:
        job.send(0, 1, tensors=(shaped(dtype, *shape),))
        job.recv(1, 0, tensors=(shaped(as_dtype, *as_shape),))
    job.send(0, 1, size=8, group="mpi")
    job.recv(1, 0, size=12, group="mpi")
    # Lines of two threads that C++ has started: whether they were to meet is not known.
    for rank, thread in enumerate(["Dummy-1", "Dummy-2"]):
        job.collective("all_reduce", size=4, ranks=[rank], site=f"a.py:{rank}", thread=thread)
    assert mismatches(job.load()) == ()


def test_a_member_of_a_group_keeps_its_name_beside_a_master_of_rpc_alone(tmp_path):
    """Workers 1 and 2 of RPC are ranks 0 and 1 of the group, worker 0 is in none."""
    job = Job(tmp_path, ranks=2)
    job.headers[:] = [header(None, pid=1), header(None, pid=2), header(None, pid=3)]
    job.files.append([])
    job.files[2].append(Worker(name="master", id=0, wall_ns=0))
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


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_a_child_that_an_exception_ends_is_told_with_its_line(tmp_path, start_method):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, RAISES), "raises", start_method)
    assert "rank 1 raised LookupError at train.py:7." in done.stderr


def test_the_status_of_a_child_is_what_its_parent_saw(tmp_path):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, RAISES), "exits", "spawn")
    assert "dlearn: rank 1 ended with status 7.\n" in done.stderr


def test_a_child_that_has_handled_its_exception_is_not_told_to_have_raised_it(tmp_path):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, RAISES), "handles", "spawn")
    assert "rank 0 raised" in done.stderr
    assert "LookupError" not in done.stderr.partition("dlearn: the trace is in")[2]


def test_a_call_that_was_refused_long_ago_is_not_told_of_a_rank_that_dies(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("broadcast", ranks=[1], by=REFUSED, error="RuntimeError", site="a.py:5")
    job.collective("barrier", start_ns=30)
    job.files[1].append(Exit(status=-9))
    assert "rank 1 was killed by SIGKILL." in explain(job.load()).sentences


def test_the_line_is_the_users_and_not_that_of_a_library(tmp_path):
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--trace", "t", script(tmp_path, INNER))
    assert "rank 0 raised JSONDecodeError at train.py:6." in done.stderr
