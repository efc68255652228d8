"""Calls of mpi4py, and torch's collectives over MPI: results as ever, all in one trace, and none left out."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path

import mpi_jobs
import mpi_programs
import pytest
import torch

from dlearn import Cluster, Trace, messages, operations
from dlearn.events.event import NOT_OBSERVED, PointToPoint, TensorInfo

HERE = Path(__file__).parent
MPIEXEC = Path(sysconfig.get_path("scripts"), "mpiexec")
"""As README tells: two jobs of gforker's that get the same pid share what the first has left."""


def total_bytes(tensors: tuple[TensorInfo, ...]) -> int:
    return sum(tensor.payload_bytes for tensor in tensors)


def test_every_collective_with_what_each_rank_gives_and_gets(recorded):
    trace = recorded(mpi_programs.collectives, backend="mpi")
    found = [each for each in operations(trace) if len(each.ends) == 2]
    assert len(found) == len(operations(trace)) == 18
    assert {each.problem for each in found} == {""}
    told = [
        (each.op, *((total_bytes(end.inputs), total_bytes(end.outputs)) for end in each.ends)) for each in found[6:]
    ]
    assert told == [
        ("broadcast", (0, 32), (32, 0)),
        ("gather", (32, 64), (32, 0)),
        ("scatter", (64, 32), (0, 32)),
        ("all_gather", (32, 64), (32, 64)),
        ("all_gather_v", (8, 24), (16, 24)),
        ("all_to_all", (64, 64), (64, 64)),
        ("reduce", (32, 32), (32, 0)),
        ("all_reduce", (32, 0), (32, 0)),  # In place.
        ("reduce_scatter", (64, 32), (64, 32)),
        ("scan", (32, 32), (32, 32)),
        ("all_reduce", (32, 32), (32, 32)),
        ("barrier", (0, 0), (0, 0)),
    ]
    objects = {each.op: each.ends for each in found[:6]}
    assert objects["gather"][0].root == 1
    assert not any(end.inputs or end.outputs for ends in objects.values() for end in ends)  # Their size is not known.
    assert all("does not say" in reason for _, reason in messages(trace).unexplained)
    assert len(messages(trace)) == 0  # Nothing is made up.


def test_wildcards_meet_what_they_truly_got(own_folder):
    """Each message says which of its sender's it is; so each receive, in the order of posting, tells whom it met."""
    run = Cluster(3, backend="mpi", init=False).run(mpi_programs.at_random, timeout=60)
    assert sum(map(len, run.results.values())) == 60
    calls = [event for event in run.trace.events if isinstance(event, PointToPoint)]
    place: dict[tuple[int, int], int] = {}
    for op in ("send", "recv"):
        for rank in range(3):
            own = [event.number for event in calls if (event.op, event.rank) == (op, rank)]
            place.update({(rank, number): at for at, number in enumerate(sorted(own))})
    met = {}
    for operation in operations(run.trace):
        if operation.op == "send":
            send, recv = operation.ends
            met[recv.rank, place[recv.rank, recv.number]] = (send.rank, place[send.rank, send.number])
    truth = {(rank, at): told for rank, got in run.results.items() for at, told in enumerate(got)}
    assert met == truth


def test_whoever_waits_tells_the_end_and_what_is_taken_back_is_no_message(recorded):
    trace = recorded(mpi_programs.waits, backend="mpi")
    assert len(trace.events) == 22
    assert all(event.ended_by == "wait" and event.end_ns is not None for event in trace.events)
    assert [bool(event.error) for event in trace.events if event.tag == 99] == [True, True]
    assert len(messages(trace)) == 10
    assert [reason for _, reason in messages(trace).unexplained] == ["a recv that the program took back"] * 2


def mpiexec(folder: Path, ranks: int, program: str | Path, *arguments: str | Path, before: tuple[str, ...] = ()) -> str:
    """What a program, or its text, prints; if it hangs, its ranks end with it."""
    if isinstance(program, str):
        (folder / "program.py").write_text(textwrap.dedent(program))
        program = folder / "program.py"
    command = [MPIEXEC, "-n", str(ranks), *before, sys.executable, "-m", "mpi4py", program, *arguments]
    told = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(list(map(str, command)), **told, cwd=folder, start_new_session=True)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    return out + err


@pytest.mark.slow
def test_names_are_given_back_and_what_is_held_goes_on(tmp_path):
    """Of a script under mpiexec: mpi4py during a recording, before another one, and what the program keeps after it."""
    program = """
    import mpi4py, pickle, sys
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    import dlearn
    finders = [type(each) for each in sys.meta_path]
    with dlearn.record(sys.argv[1] + "-before"):
        from mpi4py import MPI
        MPI.Init_thread()
        MPI.COMM_WORLD.bcast("x")
    assert [type(each) for each in sys.meta_path] == finders
    names = {name: getattr(MPI, name) for name in dir(MPI)}
    with dlearn.record(sys.argv[1]):
        from mpi4py.MPI import COMM_WORLD as comm
        assert comm is not names["COMM_WORLD"] and comm == names["COMM_WORLD"]
        assert isinstance(comm, MPI.Intracomm) and isinstance(names["COMM_WORLD"], MPI.Intracomm)
        assert pickle.loads(pickle.dumps(comm)) is comm
        assert pickle.loads(pickle.dumps(names["COMM_WORLD"])) == comm
        names["COMM_WORLD"].barrier()     # taken before: not seen
        request = comm.isend("x", 1 - comm.rank)
        assert comm.recv() == "x"
    assert {name: getattr(MPI, name) for name in dir(MPI)} == names
    request.wait()
    assert comm.allreduce(1) == comm.Dup().allreduce(1) == 2
    MPI.Finalize()
    """
    assert mpiexec(tmp_path, 2, program, tmp_path / "trace") == ""
    before, trace = Trace.load(tmp_path / "trace-before"), Trace.load(tmp_path / "trace")
    assert before.problems == trace.problems == ()
    assert [each.op for each in operations(before)] == ["broadcast"]
    assert [each.op for each in operations(trace)] == ["send", "send"]
    assert {end.ended_by for each in operations(trace) for end in each.ends} == {NOT_OBSERVED, "return"}


@pytest.mark.slow
def test_as_many_messages_and_bytes_as_mpi_was_asked_to_send(tmp_path):
    """A library below mpi4py counts (PMPI): with and without the recorder MPI gets the same, and the trace has it."""
    mpicc = MPIEXEC.with_name("mpicc")
    if not mpicc.exists() or not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("no C compiler here, or no mpicc beside mpiexec")
    counter = tmp_path / "mpi_sends.so"
    subprocess.run([str(mpicc), "-shared", "-fPIC", str(HERE / "oracle/mpi_sends.c"), "-o", str(counter)], check=True)
    asked = {}
    for how in ("plain", "recorded"):
        (tmp_path / how).mkdir()
        before = ("env", f"LD_PRELOAD={counter}", f"MPI_SENDS={tmp_path / how}")
        mpiexec(tmp_path, 3, HERE / "mpi_programs.py", *([tmp_path / "trace"] * (how == "recorded")), before=before)
        lines = [line for file in (tmp_path / how).iterdir() for line in file.read_text().splitlines()]
        asked[how] = Counter(tuple(map(int, line.split())) for line in lines)
    assert asked["plain"] == asked["recorded"]
    trace = Trace.load(tmp_path / "trace")
    seen = [message for message in messages(trace) if message.op == "send"]
    found = Counter((m.src, m.dst, m.operation.ends[0].tag, m.payload_bytes) for m in seen)
    assert found == asked["plain"]
    assert {each.group.members for each in operations(trace)} == {(0, 1, 2), (2, 1, 0)}
    assert found.total() > 50
    assert {message.how for message in seen} == {"observed"}
    calls = [event for event in trace.events if isinstance(event, PointToPoint)]
    assert {event.peer for event in calls} == {0, 1, 2}  # What goes to nobody, or comes from there, is no call.
    assert {Path(event.site.split(":")[0]).name for event in trace.events} == {"mpi_programs.py"}
    told = "made 2 other MPI calls, not read: Send_init (1), Recv_init (1)"  # They are in neither.
    assert [*trace.problems] == [f"rank {rank} {told}" for rank in range(3)]


def test_the_results_are_gloos_and_what_is_sent_is_observed(own_folder):
    gloo, mpi = (Cluster(3, backend=backend).run(mpi_jobs.every_job, timeout=100) for backend in ("gloo", "mpi"))
    for rank in range(3):
        torch.testing.assert_close(mpi.results[rank], gloo.results[rank], rtol=0, atol=0)
    assert mpi.trace.problems == ()
    assert not any(event.pending for event in mpi.trace.events)
    sent = messages(mpi.trace)
    assert {message.how for message in sent} == {"observed"}
    # A large one to the right, a small one to the left, and 8 B to rank 0, who did not know from whom; 20 B in a group.
    right = {(rank, (rank + 1) % 3, 800_000) for rank in range(3)}
    left = {(rank, (rank - 1) % 3, 16) for rank in range(3)}
    found = {(message.src, message.dst, message.payload_bytes) for message in sent}
    assert found == right | left | {(1, 0, 8), (2, 0, 8), (0, 2, 20)}
    views = {(message.offset_bytes, message.whole_bytes) for message in sent if message.payload_bytes == 800_000}
    assert views == {(200_000, 1_200_000)}
    assert {Path(event.site.split(":")[0]).name for event in mpi.trace.events} == {"mpi_jobs.py"}


PROGRAM = """
import psutil, sys, threading
import torch, torch.distributed as dist
import dlearn, dlearn.collectives
from mpi4py import MPI

def listening():
    found = psutil.Process().net_connections("tcp")
    return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}

before = listening()  # MPI's own
with dlearn.record(sys.argv[1]):
    for _ in range(2):  # destroy leaves no thread, and init works again
        dist.init_process_group("mpi4py", init_method="mpi4py://")
        dist.all_reduce(tensor := torch.ones(3) * MPI.COMM_WORLD.rank)
        assert tensor.tolist() == [3.0] * 3
        assert {ip for ip, _ in listening() - before} <= {"127.0.0.1"}
        dist.destroy_process_group()
        assert not [thread.name for thread in threading.enumerate() if "mpi4py" in thread.name]
if MPI.COMM_WORLD.rank == 1:
    try:
        dist.init_process_group("mpi4py", store=dist.HashStore(), rank=0, world_size=1)
    except dlearn.errors.SetupError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_program_under_mpiexec(tmp_path):
    told = mpiexec(tmp_path, 3, PROGRAM, tmp_path / "trace")
    assert "torch's rank 0 is rank 1 of 3 in MPI, and they must be the same" in told
    found = operations(Trace.load(tmp_path / "trace"))
    # A broadcast tells where the store is, each time.
    assert [each.op for each in found] == ["broadcast", "all_reduce"] * 2
    assert {(len(each.ends), each.group.backend) for each in found} == {(3, "mpi4py")}


def test_a_receive_that_waits_is_told_while_it_lasts(tmp_path):
    """Rank 1 sends only when rank 0 has said that it waits."""
    program = """
    import dlearn, numpy as np, os, sys, time
    class Told:
        isatty = lambda self: False
        flush = lambda self: None
        write = lambda self, text: "recv #1" in text and open("told", "a").write(text)
    with dlearn.record("t", hang_after=0.5):
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.Barrier()
        if comm.Get_rank() == 0:
            sys.stderr = Told()
            comm.Recv(np.empty(4), source=1)
        else:
            while not os.path.exists("told"):
                time.sleep(0.01)
            comm.Send(np.zeros(4), dest=0)
    """
    mpiexec(tmp_path, 2, program)
    told = (tmp_path / "told").read_text()
    assert "rank 0 waits for rank 1 in recv #1 (program.py:13); rank 1 never sent it" in told


def test_a_status_that_an_earlier_receive_has_filled_says_nothing_of_one_that_failed(tmp_path):
    program = """
    import dlearn, numpy as np
    from contextlib import suppress
    with dlearn.record("t"):
        from mpi4py import MPI
        comm, status, me = MPI.COMM_WORLD, MPI.Status(), MPI.COMM_WORLD.Get_rank()
        comm.Sendrecv(np.zeros(1), dest=me, sendtag=5, recvbuf=np.empty(1), source=me, recvtag=5, status=status)
        with suppress(MPI.Exception):
            comm.Recv(np.empty(1), tag=-7, status=status)
    """
    mpiexec(tmp_path, 2, program)
    failed = [each for each in Trace.load(tmp_path / "t").of(PointToPoint) if each.error]
    assert sorted((each.rank, each.peer, each.tag) for each in failed) == [(0, None, -7), (1, None, -7)]
