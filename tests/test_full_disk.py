"""A disk that fills up while a job is recorded: the job's results come back, and the trace says what is not in it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from disks import ROOM, full_disk
from traces import header

from dlearn import Cluster, Trace
from dlearn.errors import RankError
from dlearn.trace.event import Span
from dlearn.trace.store import read
from dlearn.trace.writer import Writer


def reduce_on_a_full_disk(times: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    for _ in range(times):
        dist.all_reduce(torch.ones(1))
    return "done"


def test_a_full_disk_costs_no_result_and_the_trace_says_how_much_is_not_in_it(own_folder):
    run = Cluster(2).run(reduce_on_a_full_disk, 800, timeout=60)
    assert run.results == {0: "done", 1: "done"}
    for rank, process in enumerate(run.trace.processes):
        assert process.footer is not None
        # Each call has a line for its begin and one for its end, and there are others.
        assert process.footer.lines + process.footer.not_written > 1600
        assert process.path.stat().st_size <= ROOM
        assert (
            f"{process.path.name}: {process.footer.not_written:,} lines were not written (the system refused them:"
            " EFBIG)"
        ) in run.trace.problems
        assert run.output[rank].count("could not be written") == 1


def test_how_a_rank_died_is_told_though_the_disk_is_full(own_folder, capsys):

    def die() -> None:
        for _ in range(400):
            dist.all_reduce(torch.ones(1))
        if dist.get_rank():
            os._exit(7)

    Cluster(2).run(os.getpid)  # The fork server and its spares are there, and have no limit.
    with full_disk(), pytest.raises(RankError, match="rank 1 died: it exited with code 7"):
        Cluster(2).run(die, timeout=60)
    assert "the trace does not say how rank 1 ended: File too large" in capsys.readouterr().err


def test_a_full_disk_ends_no_worker_of_rpc(tmp_path, monkeypatch, capsys):
    """Their agents' log is written by the process that started them."""
    monkeypatch.chdir(tmp_path)

    def call() -> str:
        import torch.distributed.rpc as rpc

        for _ in range(100):
            rpc.rpc_sync("callee", torch.add, args=(torch.ones(1), 1))
        return "done"

    Cluster(2).run(os.getpid)
    with full_disk():
        run = Cluster(["caller", "callee"], rpc=True).run({"caller": call}, timeout=60)
    assert run.results == {"caller": "done"}
    assert "lines of the RPC agents' logs could not be written: File too large" in capsys.readouterr().err


def test_the_footer_takes_the_place_of_the_last_lines(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 20)
    writer.write(header())
    with full_disk(5_000):
        for number in range(100):
            try:
                writer.write(Span(number=number, start_ns=number, name="step"))
            except OSError:
                break
        assert writer.not_written == 1
        written = writer.lines
        writer.finish(at_ns=1000)
    file = read(writer.path)
    assert file.footer is not None
    # The header is a line, too; what was given up for the footer counts as not written.
    assert len(file.events) == file.footer.lines - 1 < written - 1
    assert file.footer.lines + file.footer.not_written == written + 1
    assert file.problems == [
        f"host-1.jsonl: {file.footer.not_written} lines were not written (the system refused them: EFBIG)"
    ]


def test_a_file_with_a_header_only_is_not_cut(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 20)
    writer.write(header())
    with full_disk(writer.path.stat().st_size), pytest.raises(OSError, match="File too large"):
        writer.finish(at_ns=1000)
    assert Trace.load(tmp_path).processes[0].footer is None


TMPFS = """
import os, shutil
import torch
import torch.distributed as dist
from dlearn import Cluster, DlearnError

def reduce(end):
    for _ in range(4000):
        dist.all_reduce(torch.ones(1))
    if end == "die" and dist.get_rank():
        os._exit(7)
    return "done"

run = Cluster(2).run(reduce, "return", timeout=60)
print(run.results)
print(run.trace.problems)
with open("filler", "wb") as filler:
    try:
        filler.write(bytes(1 << 20))
    except OSError:
        pass
try:
    Cluster(2).run(reduce, "return", timeout=60)
except DlearnError as error:
    print(error)
os.unlink("filler")
shutil.rmtree(".dlearn")
print(Cluster(2).run(reduce, "die", timeout=60, check=False).error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs of its own")
def test_on_a_disk_that_is_really_full(tmp_path):
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=200k none {tmp_path} && cd {tmp_path} && "$@"']
    probe = subprocess.run([*mount, "sh", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"nothing can be mounted here: {probe.stderr.strip()[:80]}")
    done = subprocess.run([*mount, "sh", sys.executable, "-c", TMPFS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if not line.startswith("[rank ")]
    assert told[0] == "{0: 'done', 1: 'done'}"
    assert told[1].count("lines were not written (the disk was full)") == 2
    assert "No space left on device. Make room on its disk." in told[2]
    assert told[3].startswith("rank 1 died: it exited with code 7")
    assert "Traceback" not in done.stdout + done.stderr
