"""Ranks beside the engines of a real ipyparallel cluster: the same run as on a local one, and every fault."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import torch
from waiting import all_end, comes_true

from dlearn import Cluster, messages
from dlearn.errors import RankError, SetupError

pytestmark = pytest.mark.usefixtures("own_folder")

ipyparallel = pytest.importorskip("ipyparallel")


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Any]:
    """Three engines on loopback. At the end all of their processes are gone, and so is what they wrote."""
    home, scratch = tmp_path_factory.mktemp("ipython"), tmp_path_factory.mktemp("scratch")
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(home))
        patch.setenv("TMPDIR", str(scratch))
        cluster = ipyparallel.Cluster(n=3, controller_ip="127.0.0.1", log_level=40, engine_timeout=100)
        client = cluster.start_and_connect_sync()
    started = set(psutil.Process().children(recursive=True)) - before
    try:
        yield client
        assert [path.name for path in scratch.glob("dlearn-*")] == []
    finally:
        for id in client.ids:
            started |= set(engine(client, id).children(recursive=True))
        client.close()
        cluster.stop_cluster_sync()
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
    assert left == []


def engine(client: Any, id: int) -> psutil.Process:
    return psutil.Process(client[id].apply_async(os.getpid).get(60))


def _sent(run: Any) -> list[tuple[Any, ...]]:
    return sorted((m.src, m.dst, m.payload_bytes, str(m.what)) for m in messages(run.trace))


@pytest.mark.slow
def test_results_output_trace_and_faults_are_those_of_a_local_cluster(client, capsys):
    run, local = Cluster(2, engine=client).run(programs.train_ddp, 2), Cluster(2).run(programs.train_ddp, 2)
    assert all(map(torch.equal, run.results[1], local.results[1]))
    assert run.trace.spans == local.trace.spans == ("step 0", "step 1")
    assert _sent(run) == _sent(local) != []
    capsys.readouterr()
    run = Cluster(engine=client).run(programs.say, "hello")
    assert (run.results, run.output) == ({0: 0, 1: 1, 2: 2}, {rank: f"hello {rank}\n" for rank in range(3)})
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] hello {r}" for r in range(3)]
    for fault in ("exception", "exit"):
        here, there = (
            Cluster(2, **options).run(programs.all_reduce_then, fault, check=False).error
            for options in ({}, {"engine": client})
        )
        assert there.what.partition("\nthen")[0] == here.what.partition("\nthen")[0]
        assert (there.rank, there.details) == (here.rank, here.details)


def _say_pid_and_wait(began: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    (began / str(os.getpid())).touch()
    dist.recv(torch.ones(1))


@pytest.mark.slow
def test_an_engine_that_is_killed_ends_the_run_and_leaves_no_rank(client, tmp_path, capfd):
    began = tmp_path / "began"
    began.mkdir()
    cluster, victim = Cluster(engine=client), client.ids[-1]
    killed = engine(client, victim)
    children = killed.children(recursive=True)

    def kill() -> None:
        assert comes_true(lambda: len(list(began.iterdir())) == len(cluster.names))
        killed.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankError) as caught:
        cluster.run(_say_pid_and_wait, began, timeout=60)
    thread.join()
    host = os.uname().nodename
    lost = f"rank {victim} lost its engine: engine {victim} on {host} was killed, or has ended"
    assert caught.value.rank == victim
    assert caught.value.what.splitlines()[0] == lost
    assert len(caught.value.run.trace.processes) == len(cluster.names)  # Its disk is ours, too.
    pids = [int(path.name) for path in began.iterdir()]  # Each rank has written a file of this name.
    assert all_end([*pids, *(process.pid for process in children)])

    gone = cluster.run(programs.say, "again", check=False)
    assert (gone.error.what, gone.results) == (lost, {})
    left = Cluster(engine=client)
    assert left.names == cluster.names[:-1]
    assert left.run(programs.say, "next").results == {name: name for name in left.names}
    with pytest.raises(SetupError, match=f"{len(left.names) + 1} ranks need .* engines, and .* has {len(left.names)}"):
        Cluster(len(left.names) + 1, engine=client)


def test_what_is_no_client_is_refused_in_a_sentence():
    with pytest.raises(SetupError, match=r"takes an ipyparallel Client, .* not str"):
        Cluster(engine="my cluster")
    with pytest.raises(SetupError, match="give the number of ranks, or a list of names"):
        Cluster()
