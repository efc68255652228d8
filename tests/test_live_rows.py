"""What each rank does now, from trace files that still grow."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dlearn
from dlearn import Cluster
from dlearn.live.follower import LANE_SECONDS, WINDOW_BYTES
from dlearn.live.live_rows import MOST_ROWS, WIDTH, LiveRows


def begin(number, seq, ago_s=0.0, **more):
    """A line as the recorder writes it, of a call that began so long ago."""
    told = {"kind": "collective", "number": number, "op": "all_reduce", "group": "0", "seq": seq, "site": "train.py:14"}
    return told | {"start_ns": time.monotonic_ns() - int(ago_s * 1e9), "phase": "none", "thread": ""} | more


HEAD = {"kind": "header", "format": 5, "job": "", "host": "", "pid": 0, "torch": "", "dlearn": "", "start_ns": 0}
A_MEGABYTE = {"shape": [250_000], "dtype": "float32", "device": "cpu"}
A_MEGABYTE |= {"logical_bytes": 1_000_000, "payload_bytes": 1_000_000}
OF_A_BUCKET = {"model": 0, "bytes": 8, "parameters": [], "built": "first"}


def now(rows):
    """Without the lane and the rate, which depend on the clock."""
    return [f"{row.name}  {row.now}" for row in rows.rows()]


class Files:
    """Trace files of some ranks, written by hand."""

    def __init__(self, folder, ranks):
        self.paths = [folder / f"host-{rank}.jsonl" for rank in range(ranks)]
        for rank in range(ranks):
            self.write(rank, HEAD | {"rank": rank})
            members = {"rank": rank, "ranks": list(range(ranks)), "size": ranks, "backend": "gloo"}
            self.write(rank, {"kind": "group", "name": "0"} | members)

    def write(self, rank, *lines, end="\n"):
        with self.paths[rank].open("a") as file:
            file.writelines((line if isinstance(line, str) else json.dumps(line)) + end for line in lines)


@pytest.fixture
def still(monkeypatch):
    """The clock stands still."""
    at = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: at)


def test_a_row_says_step_call_line_and_for_whom_a_rank_waits(tmp_path, still):
    files = Files(tmp_path, 3)
    rows = LiveRows(tmp_path)
    assert now(rows) == ["rank 0  computes", "rank 1  computes", "rank 2  computes"]
    for rank in range(3):
        files.write(rank, {"kind": "span", "number": 1, "name": "step 3", "start_ns": 5}, begin(2, 11, ago_s=3.0))
    files.write(2, {"kind": "end", "event": 2, "at_ns": time.monotonic_ns() - 2 * 10**9, "by": "wait"})
    for rank in range(2):
        files.write(rank, f"[2,{time.monotonic_ns()},1]", f"[2,3,{time.monotonic_ns() - 1_300_000_000},1,12,-1]")
    assert now(rows) == [
        "rank 0  step 3: waits 1.3 s for rank 2 in all_reduce #12 (train.py:14)",
        "rank 1  step 3: waits 1.3 s for rank 2 in all_reduce #12 (train.py:14)",
        "rank 2  step 3: computes for 2.0 s",
    ]
    files.write(2, f"[2,3,{time.monotonic_ns()},1,12,-1]")
    assert "waits" not in "".join(now(rows))
    files.write(0, {"kind": "footer", "at_ns": 9, "lines": 9})
    assert now(rows)[0] == "rank 0  step 3: has ended"


def test_of_a_rank_of_which_nothing_is_known_nothing_is_said(tmp_path, still):
    files = Files(tmp_path, 2)
    files.write(0, begin(1, 5, ago_s=9.0))
    # Of what rank 1 has written only the end is read, and that is no call.
    calls = (f"[1,{n},{n},-1,{n},-1]\n[{n},{n + 1},1]" for n in range(2, 2000))
    files.write(1, begin(1, 1), *calls, "\n".join(["[9,9,2]"] * WINDOW_BYTES))
    assert now(LiveRows(tmp_path))[0] == "rank 0  in all_reduce #5 for 9.0 s (train.py:14)"


def test_of_much_that_is_new_only_the_end_is_read(tmp_path):
    files = Files(tmp_path, 1)
    rows = LiveRows(tmp_path)
    files.write(0, begin(1, 1), *(f"[1,{n},{n},-1,{n},-1]\n[{n},{n + 1},1]" for n in range(2, 20_000)))
    assert files.paths[0].stat().st_size > 10 * WINDOW_BYTES
    files.write(0, f"[1,20000,{time.monotonic_ns()},-1,20000,-1]")
    assert now(rows) == ["rank 0  in all_reduce #20000 (train.py:14)"]


def test_a_step_that_ended_in_what_was_not_read_is_over(tmp_path):
    files = Files(tmp_path, 1)
    for n in range(3):
        files.write(0, {"kind": "span", "number": n, "name": f"step {n}", "start_ns": 5}, f"[{n},9,1]")
    files.write(0, "\n".join(["[9,9,2]"] * WINDOW_BYTES))
    assert "step" not in now(LiveRows(tmp_path))[0]


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    files, rows = Files(tmp_path, 1), LiveRows(tmp_path)
    whole = json.dumps(begin(1, 1))
    files.write(0, whole[:40], end="")
    assert now(rows) == ["rank 0  computes"]
    files.write(0, whole[40:])
    assert now(rows)[0].startswith("rank 0  in all_reduce #1")
    files.write(0, '{"kind": "colle', "[1,2", "nonsense")  # Damage is told elsewhere.
    assert now(rows)[0].startswith("rank 0  in all_reduce #1")


def test_rows_fit_a_terminal_and_many_ranks_are_counted(tmp_path):
    files = Files(tmp_path, MOST_ROWS + 4)
    files.write(0, {"kind": "span", "number": 1, "name": "x" * 200 + "\x1b[2J", "start_ns": 0}, begin(2, 1))
    rows = LiveRows(tmp_path)
    lines = rows.lines()
    assert len(lines) == MOST_ROWS + 1
    assert lines[-1] == "and 4 more ranks"
    assert len(rows.table().rows) == 1 + MOST_ROWS + 4
    assert all(len(line) <= WIDTH and line.isprintable() for line in lines)


def test_a_folder_that_is_gone_has_no_rows(tmp_path):
    assert LiveRows(tmp_path / "gone").lines() == []


def wait_before_the_last(seen):
    for step in range(3):
        with dlearn.span(f"step {step}"):
            dist.all_reduce(torch.ones(10))
    with dlearn.span("step 3"):
        end = time.monotonic() + 60
        while dist.get_rank() == 1 and not Path(seen).exists() and time.monotonic() < end:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(10))


def test_the_bucket_of_an_all_reduce_of_ddp_is_told(tmp_path):
    files, rows = Files(tmp_path, 1), LiveRows(tmp_path)
    files.write(0, {"kind": "bucket", "number": 1, "index": 0, "count": 2, "start_ns": 1} | OF_A_BUCKET)
    files.write(0, begin(2, 7, launcher="reducer", backward=4))
    assert now(rows) == ["rank 0  in all_reduce #7, bucket 0 (train.py:14)"]
    files.write(0, f"[2,{time.monotonic_ns()},0]", begin(3, 8, launcher="reducer", backward=4))
    assert now(rows) == ["rank 0  in all_reduce #8, bucket 1 (train.py:14)"]
    files.write(0, f"[3,{time.monotonic_ns()},0]", begin(4, 9, launcher="reducer", backward=4))  # Which are used.
    assert now(rows) == ["rank 0  in all_reduce #9 (train.py:14)"]


def test_a_lane_shows_the_share_of_each_second_inside_of_calls_and_the_payload_given(tmp_path, still):
    files, rows = Files(tmp_path, 1), LiveRows(tmp_path)
    second = time.monotonic_ns() // 10**9 - 4
    shares, size = (1.0, 0.5, 0.0), [A_MEGABYTE]
    for n, share in enumerate(shares):
        start_ns = (second + n) * 10**9
        files.write(0, begin(n + 1, n + 1, inputs=size) | {"start_ns": start_ns})
        files.write(0, f"[{n + 1},{start_ns + round(share * 1e9)},2]")
    (row,) = rows.rows()
    assert row.lane.strip().startswith("█▄·")
    assert len(row.lane) == LANE_SECONDS
    assert 3e6 / 6 < row.bytes_per_second < 3e6 / 3


def test_a_rank_whose_process_is_gone(tmp_path):
    rows = LiveRows(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    head = HEAD | {"rank": 2, "pid": gone.pid, "host": socket.gethostname()}
    (tmp_path / "host-2.jsonl").write_text(json.dumps(head) + "\n")
    assert now(rows) == ["rank 2  gone"]


@pytest.mark.slow
def test_a_real_job_that_waits_is_told_while_it_does(tmp_path, own_folder):
    seen = tmp_path / "seen"
    runs = []
    job = threading.Thread(target=lambda: runs.append(Cluster(3).run(wait_before_the_last, str(seen), timeout=90)))
    job.start()
    end, lines, rows = time.monotonic() + 60, [], None
    while (rows is None or not rows.hang) and time.monotonic() < end:
        time.sleep(0.2)
        folder = next(Path(".dlearn", "runs").glob("*/trace"), None)
        rows = rows or (LiveRows(folder) if folder is not None else None)
        lines = rows.lines() if rows is not None else []
    seen.touch()
    job.join()
    told = [line[line.index("step") :] for line in lines[:3]]
    assert told[0].startswith("step 3: waits ")
    assert told[1].startswith("step 3: computes for ")
    assert "s for rank 1 in all_reduce #4" in told[2]
    hang = rows.hang
    assert hang.startswith("rank 0 and rank 2 wait for rank 1 in all_reduce #4 (tests/test_live_rows.py:")
    assert hang.endswith("; rank 1 never called it, it computes")
    assert " ".join(lines[3:]) == hang
    assert all(len(line) <= WIDTH for line in lines)
    assert set(runs[0].results) == {0, 1, 2}
    rows.lines()
    assert rows.hang == ""
