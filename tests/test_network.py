"""A chosen network: its words, its ports, its switch, and real ranks that feel it and leave nothing."""

import gc
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_run import dlearn_run, script
from waiting import all_end, comes_true

import dlearn
from dlearn import Cluster, Trace, analysis, draw
from dlearn.errors import RankError, SetupError
from dlearn.network import Link, Network
from dlearn.network.switch import Switch

pytestmark = pytest.mark.usefixtures("own_folder")

needs_network = pytest.mark.usefixtures("permitted")

RANGES = {"rate": (1e3, 1e11), "latency": (0, 10), "jitter": (0, 10), "loss": (0, 0.9), "queue": (2e3, 1e9)}
numbers = {name: st.floats(low, high) for name, (low, high) in RANGES.items()}


@given(st.builds(Link, **numbers))
def test_any_link_survives_its_words(link):
    again = Link.of(str(link))
    for name in RANGES:
        assert getattr(again, name) == pytest.approx(getattr(link, name), rel=1e-9)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link.of("fast"), "'fast' tells nothing of a network"),
        (lambda: Link.of("1 Gbit/s, 10 Mbit/s"), "tells the rate twice"),
        (lambda: Link(rate=0), "the rate of a link is 1 kbit/s to 100 Gbit/s, not 0 bit/s."),
        (lambda: Link(latency="1 Mbit/s"), "'1 Mbit/s' is no latency of a link; its units are ns, us, µs, ms, s."),
        (lambda: Network.racks([2, 0], inside="1 ms", between="1 ms"), "racks have a list of sizes"),
        (lambda: Cluster(3, network=Network.racks([2, 2], inside="1 ms", between="1 ms")), "is for 4 ranks"),
        (lambda: Cluster(2, network="1 ms").network.straggler(1, 0.5), "1 to 100 times as long, not 0.5"),
        (lambda: Cluster(2, network="1 ms", backend="mpi"), "ranks of this machine that speak TCP"),
        (lambda: Cluster(2, private=True, backend="nccl"), "private= is for ranks of this machine over gloo"),
        *((lambda given=given: Network.of(given), "") for given in (5, float("nan"), 10**400, [1] * 100_000)),
        *((lambda words=words: Network.of(words), "") for words in ("x" * 100_000, "1e999 bit/s", "1 ms, " * 20_000)),
    ],
)
def test_what_is_no_network_is_refused_in_a_short_sentence(make, sentence):
    with pytest.raises(SetupError) as refused:
        make()
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_way_has_the_latency_and_the_loss_of_its_links():
    racks = Network.racks([2, 2], inside="1 Gbit/s, 50 us, loss 10 %", between="10 Mbit/s, 1 ms").fitted(4)
    ports = racks.ports(1500)
    assert racks.path(0, 1) == ["from rank 0", "to rank 1"]
    assert racks.path(1, 2) == ["from rank 1", "from rack 0", "to rack 1", "to rank 2"]
    assert sum(ports[name].latency for name in racks.path(1, 2)) == pytest.approx(0.00105)
    kept = [1 - ports[name].loss for name in racks.path(0, 1)]
    assert kept[0] * kept[1] == pytest.approx(0.9)
    assert ports["from rank 0"].queue is None  # A sender waits for its own port.
    assert ports["from rack 0"].queue == 64 * 1500
    # 1 Gbit/s puts 125,000 B on the way in a ms, and the longest way takes 2.1 ms there and back.
    assert racks.window_bytes == 8 * 125_000 * 2.1


def carried(port: list[float | None], packets: list[bytes], counted: int) -> dict[str, list]:
    """What a switch with this one port from rank 0 to rank 1 says of it when it has counted so many packets."""
    control, notebook = socket.socketpair()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for end, _ in pairs:
        end.setblocking(False)
    for packet in packets:
        pairs[0][1].send(packet)
    switch = Switch(control, {"ports": [port], "routes": [[0, 1, [0]]]}, [end.fileno() for end, _ in pairs])
    thread = threading.Thread(target=switch.serve)
    thread.start()
    command = json.dumps({"ports": [port], "cut": [], "stragglers": []}).encode() + b"\n"
    told: dict[str, list] = {}
    with notebook.makefile("rb") as answers:

        def all_counted() -> bool:
            notebook.sendall(command)
            told.update(json.loads(answers.readline()))
            return told["pairs"][0][2] == counted

        assert comes_true(all_counted)
    notebook.sendall(command)  # It ends quietly where its notebook does while it answers.
    notebook.close()
    thread.join()
    for end in (control, *pairs[0], *pairs[1]):
        end.close()
    return told


def test_the_switch_carries_packets_of_any_length():
    """A rank may send anything by a raw socket: whole or cut, it is counted and no end of the switch."""
    tcp = struct.pack("!HHIIBBHHH", 5, 6, 7, 8, 5 << 4, 0, 0, 0, 0) + b"data"
    packet = bytes([0x4F, *[0] * 8, 6, *[0] * 9, 2]) + bytes(40) + tcp
    cuts = [packet[:length] for length in range(1, len(packet) + 1)]
    told = carried([0, 0, 0, 0, None], cuts, counted=len(packet) - 19)  # Shorter ones have no address.
    _, _, _, payload, again, dropped = told["pairs"][0]
    assert (payload, again, dropped) == (4, 6, 0)  # 1 to 4 bytes of "data", of which 0, 1, 2, 3 were sent before.


def test_a_queue_takes_as_many_bytes_as_were_asked_for():
    """At 10 B/s each packet of 100 B takes 10 s: one leaves at once, and of 250 B of queue two packets find room."""
    packet = bytes([0x45, *[0] * 18, 2]) + bytes(80)
    told = carried([10, 0, 0, 0, 250], [packet] * 6, counted=6)
    (port,) = told["ports"]
    assert (port["packets"], port["bytes"], port["dropped"]) == (2, 200, 4)
    assert told["pairs"][0][5] == 4


# Real ranks -----------------------------------------------------------------------------------------------------------


def all_reduce(numbers: int) -> tuple[float, float, float]:
    """When it began, when it ended, and what it gave."""
    total = torch.full((numbers,), float(dist.get_rank() + 1))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(total)
    return began, time.monotonic(), total[0].item()


def seconds(run) -> float:
    """From the last one's begin to the last one's end."""
    begins, ends, _ = zip(*run.results.values(), strict=True)
    return max(ends) - max(begins)


@needs_network
def test_ranks_feel_a_rate_a_latency_and_a_cut():
    with Cluster(["left", "right"], network="20 Mbit/s, 5 ms") as cluster:
        # 500 kB: each way 500 kB, 200 ms at 20 Mbit/s. No network of that rate is faster.
        run = cluster.run(all_reduce, 125_000, timeout=60)
        assert seconds(run) >= 0.200 + 0.010
        assert [value for _, _, value in run.results.values()] == [3, 3]
        assert "\nover 20 Mbit/s, 5 ms: " in str(run)
        port = next(port for port in run.network.ports if port.name == "from rank 0")
        assert port.rate < 22e6, "what was carried, not what was asked"
        assert sum(each.dropped + each.lost for each in run.network.ports) == 0
        cluster.network.slow("right", "100 Mbit/s")  # The other's cable is still as slow.
        assert seconds(cluster.run(all_reduce, 125_000, timeout=60)) >= 0.210

        cluster.network.cut("left", "right")
        with pytest.raises(RankError, match=r"not done after 1 s[^$]*link between ranks left and right is cut\."):
            cluster.run(all_reduce, 10, timeout=1)
        with pytest.raises(SetupError, match="has no rank 2; its ranks are"):
            cluster.network.slow(2, "1 Mbit/s")


def three_sums() -> None:
    for numbers in (1, 1001, 33_333):
        dist.all_reduce(torch.ones(numbers))


@needs_network
def test_the_switch_counts_the_bytes_that_the_kernel_counts():
    with Cluster(3, network="200 Mbit/s, 100 us") as cluster:
        before = cluster.run(three_sums, timeout=60).network
        run = cluster.run(three_sums, timeout=60)
    kernel = analysis.measured_traffic(run.trace)
    assert not kernel.not_measured
    for old, new in zip(before.pairs, run.network.pairs, strict=True):
        if 0 not in (new.source, new.target):  # With rank 0 they talk through the store, too.
            assert new.payload - old.payload == kernel.sizes[new.source, new.target] > 100_000 * (new.source == 2)
    found = analysis.reconcile(run.trace)
    assert found.exact, "prediction and kernel"
    for pair in found.whole.pairs:  # the third witness
        more = found.switched[pair.src, pair.dst][0] - pair.measured_bytes
        assert more == 0 if 0 not in (pair.src, pair.dst) else 0 <= more < 1000
    carried = sum(size for size, _ in found.switched.values())
    assert f"The switch carried {carried:,} B of TCP's payload, each byte once" in str(found)
    assert "Over a chosen network: 200 Mbit/s, 100 us." in [text.get_text() for text in draw.timeline(run.trace).texts]


def compute(least: float) -> tuple[float, float]:
    """Seconds that it took, and of a core."""
    began, computed = time.monotonic(), time.process_time()
    while time.process_time() - computed < least:
        torch.mm(torch.ones(300, 300), torch.ones(300, 300))
    return time.monotonic() - began, time.process_time() - computed


@needs_network
@pytest.mark.slow
def test_a_straggler_computes_slowly_until_it_is_healed():
    with Cluster(2, network="1 Gbit/s, 100 us") as cluster:
        cluster.network.straggler(rank=1, factor=3)
        run = cluster.run(compute, 0.3, timeout=60)
        took, computed = run.results[1]
        assert took > 2.8 * computed, "however busy the machine is: it is stopped for that time"
        (told,) = run.network.stragglers
        assert (told.rank, told.asked) == (1, 3)
        cluster.network.heal()
        assert cluster.run(compute, 0.1, timeout=60).network.stragglers == ()


def switches() -> set[int]:
    """This process's own."""
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(word.endswith("switch.py") for word in process.cmdline()):
                found.add(process.pid)
    return found


@needs_network
@pytest.mark.parametrize("network", [None, "1 Gbit/s, 100 us"])
def test_runs_and_those_that_fail_before_their_call_leave_nothing(network):
    Cluster(2).run(os.getpid)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Cluster(2, network=network).run(os.getpid)
        with pytest.raises(SetupError, match="hold is True, a function of a call, or a schedule"):
            Cluster(2, network=network, hold="yes").run(os.getpid)
        with pytest.raises(SetupError, match="cannot be sent to the ranks"):
            Cluster(2, network=network).run(len, (number for number in range(3)))
    assert comes_true(lambda: not switches())
    # One more for each of these 15 runs would be more than the ten of two ranks that are ready for the next run.
    assert comes_true(lambda: len(os.listdir("/proc/self/fd")) < opened + 15)


HOUSE = str(Path(dlearn.__file__).parent)
SLOW = "1 Gbit/s, 100 us"


def left() -> tuple[int, int]:
    gc.collect()
    return len(psutil.Process().children(recursive=True)), len(os.listdir("/proc/self/fd"))


def calls_of_a_start(**options: object) -> list[str]:
    """The functions of dlearn that are called from the start of a run until its ranks are followed."""
    names: list[str] = []

    def note(frame, event, _):
        name = frame.f_code.co_qualname
        begun = names or name == "Cluster.run"
        over = "RankPool._send_and_follow" in names or "PausedRun.of" in names
        if begun and not over and event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            names.append(name)

    sys.setprofile(note)
    try:
        Cluster(2, **options).run(os.getpid)
    finally:
        sys.setprofile(None)
    return [name for name in dict.fromkeys(names) if "<" not in name]


@pytest.mark.slow
@needs_network
@pytest.mark.parametrize(("options", "first"), [({"network": SLOW, "hold": True}, 0), ({}, 1)])
def test_an_interrupt_wherever_it_comes(options, first):
    """In every third of the functions."""
    Cluster(2).run(os.getpid)
    names = calls_of_a_start(**options)[first::3]
    there, opened = left()
    interrupted = []
    for name in names:

        def interrupt(frame, event, _, name=name):
            if event == "call" and frame.f_code.co_qualname == name:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            Cluster(2, **options).run(os.getpid)
        except KeyboardInterrupt:
            interrupted.append(name)
        finally:
            sys.setprofile(None)
        # Two ranks are made ready for the next run, which need as many as those that were ready before.
        assert comes_true(lambda: left()[0] <= there and left()[1] <= opened), name
    assert len(interrupted) > 0.7 * len(names), "what is called by the first run only is no more than a few"


def for_ever(begun: Path = Path(os.devnull)) -> None:
    while True:
        dist.all_reduce(torch.ones(1000))
        begun.touch()


@needs_network
def test_a_killed_switch_ends_the_run_in_a_sentence_and_leaves_nothing(tmp_path):
    cluster, begun = Cluster(2, network="1 Gbit/s, 1 ms"), tmp_path / "begun"

    def kill_the_switch() -> None:
        assert comes_true(begun.exists)
        for pid in switches():
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill_the_switch).start()
    with pytest.raises(RankError, match="lost its network: the switch has ended"):
        cluster.run(for_ever, begun, timeout=100)
    assert comes_true(lambda: not switches())


KILLED = """
import os, threading, time, psutil
from dlearn import Cluster
from test_network import for_ever

def tell():
    while len(psutil.Process().children(recursive=True)) < 5:  # Tracker, fork server, two ranks, the switch.
        time.sleep(0.05)
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)

threading.Thread(target=tell).start()
cluster = Cluster(2, network="1 Gbit/s, 1 ms")
cluster.network.straggler(rank=1, factor=100)
cluster.run(for_ever)
"""


@needs_network
@pytest.mark.slow
def test_a_killed_notebook_leaves_nothing(tmp_path):
    """Not even a rank that is stopped as a straggler while its notebook and the switch are killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as notebook:
        pids = set(map(int, notebook.stdout.readline().split()))
        assert len(pids) >= 5
        started = [psutil.Process(pid) for pid in pids]
        assert comes_true(lambda: psutil.STATUS_STOPPED in [each.status() for each in started])
        (switch,) = (each for each in started if any(w.endswith("switch.py") for w in each.cmdline()))
        switch.kill()
        notebook.kill()
    assert all_end(pids)


FORBIDDEN = """
import ctypes, os
from pathlib import Path

uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")

from dlearn import Cluster, DlearnError  # Only now, because that starts the fork server.
for options in ({"network": "1 ms"}, {"private": True}):
    try:
        Cluster(2, **options).run(print)
    except DlearnError as error:
        print(">", error, flush=True)
run = Cluster(["a", "b"], rpc=True, record=False).run(os.getpid)
print(">", run.private, run.exposed)
"""


@needs_network
def test_where_namespaces_are_not_permitted_a_sentence_says_so():
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=100)
    network, private, exposed = re.findall("^> (.*)$", done.stdout, re.MULTILINE)
    reason = "user namespaces are not permitted here (their limit is 0); sysctl user.max_user_namespaces sets it"
    assert network.startswith(f"ranks cannot have a network of their own on this machine: {reason}")
    assert private.startswith("these ranks cannot be private on this machine: user namespaces are not permitted here")
    assert exposed.startswith("False other users of this machine could reach its RPC workers: user namespaces are not")


SCRIPT = """\
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(250_000)
dist.barrier()
begin = time.perf_counter()
dist.all_reduce(numbers)
os.write(1, f"{numbers[0].item()} {time.perf_counter() - begin}\\n".encode())  # a line of one rank in one piece
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1 else 0)
"""


@needs_network
@pytest.mark.slow
def test_ranks_of_torchrun_find_their_network_when_they_start_again_too(tmp_path):
    """A sum of 1 MB over 2 ranks and 20 Mbit/s: 0.4 s, whatever the machine does beside."""
    network = ["--network", "20 Mbit/s, 1 ms", "--trace", "t", "--max-restarts", "1", "--nproc-per-node=2"]
    done = dlearn_run(tmp_path, *network, script(tmp_path, SCRIPT))
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in told] == ["2.0"] * 4
    assert max(float(seconds) for _, seconds in told[2:]) >= 0.4
    assert "Over a chosen network: 20 Mbit/s, 1 ms." in done.stderr
    for attempt in (0, 1):
        trace = Trace.load(tmp_path / "t", attempt=attempt)
        assert all(process.network.asked == "20 Mbit/s, 1 ms" for process in trace.processes)
        assert all(sum(size for size, _ in process.network.sent.values()) > 10**6 for process in trace.processes)
    assert set(analysis.reconcile(Trace.load(tmp_path / "t")).switched) == {(0, 1), (1, 0)}
