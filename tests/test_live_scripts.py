"""`dlearn run --live` and `dlearn run --hold`: a script's ranks in rows, and at a prompt. Real jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from terminal import run_in_terminal
from waiting import all_end

LATE = """
import time, torch, torch.distributed as dist, dlearn
from pathlib import Path
dist.init_process_group("gloo")
for step in range(3):
    with dlearn.span(f"step {step}"):
        if dist.get_rank() == 0:
            print("loss of step", step, flush=True)
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
SPAWNED = """
import torch, torch.distributed as dist, torch.distributed.rpc as rpc, torch.multiprocessing as mp

def rank(me, port):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{me}", rank=me, world_size=2, rpc_backend_options=options)
    if me == 1:
        print("sum", rpc.rpc_sync("worker0", torch.add, args=(torch.ones(1), 2)).item(), flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(rank, (port,), nprocs=2)
"""


def held(folder, program, *options, told=""):
    """Run it with these lines at its prompt; what it says, of both kinds, and its exit status."""
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "dlearn.cli", "run", "--hold", "--trace", "trace", *options, "train.py"]
    done = subprocess.run(command, input=told, capture_output=True, text=True, cwd=folder, timeout=100)
    return done.stdout, done.stderr, done.returncode


@pytest.mark.slow
def test_rows_stand_at_the_foot_of_a_terminal_while_the_script_prints_above(tmp_path):
    (tmp_path / "train.py").write_text(LATE)
    screens = []

    def look(screen):
        screens.append(screen)
        if "rank 1 never called it, it computes" in " ".join(screen.split()):
            (tmp_path / "seen").touch()

    command = ["-m", "dlearn.cli", "run", "--live", "--trace", "trace", "--nproc-per-node", "2", "train.py"]
    status, last = run_in_terminal(command, look, cwd=tmp_path)
    told = next(screen for screen in screens if "rank 1 never" in screen).splitlines()
    assert status == 0
    assert [line for line in told if line.startswith("loss")] == [f"loss of step {step}" for step in range(3)]
    assert len(told) == 24
    assert re.fullmatch(r"dlearn: \d+ s", told[-5])
    assert re.fullmatch(
        r"rank 0  [ ·▁▂▃▄▅▆▇█░]{10} +[\d.]+ k?B/s  step 2: waits [\d.]+ s for rank 1 in all_reduce #3 ?", told[-4][:78]
    )
    assert "step 2: computes for " in told[-3]
    assert told[-2].startswith("rank 0 waits for rank 1 in all_reduce #3 (train.py:12); rank 1 never")
    assert all(len(line) <= 80 for line in told)
    assert "waits" not in str(last).replace("others waited", "")
    assert "dlearn: the trace is in trace" in str(last)


@pytest.mark.slow
def test_rows_are_printed_where_stderr_is_no_terminal(tmp_path):
    (tmp_path / "train.py").write_text(LATE)
    options = ["--live", "--trace", "trace", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "dlearn.cli", "run", *options, "train.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        told = []
        for line in job.stderr:
            told.append(line)
            if line.startswith("rank 0 waits for rank 1"):
                (tmp_path / "seen").touch()
    assert job.returncode == 0
    assert "calls" not in "".join(told)
    assert "rank 0 waits for rank 1 in all_reduce #3 (train.py:12)" in "".join(told)


@pytest.mark.slow
def test_a_script_is_held_at_a_prompt_that_reads_lines(tmp_path):
    lines = ["waiting", "step", "ranks", "until span step 2", "nonsense", "until send", "step 2"]
    out, err, status = held(tmp_path, HELD, "--nproc-per-node", "2", told="\n".join(lines))
    assert (sorted(out.splitlines()), status) == (["done 0", "done 1"], 0)
    assert err.startswith("dlearn: this job is held: its calls wait until you let them through; help says how\n")
    assert re.search(r"\n[01]     all_reduce         16  train.py:6\n", err)
    assert re.search(r"let through: rank [01]'s all_reduce \(train.py:6\)", err)
    assert re.search(r"[01]     waits at the gate: all_reduce \(train.py:6\)\n", err)
    assert re.search(r"[01]     in all_reduce #1 \(train.py:6\)\n", err)
    assert "dlearn: 'nonsense' is no command here; help shows them." in err
    assert "waits: rank 0's send to 1 (train.py:7)" in err
    passed = re.findall(r"(let through: rank 0's send|let through: rank 1's recv|all ranks have ended)\b", err)
    # The receive may have come first: it waits longest, or was let through on the way to the send.
    send = "let through: rank 0's send"
    assert sorted(passed) in ([send, "let through: rank 1's recv"], ["all ranks have ended", send])
    assert "dlearn: the gate is open" in err
    assert "4 of 4 operations explained" in err


@pytest.mark.slow
def test_ranks_that_a_script_spawns_are_held_and_what_rpc_says_for_itself_is_not(tmp_path):
    out, err, status = held(tmp_path, SPAWNED, told="waiting\nstep\nfree\n")
    assert (out, status) == ("sum 3.0\n", 0)
    assert re.search(r"\n1     rpc add  worker0 +\d+  train.py:8\n", err)
    assert err.count("let through") == 1


@pytest.mark.slow
def test_the_end_of_a_held_script_leaves_nothing(tmp_path):
    out, _, status = held(tmp_path, HELD, "--nproc-per-node", "2", told="end\n")
    pids = [int(path.stem.rsplit("-", 1)[1]) for path in (tmp_path / "trace").glob("*.jsonl")]
    assert (out, status) == ("", -signal.SIGTERM)
    assert len(pids) == 2
    assert all_end(pids)


def test_what_cannot_be_held_is_told(tmp_path):
    out, err, status = held(tmp_path, HELD, "--live", "--nproc-per-node", "2")
    assert (out, status) == ("", 2)
    assert err == "dlearn: dlearn run --hold is for the ranks of one host (without --nnodes), and without --live.\n"
    assert os.listdir(tmp_path) == ["train.py"]
