"""The files of one job: which belong together, and one clock for several hosts. Real hosts are in test_hosts.py."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job, fact, header

import dlearn
from dlearn import Trace, explain
from dlearn.errors import TraceError

SECOND = 10**9


def attempt(folder, *, number=0, met="", **facts):
    made = Job(folder, ranks=2)
    facts = {"job": "job", "world_size": 2, "restart": number, "start_ns": number} | facts
    made.headers = [header(rank, pid=1000 * (number + 1) + rank, **facts) for rank in range(2)]
    for lines in made.files:
        lines += [fact("joined", job=met)] if met else []
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


def unknown(folder, pid, *, job="", start_ns=0, met=(), died=False, **facts):
    """The file of a process that nobody had told of its job; it ends at 1000 ns."""
    made = Job(folder, ranks=1)
    made.headers = [header(None, pid=pid, job=job, start_ns=start_ns, **facts)]
    made.files = [[fact("joined", job=name) for name in met]]
    made.write(died=[0] if died else [])
    return folder


def test_processes_are_of_one_job_that_met_whatever_they_began_as(tmp_path):
    """Trainers met in a group and by RPC, the server by RPC alone: one attempt; the next ones met elsewhere."""
    for number in (0, 1):
        for rank, met in enumerate([["rpc"], ["group", "rpc"], ["group"]]):
            where = [f"{name} {number}" for name in met]
            unknown(tmp_path / "a", 100 * number + rank, job="job", start_ns=1000 * number, met=where)
    first, last = Trace.load(tmp_path / "a", attempt=0), Trace.load(tmp_path / "a")
    assert [process.header.pid for process in (*first.processes, *last.processes)] == [0, 1, 2, 100, 101, 102]
    for host in ("b", "c"):  # Ranks that are spawned on two hosts have nothing in common before they meet.
        unknown(tmp_path / host, 7, host=host, job=f"children of {host}", met=["store"])
    assert len(Trace.load(tmp_path / "b", tmp_path / "c").processes) == 2
    with pytest.raises(TraceError, match="holds the files of 2 jobs"):
        Trace.load(tmp_path / "a", tmp_path / "b")


def test_a_missing_rank_is_named_with_the_place_of_its_file_and_an_exit_is_read(tmp_path, job):
    job.headers = job.headers[:1]
    job.files = [[fact("peer", rank=1, host="nodeB", path="/traces/nodeB-7.jsonl")]]
    job.write()
    with (tmp_path / "host-1000.jsonl").open("a") as stream:
        stream.write('{"kind":"exit","status":-9}\n')
    trace = Trace.load(tmp_path)
    (problem,) = trace.problems
    assert "that of rank 1 is missing (rank 1's is /traces/nodeB-7.jsonl on host nodeB: copy it here)" in problem
    assert trace.processes[0].exit_status == -9


@pytest.mark.parametrize(
    ("run", "rank", "restart", "told"),
    [
        ("job", 0, 0, "another job"),  # A job without an id has the name of the one before.
        ("job", 2, 0, ""),  # Another rank of the same job, on another host.
        ("job", 0, 1, ""),
        ("another", 2, 0, "nothing is overwritten"),
    ],
)
def test_a_recording_into_another_jobs_folder_or_over_this_ranks_file_is_refused(
    run, rank, restart, told, tmp_path, monkeypatch
):
    attempt(tmp_path, job="job@here:1").write()
    known = {"RANK": rank, "WORLD_SIZE": 3, "TORCHELASTIC_RUN_ID": run, "MASTER_ADDR": "here", "MASTER_PORT": 1}
    for name, value in (known | {"TORCHELASTIC_RESTART_COUNT": restart}).items():
        monkeypatch.setenv(name, str(value))
    said = refused(tmp_path)
    assert told in said
    assert bool(told) == bool(said)
    assert "exists already" in refused(tmp_path) or told


def refused(folder):
    try:
        with dlearn.record(folder):
            return ""
    except TraceError as error:
        return str(error)


def test_a_process_that_knows_no_job_may_join_one_that_still_waits_for_others(tmp_path):
    """Ranks started one by one: of the first the second finds a file, which is not of another job."""
    with dlearn.record(tmp_path / "own"):
        pass
    clock = Trace.load(tmp_path / "own").processes[0].header.clock
    cases = {"waits": {"died": True}, "met": {"died": True, "met": ["store 1"]}, "ended": {}}
    said = {
        name: refused(unknown(tmp_path / name, os.getppid(), clock=clock, **facts)) for name, facts in cases.items()
    }
    said["gone"] = refused(unknown(tmp_path / "gone", 2**22 + 1, clock=clock, died=True))  # More than Linux numbers.
    assert said.pop("waits") == ""
    assert all("holds a trace of another job already" in each for each in said.values())


def job_on_two_hosts(folder, *readings):
    """Rank 1's clock is another one; its readings are (at, offset, error)."""
    job = Job(folder, ranks=2)
    job.headers = [header(0, world_size=2, clock="a"), header(1, world_size=2, clock="b", host="other")]
    for at_ns, offset_ns, error_ns in readings:
        reading = fact("clock", at_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns, reference="a", rounds=1)
        job.files[1].append(reading)
    return job


def test_times_are_moved_to_rank_0s_clock(tmp_path):
    job = job_on_two_hosts(tmp_path, (500, 1000, 5))
    job.collective("all_reduce", size=8, start_ns={0: 1500, 1: 510}, end_ns={0: 1600, 1: 605})
    trace = job.load()
    assert [(event.rank, event.start_ns, event.end_ns) for event in trace.events] == [(0, 1500, 1600), (1, 1510, 1605)]
    assert trace.problems == ()
    told = "2 clocks: other's is moved by +0.000001 s, give or take 0.0 us (drift not measured)."
    assert told in str(explain(trace))


def test_drift_is_the_line_through_the_two_best_readings(tmp_path):
    """10 us in 10 s are 1 ppm; the bad reading in between changes nothing."""
    job = job_on_two_hosts(tmp_path, (0, 1000, 50), (5 * SECOND, 999_000, 2_000_000), (10 * SECOND, 11_000, 60))
    job.collective("barrier", start_ns={0: 5 * SECOND, 1: 5 * SECOND}, end_ns={0: 6 * SECOND, 1: 5 * SECOND + 9})
    trace = job.load()
    (event,) = (event for event in trace.events if event.rank == 1)
    assert event.start_ns == 5 * SECOND + 1000 + 5000
    clock = trace.processes[1].clock
    assert (clock.drift, clock.error_ns) == (1e-6, 60)
    # Both ends may be wrong by 60: in the 10 s beyond, the line by 120 more.
    assert clock.error_at(20 * SECOND) == 60 + 120


@pytest.mark.parametrize(
    ("readings", "at_ns", "error_ns"),
    [  # In the middle the line says 0, the reading 1,000 give or take 55: it is off by 945 at least.
        ([(0, 0, 50), (5 * SECOND, 1000, 55), (10 * SECOND, 0, 60)], SECOND, 945),
        # Of one reading the drift is not known: two clocks may part by 500 ppm, 1 ms in 2 s.
        ([(SECOND, 0, 100)], 3 * SECOND, 100 + 1_000_000),
    ],
)
def test_the_bound_grows_with_what_contradicts_the_line_and_away_from_the_readings(readings, at_ns, error_ns, tmp_path):
    assert job_on_two_hosts(tmp_path, *readings).load().processes[1].clock.error_at(at_ns) == error_ns


@pytest.mark.parametrize(("error_ns", "told"), [(50, True), (500, False)])
def test_an_arrow_that_runs_backwards_beyond_the_bound_is_told(tmp_path, error_ns, told):
    """Rank 1 has received 400 before rank 0 sends; the clocks may be wrong by `error_ns`."""
    job = job_on_two_hosts(tmp_path, (0, 0, error_ns))
    job.message(0, 1, start_ns={0: 1000, 1: 500}, end_ns={0: 1100, 1: 600})
    problems = job.load().problems
    assert len(problems) == told
    assert not told or "1 of 1 operations end before they can, by up to 0.3 us beyond the bound" in problems[0]


@pytest.mark.parametrize("readings", [[], [(0, 2**62, 0)], [(0, 0, 1), (2 * SECOND, SECOND, 1)]])
def test_without_readings_and_with_those_that_no_clock_can_give_nothing_is_moved_and_it_is_told(tmp_path, readings):
    """146 years off; or half as fast again. Once a sum of a time and an offset was larger than 64 bits hold."""
    job = job_on_two_hosts(tmp_path, *readings)
    job.collective("barrier", start_ns=2**62 - 9, end_ns=2**62)
    trace = job.load()
    assert {event.end_ns for event in trace.events} == {2**62}
    assert trace.problems[0] == (
        "the clock of host other was never compared with that of the others, or only in readings that no clock can"
        " give: compare no times with it"
    )


@settings(max_examples=80, deadline=None)
@given(
    offset=st.integers(-(10**15), 10**15),
    drift_ppm=st.floats(-400, 400),
    moments=st.lists(st.integers(0, 10**11), min_size=1, max_size=12),
    ways=st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), min_size=12, max_size=12),
)
def test_what_is_true_lies_within_the_bound(tmp_path_factory, offset, drift_ppm, moments, ways):
    """A clock that drifts evenly, read over ways of any length: the line is never wrong by more than it says."""

    def truth(at_ns: int) -> int:
        return at_ns + offset + round(at_ns * drift_ppm * 1e-6)

    readings = []
    for at_ns, (there, back) in zip(moments, ways, strict=False):
        asked, came = at_ns, at_ns + there + back
        heard = truth(at_ns + there)
        # While the answer travels the clock drifts on; 2 for rounding.
        error = (there + back + 1) // 2 + round((there + back) * 400e-6) + 2
        readings.append((came, ((heard - asked) + (heard - came)) // 2, error))
    clock = job_on_two_hosts(tmp_path_factory.mktemp("job"), *readings).load().processes[1].clock
    for at_ns in [*moments, 0, 10**11]:
        assert abs(clock.to_reference(at_ns) - truth(at_ns)) <= clock.error_at(at_ns) + 2
