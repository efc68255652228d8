"""What goes wrong at the gate of a held job ends it in a sentence, and opens the gate for no rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from waiting import all_end, comes_true

from dlearn import Cluster
from dlearn.errors import DlearnError, SetupError
from dlearn.live.keeper import Keeper
from dlearn.live.schedule import Passed
from dlearn.trace.writer import file_of_rank

CALL = {"op": "send", "to": None, "bytes": 4, "site": "a.py:1", "phase": "none", "spans": []}


class HandMade:
    """A gate without a job: `ranks` are connections that say what a rank would."""

    def __init__(self, size, hold=True):
        self.keeper, self.ended = Keeper(range(size), hold), threading.Event()
        self.keeper.on_trouble = self.ended.set
        self.ranks = [socket.socket(socket.AF_UNIX) for _ in range(size)]
        for rank, way in enumerate(self.ranks):
            way.connect(self.keeper.address)
            self.say(rank, rank=rank, size=size)
        assert comes_true(lambda: len(self.keeper.ways) == size)

    def say(self, number, /, **line):
        self.ranks[number].sendall(json.dumps(line).encode() + b"\n")

    def call(self, rank, number):
        self.say(rank, number=number, **CALL)

    def heard(self, rank):
        """All that this rank hears before its connection ends."""
        with self.ranks[rank].makefile() as lines:
            return lines.read()

    def close(self):
        self.keeper.close()
        for way in self.ranks:
            way.close()


@pytest.fixture
def gate():
    made = []

    def make(size, hold=True):
        made.append(HandMade(size, hold))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, Odd, OSError])
def test_whatever_a_condition_raises_ends_the_job_and_opens_no_gate(gate, kind):
    def condition(_):
        raise kind("so")

    held = gate(1, condition)
    held.call(0, 1)
    held.ranks[0].shutdown(socket.SHUT_WR)
    assert held.heard(0) == ""
    assert held.ended.wait(60)
    told = f"the condition of hold= raised {kind.__name__} at rank 0's send (a.py:1): so; the ranks were ended"
    assert held.keeper.trouble == told


@pytest.mark.parametrize("line", [b"?\n", b"{}\n", b"[]\n", b'{"number": "x"}\n', b"\xff\n"])
def test_whatever_else_ends_a_ranks_thread_ends_the_job(gate, line):
    held = gate(1)
    held.ranks[0].sendall(line)
    assert held.heard(0) == ""
    assert held.ended.wait(60)
    assert held.keeper.trouble.startswith("the gate of rank 0 failed, ")


@pytest.mark.parametrize(
    ("hold", "told"),
    [
        (b"x", "not bytes"),
        ("yes", "not str"),
        ({}, "not dict"),
        (None, "not NoneType"),
        ([1, 2], "item 1 of hold= is 1"),
        ([Passed(0, 1, "send"), None], "item 2 of hold= is None"),
        ([Passed(7, 1, "send")], r"no call of ranks \[0, 1\]"),
    ],
)
def test_what_is_no_schedule_is_refused(hold, told):
    with pytest.raises(SetupError, match=told):
        Keeper((0, 1), hold)


@pytest.mark.parametrize("due", [Passed(0, 3, "send"), Passed(1, 1, "send", frozenset({(0, 3)}))])
def test_a_schedule_that_is_longer_than_the_program_ends_the_job(gate, due):
    """Rank 1 waits with its call, and would wait for ever."""
    schedule = [Passed(0, 1, "send"), Passed(0, 2, "send"), due]
    held = gate(2, schedule)
    held.call(1, 1)
    for number in (1, 2):
        held.call(0, number)
    held.say(0, returned=True)
    held.ranks[0].shutdown(socket.SHUT_WR)
    assert held.ended.wait(60)
    assert held.keeper.trouble == "the schedule has call 3 of rank 0 next, and rank 0 has ended after 2"


def reduce_once():
    dist.all_reduce(torch.ones(1))


def test_what_is_left_of_a_schedule_when_all_ranks_have_ended_is_told():
    schedule = [Passed(rank, number, "all_reduce") for number in (1, 2) for rank in (0, 1)]
    told = r"the schedule has call 2 of rank \d next, and rank \d has ended after 1"
    with pytest.raises(DlearnError, match=told):
        Cluster(2, hold=schedule).run(reduce_once).join(60)


def test_a_schedule_grows_with_the_calls_and_not_with_their_square(gate):
    held = gate(2)
    for number in range(1, 101):
        held.call(0, number)
        held.call(1, number)
    assert comes_true(lambda: len(held.keeper.calls) == 200)
    while held.keeper.let_through(lambda calls: next(iter(calls), None)):
        pass
    assert sum(len(each.beside) for each in held.keeper.passed) == 199


def test_a_stopped_rank_is_told_and_its_connection_does_not_fill(gate):
    held = gate(1)
    for number in range(100_000):
        assert held.keeper.ask(number) == {0}
    held.keeper.free()
    held.ranks[0].shutdown(socket.SHUT_WR)
    assert held.heard(0) == "?0\nopen\n"


def test_a_folder_that_is_too_deep_for_a_socket_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(SetupError, match="Set TMPDIR to a shorter path"):
        Keeper((0,), True)
    assert os.listdir(deep) == []


def fork_and_call():
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        reduce_once()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    dist.init_process_group("gloo")
    reduce_once()
    reduce_once()
    return status


def test_a_forked_childs_call_is_not_the_ranks():
    run = Cluster(2, init=False, hold=True).run(fork_and_call)
    ops = []
    while call := run.step():
        ops.append(call.op)
    assert ops == ["all_reduce"] * 4
    assert run.join(60).results == {0: 0, 1: 0}


def receive_on_rank_1():
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)


def test_what_is_said_of_a_run_is_true_at_every_moment():
    run = Cluster(2, hold=True).run(receive_on_rank_1)
    assert run.hang == ""
    known = ("starting", "computes", "has ended", "waits at the gate: recv from 0 (")
    assert all(now.startswith(known) for now in run.ranks.values())
    assert len(run.waiting) == 1
    with pytest.raises(DlearnError, match=r"there is no rank 7; the ranks of this job are \[0, 1\]"):
        run.release(7)
    with pytest.raises(DlearnError, match="count is how many calls to let through: 1 or more, not -3"):
        run.release(0, -3)
    file = file_of_rank(run.folder / "trace", 1)
    pid = int(file.stem.rsplit("-", 1)[1])
    os.kill(pid, signal.SIGSTOP)
    assert comes_true(lambda: run.ranks[1] == "is stopped (SIGSTOP or a debugger: state T)")
    assert "1     is stopped" in str(run)
    os.kill(pid, signal.SIGCONT)
    run.free()
    assert comes_true(lambda: run.ranks[1].startswith("in recv #1 ("))
    assert run.ranks[0] == "has ended"
    assert run.waiting.why == "nothing waits at the gate: it was opened for good"
    run.end()
    assert run.ranks == {0: "has ended", 1: "was killed by SIGKILL"}
    assert (run.step(), run.run_until(op="send")) == (None, None)
    assert repr(run.waiting) == "nothing waits at the gate: all ranks have ended"
    assert "nothing waits at the gate: all ranks have ended" in run.waiting._repr_html_()
    with pytest.raises(DlearnError, match="no call of rank 0 comes to the gate: all ranks have ended"):
        run.release(0)


def test_while_a_condition_is_asked_its_rank_waits_for_it():
    asked, answer = threading.Event(), threading.Event()

    def condition(_):
        asked.set()
        return answer.wait(60)

    run = Cluster(2, hold=condition).run(receive_on_rank_1)
    assert asked.wait(60)
    assert comes_true(lambda: run.ranks[1].startswith("waits for the condition of hold=: recv from 0 ("))
    waiting = run.waiting_within(0.1)
    assert waiting == ()
    assert "rank 1 waits for the condition of hold=" in waiting.why
    answer.set()
    assert [call.op for call in run.waiting] == ["recv"]
    run.end()


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
