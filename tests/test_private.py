"""Workers that nobody else on this machine reaches: tried as another user would."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from dlearn import Cluster, Trace, analysis
from dlearn.cluster import enclosed_rank, strangers
from dlearn.cluster.enclosed_rank import enclose
from dlearn.doctor import tried
from dlearn.errors import RankError, SetupError
from dlearn.network.namespace import NotPermitted, refusal

not_here = refusal("unshare")
needs_namespaces = pytest.mark.skipif(bool(not_here), reason=not_here or "permitted")
LISTENS = "0A"


def network():
    return os.readlink("/proc/self/ns/net")


def where():
    """This worker's network, and the ports on which somebody listens there."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    ports = {int(line.split()[1].partition(":")[2], 16) for line in lines if line.split()[3] == LISTENS}
    if rpc.get_worker_info().name == "a":
        assert rpc.rpc_sync("b", torch.add, (torch.ones(2), 1)).sum() == 4
    return network(), ports


@needs_namespaces
def test_workers_share_a_network_that_nobody_else_is_in():
    run = Cluster(["a", "b"], rpc=True).run(where, timeout=60)
    (one, ports), (other, _) = run.results["a"], run.results["b"]
    assert one == other != network()
    assert len(ports) >= 3  # The store's, and each worker's.
    assert run.private
    assert run.exposed == ""
    assert analysis.reconcile(run.trace).whole.measured_bytes


def summed():
    total = torch.ones(1000)
    dist.all_reduce(total)
    return network(), total.sum().item()


@needs_namespaces
@pytest.mark.parametrize("backend", ["gloo", "dlearn_ring"])
def test_ranks_without_rpc_can_be_private_too_and_are_counted_to_the_byte(backend):
    with Cluster(3, backend=backend, private=True) as cluster:
        run = cluster.run(summed, timeout=60)
    networks, sums = zip(*run.results.values(), strict=True)
    assert len(set(networks)) == 1
    assert networks[0] != network()
    assert sums == (3000,) * 3
    assert analysis.reconcile(run.trace).exact


def wait_for_stranger(folder):
    """Be worker `a`, and wait until the stranger has done what it can."""
    if rpc.get_worker_info().name == "a":
        Path(folder, "port.new").write_text(os.environ["MASTER_PORT"])
        Path(folder, "port.new").rename(Path(folder, "port"))
        end = time.monotonic() + 60
        while not Path(folder, "did").exists() and time.monotonic() < end:
            time.sleep(0.05)
    return os.getpid(), os.getuid()


@contextmanager
def stranger(folder):
    """Another user who comes when the folder has a port in it, and stays until the end."""
    command = [sys.executable, Path(__file__).with_name("stranger.py"), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield
            process.communicate(b"!", timeout=60)
        finally:
            process.kill()


@needs_namespaces
@pytest.mark.slow
def test_another_user_does_not_find_private_workers(tmp_path):
    with stranger(tmp_path):
        run = Cluster(["a", "b"], rpc=True).run(wait_for_stranger, str(tmp_path), timeout=120)
    assert (tmp_path / "did").read_text().endswith("cannot reach the store")
    assert run.private
    assert run.exposed == ""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_another_user_has_joined_is_ended_with_a_sentence(tmp_path):
    with stranger(tmp_path), pytest.raises(SetupError, match="user 65534 of this machine has connected") as error:
        Cluster(["a", "b"], rpc=True, private=False).run(wait_for_stranger, str(tmp_path), timeout=120)
    folder = Path(re.search(r"recorded is in (\S+)\. Where", str(error.value))[1])
    assert Trace.load(folder).ranks == (0, 1)


def count_connections(_):
    return len(psutil.Process().net_connections("tcp"))


def test_workers_that_others_could_reach_say_so():
    run = Cluster(["a", "b"], rpc=True, private=False).run(count_connections, 0, timeout=60)
    assert min(run.results.values()) > 0  # Of one's own user nobody says anything.
    assert run.exposed == "other users of this machine could reach its RPC workers"
    assert run.exposed in str(run)


def refuse(*_):
    raise NotPermitted("user namespaces are not permitted here (said by a test)")


def test_where_it_is_not_permitted_the_run_says_so_or_does_not_begin(monkeypatch):
    monkeypatch.setattr(enclosed_rank, "start_ranks", refuse)
    run = Cluster(["a", "b"], rpc=True).run(where, timeout=60)
    assert run.results["a"][0] == network()
    assert not run.private
    assert run.exposed == (
        "other users of this machine could reach its RPC workers:"
        " user namespaces are not permitted here (said by a test)"
    )
    with pytest.raises(SetupError, match="cannot be private on this machine: user namespaces are not permitted here"):
        Cluster(2, private=True).run(network)


def call_home():
    with socket.create_connection(("192.0.2.1", 80), timeout=5):
        pass


@needs_namespaces
def test_ranks_that_look_for_a_way_out_are_told_how_to_get_one():
    with pytest.raises(RankError, match=r"Network is unreachable[^$]*private=False\) gives them a way out"):
        Cluster(2, rpc=True).run(call_home, timeout=60)


def test_a_network_of_ranks_elsewhere_cannot_be_private():
    with pytest.raises(SetupError, match="private= is for ranks of this machine over gloo, dlearn_ring or RPC"):
        Cluster(2, backend="nccl", private=True)


def test_a_first_rank_that_has_ended_is_not_followed():
    with pytest.raises(NotPermitted, match="the first rank's network cannot be entered"):
        enclose(2**22 + 1)  # No pid is so large.


@needs_namespaces
def test_doctor_tells_that_workers_are_kept_apart():
    assert tried("private").verdict == "ok"


def test_doctor_tells_why_they_cannot_be(monkeypatch):
    monkeypatch.setattr("dlearn.network.namespace.refusal", lambda how: f"no {how} here")
    found = tried("private")
    assert found.verdict == "warning"
    assert found.found == "other users of this machine can reach RPC workers: no unshare here"


def test_a_connection_of_another_user_to_such_a_port_of_another_machine_is_none_to_ours(tmp_path, monkeypatch):
    head = "sl local rem st tx tr retrnsmt uid timeout inode\n"
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port, inode = ours.getsockname()[1], os.fstat(ours.fileno()).st_ino
        # Another user's connection with another machine, where a port has the same number.
        lines = [f"0: 0100007F:{port:04X} 00000000:0000 0A 0 0 0 {os.getuid()} 0 {inode}"]
        lines += [f"1: 0500000A:0016 0900000A:{port:04X} 01 0 0 0 4321 0 77"]
        (tmp_path / "tcp").write_text(head + "\n".join(lines))
        monkeypatch.setattr(strangers, "TABLES", (tmp_path / "tcp",))
        assert strangers.users_connected_to([os.getpid()]) == set()
        lines += [f"2: 0100007F:9999 0100007F:{port:04X} 01 0 0 0 4321 0 78"]
        lines += [f"3: 0100007F:{port:04X} 0100007F:9999 01 0 0 0 {os.getuid()} 0 79"]
        (tmp_path / "tcp").write_text(head + "\n".join(lines))
        assert strangers.users_connected_to([os.getpid()]) == {4321}
