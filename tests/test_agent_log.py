"""The RPC agent's own log: taken out of stderr, and read."""

import itertools
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlearn.trace.rpc import agent_log
from dlearn.trace.rpc.agent_log import Filter, Moment, line_time, moments

SENDING = b"[V1121 15:47:36.741144657 tensorpipe_agent.cpp:894] RPC agent for tr1 is sending request #0 to ps\n"
RUNNING = (
    b"[rank0]:[V1121 15:47:36.741999999 tensorpipe_agent.cpp:640] RPC agent for ps is running request #0 from tr1"
    b" in thread pool\n"
)
OTHER = b"[V1121 15:47:36.741144657 reducer.cpp:12] something else at this level\n"
INFO = b"[I1121 15:47:36.741144657 socket.cpp:1] torch does not show this by itself\n"
WARNING = b"[W1121 15:47:36.741144657 tensorpipe_agent.cpp:723] encountered error when reading\n"


def sieve(data, cuts):
    """What passes when the data comes in pieces, and what is kept."""
    filtered = Filter()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    passed = b"".join(filtered.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    return passed + filtered.rest(), filtered.take_lines().splitlines(keepends=True)[1:]


def test_the_agents_lines_are_kept_and_all_else_passes():
    passed, kept = sieve(
        b"mine\n" + SENDING + b"half a line " + RUNNING + b"and its end\n" + OTHER + INFO + WARNING, []
    )
    assert kept == [SENDING, RUNNING]
    assert passed == b"mine\nhalf a line and its end\n" + WARNING


own = st.binary(max_size=30) | st.sampled_from(
    [b"[", b"[V", b"[rank", b"[V1121 15:47", b"\n", b"[1/3] done\n", WARNING]
)


@given(
    st.lists(st.tuples(own, st.sampled_from([b"", SENDING, RUNNING])), max_size=8),
    st.lists(st.integers(0, 2000), max_size=12),
)
def test_however_it_is_cut_nothing_is_lost_and_nothing_swallowed(parts, cuts):
    """Our own bytes end in a line's end where a log line follows: torch writes each with one call."""
    data = b"".join(mine + (b"\n" if logged and mine else b"") + logged for mine, logged in parts)
    whole, kept = sieve(data, [])
    assert sieve(data, cuts) == (whole, kept)
    assert sorted(kept) == sorted(logged for _, logged in parts if logged)
    assert len(whole) + sum(map(len, kept)) == len(data)


def test_a_line_says_who_sent_what_to_whom():
    stamp = b"written 5700000000 to 5800000000\n"
    assert list(moments(iter([stamp, SENDING, b"no such line\n", RUNNING]), wall_ns=0)) == [
        Moment("is sending request", "tr1", 0, "ps", 5_741_144_657),
        Moment("is running request", "tr1", 0, "ps", 5_741_999_999),
    ]


@pytest.mark.parametrize("byte", [b"\xff", b"\x00", b" "])
@pytest.mark.parametrize("line", [SENDING, RUNNING])
def test_a_damaged_byte_anywhere_in_a_line_ends_nothing(line, byte):
    list(moments((line[:place] + byte + line[place + 1 :] for place in range(len(line))), wall_ns=0))


MS, SECOND = 10**6, 10**9
WALL_NS = 1_795_000_000 * SECOND
"""A wall clock whose seconds begin with the monotonic clock's."""


def time_of(at_ns, written, *, wall_ns=WALL_NS, late_ns=0):
    """What is found of a line as torch 2.13 prints it: the coarse wall clock's second, the other's fraction."""
    second = (at_ns + wall_ns - late_ns) // SECOND
    return line_time(second * SECOND - WALL_NS, at_ns % SECOND, *written)


@st.composite
def logs(draw):
    """True times with gaps of 0 to 3 s, each with a lag of 0 to 10 ms of the coarse clock, and when it was read.

    The reader looks every 0.25 s into a silent pipe, 20 ms after what it has found, and up to 0.2 s later when busy.
    """
    gaps = draw(st.lists(st.integers(0, 3 * SECOND) | st.integers(0, 30 * MS), min_size=1, max_size=12))
    truth = list(itertools.accumulate(gaps, initial=draw(st.integers(5 * SECOND, 6 * SECOND))))
    lags = draw(st.lists(st.integers(0, 10 * MS), min_size=len(truth), max_size=len(truth)))
    busy = draw(st.lists(st.integers(0, 200 * MS), min_size=8, max_size=8))
    looks, at = [truth[0] - draw(st.integers(0, 200 * MS))], 0
    while len(looks) == 1 or looks[-1] < truth[-1]:
        ahead = next((each for each in truth if each > looks[-1]), truth[-1])
        looks.append(min(max(looks[-1] + 20 * MS, ahead), looks[-1] + 250 * MS) + busy[at % len(busy)])
        at += 1
    windows = [next((a, b) for a, b in itertools.pairwise(looks) if at <= b) for at in truth]
    return truth, lags, windows


@given(logs(), st.integers(-5 * SECOND, 5 * SECOND))
def test_each_line_has_one_moment_and_the_right_one(log, stepped):
    """Over gaps of seconds, with a late coarse clock, and a wall clock that somebody sets in the middle."""
    truth, lags, windows = log
    found = [
        time_of(at, written, wall_ns=WALL_NS + (stepped if place > len(truth) // 2 else 0), late_ns=late)
        for place, (at, late, written) in enumerate(zip(truth, lags, windows, strict=True))
    ]
    assert found == truth


def test_a_reader_that_was_held_up_for_seconds_leaves_it_to_the_wall_clock():
    truth = [7 * SECOND + 300 * MS, 8 * SECOND + 400 * MS, 10 * SECOND + 500 * MS]
    written = (7 * SECOND, 11 * SECOND)
    assert [time_of(at, written) for at in truth] == truth
    # In Nepal it is 5 h 45 min later.
    assert [time_of(at, written, wall_ns=WALL_NS + 20_700 * SECOND) for at in truth] == truth
    # If somebody set that, too, it may be any second since the last look: the last one is taken.
    assert time_of(truth[1], written, wall_ns=WALL_NS + 3607 * SECOND) == 10 * SECOND + 400 * MS


def test_stamps_stand_in_the_log_and_are_read_again(tmp_path):
    reader, writer = os.pipe()
    filtered = Filter()
    filtered.found_empty(1000)
    os.write(writer, b"mine\n" + SENDING)
    assert filtered.feed(filtered.read(reader)) == b"mine\n"
    stamp, line = filtered.take_lines().splitlines(keepends=True)
    _, since, _, until = stamp.split()
    assert int(since) == 1000 < int(until) <= time.monotonic_ns()
    [moment] = moments(iter([stamp, line]), wall_ns=0)
    assert moment.at_ns % SECOND == 741144657
    assert filtered.take_lines() == b""
    for end in (reader, writer):
        os.close(end)


def test_the_filter_process_hands_everything_on_and_ends_with_its_last_writer(tmp_path):
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    process = subprocess.run(
        [sys.executable, "-I", "-S", agent_log.__file__, str(log), "1", "0"],
        input=b"a\n" + SENDING + b"b, and no end",
        pass_fds=(log,),
        stderr=subprocess.PIPE,
        timeout=20,
        check=True,
    )
    os.close(log)
    assert process.stderr == b"a\nb, and no end"
    stamp, line = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    assert (stamp.startswith(b"written 0 to "), line) == (True, SENDING)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk_costs_the_program_none_of_its_stderr():
    log = os.open("/dev/full", os.O_WRONLY)
    process = subprocess.run(
        [sys.executable, "-I", "-S", agent_log.__file__, str(log), "1", "0"],
        input=b"a\n" + SENDING + RUNNING + b"b\n",
        pass_fds=(log,),
        stderr=subprocess.PIPE,
        timeout=20,
        check=True,
    )
    os.close(log)
    told = b"dlearn: 2 lines of the RPC agent's log were not written: No space left on device.\n"
    assert process.stderr == b"a\nb\n" + told
