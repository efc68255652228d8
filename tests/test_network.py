"""A chosen network: its words, its ports, and real ranks that feel it."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import comes_true

from dlearn import Cluster, Trace, analysis, draw
from dlearn.analysis.telling.words import network_sentences
from dlearn.doctor import tried
from dlearn.errors import RankError, SetupError
from dlearn.network import Link, Network
from dlearn.network.link import RANGES, parse
from dlearn.network.namespace import refusal
from dlearn.network.switch import Switch

not_here = refusal()
needs_network = pytest.mark.skipif(bool(not_here), reason=not_here or "permitted")


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("1 Gbit/s, 100 us", Link(1e9, 100e-6)),
        ("100us,1Gbit/s", Link(1e9, 100e-6)),
        ("rate 12.5 MB/s", Link(100e6)),
        ("jitter 1 ms, loss 1 %, queue 64 kB", Link(jitter=0.001, loss=0.01, queue=64_000)),
        ("1e2 Mbit/s, latency 0.5 ms", Link(rate="100 Mbit/s", latency="500 us")),
    ],
)
def test_words_tell_a_link(words, link):
    assert Link.of(words) == link


def test_a_link_tells_itself_in_words_that_make_it_again():
    link = Link(rate=2.5e6, latency=0.02, jitter=0.001, loss=0.05, queue=64_000)
    assert str(link) == "2.5 Mbit/s, 20 ms, jitter 1 ms, loss 5 %, queue 64 kB"
    assert Link.of(str(link)) == link


numbers = {name: st.floats(low, high) for name, (low, high) in RANGES.items()}


@given(st.builds(Link, **numbers))
def test_any_link_survives_its_words(link):
    again = Link.of(str(link))
    for name in RANGES:
        assert getattr(again, name) == pytest.approx(getattr(link, name), rel=1e-9)


@given(st.text(max_size=40) | st.lists(st.sampled_from(["1", "Mbit/s", ",", " ", "ms", "loss", "%", "-"])).map("".join))
def test_any_other_words_are_refused_in_one_sentence(words):
    told = {}
    sentence = "told."
    try:
        told = parse(words)
    except SetupError as error:
        sentence = str(error)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert all(RANGES[name][0] <= value <= RANGES[name][1] for name, value in told.items())


def slowed(rank: int, factor: object) -> None:
    Cluster(2, network="1 ms").network.straggler(rank, factor)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link.of("fast"), "'fast' tells nothing of a network"),
        (lambda: Link.of("1 Gbit/s, 10 Mbit/s"), "tells the rate twice"),
        (lambda: Link.of("64 kB"), "what of the network is '64 kB'?"),
        (lambda: Link.of("1 parsec/s"), "what of the network"),
        (lambda: Link(rate=0), "the rate of a link is 1 kbit/s to 100 Gbit/s, not 0 bit/s."),
        (lambda: Link(loss=1), "the loss of a link is 0 % to 90 %, not 100 %."),
        (lambda: Link(latency="1 Mbit/s"), "'1 Mbit/s' is no latency of a link; its units are ns, us, µs, ms, s."),
        (lambda: Network.star("1 Gbit/s"), "a star has a list of cables"),
        (lambda: Network.racks([2, 0], inside="1 ms", between="1 ms"), "racks have a list of sizes"),
        (lambda: Network.links({(0, 0): "1 ms"}, others="1 ms"), "a single link is between two ranks, not (0, 0)"),
        (lambda: Network.links({0: "1 ms"}, others="1 ms"), "a single link is between two ranks, not 0"),
        (lambda: Cluster(2, network=Network.links({(0, "ps"): "1 ms"}, others="1 ms")), "no rank 'ps'; its ranks are"),
        (lambda: Network.of(5), "a network is told in words"),
        (lambda: Cluster(3, network=Network.racks([2, 2], inside="1 ms", between="1 ms")), "is for 4 ranks"),
        (lambda: slowed(2, 3), "has no rank 2"),
        (lambda: slowed(1, 0.5), "1 to 100 times as long, not 0.5"),
        (lambda: slowed(1, "3"), "1 to 100 times as long, not '3'"),
        (lambda: Cluster(2, network="1 ms", backend="mpi"), "ranks of this machine that speak TCP"),
    ],
)
def test_what_is_no_network_is_refused(make, sentence):
    with pytest.raises(SetupError) as refused:
        make()
    assert sentence in str(refused.value)


LONG = ["x" * 100_000, "1e99999999999999999999 bit/s", "1e999 bit/s", "9" * 100_000 + " ms", "1 ms, " * 20_000]


@pytest.mark.parametrize("words", [*LONG, 10**400, -(10**400), float("nan"), [1] * 100_000])
@pytest.mark.parametrize("make", [Network.of, Link.of, lambda words: Link(rate=words), lambda words: Link(loss=words)])
def test_what_is_too_long_is_refused_in_a_short_sentence(words, make):
    with pytest.raises(SetupError) as refused:
        make(words)
    assert len(str(refused.value)) < 400


def test_the_switch_carries_packets_of_any_length():
    """A rank may send anything by a raw socket: whole or cut, it is counted and no end of the switch."""
    tcp = struct.pack("!HHIIBBHHH", 5, 6, 7, 8, 5 << 4, 0, 0, 0, 0) + b"data"
    packet = bytes([0x4F, *[0] * 8, 6, *[0] * 9, 2]) + bytes(40) + tcp
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    plan = {"ports": [[0, 0, 0, 0, None]], "ways": [[0, 1, [0]]]}
    carrier = Switch(ours, plan, [ours.fileno(), os.open(os.devnull, os.O_WRONLY)])
    with ours, theirs:
        for length in range(1, len(packet) + 1):
            theirs.send(packet[:length])
            carrier._read(ours.fileno(), 0)
    os.close(carrier.tuns[1])
    way = carrier.ways[0, 1]
    assert way.packets == len(packet) - 19  # Shorter ones have no address.
    assert (way.payload, way.again) == (4, 6)  # 1, 2, 3 and 4 bytes of "data", of which 0, 1, 2, 3 were sent before.


def test_a_switch_whose_notebook_ends_while_it_answers_ends_quietly():
    ours, theirs = socket.socketpair()
    carrier = Switch(ours, {"ports": [], "ways": []}, [])
    with ours:
        theirs.sendall(b'{"ports": [], "cut": [], "paused": false, "stragglers": []}\n')
        theirs.close()
        assert not carrier._obey()


def test_a_way_has_the_latency_and_the_loss_of_its_links():
    racks = Network.racks([2, 2], inside="1 Gbit/s, 50 us, loss 10 %", between="10 Mbit/s, 1 ms").fitted(range(4))
    ports = racks.ports(1500)
    assert racks.way(0, 1) == ["from rank 0", "to rank 1"]
    assert racks.way(1, 2) == ["from rank 1", "from rack 0", "to rack 1", "to rank 2"]
    assert sum(ports[name].latency for name in racks.way(1, 2)) == pytest.approx(0.00105)
    kept = [1 - ports[name].loss for name in racks.way(0, 1)]
    assert kept[0] * kept[1] == pytest.approx(0.9)
    assert ports["from rank 0"].queue is None  # A sender waits for its own port.
    assert ports["from rack 0"].queue == 64 * 1500
    # 1 Gbit/s puts 125,000 B on the way in a ms, and the longest way takes 2.1 ms there and back.
    assert racks.window_bytes == 8 * 125_000 * 2.1


def test_a_single_link_is_a_way_of_its_own_between_two_named_ranks():
    one = Network.links({("c", "a"): "10 Mbit/s, 5 ms"}, others="1 Gbit/s, 100 us").fitted(["a", "b", "c"])
    ports = one.ports(one.packet_bytes)
    assert one.way(0, 2) == ["rank 0 to rank 2"]
    assert one.way(2, 0) == ["rank 2 to rank 0"]
    assert one.way(2, 1) == ["from rank 2", "to rank 1"]
    assert ports["rank 0 to rank 2"] == ports["rank 2 to rank 0"] == Link(10e6, 0.005)
    assert one.packet_bytes == 3000, "as the slowest needs it"
    assert str(one) == "1 Gbit/s, 100 us; between ranks 0 and 2 10 Mbit/s, 5 ms"


# Real ranks -----------------------------------------------------------------------------------------------------------


def all_reduce(numbers: int) -> tuple[float, float, float]:
    """When it began, when it ended, and what it gave."""
    import time

    import torch
    import torch.distributed as dist

    total = torch.full((numbers,), float(dist.get_rank() + 1))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(total)
    return began, time.monotonic(), total[0].item()


def duration(results) -> float:
    """From the last one's begin to the last one's end, in seconds."""
    return max(end for _, end, _ in results.values()) - max(begin for begin, _, _ in results.values())


def assert_takes(least: float, most: float, cluster, numbers: int) -> None:
    """Until one does: a busy machine makes some of them longer, and none shorter than the network lets it be."""
    deadline = time.monotonic() + 60
    while (took := duration(cluster.run(all_reduce, numbers, timeout=60).results)) >= most:
        assert time.monotonic() < deadline
    assert took >= least


@needs_network
def test_an_all_reduce_takes_latency_and_bytes_over_rate():
    with Cluster(2, network="20 Mbit/s, 5 ms") as cluster:
        # 500 kB: each way 500 kB, 200 ms at 20 Mbit/s. No network of that rate is faster. How near it comes to it,
        # benchmarks/network.py says.
        assert_takes(0.200 + 0.010, 0.4, cluster, 125_000)
        run = cluster.run(all_reduce, 125_000, timeout=60)
        assert [value for _, _, value in run.results.values()] == [3, 3]
        assert "\nover 20 Mbit/s, 5 ms: " in str(run)
        port = next(port for port in run.network.ports if port.name == "from rank 0")
        assert 10e6 < port.rate < 22e6, "what was carried, not what was asked"
        assert port.asked.queue is None
        assert sum(each.dropped + each.lost for each in run.network.ports) == 0

        cluster.network.slow(1, "100 Mbit/s")  # The other's cable is still as slow.
        assert duration(cluster.run(all_reduce, 125_000, timeout=60).results) >= 0.210
        cluster.network.slow(0, "100 Mbit/s")  # 40 ms.
        assert_takes(0.050, 0.2, cluster, 125_000)  # Else it is still slow.


def three_sums() -> None:
    import torch
    import torch.distributed as dist

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
    assert found.third_witness.endswith("more than these connections, all of it to and from rank 0, where the store is")
    loaded = Trace.load(run.folder / "trace")
    assert network_sentences(loaded) == ["Over a chosen network: 200 Mbit/s, 100 us."]
    assert not loaded.problems
    assert "Over a chosen network: 200 Mbit/s, 100 us." in [text.get_text() for text in draw.timeline(loaded).texts]
    assert not analysis.reconcile(loaded.where(rank=[1, 2])).switched, "of a part the switch knows nothing"


@needs_network
def test_what_is_paused_goes_on_and_what_is_cut_is_said():
    with Cluster(["left", "right"], network="1 Gbit/s, 100 us") as cluster:
        cluster.run(all_reduce, 10, timeout=60)
        cluster.network.pause()
        threading.Timer(0.5, cluster.network.heal).start()
        began = time.monotonic()
        cluster.run(all_reduce, 10, timeout=60)
        assert time.monotonic() - began >= 0.5
        cluster.network.cut("left", "right")
        with pytest.raises(RankError) as error:
            cluster.run(all_reduce, 10, timeout=1)
        assert "not done after 1 s" in str(error.value)
        assert "The way between ranks left and right is cut." in str(error.value)
        with pytest.raises(SetupError, match="has no rank 2; its ranks are"):
            cluster.network.slow(2, "1 Mbit/s")


def compute(seconds: float) -> tuple[float, float]:
    """Seconds that it took, and of a core."""
    import time

    import torch

    numbers = torch.randn(300, 300)
    torch.mm(numbers, numbers)
    began, computed = time.monotonic(), time.process_time()
    while time.process_time() - computed < seconds:
        torch.mm(numbers, numbers)
    return time.monotonic() - began, time.process_time() - computed


@needs_network
@pytest.mark.slow
@pytest.mark.alone
def test_a_straggler_computes_as_slowly_as_asked_and_nobody_else_does():
    with Cluster(2, network="1 Gbit/s, 100 us") as cluster:
        cluster.network.straggler(rank=1, factor=3)
        run = cluster.run(compute, 0.3, timeout=60)
        took, computed = run.results[1]
        assert took > 2.8 * computed, "however busy the machine is: it is stopped for that time"
        (told,) = run.network.stragglers
        assert (told.rank, told.asked) == (1, 3)
        assert told.computed >= 0.3
        assert told.reached == pytest.approx(3, rel=0.1)
        assert "rank 1's computing was to take 3 times as long, and took" in str(run.network)
        cluster.network.heal()
        assert cluster.run(compute, 0.1, timeout=60).network.stragglers == ()


@needs_network
@pytest.mark.slow
@pytest.mark.alone
def test_a_straggler_that_only_waits_is_not_stopped():
    with Cluster(2, network="1 Gbit/s, 100 us") as cluster:
        cluster.run(nap, timeout=60)  # To load what there is to load.
        cluster.network.straggler(rank=1, factor=5)
        (told,) = cluster.run(nap, timeout=60).network.stragglers
    assert told.computed < 0.5, "else 1 s would be 5"


def nap() -> None:
    import time

    time.sleep(1)


@needs_network
@pytest.mark.slow
def test_a_straggler_that_does_not_end_is_told_as_one_that_computes():
    with Cluster(2, network="1 Gbit/s, 100 us") as cluster:
        cluster.run(nap, timeout=60)  # To load what there is to load.
        cluster.network.straggler(rank=1, factor=5)
        with pytest.raises(RankError) as error:
            cluster.run({1: partial(compute, 1000)}, timeout=10)
    assert "is stopped" not in str(error.value)
    assert "rank 1 is at tests/test_network.py:" in str(error.value)


# Nothing is left ------------------------------------------------------------------------------------------------------


def switches() -> set[int]:
    """This process's own."""
    found = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(word.endswith("switch.py") for word in process.cmdline()):
                found.add(process.pid)
    return found


def of_networks() -> set[int]:
    """Descendants of this process that are a switch, or have another network than it has."""
    mine = os.readlink("/proc/self/ns/net")
    found = switches()
    for process in psutil.Process().children(recursive=True):
        with suppress(FileNotFoundError, PermissionError):  # The second where it ends at this moment.
            if os.readlink(f"/proc/{process.pid}/ns/net") != mine:
                found.add(process.pid)
    return found


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
    assert comes_true(lambda: not of_networks())


def for_ever(begun: Path = Path(os.devnull)) -> None:
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.ones(1000))
        begun.touch()


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
cluster.network.straggler(rank=1, factor=FACTOR)
cluster.run(for_ever)
"""


def is_stopped(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


@needs_network
@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 100])
def test_a_killed_notebook_leaves_nothing(tmp_path, factor):
    """Not even a rank that is stopped as a straggler while its notebook and the switch are killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    script = KILLED.replace("FACTOR", str(factor))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=tmp_path, env=environment, text=True
    ) as notebook:
        pids = set(map(int, notebook.stdout.readline().split()))
        assert len(pids) >= 5
        if factor > 1:
            assert comes_true(lambda: any(map(is_stopped, pids)))
            (switch,) = (pid for pid in pids if any(w.endswith("switch.py") for w in psutil.Process(pid).cmdline()))
            os.kill(switch, signal.SIGKILL)
        notebook.kill()
    assert comes_true(lambda: not (pids & set(psutil.pids())))


@needs_network
@pytest.mark.slow
def test_lost_packets_cost_time_and_no_bit():
    plain = Cluster(3).run(random_sums, timeout=60)
    lossy = Cluster(3, network="100 Mbit/s, 1 ms, loss 5 %").run(random_sums, timeout=250)
    assert lossy.results == plain.results
    assert sum(pair.again for pair in lossy.network.pairs) > 0
    assert sum(port.lost for port in lossy.network.ports) > 0


def random_sums() -> bytes:
    import torch
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    numbers = torch.randn(5000)
    dist.all_reduce(numbers)
    return numbers.numpy().tobytes()


@needs_network
@pytest.mark.slow
def test_where_several_send_to_one_its_queue_overflows():
    network = Network(rate="50 Mbit/s", latency="1 ms", queue="20 kB")
    run = Cluster(4, network=network).run(gather, timeout=120)
    dropped = {port.name: port.dropped for port in run.network.ports}
    assert dropped["to rank 0"] > 0
    assert dropped["to rank 1"] + dropped["to rank 2"] + dropped["from rank 1"] == 0
    assert run.results[0] == [0, 1, 2, 3]


def gather() -> list[int]:
    """Five times: on a busy machine the ranks may come to one of them one after the other."""
    import torch
    import torch.distributed as dist

    mine = torch.full((100_000,), dist.get_rank(), dtype=torch.int32)
    into = [torch.empty_like(mine) for _ in range(4)] if dist.get_rank() == 0 else None
    for _ in range(5):
        dist.barrier()
        dist.gather(mine, into)
    return [int(each[-1]) for each in into or ()]


@needs_network
@pytest.mark.slow
@pytest.mark.alone
def test_the_cable_between_racks_is_the_slow_one():
    racks = Network.racks([1, 2], inside="1 Gbit/s, 50 us", between="20 Mbit/s, 1 ms")
    with Cluster(3, network=racks, rpc=True) as cluster:
        # 150 kB, 2 * 2/3 of that in each direction of the cable between: 80 ms.
        assert_takes(0.080, 0.3, cluster, 37_500)
        run = cluster.run(all_reduce, 37_500, timeout=60)
    port = next(port for port in run.network.ports if port.name == "from rack 0")
    assert 10e6 < port.rate < 22e6


@needs_network
@pytest.mark.slow
@pytest.mark.alone
def test_a_single_link_is_slow_for_its_two_ranks_only():
    slow = Network.links({(0, 2): "10 Mbit/s, 5 ms"}, others="1 Gbit/s, 100 us")
    run = Cluster(3, network=slow).run(to_each_other, timeout=60)
    near, far = (median(run.results[0][rank]) for rank in (1, 2))
    assert far >= 0.200 + 0.010  # 250 kB at 10 Mbit/s, and gloo asks before it sends.
    assert near < far / 2
    carried = {port.name: port.rate for port in run.network.ports}
    assert 5e6 < carried["rank 0 to rank 2"] < 11e6


def to_each_other() -> dict[int, list[float]]:
    """Seconds of each of three sends of 250 kB from rank 0 to each other rank, until it says that it came."""
    import time

    import torch
    import torch.distributed as dist

    taken, data, rank = {}, torch.ones(62_500), dist.get_rank()
    for other in (1, 2):
        for _ in range(3):
            began = time.monotonic()
            if rank == 0:
                dist.send(data, other)
                dist.recv(data[:1], other)
            elif rank == other:
                dist.recv(data, 0)
                dist.send(data[:1], 0)
            taken.setdefault(other, []).append(time.monotonic() - began)
    return taken


# Where it is not permitted --------------------------------------------------------------------------------------------

FORBIDDEN = """
import ctypes, os
from pathlib import Path

uid, gid = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")

from dlearn import Cluster  # Only now, because that starts the fork server.
from dlearn.doctor import tried
from dlearn.errors import SetupError

print(tried("network"))
try:
    Cluster(2, network="1 ms").run(print)
except SetupError as error:
    print(error)
"""


@needs_network
def test_where_namespaces_are_not_permitted_a_sentence_says_so(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert done.stderr == ""
    doctor, remedy, cluster = done.stdout.splitlines()
    reason = "user namespaces are not permitted here (their limit is 0); sysctl user.max_user_namespaces sets it"
    assert doctor.startswith("network")
    assert reason in doctor
    assert "all else works" in remedy
    assert cluster.startswith(f"ranks cannot have a network of their own on this machine: {reason}")


@needs_network
def test_doctor_says_that_it_is_permitted():
    assert tried("network").verdict == "ok"


# Scripts -------------------------------------------------------------------------------------------------------------

SCRIPT = """\
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(250_000)
dist.barrier()
begin = time.perf_counter()
dist.all_reduce(numbers)
again = "0" == os.environ["TORCHELASTIC_RESTART_COUNT"] and "again" in sys.argv
os.write(1, f"{numbers[0].item()} {time.perf_counter() - begin}\\n".encode())  # a line of one rank in one piece
sys.exit(3 if again and dist.get_rank() == 1 else 0)
"""


def dlearn_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-c", "import sys; from dlearn.cli import main; sys.exit(main())", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@needs_network
@pytest.mark.slow
def test_ranks_of_torchrun_find_their_network_and_the_trace_says_so(tmp_path):
    """A sum of 1 MB over 2 ranks and 20 Mbit/s: 0.4 s, whatever the machine does beside."""
    network = ("--network", "20 Mbit/s, 1 ms", "--trace", "t")
    done = dlearn_run(tmp_path, *network, "--nproc-per-node=2", "train.py")
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in told] == ["2.0", "2.0"]
    assert max(float(seconds) for _, seconds in told) >= 0.4
    assert "dlearn: over 20 Mbit/s, 1 ms: 2.0" in done.stderr
    found = analysis.reconcile(Trace.load(tmp_path / "t"))
    assert found.exact
    assert set(found.switched) == {(0, 1), (1, 0)}
    assert "Over a chosen network: 20 Mbit/s, 1 ms." in done.stderr


@needs_network
@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_have_a_network_again(tmp_path):
    network = ("--network", "1 Gbit/s, 100 us", "--trace", "t", "--max-restarts", "1")
    done = dlearn_run(tmp_path, *network, "--nproc-per-node=2", "train.py", "again")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0 ") == 4
    for attempt in (0, 1):
        trace = Trace.load(tmp_path / "t", attempt=attempt)
        assert all(process.network.asked == "1 Gbit/s, 100 us" for process in trace.processes)
        assert all(sum(size for size, _ in process.network.sent.values()) > 10**6 for process in trace.processes)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--network", "fast", "--nproc-per-node=2", "train.py"), "'fast' tells nothing of a network"),
        (("--network", "1 Gbit/s", "train.py"), "is for ranks that torchrun starts: say --nproc-per-node, too"),
        (("--network", "1 Gbit/s", "--nnodes=2", "--nproc-per-node=2", "train.py"), "is for the ranks of one machine"),
    ],
)
def test_what_dlearn_run_cannot_put_on_a_network_is_a_sentence(tmp_path, arguments, sentence):
    done = dlearn_run(tmp_path, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


@needs_network
def test_a_rank_that_finds_no_seat_ends_and_does_not_run_on_another_network(tmp_path):
    """Its Python would go on after a fault in sitecustomize."""
    site = Path(__file__).parent.parent / "dlearn" / "scripts" / "site"
    order = json.dumps({"launcher": os.getpid()})
    environment = {**os.environ, "PYTHONPATH": str(site), "RANK": "0", "DLEARN_RUN": order}
    environment["DLEARN_RUN_NETWORK"] = str(tmp_path / "nobody")
    done = subprocess.run(
        [sys.executable, "-c", "print('it runs')"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "dlearn: this rank found no network: FileNotFoundError: [Errno 2] No such file or directory\n"
