"""A job on several hosts, with clocks of their own: real network and time namespaces."""

import re
import socket
import statistics
import sys
from pathlib import Path

import pytest
from hosts import ADDRESSES, AHEAD_SECONDS, two_hosts, why_not

from dlearn import Trace, explain
from dlearn.events.event import PointToPoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SCRIPT = Path(__file__).parent / "scripts" / "ddp.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a job by `dlearn run` on two hosts with two ranks each: a and b hold what each host has recorded."""
    if reason := why_not():
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("hosts")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with two_hosts() as hosts:
        started = []
        for number, host in enumerate(hosts):
            command = [sys.executable, "-m", "dlearn.cli", "run", "--nnodes=2", "--nproc-per-node=2", "--gather"]
            command += [f"--node-rank={number}", f"--master-addr={ADDRESSES['nodeA']}", f"--master-port={port}"]
            command += ["--trace", str(home / "ab"[number]), str(SCRIPT)]
            started.append(host.start(command))
        try:
            told = [each.communicate(timeout=150)[0] for each in started]
        finally:
            for each in started:
                each.kill()
    assert [each.returncode for each in started] == [0, 0], told
    return home


@pytest.fixture(scope="module")
def trace(folder):
    return Trace.load(folder / "a")


def test_the_offset_is_found_within_its_bound(trace):
    """The clock of nodeB is ahead by exactly 777 s, because the kernel was told so."""
    assert trace.problems == ()
    clocks = {process.header.host: process.clock for process in trace.processes}
    assert clocks["nodeA"].offset_ns == 0
    moved = clocks["nodeB"]
    for at_ns in (moved.first_ns, moved.last_ns):
        assert abs(moved.to_reference(at_ns) - at_ns + AHEAD_SECONDS * 10**9) <= moved.error_ns
    assert re.search(r"2 clocks: nodeB's is moved by -77[67]\.\d+ s, give or take [\d.,]+ us", str(explain(trace)))


def test_the_bound_is_smaller_than_the_way_of_a_message_and_bytes_are_explained(trace):
    bound = next(process.clock.error_ns for process in trace.processes if process.clock.error_ns)
    points = [match.ends for match in trace.matches if isinstance(match.ends[0], PointToPoint)]
    took = [recv.end_ns - send.start_ns for send, recv in points]
    assert len(took) == 50
    assert bound < statistics.median(took)
    assert min(took) > -bound, "no arrow runs backwards by more than the bound"
    assert "residue 0 B" in str(explain(trace))


def test_rank_0_has_all_files_folders_are_merged_and_who_is_missing_is_named(folder):
    theirs, ours = list(folder.glob("b/nodeB-*.jsonl")), list(folder.glob("a/nodeA-*.jsonl"))
    assert (len(theirs), len(ours)) == (2, 2)
    for path in theirs:
        assert (folder / "a" / path.name).read_bytes() == path.read_bytes()
    merged = Trace.load(folder / "b", folder / "a")
    assert (len(merged.processes), merged.problems) == (4, ())
    (problem,) = Trace.load(folder / "b").problems
    assert "those of ranks 0, 1 are missing" in problem
    for path in ours:
        assert f"{path} on host nodeA" in problem
