"""Ranks beside the engines of a real ipyparallel cluster: the same run as on a local one, and every fault."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import psutil
import pytest
import torch
from disks import full_disk
from hanging import all_of, end_when, in_calls, said
from waiting import comes_true

from dlearn import Cluster, messages
from dlearn.cluster import engine_relay, engines, spares
from dlearn.cluster.engines import Engine
from dlearn.errors import Interrupted, RankError, SetupError

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
            started |= set(_children(client, id))
        client.close()
        cluster.stop_cluster_sync()
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
    assert left == []


def _children(client: Any, id: int) -> list[psutil.Process]:
    return psutil.Process(client[id].apply_async(os.getpid).get(60)).children(recursive=True)


def _gone(pids: list[int]) -> bool:
    return comes_true(lambda: not any(map(psutil.pid_exists, pids)))


def _pids(folder: Path, ranks: int) -> list[int]:
    """Of ranks that have written a file each, with their pid as its name."""
    assert comes_true(lambda: len(list(folder.iterdir())) == ranks)
    return [int(path.name) for path in folder.iterdir()]


def _sent(run: Any) -> list[tuple[Any, ...]]:
    return sorted((m.src, m.dst, m.payload_bytes, str(m.what)) for m in messages(run.trace))


@pytest.mark.slow
def test_results_output_and_trace_are_those_of_a_local_cluster(client, capsys):
    run, local = Cluster(2, engine=client).run(programs.train_ddp, 2), Cluster(2).run(programs.train_ddp, 2)
    assert all(map(torch.equal, run.results[1], local.results[1]))
    assert run.trace.spans == local.trace.spans == ("step 0", "step 1")
    assert _sent(run) == _sent(local) != []
    assert {path.suffix for path in (run.folder / "trace").iterdir()} == {".jsonl"}

    capsys.readouterr()
    run = Cluster(engine=client).run(programs.say, "hello")
    assert run.results == {0: 0, 1: 1, 2: 2}
    assert run.output == {0: "hello 0\n", 1: "hello 1\n", 2: "hello 2\n"}
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {r}] hello {r}" for r in range(3)]


@pytest.mark.slow
def test_names_rpc_and_a_tutorials_own_init(client):
    run = Cluster(["ps", "trainer"], engine=client, rpc=True).run({"trainer": _ask_ps})
    assert run.results == {"trainer": 3.0}
    assert [process.label for process in run.trace.processes] == ["ps", "trainer"]
    assert {path.suffixes[-1] for path in (run.folder / "trace").iterdir()} == {".jsonl", ".log"}
    addresses = Cluster(2, engine=client, init=False).run(_own_init_then_listen).results
    assert {address for found in addresses.values() for address in found} == {"0100007F"}  # 127.0.0.1


@pytest.mark.slow
def test_on_a_full_disk_here_what_was_recorded_stays_beside_the_engines(client, capsys):
    cluster = Cluster(2, engine=client)
    with full_disk(100):
        run = cluster.run(programs.say, "hello")
    assert run.results == {0: 0, 1: 1}
    told = [line for line in capsys.readouterr().err.splitlines() if "stayed there" in line]
    assert len(told) == 2
    for line in told:
        folder = Path(line.split(", in ")[1].removesuffix("/trace (File too large)"))
        assert (folder / "trace").is_dir()
        shutil.rmtree(folder)


def _ask_ps() -> float:
    import torch
    import torch.distributed.rpc as rpc

    return rpc.rpc_sync("ps", torch.add, args=(torch.ones(1), 2)).item()


def _own_init_then_listen() -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return programs.listening_addresses()


@pytest.mark.slow
def test_ranks_are_fresh_processes_beside_their_engines_and_stay_inside_with(client):
    assert Cluster(2, engine=client).run(programs.count).results == {0: 1, 1: 1}
    assert Cluster(2, engine=client).run(programs.count).results == {0: 1, 1: 1}
    with Cluster(2, engine=client) as kept:
        assert [kept.run(programs.count).results[0] for _ in range(3)] == [1, 2, 3]
        pids = list(kept.run(os.getpid).results.values())
        assert pids[0] in [process.pid for process in _children(client, client.ids[0])]
    assert _gone(pids)


@pytest.fixture
def nothing_from_disk(monkeypatch):
    """Here the engines' disk is ours, too; on other hosts everything must come through ipyparallel."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("copied from disk")

    monkeypatch.setattr(shutil, "copytree", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_from_disk")
@pytest.mark.parametrize("fault", ["exception", "exit", "sleep"])
def test_faults_are_told_in_the_words_of_a_local_cluster(client, fault):
    told = []
    for options in ({"engine": client}, {}):
        if fault == "sleep":
            stuck = all_of(said("asleep", 1), in_calls(2))
            run = end_when(stuck, Cluster(2, **options), programs.all_reduce_then, fault)
        else:
            run = Cluster(2, **options).run(programs.all_reduce_then, fault, check=False)
        told.append((run.error.rank, run.error.what.partition("\nthen")[0], run.error.details))
        assert len(run.trace.processes) == 2
    assert told[0] == told[1]
    assert Cluster(2, engine=client).run(programs.say, "next").results == {0: 0, 1: 1}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_from_disk")
def test_an_interrupt_ends_the_ranks_and_keeps_what_they_recorded(client, tmp_path):
    began = tmp_path / "began"
    began.mkdir()
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(_pids(began, 2))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match=r"what they had recorded is in (.*)/trace") as caught:
        Cluster(2, engine=client).run(_say_pid_and_wait, began)
    thread.join()
    assert _gone(pids)
    folder = Path(str(caught.value).partition(" is in ")[2])
    assert len(list(folder.glob("*.jsonl"))) == 2


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
    engine = psutil.Process(client[victim].apply_async(os.getpid).get(60))
    children = engine.children(recursive=True)
    pids: list[int] = []

    def kill() -> None:
        pids.extend(_pids(began, len(cluster.names)))
        engine.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankError) as caught:
        cluster.run(_say_pid_and_wait, began, timeout=60)
    thread.join()
    host = os.uname().nodename
    lost = f"rank {victim} lost its engine {victim} on {host}, which was killed, or has ended"
    assert caught.value.rank == victim
    assert caught.value.what.splitlines()[0] == lost
    assert len(caught.value.run.trace.processes) == len(cluster.names)  # Its disk is ours, too.
    assert _gone([*pids, *(process.pid for process in children)])

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
    with pytest.raises(SetupError, match="start= is for ranks on this machine"):
        Cluster(engine="my cluster", start="spawn")


_TOLD = {
    "host": "a",
    "boot": "1",
    "python": sys.version.split()[0],
    "dlearn": "0.1.0",
    "torch": "2.13.0",
    "wanted": "",
    "controller": "10.0.0.9",
    "interfaces": {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.1.0.1": "ib0"},
    "routes": {"10.0.0.9": "10.0.0.1"},
}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"dlearn": ""}, "engine 1 on b has no dlearn: install it there"),
        ({"dlearn": "0.0.9"}, "engine 1 on b has dlearn 0.0.9, and this notebook 0.1.0"),
        ({"python": "3.9.1"}, "engine 1 on b runs Python 3.9.1, and this notebook 3"),
        ({"torch": ""}, "engine 1 on b has no torch"),
        ({"torch": "2.12.0"}, "engine 1 on b has torch 2.12.0, and engine 0 on a has 2.13.0"),
    ],
)
def test_an_engine_that_does_not_fit_is_named(other, sentence):
    with pytest.raises(SetupError, match=sentence):
        engines._check([Engine(0, None, _TOLD), Engine(1, None, {**_TOLD, "host": "b", **other})])


def test_on_one_host_everything_stays_on_loopback_and_between_hosts_each_has_its_interface():
    here = Engine(0, None, _TOLD)
    assert [engine.place for engine in engines._placed([here, replace(here, id=1)])] == [None, None]
    assert engines._placed([here])[0].address == "127.0.0.1"

    there = Engine(1, None, {**_TOLD, "host": "b", "wanted": "ib0"})
    placed = engines._placed([here, there, replace(there, id=2)])
    assert [engine.address for engine in placed] == ["10.0.0.1", "10.1.0.1", "10.1.0.1"]
    assert [(e.place.interface, e.place.local_rank, e.place.local_world_size) for e in placed] == [
        ("eth0", 0, 1),
        ("ib0", 0, 2),
        ("ib0", 1, 2),
    ]


def test_what_was_recorded_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_relay, "PIECE_BYTES", 4)
    (tmp_path / "run" / "trace").mkdir(parents=True)
    (tmp_path / "run" / "trace" / "b").write_bytes(b"bb")
    (tmp_path / "run" / "trace" / "a").write_bytes(b"aaaaaa")
    folder = str(tmp_path / "run")
    assert engine_relay.files(folder) == ["a", "b"]
    assert [engine_relay.piece(folder, "a", first) for first in (0, 4, 6)] == [b"aaaa", b"aa", b""]


def test_a_rank_whose_notebook_does_not_ask_any_more_is_ended(monkeypatch):
    monkeypatch.setattr(engine_relay, "LEASE_SECONDS", 0.2)
    try:
        assert _gone([engine_relay.start("forgotten")])
        assert "had not heard from the notebook" in engine_relay.exchange("forgotten", [], 0).note
    finally:
        spares.close()


_TWO_HOSTS = """
ip link set lo up; hostname nodeA; mkdir $TMPDIR
unshare --net --uts --mount sh -c 'hostname nodeB; mount -t tmpfs none $TMPDIR; echo $$ > pid; exec sleep 600' &
while [ ! -s pid ]; do sleep 0.1; done
nodeB="nsenter -t $(cat pid) -n -u -m"
ip link add vA type veth peer name vB && ip link set vB netns $(cat pid)
ip addr add 10.78.0.1/24 dev vA; ip link set vA up
$nodeB ip link set lo up; $nodeB ip addr add 10.78.0.2/24 dev vB; $nodeB ip link set vB up
python=$1; files=$IPYTHONDIR/profile_default/security
$python -m ipyparallel.controller --ip=10.78.0.1 --log-level=40 2> log &
while [ ! -s $files/ipcontroller-client.json ]; do sleep 0.1; done
$python -m ipyparallel.engine --file=$files/ipcontroller-engine.json --log-level=40 2> log &
while ! grep -q nanny log; do sleep 0.1; done  # The first engine is number 0.
$nodeB $python -m ipyparallel.engine --file=$files/ipcontroller-engine.json --log-level=40 2> log &
exec $python job.py $files/ipcontroller-client.json
"""

_JOB = """
import os, sys, threading
import ipyparallel, programs
from hanging import all_of, end_when, in_calls, said
from dlearn import Cluster, analysis

client = ipyparallel.Client(sys.argv[1])
client.wait_for_engines(2, timeout=60)
cluster = Cluster(engine=client)
run = cluster.run(programs.train_ddp, 2)
print(sorted(path.name.split("-")[0] for path in (run.folder / "trace").iterdir()))
print(str(analysis.reconcile(run.trace)).splitlines()[-1])
print(cluster.run(programs.listening_addresses).results)
stuck = all_of(said("asleep", 1), in_calls(2))
print(end_when(stuck, cluster, programs.all_reduce_then, "sleep").error.what)
(engine,) = [id for id in client.ids if client[id].apply_sync(os.uname).nodename == "nodeB"]
pid = client[engine].apply_sync(os.getpid)
threading.Timer(1, lambda: os.kill(pid, 9)).start()
print(cluster.run(programs.all_reduce_then, "sleep", timeout=60, check=False).error.what.splitlines()[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux namespaces")
def test_engines_on_two_hosts(tmp_path):
    """Two network namespaces with names and temporary folders of their own; all their processes end with the first."""
    namespaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    probe = subprocess.run([*namespaces, "ip", "link", "add", "here", "type", "veth"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()[:80]}")
    (tmp_path / "job.py").write_text(_JOB)
    done = subprocess.run(
        [*namespaces, "sh", "-c", _TWO_HOSTS, "sh", sys.executable],
        capture_output=True,
        text=True,
        timeout=110,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "TMPDIR": str(tmp_path / "scratch"),
        },
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[rank ")]
    told = [line for line in lines if "hostname of the client socket" not in line]  # torch's own.
    files, bytes_, listening, hang, lost = told[-5:]
    assert files == "['nodeA', 'nodeB']", done.stderr
    assert bytes_ == "2 of 2 parts with residue 0."
    assert listening == "{0: ['01004E0A', '01004E0A'], 1: ['02004E0A']}"  # 10.78.0.1 and 10.78.0.2
    assert "rank 0 waits for rank 1 in all_reduce #2" in hang
    assert "rank 1 never called it, it is at " in hang
    assert lost.startswith("rank 1 lost its engine 1 on nodeB, which was killed, or has ended; what it had recorded")
    assert f"stayed there, in {tmp_path}/scratch/dlearn-" in lost
