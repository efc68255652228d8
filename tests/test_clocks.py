"""One clock for several hosts, from readings by hand. Real hosts are in test_hosts.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job, header

from dlearn.analysis.telling.words import clock_sentence
from dlearn.trace.clocks import SLEW, Clock, _line
from dlearn.trace.job_facts import ClockReading

SECOND = 10**9


def job_on_two_hosts(folder, *readings):
    """Rank 1's clock is another one; its readings are (at, offset, error)."""
    job = Job(folder, ranks=2)
    job.headers = [header(0, world_size=2, clock="a"), header(1, world_size=2, clock="b", host="other")]
    for at_ns, offset_ns, error_ns in readings:
        reading = ClockReading(at_ns=at_ns, offset_ns=offset_ns, error_ns=error_ns, reference="a", rounds=1)
        job.files[1].append(reading)
    return job


def test_times_are_moved_to_rank_0s_clock(tmp_path):
    job = job_on_two_hosts(tmp_path, (500, 1000, 5))
    job.collective("all_reduce", size=8, start_ns={0: 1500, 1: 510}, end_ns={0: 1600, 1: 605})
    trace = job.load()
    assert [(event.rank, event.start_ns, event.end_ns) for event in trace.events] == [(0, 1500, 1600), (1, 1510, 1605)]
    assert trace.problems == ()
    assert clock_sentence(trace) == (
        "2 clocks: other's is moved by +0.000001 s, give or take 0.0 us (drift not measured)."
    )


def test_drift_is_the_line_through_the_two_best_readings(tmp_path):
    """10 us in 10 s are 1 ppm; the bad reading in between changes nothing."""
    job = job_on_two_hosts(tmp_path, (0, 1000, 50), (5 * SECOND, 999_000, 2_000_000), (10 * SECOND, 11_000, 60))
    job.collective("barrier", start_ns={0: 5 * SECOND, 1: 5 * SECOND}, end_ns={0: 6 * SECOND, 1: 5 * SECOND + 9})
    trace = job.load()
    (event,) = (event for event in trace.events if event.rank == 1)
    assert event.start_ns == 5 * SECOND + 1000 + 5000
    clock = trace.processes[1].clock
    assert (clock.drift, clock.error_ns) == (1e-6, 60)


def test_a_reading_that_contradicts_the_line_widens_its_bound(tmp_path):
    """In the middle the line says 0, the reading 1,000 give or take 55: it is off by 945 at least."""
    job = job_on_two_hosts(tmp_path, (0, 0, 50), (5 * SECOND, 1000, 55), (10 * SECOND, 0, 60))
    assert job.load().processes[1].clock.error_ns == 945


def test_the_bound_grows_away_from_the_readings():
    once = Clock("b", error_ns=100, first_ns=SECOND, last_ns=SECOND)
    assert once.error_at(SECOND) == 100
    assert once.error_at(3 * SECOND) == 100 + 2 * SECOND * SLEW == 1_000_100
    twice = Clock("b", error_ns=100, first_ns=0, last_ns=10 * SECOND)
    assert twice.error_at(5 * SECOND) == 100
    assert twice.error_at(20 * SECOND) == 100 + 10 * 20  # 200 ns in 10 s of drift may be wrong.


@pytest.mark.parametrize(("error_ns", "told"), [(50, True), (500, False)])
def test_an_arrow_that_runs_backwards_beyond_the_bound_is_told(tmp_path, error_ns, told):
    """Rank 1 has received 400 before rank 0 sends; the clocks may be wrong by `error_ns`."""
    job = job_on_two_hosts(tmp_path, (0, 0, error_ns))
    job.send(0, 1, start_ns=1000, end_ns=1100)
    job.recv(1, 0, start_ns=500, end_ns=600)
    problems = job.load().problems
    assert len(problems) == told
    said = "1 of 1 operations end before they can, by up to 0.3 us beyond the bound"
    assert not told or said in problems[0]


def test_a_clock_that_nobody_read_is_told(tmp_path):
    (problem,) = job_on_two_hosts(tmp_path).load().problems
    assert problem == (
        "the clock of host other was never compared with that of the others, or only in readings that no clock can"
        " give: compare no times with it"
    )


@pytest.mark.parametrize(
    "readings", [[(0, 2**62, 0)], [(0, 0, 1), (2 * SECOND, SECOND, 1)]], ids=["146 years off", "half as fast again"]
)
def test_readings_that_no_clock_can_give_move_nothing(tmp_path, readings):
    """Once a sum of a time and an offset was larger than 64 bits hold."""
    job = job_on_two_hosts(tmp_path, *readings)
    job.collective("barrier", start_ns=2**62 - 9, end_ns=2**62)
    trace = job.load()
    assert {event.end_ns for event in trace.events} == {2**62}
    assert "in readings that no clock can give" in trace.problems[0]


@settings(max_examples=200, deadline=None)
@given(
    offset=st.integers(-(10**15), 10**15),
    drift_ppm=st.floats(-400, 400),
    moments=st.lists(st.integers(0, 10**11), min_size=1, max_size=12),
    ways=st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), min_size=12, max_size=12),
)
def test_what_is_true_lies_within_the_bound(offset, drift_ppm, moments, ways):
    """A clock that drifts evenly, read over ways of any length: the line is never wrong by more than it says."""

    def truth(at_ns: int) -> int:
        return at_ns + offset + round(at_ns * drift_ppm * 1e-6)

    readings = []
    for at_ns, (there, back) in zip(moments, ways, strict=False):
        asked, came = at_ns, at_ns + there + back
        heard = truth(at_ns + there)
        guess = ((heard - asked) + (heard - came)) // 2
        # While the answer travels the clock drifts on; 2 for rounding.
        error = (there + back + 1) // 2 + round((there + back) * 400e-6) + 2
        readings.append(ClockReading(at_ns=came, offset_ns=guess, error_ns=error, reference="a", rounds=1))
    line = _line("b", readings)
    for at_ns in [*moments, 0, 10**11]:
        assert abs(line.to_reference(at_ns) - truth(at_ns)) <= line.error_at(at_ns) + 2
