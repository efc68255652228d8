"""A held job: its calls wait at the gate, and go on in the order that is asked for. Real ranks."""

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import programs
import pytest
import rpc_jobs
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from traces import Job
from waiting import all_end, comes_true

from dlearn import Cluster
from dlearn.analysis import breakdown, overlap, step_times
from dlearn.errors import DlearnError, GateError, RankError, SetupError

pytestmark = pytest.mark.usefixtures("own_folder")
over_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no MPI here: pip install dlearn-trace[mpi]")


def sum_and_send():
    me, tensor = dist.get_rank(), torch.ones(4)
    dist.all_reduce(tensor)
    if me == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return os.getpid()


def both_send_first():
    me, tensor = dist.get_rank(), torch.ones(4)
    dist.send(tensor, 1 - me)
    dist.recv(tensor, 1 - me)


def pids_of(run):
    return [process.header.pid for process in run.trace.processes]


def let_through(run):
    """All calls, one by one; their ops."""
    return [call.op for call in iter(run.step, None)]


def test_calls_wait_and_are_let_through_one_by_one(monkeypatch):
    run = Cluster(2, hold=True).run(sum_and_send)
    assert {(call.rank, call.op, call.bytes) for call in run.waiting} == {(0, "all_reduce", 16), (1, "all_reduce", 16)}
    assert "test_live.py:" in run.waiting[0].site
    assert "all_reduce" in repr(run.waiting)
    assert "2 calls wait" in str(run)
    first = run.step()
    (left,) = run.waiting
    assert left.rank != first.rank
    run.release(left.rank)
    run.release(0)
    assert run.waiting[0].op == "recv"
    assert run.ranks[1].startswith("waits at the gate: recv from 0 (")
    assert run.ranks[0].startswith("in send #1 (")
    assert [(each.rank, each.op) for each in run.schedule][2:] == [(0, "send")]
    run.free().join(60)
    assert sorted(run.results) == [0, 1]
    assert "<details><summary>Play 9 messages</summary>" in run._repr_html_()
    monkeypatch.setattr("dlearn.live.live_rows.MOST_EVENTS", 5)
    assert "<details><summary>Play" not in run._repr_html_()
    assert "held before all_reduce" in {getattr(event, "name", "") for event in run.trace.events}
    assert all_end(run.results.values())


def test_a_condition_holds_what_it_says_and_a_job_goes_on_until_what_is_asked_for():
    run = Cluster(2, hold=lambda call: call.op == "send").run(sum_and_send)
    (call,) = run.waiting
    assert (call.rank, call.op, call.to) == (0, "send", 1)
    assert run.free().join(60).error is None
    run = Cluster(2, hold=True).run(sum_and_send)
    call = run.run_until(op="send")
    assert (call.rank, call.op) == (0, "send")
    assert call in run.waiting
    assert run.run_until(op="gather") is None
    assert run.join(60).error is None


EACH_OTHER = "rank 0 and rank 1 wait for each other: rank 0 in send #1 ("


def test_a_deadlock_is_named_while_nobody_has_timed_out():
    run = Cluster(2, hold=True).run(both_send_first)
    run.release(0)
    half = run.hang  # Rank 1's send waits at the gate: it can still be let through.
    assert not half
    assert repr(half).startswith("no rank hangs: rank 0 waits for rank 1 in send #1 (")
    run.release(1)
    hang = run.hang
    assert hang
    assert repr(hang).startswith(EACH_OTHER)
    assert f'<p class="title">{EACH_OTHER}' in hang._repr_html_()
    assert hang.stage["hung"] == [(0, 1), (1, 0)]
    assert hang.stage["guilty"] == [0, 1]
    assert run.waiting == ()
    with pytest.raises(GateError, match=f"no call of any rank comes .*: {EACH_OTHER[:-1]}") as raised:
        run.step()
    assert len(raised.value._render_traceback_()) == 1
    with pytest.raises(DlearnError, match=r"has not ended after 0.1 s; .*rank 0"):
        run.join(0.1)
    run.end()


def sleep_between_calls():
    tensor, receives = torch.ones(4), dist.get_rank() == 0
    dist.all_reduce(tensor)
    if receives:
        work = dist.irecv(tensor, 1)
    time.sleep(1)  # Rank 0 has a receive under way, and is not inside of it.
    dist.barrier()
    if receives:
        work.wait()
    else:
        dist.send(tensor, 0)


def test_a_rank_that_computes_is_waited_for():
    run = Cluster(2, hold=True).run(sleep_between_calls)
    assert sorted(let_through(run)) == ["all_reduce"] * 2 + ["barrier"] * 2 + ["recv", "send"]
    assert run.join(60).error is None


def fork_and_call():
    if (child := os.fork()) == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    dist.init_process_group("gloo")
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    return status


def test_a_forked_childs_call_is_not_the_ranks():
    run = Cluster(2, init=False, hold=True).run(fork_and_call)
    assert let_through(run) == ["all_reduce"] * 4
    assert run.join(60).results == {0: 0, 1: 0}


def test_what_is_said_of_a_run_is_true_at_every_moment():
    run = Cluster(2, hold=True).run(lambda: dist.get_rank() == 1 and dist.recv(torch.ones(1), 0))
    assert not run.hang
    assert len(run.waiting) == 1
    assert repr(run.hang).startswith("no rank hangs: rank 0 has ended; rank 1 waits at the gate: recv from 0 (")
    with pytest.raises(DlearnError, match=r"there is no rank 7; the ranks of this job are \[0, 1\]"):
        run.release(7)
    with pytest.raises(DlearnError, match="count is how many calls to let through: 1 or more, not -3"):
        run.release(0, -3)
    pid = pids_of(run)[1]
    os.kill(pid, signal.SIGSTOP)
    assert comes_true(lambda: run.ranks[1] == "is stopped (SIGSTOP or a debugger: state T)")
    os.kill(pid, signal.SIGCONT)
    run.free()
    assert comes_true(lambda: run.ranks[1].startswith("in recv #1 ("))
    assert run.ranks[0] == "has ended"
    assert run.waiting.why == "nothing waits at the gate: it was opened for good"
    run.end()
    assert run.ranks == {0: "has ended", 1: "was killed by SIGKILL"}
    assert (run.step(), run.run_until(op="send")) == (None, None)
    assert repr(run.waiting) == "nothing waits at the gate: all ranks have ended"
    with pytest.raises(DlearnError, match="no call of rank 0 comes to the gate: all ranks have ended"):
        run.release(0)


def train():
    return [gradient.numpy().tobytes() for gradient in programs.train_ddp(2)]


def reduce_a_thousand():
    tensor = torch.arange(1000.0).sin() * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.numpy().tobytes()


def mpi_program():
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine, other = numpy.sin(numpy.arange(100.0)) * (world.rank + 1), numpy.empty(100)
    world.Allreduce(MPI.IN_PLACE, mine)
    world.Sendrecv(mine * world.rank, (world.rank + 1) % world.size, recvbuf=other)
    return other.tobytes(), world.bcast("said" if world.rank == 0 else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "program", "ops"),
    [
        (2, {}, train, {"all_reduce", "broadcast"}),
        (3, {"backend": "dlearn_ring"}, reduce_a_thousand, {"send", "recv"}),
        (["ps", "trainer"], {"rpc": True}, rpc_jobs.serve_and_train, {"rpc forward", "remote Net"}),
        pytest.param(2, {"backend": "mpi"}, train, {"all_reduce"}, marks=over_mpi),
        pytest.param(2, {"backend": "mpi", "init": False}, mpi_program, {"send", "recv", "broadcast"}, marks=over_mpi),
    ],
)
def test_what_is_held_is_bit_equal(ranks, options, program, ops):
    free = Cluster(ranks, **options).run(program, timeout=60).results
    run = Cluster(ranks, hold=True, **options).run(program)
    passed = let_through(run)
    assert run.join(60).results == free
    assert ops <= set(passed)


WEIGHT = [10]


def read_weight():
    return WEIGHT[0]


def write_weight(value):
    WEIGHT[0] = value


def add_one_on_server():
    """Read, then write: two workers lose an update if both read first."""
    if dist.get_rank():
        seen = rpc.rpc_sync("server", read_weight)
        rpc.rpc_sync("server", write_weight, args=(seen + 1,))
    dist.barrier()
    return rpc.rpc_sync("server", read_weight)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "left"), [("abab", 11), ("aabb", 12)])
def test_a_lost_update_happens_on_demand_and_again(order, left):
    cluster = Cluster(["server", "a", "b"], rpc=True, hold=True)
    run = cluster.run(add_one_on_server)
    for name in order:
        run.release(name)
        # Its answer has come when its next call waits.
        assert comes_true(lambda name=name: name in {call.rank for call in run.waiting})
    schedule = run.schedule
    assert run.free().join(60).results["server"] == left
    again = Cluster(["server", "a", "b"], rpc=True, hold=schedule).run(add_one_on_server)
    assert again.join(60).results["server"] == left


def come_late(go_on):
    """Rank 1 comes when it is told; nobody waits for anybody inside of the calls."""
    if dist.get_rank() == 1:
        assert comes_true(Path(go_on).exists)
    dist.isend(torch.ones(1), 1 - dist.get_rank())


def test_a_call_is_let_through_again_beside_the_calls_that_were_there(tmp_path):
    there, late = tmp_path / "there", tmp_path / "late"
    there.touch()
    run = Cluster(2, hold=True).run(come_late, str(there))
    assert len(run.waiting) == 2
    run.release(0)
    run.release(1)
    schedule = run.schedule
    run.join(60)
    assert schedule[0].beside == {(1, 1)}
    again = Cluster(2, hold=schedule).run(come_late, str(late))
    assert comes_true(lambda: again.ranks[0] not in ("starting", "computes"))
    late.touch()
    again.join(60)
    assert again.schedule == schedule


def test_what_is_no_schedule_of_this_program_is_refused_in_a_sentence():
    run = Cluster(2, hold=True).run(sum_and_send)
    let_through(run)
    run.join(60)
    schedule = list(run.schedule)
    for hold, told in [
        ("yes", "not str"),
        (None, "not NoneType"),
        ([1, 2], "item 1 of hold= is 1"),
        ([schedule[0], None], "item 2 of hold= is None"),
        ([replace(schedule[0], rank=7)], r"no call of ranks \[0, 1\]"),
    ]:
        with pytest.raises(SetupError, match=told):
            Cluster(2, hold=hold).run(sum_and_send)
    with pytest.raises(DlearnError, match="the schedule has all_reduce as call 1 of rank"):
        Cluster(2, hold=schedule).run(both_send_first).join(60)
    with pytest.raises(DlearnError, match=r"the schedule has call 3 of rank \d next, and rank \d has ended after 2"):
        Cluster(2, hold=[*schedule, replace(schedule[-1], number=3)]).run(sum_and_send).join(60)
    with pytest.raises(SetupError, match="hold= is for recorded ranks"):
        Cluster(2, hold=True, record=False)


@pytest.mark.parametrize("kind", [SystemExit, OSError, GeneratorExit])
def test_whatever_a_condition_raises_ends_the_job_and_opens_no_gate(kind, tmp_path):
    def condition(_):
        raise kind("so")

    def call():
        dist.barrier()
        (tmp_path / "went on").touch()

    with pytest.raises(DlearnError, match=rf"condition of hold= raised {kind.__name__} at rank 0's barrier .*: so;"):
        Cluster(1, hold=condition).run(call).join(60)
    assert not (tmp_path / "went on").exists()


def test_a_second_run_of_held_ranks_is_told_and_a_held_rank_that_is_killed():
    with Cluster(2, hold=True) as cluster:
        run = cluster.run(dist.barrier)
        with pytest.raises(SetupError, match="a held run of these ranks is under way"):
            cluster.run(dist.barrier)
        assert comes_true(lambda: len(run.waiting) == 2)
        os.kill(pids_of(run)[0], signal.SIGKILL)
        with pytest.raises(RankError, match="SIGKILL"):
            run.join(60)


def test_a_run_that_is_forgotten_ends_its_ranks():
    run = Cluster(2, hold=True).run(sum_and_send)
    while len(run.waiting) < 2:  # Of a busy machine each look ends too early.
        pass
    pids = pids_of(run)
    del run
    gc.collect()
    assert len(pids) == 2
    assert all_end(pids)


RANK = """
import os, signal, subprocess, torch, torch.distributed as dist
from pathlib import Path

def rank():
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(["sleep", "1000"])
    Path(f"pids{os.getpid()}").write_text(f"{os.getpid()} {child.pid}")
    dist.all_reduce(torch.ones(1))
    Path("checkpoint").touch()
"""
JOBS = {
    "notebook": "\nif __name__ == '__main__':\n    from dlearn import Cluster\n"
    "    run = Cluster(2, hold=True).run(rank)\n    run.join()",
    "script": "\ndist.init_process_group('gloo')\nrank()\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOBS)
def test_no_rank_goes_on_or_stays_when_what_held_it_is_killed(tmp_path, kind):
    (tmp_path / "job.py").write_text(RANK + JOBS[kind])
    run = ["-m", "dlearn.cli", "run", "--hold", "--trace", "trace", "--nproc-per-node", "2"]
    command = [sys.executable, *(run if kind == "script" else []), "job.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as job:
        files = tmp_path.rglob
        try:
            assert comes_true(lambda: sum("held before" in each.read_text() for each in files("*.jsonl")) == 2)
        finally:
            job.kill()
    pids = [int(pid) for file in tmp_path.glob("pids*") for pid in file.read_text().split()]
    assert len(pids) == 4
    assert all_end(pids)
    assert not (tmp_path / "checkpoint").exists()


def test_the_gates_waiting_is_told_apart_from_that_for_a_late_rank(tmp_path):
    """Rank 1 stood 6 of the 9 ms at the gate for which rank 0 waited."""
    job = Job(tmp_path, ranks=2)
    job.span(1, "held before all_reduce", held="all_reduce", start_ns=3_000_000, end_ns=9_000_000)
    for rank, start_ns in enumerate((0, 9_000_000)):
        job.collective("all_reduce", size=8, ranks=[rank], start_ns=start_ns, end_ns=9_500_000)
    trace = job.load()
    told = "Held: rank 1 stood 6.00 ms at the gate, and 6.00 ms of the waiting for it were the gate's."
    assert all(answer(trace).note.endswith(told) for answer in (breakdown, overlap, step_times))
