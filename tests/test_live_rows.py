"""What each rank does now, from trace files that still grow; and at a script's foot and prompt, of real jobs."""

import json
import os
import pty
import re
import subprocess
import termios
import time

import pytest
from test_run import COMMAND, dlearn_run, script
from traces import Job

from dlearn.live.live_rows import LiveRows

A_MEGABYTE = {"shape": [250_000], "dtype": "float32", "device": "cpu"}
A_MEGABYTE |= {"logical_bytes": 1_000_000, "payload_bytes": 1_000_000}
MUCH = "\n".join(["[9,9,2]"] * 20_000)


def begin(number, seq, ago_s=0.0, **more):
    """A line as the recorder writes it, of a call that began so long ago."""
    told = {"kind": "collective", "number": number, "op": "all_reduce", "group": "world", "seq": seq}
    told |= {"site": "train.py:14", "start_ns": time.monotonic_ns() - int(ago_s * 1e9)}
    return told | {"phase": "none", "thread": ""} | more


class Files:
    """Trace files of some ranks, whose lines are written by hand."""

    def __init__(self, folder, ranks):
        self.paths = Job(folder, ranks=ranks).write(died=range(ranks))
        self.rows = LiveRows(folder)

    def write(self, rank, *lines, end="\n"):
        with self.paths[rank].open("a") as file:
            for line in lines:
                text = line if isinstance(line, str) else json.dumps(line, separators=(",", ":"))
                file.write(text + end)

    def now(self):
        """Without the lane and the rate, which depend on the clock."""
        return [f"{row.name}  {row.now}" for row in self.rows.rows()]


@pytest.fixture
def still(monkeypatch):
    """The clock stands still."""
    at = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: at)


@pytest.mark.usefixtures("still")
def test_a_row_says_step_call_line_and_for_whom_a_rank_waits(tmp_path):
    files = Files(tmp_path, 3)
    assert files.now() == ["rank 0  computes", "rank 1  computes", "rank 2  computes"]
    for rank in range(3):
        files.write(rank, {"kind": "span", "number": 1, "name": "step 3", "start_ns": 5}, begin(2, 11, ago_s=3.0))
    files.write(2, {"kind": "end", "event": 2, "at_ns": time.monotonic_ns() - 2 * 10**9, "by": "wait"})
    for rank in range(2):
        files.write(rank, f"[2,{time.monotonic_ns()},1]", f"[2,3,{time.monotonic_ns() - 1_300_000_000},1,12]")
    assert files.now() == [
        "rank 0  step 3: waits 1.3 s for rank 2 in all_reduce #12 (train.py:14)",
        "rank 1  step 3: waits 1.3 s for rank 2 in all_reduce #12 (train.py:14)",
        "rank 2  step 3: computes for 2.0 s",
    ]
    files.write(2, f"[2,3,{time.monotonic_ns()},1,12]")
    assert "waits" not in "".join(files.now())
    files.write(0, {"kind": "footer", "at_ns": 9, "lines": 9})
    files.write(1, {"kind": "place", "at_ns": 9, "ended": "returned"})
    assert files.now()[:2] == ["rank 0  step 3: has ended", "rank 1  step 3: has returned"]


@pytest.mark.usefixtures("still")
def test_a_rank_waits_for_members_of_its_group_only(tmp_path):
    files = Files(tmp_path, 3)
    for rank in (0, 1):
        group = {"kind": "group", "name": "1", "rank": rank, "ranks": [0, 1], "size": 2, "backend": "gloo"}
        files.write(rank, group, begin(1, 1, ago_s=9.0, group="1") | ({"end_ns": 9} if rank else {}))
    assert files.now()[0] == "rank 0  waits 9.0 s for rank 1 in all_reduce #1 (train.py:14)"


@pytest.mark.usefixtures("still")
def test_where_one_of_two_calls_ends_the_rank_is_inside_of_the_other(tmp_path):
    files = Files(tmp_path, 1)
    second = time.monotonic_ns() // 10**9 - 4
    for number in (1, 2):
        files.write(0, begin(number, number, inputs=[A_MEGABYTE]) | {"start_ns": second * 10**9})
    files.write(0, f"[1,{second * 10**9 + 1},2]")
    assert files.now()[0].startswith("rank 0  in all_reduce #2 for ")
    (row,) = files.rows.rows()
    assert row.lane.strip().startswith("████")
    assert 2e6 / 6 < row.bytes_per_second < 2e6 / 3


@pytest.mark.usefixtures("still")
def test_of_much_that_is_new_only_the_end_is_read_and_of_the_rest_nothing_is_said(tmp_path):
    files = Files(tmp_path, 2)
    span = {"kind": "span", "number": 0, "name": "step 0", "start_ns": 5}
    files.write(0, begin(1, 5, ago_s=9.0))
    files.write(1, span, "[0,9,1]", begin(1, 1), MUCH, f"[1,20000,{time.monotonic_ns()},-1,20000]")
    assert files.now() == [
        "rank 0  in all_reduce #5 for 9.0 s (train.py:14)",
        "rank 1  in all_reduce #20000 (train.py:14)",
    ]


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    files, whole = Files(tmp_path, 1), json.dumps(begin(1, 1))
    files.write(0, whole[:40], end="")
    assert files.now() == ["rank 0  computes"]
    files.write(0, whole[40:])
    files.write(0, '{"kind": "colle', "[1,2", "nonsense")  # Damage is told elsewhere.
    assert files.now()[0].startswith("rank 0  in all_reduce #1")


def test_rows_fit_a_terminal_and_many_ranks_are_counted(tmp_path):
    files = Files(tmp_path, 12)
    files.write(0, {"kind": "span", "number": 1, "name": "x" * 200 + "\x1b[2J", "start_ns": 0}, begin(2, 1))
    lines = files.rows.lines()
    assert (len(lines), lines[-1]) == (9, "and 4 more ranks")
    assert files.rows.html(files.rows.rows()).count('role="row"') == 12
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert LiveRows(tmp_path / "gone").lines() == []


LATE = """
import time, torch, torch.distributed as dist, dlearn
from pathlib import Path
dist.init_process_group("gloo")
for step in range(3):
    with dlearn.span(f"step {step}"):
        end = time.monotonic() + 60
        while step == 2 and dist.get_rank() == 1 and not Path("seen").exists() and time.monotonic() < end:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1000))
"""
HELD = """
import sys, torch, torch.distributed as dist, dlearn
dist.init_process_group("gloo")
for step in range(3):
    with dlearn.span(f"step {step}"):
        dist.all_reduce(torch.ones(4))
(dist.send if dist.get_rank() == 0 else dist.recv)(torch.ones(4), 1 - dist.get_rank())
sys.stdout.write(f"done {dist.get_rank()}\\n")  # In one piece, where two ranks write.
"""


@pytest.mark.slow
def test_rows_say_while_a_script_runs_who_waits_for_whom(tmp_path):
    command = [*COMMAND, "--live", "--nproc-per-node=2", script(tmp_path, LATE)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        told = []
        for line in job.stderr:
            told.append(line)
            if line.startswith("rank 0 waits for rank 1"):
                (tmp_path / "seen").touch()
    assert job.returncode == 0
    assert "rank 0 waits for rank 1 in all_reduce #3 (train.py:10)" in "".join(told)


@pytest.mark.slow
def test_a_script_is_held_at_a_prompt_that_reads_lines(tmp_path):
    lines = ["waiting", "step", "ranks", "until span step 2", "nonsense", "until send", "step 2"]
    arguments = ["--hold", "--nproc-per-node=2", script(tmp_path, HELD)]
    done = dlearn_run(tmp_path, *arguments, input="\n".join(lines))
    err = done.stderr
    assert (sorted(done.stdout.splitlines()), done.returncode) == (["done 0", "done 1"], 0)
    assert err.startswith("dlearn: this job is held: a prompt comes with its first call; help says how\n")
    assert re.search(r"\n[01]     all_reduce         16  train.py:6\n", err)
    assert re.search(r"let through: rank [01]'s all_reduce \(train.py:6\)", err)
    assert re.search(r"[01]     waits at the gate: all_reduce \(train.py:6\)\n", err)
    assert re.search(r"[01]     in all_reduce #1 \(train.py:6\)\n", err)
    assert "dlearn: 'nonsense' is no command here; help shows them." in err
    assert "waits: rank 0's send to 1 (train.py:7)" in err
    assert "let through: rank 0's send" in err
    assert "4 of 4 operations explained" in err


@pytest.mark.slow
def test_keys_release_a_held_script_at_a_terminal_which_is_as_it_was_afterwards(tmp_path):
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [*COMMAND, "--hold", "--nproc-per-node=2", script(tmp_path, HELD)]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        assert "help says how" in job.stderr.readline()
        os.write(ours, b"01untix\x7fl send\n free\n")
        err = job.stderr.read()
    assert (job.returncode, termios.tcgetattr(theirs)) == (0, before)
    for told in ("rank 0's all_reduce", "rank 1's all_reduce"):
        assert f"let through: {told}\n" in err
    assert "waits: rank 0's send to 1 (train.py:7)" in err
    assert re.search(r"held> step\nlet through: rank [01]'s .*\nheld> free\ndlearn: the gate", err)
