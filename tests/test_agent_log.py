"""The RPC agent's own log: taken out of stderr, and read."""

import itertools
import os
import random
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from dlearn.trace import agent_log
from dlearn.trace.agent_log import Filter, Moment, moments, monotonic_ns

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
    kept = []
    filtered = Filter(kept.append)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    passed = b"".join(filtered.feed(data[a:b]) for a, b in itertools.pairwise(edges))
    return passed + filtered.rest(), kept


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
    assert list(moments(iter([SENDING, b"no such line\n", RUNNING]), year=2026)) == [
        Moment(
            "is sending request", "tr1", 0, "ps", (int(time.mktime((2026, 11, 21, 15, 47, 36, 0, 0, -1))), 741144657)
        ),
        Moment(
            "is running request", "tr1", 0, "ps", (int(time.mktime((2026, 11, 21, 15, 47, 36, 0, 0, -1))), 741999999)
        ),
    ]


@given(st.binary(max_size=200))
def test_damaged_lines_are_passed_over(noise):
    list(moments(iter([noise, SENDING[:60] + noise]), year=2026))


def test_seconds_of_the_wall_clock_and_a_fraction_of_the_other_make_one_moment():
    """Also where the printed second is late, as the kernel's coarse clock is: the neighbours decide."""
    rng = random.Random(0)
    wall_ns = 1_795_000_000 * 10**9 + 138_350_000
    truth = [5 * 10**9 + 40_000_000 * i for i in range(200)]
    lines = []
    for at in truth:
        late = rng.randrange(10_000_000)
        lines.append(((at + wall_ns - late) // 10**9, at % 10**9))
    assert monotonic_ns(lines, wall_ns) == truth


def test_the_filter_process_hands_everything_on_and_ends_with_its_last_writer(tmp_path):
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    process = subprocess.run(
        [sys.executable, "-I", "-S", agent_log.__file__, str(log), "1"],
        input=b"a\n" + SENDING + b"b, and no end",
        pass_fds=(log,),
        stderr=subprocess.PIPE,
        timeout=20,
        check=True,
    )
    os.close(log)
    assert process.stderr == b"a\nb, and no end"
    assert (tmp_path / "log").read_bytes() == SENDING
