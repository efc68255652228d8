"""Calls of mpi4py as events, operations and messages: in one trace with torch's, and none left out."""

from __future__ import annotations

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

import mpi_programs
import pytest
import torch
import torch.distributed as dist
from hanging import end_when, in_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn import Cluster, Trace, messages, operations
from dlearn.cluster import spares
from dlearn.trace.event import NOT_OBSERVED, End, TensorInfo
from dlearn.trace.mpi_facts import ANY_TAG, CANCELLED

HERE = Path(__file__).parent
MPIEXEC = Path(sysconfig.get_path("scripts"), "mpiexec")
"""As README tells: two jobs of gforker's that get the same pid share what the first has left."""


# The matcher, on made-up traces --------------------------------------------------------------------------------------

RANKS, TAGS = 3, 2
calls = st.lists(
    st.tuples(
        st.sampled_from(["send", "recv"]),
        st.integers(0, RANKS - 1),
        st.one_of(st.none(), st.integers(0, RANKS - 1)),
        st.one_of(st.none(), st.integers(0, TAGS - 1)),
        st.booleans(),
    ),
    max_size=30,
)


class Mpi:
    """Two queues for each rank, as in the standard: receives that wait, and messages that have come unasked.

    A message meets the first receive that waits for it, a receive the first message that it asks for: here all arrive
    in the order of their sending, of which the standard promises only that of each sender's.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.waiting: list[tuple[int, int | None, int | None, int]] = []
        self.come: list[tuple[int, int, int, int]] = []
        self.pairs: set[tuple[tuple[int, int], tuple[int, int]]] = set()

    def send(self, src: int, dst: int, tag: int) -> None:
        number = self.job.send(src, dst, tag=tag)
        for asked in self.waiting:
            if asked[0] == dst and asked[1] in (None, src) and asked[2] in (None, tag):
                self.waiting.remove(asked)
                return self.met(src, number, dst, asked[3], tag)
        self.come.append((src, dst, tag, number))

    def recv(self, dst: int, src: int | None, tag: int | None) -> None:
        number = self.job.recv(dst, src, tag=ANY_TAG if tag is None else tag, end_ns=None)
        for sent in self.come:
            if sent[1] == dst and src in (None, sent[0]) and tag in (None, sent[2]):
                self.come.remove(sent)
                return self.met(sent[0], sent[3], dst, number, sent[2])
        self.waiting.append((dst, src, tag, number))

    def take_back(self, dst: int) -> None:
        """The oldest receive that waits."""
        for asked in self.waiting:
            if asked[0] == dst:
                self.waiting.remove(asked)
                self.job.files[dst].append(End(event=asked[3], by="wait", at_ns=30, error=CANCELLED))
                return

    def met(self, src: int, send: int, dst: int, recv: int, tag: int) -> None:
        self.job.files[dst].append(End(event=recv, by="return", at_ns=30, peer=src, tag=tag))
        self.pairs.add(((src, send), (dst, recv)))

    def close(self) -> None:
        for dst, _, _, number in self.waiting:
            self.job.files[dst].append(End(event=number, by=NOT_OBSERVED))


@settings(max_examples=60, deadline=None)
@given(calls)
def test_wildcards_and_what_is_taken_back_meet_as_in_mpi(tmp_path_factory, calls):
    """Every send meets the receive that got it, whatever this asked for; every call is in exactly one exchange."""
    job = Job(tmp_path_factory.mktemp("job"), ranks=RANKS)
    mpi = Mpi(job)
    for op, rank, peer, tag, cancels in calls:
        if op == "send":
            mpi.send(rank, peer or 0, tag or 0)
        else:
            mpi.recv(rank, peer, tag)
            if cancels:
                mpi.take_back(rank)
    mpi.close()
    trace = job.load()
    found = trace.matches
    assert {tuple((end.rank, end.number) for end in each.ends) for each in found if len(each.ends) == 2} == mpi.pairs
    assert sum(len(each.ends) for each in found) == len(calls)


def test_a_receive_that_was_taken_back_is_no_message(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.recv(1, 0, error=CANCELLED, ended_by="wait")
    job.send(0, 1)
    job.recv(1, 0)
    trace = job.load()
    found = messages(trace)
    assert [(m.src, m.dst, m.how) for m in found] == [(0, 1, "observed")]
    assert [reason for _, reason in found.unexplained] == ["a recv that the program took back"]


# Real ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pytest.importorskip("mpi4py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        with Cluster(2, backend="mpi") as cluster:
            yield cluster
        spares.close()


def sent(trace: Trace) -> Counter[tuple[int, int, int, int]]:
    """src, dst, tag and bytes of each message."""
    return Counter((m.src, m.dst, m.operation.ends[0].tag, m.payload_bytes) for m in messages(trace) if m.op == "send")


def test_every_form_of_send_and_receive(pair):
    trace = pair.run(mpi_programs.points, timeout=60).trace
    both_ways = {0: 24, 1: 24, 2: 24, 10: 16, 11: 16, 12: 16, 30: 19, 31: 16, 32: 16}
    expected = Counter((src, 1 - src, tag, size) for tag, size in both_ways.items() for src in (0, 1))
    expected += Counter((0, 1, tag, size) for tag in (20, 21, 22) for size in (21, 24))
    expected += Counter([(0, 1, 23, 16), (1, 0, 0, 5)])
    assert sent(trace) == expected
    assert {m.how for m in messages(trace)} == {"observed"}
    assert {call.ended_by for call in trace.events} == {"return", "wait"}
    assert all(call.site.startswith("mpi_programs.py:") or "/mpi_programs.py:" in call.site for call in trace.events)
    # Persistent requests are not in the trace, and it says so.
    assert [each for each in trace.problems if "2 calls could not be recorded" in each] == list(trace.problems)
    assert len(trace.problems) == 2


def total_bytes(tensors: tuple[TensorInfo, ...]) -> int:
    return sum(tensor.payload_bytes for tensor in tensors)


def test_every_collective_with_what_each_rank_gives_and_gets(pair):
    trace = pair.run(mpi_programs.collectives, timeout=60).trace
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


def wild() -> list[tuple[int, int]]:
    from mpi4py import MPI

    comm, status, seen = MPI.COMM_WORLD, MPI.Status(), []
    if comm.rank == 0:
        for _ in range(2):
            comm.probe(status=status)
            seen.append((status.Get_source(), status.Get_tag()))
            comm.recv()
        message = comm.mprobe(source=1)
        later = comm.irecv(tag=9)  # After the probe, so it gets the next message.
        assert (message.recv(), later.wait()) == ("first", "second")
        dup = comm.Dup()
    else:
        for tag in (5, 7):
            comm.ssend("hello", 0, tag)
        comm.send("first", 0, 9)
        comm.send("second", 0, 9)
        dup = comm.Dup()
    dup.Split(0, -dup.rank).send("to the other", 1 - (1 - dup.rank)) if dup.rank == 0 else dup.Split(
        0, -dup.rank
    ).recv()
    dist.all_reduce(torch.ones(1))
    return seen


def test_the_real_source_and_tag_of_wildcards_and_torch_in_the_same_trace(pair):
    run = pair.run(wild, timeout=60)
    assert run.results[0] == [(1, 5), (1, 7)]
    found = operations(run.trace)
    sends = [each for each in found if each.op == "send"]
    assert [(each.sender, each.receiver, each.ends[0].tag, len(each.ends)) for each in sends if each.group.default] == [
        (1, 0, 5, 2),
        (1, 0, 7, 2),
        (1, 0, 9, 2),
        (1, 0, 9, 2),
    ]
    first, second = (each.ends for each in sends if each.ends[0].tag == 9)
    assert first[1].number < second[1].number  # By the probe's place, not by that of its recv.
    assert [(event.peer, event.tag) for event in run.trace.where(kind="probe").events][:2] == [(1, 5), (1, 7)]
    groups = {each.group.name: each.group.members for each in found}
    assert groups["COMM_WORLD"] == (0, 1)
    assert groups["COMM_WORLD.Dup.Split(1,0)"] == (1, 0)
    [torchs] = [each for each in found if each.op == "all_reduce"]  # Once: not again as the call of MPI that it makes.
    assert torchs.what == "float32[1]"


def waits() -> None:
    from mpi4py import MPI

    comm, other = MPI.COMM_WORLD, 1 - MPI.COMM_WORLD.rank
    for wait in (MPI.Request.Waitall, MPI.Request.Waitsome, MPI.Request.waitany, MPI.Request.testsome, wait_one_by_one):
        requests = [comm.isend("x", other), comm.irecv(source=other)]
        while any(requests):
            wait(requests)
    never = comm.irecv(source=other, tag=99)
    never.Cancel()
    never.Wait()


def wait_one_by_one(requests: list) -> None:
    for request in requests:
        while not request.test()[0]:
            pass


def test_whoever_waits_tells_the_end(pair):
    trace = pair.run(waits, timeout=60).trace
    assert len(trace.events) == 22
    assert all(event.ended_by == "wait" and event.end_ns is not None for event in trace.events)
    assert [event.error for event in trace.events if event.tag == 99] == [CANCELLED] * 2
    assert len(messages(trace)) == 10


def send_first(count: int) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.send(bytes(count), 1 - comm.rank, 3)
    comm.recv(source=1 - comm.rank)


@pytest.mark.slow
def test_both_send_first_and_it_is_said_who_waits_for_whom(tmp_path, monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.chdir(tmp_path)
    run = end_when(in_calls(1, 1), Cluster(2, backend="mpi", init=False), send_first, 1 << 20)
    assert "rank 0 and rank 1 wait for each other: rank 0 in send" in run.error.what
    spares.close()


# A guest --------------------------------------------------------------------------------------------------------------


def mpiexec(folder: Path, ranks: int, program: str) -> subprocess.CompletedProcess[str]:
    """The program gets a folder for its trace; if it hangs, its ranks end with it."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(script), str(folder / "trace")]
    told = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **told, cwd=folder, start_new_session=True)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_script(folder: Path, code: str) -> str:
    pytest.importorskip("mpi4py")
    done = mpiexec(folder, 2, code)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_names_are_given_back_and_what_is_held_goes_on(tmp_path):
    """Of a script under mpiexec: mpi4py before the recording, and what the program keeps after it."""
    said = run_script(
        tmp_path,
        """
        import pickle, sys
        from mpi4py import MPI
        names = {name: getattr(MPI, name) for name in dir(MPI)}
        import dlearn
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
        """,
    )
    assert said == ""
    trace = Trace.load(tmp_path / "trace")
    assert trace.problems == ()
    assert trace.ranks == (0, 1)
    assert [each.op for each in operations(trace)] == ["send", "send"]
    assert {end.ended_by for each in operations(trace) for end in each.ends} == {NOT_OBSERVED, "return"}


@pytest.mark.slow
def test_mpi4py_may_come_after_the_recording_has_begun(tmp_path):
    run_script(
        tmp_path,
        """
        import sys
        import dlearn
        assert "mpi4py.MPI" not in sys.modules
        with dlearn.record(sys.argv[1]):
            from mpi4py import MPI
            MPI.COMM_WORLD.bcast("x")
        assert not [each for each in sys.meta_path if type(each).__name__ == "_AfterMpi"]
        """,
    )
    assert [each.op for each in operations(Trace.load(tmp_path / "trace"))] == ["broadcast"]


@pytest.mark.slow
def test_a_program_may_begin_mpi_itself(tmp_path):
    run_script(
        tmp_path,
        """
        import mpi4py, sys
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        import dlearn
        with dlearn.record(sys.argv[1]):
            from mpi4py import MPI
            MPI.Init_thread()
            MPI.COMM_WORLD.barrier()
        assert type(MPI.Init_thread).__name__ != "partial"
        MPI.Finalize()
        with dlearn.record(sys.argv[1] + "-after"):
            pass
        """,
    )
    assert [each.op for each in operations(Trace.load(tmp_path / "trace"))] == ["barrier"]


# Nothing is missing: against what MPI itself was asked to send --------------------------------------------------------


@pytest.mark.slow
def test_as_many_messages_and_bytes_as_mpi_was_asked_to_send(tmp_path):
    """A library below mpi4py counts (PMPI): with and without the recorder MPI gets the same, and the trace has it."""
    pytest.importorskip("mpi4py")
    mpicc = MPIEXEC.with_name("mpicc")
    if not mpicc.exists() or not any(map(shutil.which, ("gcc", "cc", "clang"))):
        pytest.skip("no C compiler here, or no mpicc beside mpiexec")
    counter = tmp_path / "mpi_sends.so"
    subprocess.run([str(mpicc), "-shared", "-fPIC", str(HERE / "oracle/mpi_sends.c"), "-o", str(counter)], check=True)
    asked = {}
    for how in ("plain", "recorded"):
        (tmp_path / how).mkdir()
        command = [str(MPIEXEC), "-n", "3", "env", f"LD_PRELOAD={counter}", f"MPI_SENDS={tmp_path / how}"]
        command += [sys.executable, "-m", "mpi4py", str(HERE / "mpi_programs.py")]
        command += [str(tmp_path / "trace")] if how == "recorded" else []
        subprocess.run(command, check=True, timeout=100, cwd=tmp_path)
        lines = [line for file in (tmp_path / how).iterdir() for line in file.read_text().splitlines()]
        asked[how] = Counter(tuple(map(int, line.split())) for line in lines)
    assert asked["plain"] == asked["recorded"]
    seen = sent(Trace.load(tmp_path / "trace"))  # Persistent requests are in neither.
    assert seen == asked["plain"]
    assert seen.total() > 30
