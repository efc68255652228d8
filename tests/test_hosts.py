"""A job on two hosts, by real network and time namespaces: the kernel's clock of one is ahead by `AHEAD_SECONDS`."""

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import free_port

from dlearn import Trace, explain
from dlearn.events.event import PointToPoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SCRIPT = Path(__file__).parent / "scripts" / "ddp.py"
AHEAD_SECONDS = 777
ADDRESSES = {"nodeA": "10.77.0.1", "nodeB": "10.77.0.2"}
_CLOCK = ["--time", "--monotonic", str(AHEAD_SECONDS), "--boottime", str(AHEAD_SECONDS)]


def skip_where_there_can_be_none() -> None:
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {' and '.join(missing)} here")
    for command in (["ip", "netns", "list"], ["unshare", "--net", "--uts", *_CLOCK, "--fork", "true"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode:
            pytest.skip(f"namespaces are not permitted here: {done.stderr.strip() or ' '.join(command)}")


@dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    interface: str

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Run a command on this host."""
        clock = _CLOCK if self.name == "nodeB" else []
        there = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *clock, "--fork", "--kill-child"]
        set_name = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*there, *set_name, *command], env=environment, text=True, **pipes)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    own = os.getpid()
    hosts = tuple(Host(name, f"dlearn{own}{name[-1]}", f"v{own}{name[-1]}") for name in ADDRESSES)
    a, b = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        cable = ["type", "veth", "peer", "name", b.interface, "netns", b.namespace]
        _ip("link", "add", a.interface, "netns", a.namespace, *cable)
        for host in hosts:
            _ip("-n", host.namespace, "addr", "add", f"{ADDRESSES[host.name]}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield a, b
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a job by `dlearn run` on two hosts with two ranks each: a and b hold what each host has recorded."""
    skip_where_there_can_be_none()
    home = tmp_path_factory.mktemp("hosts")
    port = free_port()
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
        # How it ended its launcher adds later, on its own host.
        assert path.read_bytes().startswith((folder / "a" / path.name).read_bytes())
    merged = Trace.load(folder / "b", folder / "a")
    assert (len(merged.processes), merged.problems) == (4, ())
    (problem,) = Trace.load(folder / "b").problems
    assert "those of ranks 0, 1 are missing" in problem
    for path in ours:
        assert f"{path} on host nodeA" in problem
