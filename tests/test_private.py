"""Workers that nobody else on this machine reaches: tried as another user would."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
from waiting import comes_true

from dlearn import Cluster, Trace, analysis
from dlearn.errors import SetupError

pytestmark = pytest.mark.usefixtures("own_folder")
LISTENS = "0A"
needs_namespaces = pytest.mark.usefixtures("private_permitted")


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


def wait_for_stranger(folder):
    """Be worker `a`, and wait until the stranger has done what it can."""
    if rpc.get_worker_info().name == "a":
        Path(folder, "port.new").write_text(os.environ["MASTER_PORT"])
        Path(folder, "port.new").rename(Path(folder, "port"))
        comes_true(Path(folder, "did").exists)
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
        run = Cluster(["a", "b"], rpc=True).run(wait_for_stranger, str(tmp_path), timeout=100)
    assert (tmp_path / "did").read_text().endswith("cannot reach the store")
    assert run.private
    assert run.exposed == ""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_run_that_another_user_has_joined_is_ended_with_a_sentence(tmp_path):
    with stranger(tmp_path), pytest.raises(SetupError, match="user 65534 of this machine has connected") as error:
        Cluster(["a", "b"], rpc=True, private=False).run(wait_for_stranger, str(tmp_path), timeout=100)
    folder = Path(re.search(r"recorded is in (\S+)\. Where", str(error.value))[1])
    assert Trace.load(folder).ranks == (0, 1)
