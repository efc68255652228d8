"""Which files belong together: one job, its attempts, folders of several hosts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from traces import Job, header

from dlearn.errors import TraceError
from dlearn.recorder import refuse_other_traces
from dlearn.trace.attempts import attempts, refuse_two_jobs
from dlearn.trace.job_facts import Joined, Peer
from dlearn.trace.store import ProcessFile, read
from dlearn.trace.trace import Trace


def attempt(folder, *, number=0, met="", job="job", ranks=2, start_ns=0):
    made = Job(folder, ranks=ranks)
    made.headers = [
        header(
            rank, pid=1000 * (number + 1) + rank, world_size=ranks, restart=number, job=job, start_ns=start_ns + number
        )
        for rank in range(ranks)
    ]
    for lines in made.files:
        lines += [Joined(job=met)] if met else []
    return made


@pytest.mark.parametrize("met", [False, True])
def test_a_restarted_job_is_read_attempt_by_attempt(tmp_path, met):
    """torchrun starts the processes again: the same names and ranks, once more."""
    for number in (0, 1):
        again = attempt(tmp_path, number=number, met=f"store {number}" if met else "")
        for _ in range(number + 1):
            again.collective("barrier", start_ns=10, end_ns=20)
        again.write()
    last, first = Trace.load(tmp_path), Trace.load(tmp_path, attempt=0)
    assert [len(match.ends) for match in last.matches] == [2, 2]
    assert [len(match.ends) for match in first.matches] == [2]
    assert "the job began 2 times" in last.problems[0]
    assert "this is attempt 1;" in last.problems[0]
    with pytest.raises(TraceError, match="no attempt 2 in this trace; it has 2"):
        Trace.load(tmp_path, attempt=2)


def test_who_met_nobody_belongs_to_the_attempt_before(tmp_path):
    for number in (0, 1):
        attempt(tmp_path, number=0, met=f"store {number}", start_ns=1000 * number, ranks=1).write()
        (tmp_path / "host-1000.jsonl").rename(tmp_path / f"{number}.jsonl")
    lonely = Job(tmp_path, ranks=1)
    lonely.headers = [header(None, pid=77, start_ns=500)]
    lonely.write()
    assert len(Trace.load(tmp_path, attempt=0).processes) == 2
    assert len(Trace.load(tmp_path).processes) == 1


def test_processes_that_met_are_of_one_job_whatever_they_began_as(tmp_path):
    """Ranks that are spawned on two hosts have nothing in common before they meet."""
    for rank, host in enumerate(["a", "b"]):
        one = Job(tmp_path / host, ranks=2)
        one.headers[rank] = header(rank, host=host, job=f"children of {host}", world_size=2)
        one.headers, one.files = [one.headers[rank]], [[Joined(job="store 1")]]
        one.write()
    trace = Trace.load(tmp_path / "a", tmp_path / "b")
    assert trace.ranks == (0, 1)
    (tmp_path / "c").mkdir()
    other = Job(tmp_path / "c", ranks=1)
    other.headers = [header(0, job="another")]
    other.write()
    with pytest.raises(TraceError, match="holds the files of 2 jobs"):
        Trace.load(tmp_path / "a", tmp_path / "b", tmp_path / "c")


def unknown(folder, pid, *, start_ns=0, met="", died=False):
    """The file of a process that nobody had told of its job; it ends at 1000 ns."""
    job = Job(folder, ranks=1)
    job.headers = [header(None, pid=pid, job="", start_ns=start_ns)]
    job.files = [[Joined(job=met)] if met else []]
    job.write(died=[0] if died else [])
    return folder


def test_processes_that_nobody_told_of_their_job_find_it_when_they_meet(tmp_path):
    for pid in (1, 2):
        unknown(tmp_path, pid, met="store 1")
    trace = Trace.load(tmp_path)
    assert (len(trace.processes), trace.problems) == (2, ())
    unknown(tmp_path, 3, met="store 2")
    with pytest.raises(TraceError, match="holds the files of 2 jobs"):
        refuse_two_jobs(tmp_path, [read(path) for path in tmp_path.iterdir()])


def test_of_one_that_met_nobody_it_is_told_that_its_job_is_not_known(tmp_path):
    for pid in (1, 2):
        unknown(tmp_path, pid, met="store 1")
    unknown(tmp_path, 3, start_ns=500)
    trace = Trace.load(tmp_path)
    assert len(trace.processes) == 3
    assert trace.problems == ("host-3.jsonl: whether this process is of the job is not known: it met no other",)


def test_a_process_that_knows_no_job_may_join_those_that_still_wait_for_others(tmp_path):
    """Ranks started one by one: of the first the second finds a file, which is not of another job."""
    waits = unknown(tmp_path / "waits", os.getppid(), died=True)
    refuse_other_traces(waits, header(None, pid=7, job=""))
    refuse_other_traces(waits, header(1, pid=7, job="store 1"))
    met = unknown(tmp_path / "met", os.getppid(), died=True, met="store 1")
    refuse_other_traces(met, header(1, pid=7, job="store 1"))
    gone = unknown(tmp_path / "gone", 2**22 + 1, died=True)  # More than Linux numbers.
    ended = unknown(tmp_path / "ended", os.getppid())
    for folder in (met, gone, ended):
        with pytest.raises(TraceError, match="holds a trace of another job already"):
            refuse_other_traces(folder, header(None, pid=7, job=""))
    with pytest.raises(TraceError, match="holds a trace of another job already"):
        refuse_other_traces(met, header(1, pid=7, job="store 2"))


def test_a_missing_rank_is_named_with_the_place_of_its_file(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers, job.files = job.headers[:1], [[Peer(rank=1, host="nodeB", path="/traces/nodeB-7.jsonl")]]
    job.write()
    (problem,) = Trace.load(tmp_path).problems
    assert "that of rank 1 is missing (rank 1's is /traces/nodeB-7.jsonl on host nodeB: copy it here)" in problem


def test_the_exit_of_a_process_is_read_and_is_no_line_of_its_own(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.write()
    with (tmp_path / "host-1000.jsonl").open("a") as stream:
        stream.write('{"kind":"exit","status":-9}\n')
    trace = Trace.load(tmp_path)
    assert (trace.processes[0].exit_status, trace.problems) == (-9, ())


def test_a_folder_that_holds_this_ranks_file_is_refused(tmp_path):
    """torchrun's jobs without an id all have the same name: the second one finds the first one's file of its rank."""
    attempt(tmp_path, ranks=2).write()
    for rank, restart, pid in [(0, 0, 7), (1, 0, 7)]:
        with pytest.raises(TraceError, match="holds a trace of another job already"):
            refuse_other_traces(tmp_path, header(rank, pid=pid, restart=restart))
    refuse_other_traces(tmp_path, header(2, pid=7))  # Another rank of the same job, on another host.
    refuse_other_traces(tmp_path, header(0, pid=7, restart=1))
    with pytest.raises(TraceError, match="nothing is overwritten"):
        refuse_other_traces(tmp_path, header(2, job="another", pid=7))


def test_jobs_over_rpc_one_after_the_other_are_attempts_and_a_hybrid_job_is_one(tmp_path):
    """Trainers met in a group and by RPC, the server by RPC alone: one attempt; the next ones met elsewhere."""
    for number in (0, 1):
        job = Job(tmp_path, ranks=3)
        job.headers = [header(None, pid=100 * number + rank, start_ns=1000 * number) for rank in range(3)]
        for rank, met in enumerate([["rpc"], ["group", "rpc"], ["group"]]):
            job.files[rank] += [Joined(job=f"{name} {number}") for name in met]
        job.write()
    first, last = Trace.load(tmp_path, attempt=0), Trace.load(tmp_path)
    assert [process.header.pid for process in (*first.processes, *last.processes)] == [0, 1, 2, 100, 101, 102]


@pytest.mark.timeout(20)
def test_a_long_chain_of_meetings_is_followed_at_once():
    """Each file leads to the next only: by the job that it began as, or by where it met. Any order of them will do."""
    files = [
        ProcessFile(
            Path(f"h-{i}.jsonl"), header(0, pid=i, job=f"began {(3000 - i) // 2}"), joined={f"met {(3001 - i) // 2}"}
        )
        for i in range(3000)
    ]
    refuse_two_jobs(Path(), files)
    assert sum(map(len, attempts(files))) == 3000
    stranger = ProcessFile(Path("x-1.jsonl"), header(0, pid=1, job="another"), joined={"elsewhere"})
    with pytest.raises(TraceError, match="files of 2 jobs"):
        refuse_two_jobs(Path(), [*files, stranger])
