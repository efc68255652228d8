"""Counters of real sockets: exact, of the right group, and read without a trace left behind."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import programs
import pytest
import torch
import torch.distributed as dist

import dlearn
from dlearn import Cluster, Trace, span
from dlearn.analysis import reconcile
from dlearn.errors import SetupError
from dlearn.hooks.network import sockets
from dlearn.hooks.network.sockets import Sockets
from dlearn.trace.event import Counters

pytestmark = pytest.mark.usefixtures("own_folder")


def two_groups_and_the_store() -> None:
    pair = dist.new_group([0, 2])
    everybody = dist.new_group()
    # The store's connection carries more than all of them.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"large {dist.get_rank()}", "x" * 1_000_000)
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1000), group=pair)
    dist.all_reduce(torch.ones(50), group=everybody)


def test_groups_have_their_own_connections_and_the_store_is_not_counted():
    run = Cluster(3).run(two_groups_and_the_store)
    found = reconcile(run.trace)
    seen = {process.rank: process.sockets.values() for process in run.trace.processes}
    assert {rank: len(sockets) for rank, sockets in seen.items()} == {0: 5, 1: 4, 2: 5}
    assert {each.group for each in seen[1]} == {"0", "2"}
    assert all(each.local.startswith("127.0.0.1 ") for each in seen[0])
    assert {(pair.group, pair.src, pair.dst) for pair in found.whole.pairs if pair.payload_bytes > 1000} == {
        ("1", 0, 2),
        ("1", 2, 0),
    }
    assert found.exact


def meet() -> None:
    """By the store, and so by none of gloo's connections."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {dist.get_rank()}", "")
    store.wait(["here 0", "here 1"])


def init_destroy_init() -> None:
    for size in (10, 1000):
        dist.init_process_group("gloo")
        with span("sum"):
            dist.all_reduce(torch.ones(size))
        meet()  # Else one may close the other's connections before they are read.
        dist.destroy_process_group()


def test_after_destroy_and_init_again_both_groups_are_counted():
    """The second group has the name of the first: in the trace it is another, and counts anew."""
    run = Cluster(2, init=False).run(init_destroy_init)
    found = reconcile(run.trace)
    met = [(each.group.name, each.seq, len(each.ends)) for each in run.trace.matches]
    assert met == [("0", 1, 2), ("0~2", 1, 2)]
    assert {pair.group for pair in found.whole.pairs} == {"0", "0~2"}
    assert found.exact


def record_late(folder: str, groups: int) -> None:
    """Recording begins when the connections are there already, and have carried something."""
    others = [dist.new_group() for _ in range(groups - 1)]
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    with dlearn.record(folder):
        for group in (None, *others):
            dist.all_reduce(torch.ones(50), group=group)
        dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(2), 0)


@pytest.mark.parametrize(("groups", "names"), [(1, {"0"}), (3, {"?"})])
def test_connections_older_than_the_recording(tmp_path, groups, names):
    """Of several groups nobody can tell whose they are; the bytes between two ranks are exact all the same."""
    Cluster(2, record=False).run(record_late, str(tmp_path / "trace"), groups)
    found = reconcile(Trace.load(tmp_path / "trace"))
    assert {pair.group for pair in found.whole.pairs} == names
    assert len(found.whole.pairs) == 2
    assert found.exact


def past_the_recorder(beside: bool) -> None:
    """A recorded all-reduce, and the same on a backend object: the default group's own, or one made by hand."""
    dist.all_reduce(torch.ones(1000))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if beside:
        store = dist.PrefixStore("by hand", dist.distributed_c10d._get_default_store())
        backend = dist.ProcessGroupGloo(store, dist.get_rank(), 2, timedelta(seconds=30))
        kept.append(backend)
    backend.allreduce([torch.ones(1000)]).wait()


kept: list[object] = []


@pytest.mark.parametrize(("beside", "handshake"), [(False, 0), (True, 8)])
def test_what_goes_past_the_recorder_is_counted_and_said(beside, handshake):
    """As many bytes as the recorded call has; and 8 B that gloo writes when it connects."""
    whole = reconcile(Cluster(2).run(past_the_recorder, beside).trace).whole
    assert whole.not_seen_bytes == whole.predicted_bytes + handshake
    where = "connections of no known group" if beside else "the connections of group 0"
    assert whole.note == (
        f"not seen: {whole.not_seen_bytes:,} B were written on {where} that no recorded call accounts for"
    )


def strangers() -> None:
    """A store of the program's own, and a connection to this machine that is none between ranks."""
    kept.append(dist.TCPStore("127.0.0.1", 0, 1, is_master=True))
    dist.all_reduce(torch.ones(10))


def test_what_a_rank_has_with_itself_is_no_message():
    assert reconcile(Cluster(2).run(strangers).trace).exact


def train_when_all_are_there() -> None:
    meet()  # Else a rank may talk to one that has not yet looked at its group, which then has a connection.
    programs.train_ddp(1)


def test_connections_made_later_are_not_measured_and_not_guessed(monkeypatch):
    """Told to, gloo connects two ranks only when they first talk: whose connection that is, is not known here."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    found = reconcile(Cluster(2).run(train_when_all_are_there).trace)
    assert {pair.measured_bytes for pair in found.whole.pairs} == {None}
    assert "not measured" in found.sentence


def test_each_span_has_a_sample_at_both_ends():
    run = Cluster(2).run(programs.train_ddp, 3)
    found = reconcile(run.trace)
    assert [(part.what, part.residue_bytes) for part in found.parts] == [(f"step {i}", 0) for i in range(3)]
    assert not found.intrusive
    assert {event.still for event in run.trace.events if isinstance(event, Counters)} == {None}


def overlapping() -> None:
    """Three all-reduces under way at once, then a send before its recv: a measurement may make nothing hang."""
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (100, 200_000, 300)]
    rank = dist.get_rank()
    for work in works:
        work.wait()
    work = dist.isend(torch.ones(5), 1 - rank)
    dist.recv(torch.ones(5), 1 - rank)
    work.wait()
    dist.barrier()


def test_measure_phase_counts_what_overlaps_together():
    found = reconcile(Cluster(2, measure="phase").run(overlapping, timeout=60).trace)
    assert found.exact
    assert found.intrusive
    assert all(part.residue_bytes == 0 for part in found.parts)
    assert any(part.what.startswith("barrier #4") for part in found.parts)


def test_measure_none_reads_nothing():
    run = Cluster(2, measure=None).run(programs.train_ddp, 1)
    assert [list(process.sockets) for process in run.trace.processes] == [[], []]
    assert not any(isinstance(event, Counters) for event in run.trace.events)
    assert "not measured" in reconcile(run.trace).sentence


def test_a_wrong_measure_is_told_before_anything_starts():
    with pytest.raises(SetupError, match='measure is "span", "phase" or None, not \'all\''):
        Cluster(2, measure="all")


# A guest --------------------------------------------------------------------------------------------------------------


class Facts:
    """What `Sockets` reports to."""

    def __init__(self) -> None:
        self.lines: list[object] = []

    def fact(self, line: object) -> None:
        self.lines.append(line)

    def failed(self, where: str, error: Exception) -> None:
        raise AssertionError(where) from error


@pytest.fixture
def connection():
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("reads Linux's counters")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        with other:
            yield client, other


def test_bytes_written_are_counted_even_if_nobody_reads_them(connection):
    """The receiver's buffer is full: what waits in the sender's kernel was written, too."""
    client, _ = connection
    client.setblocking(False)
    watched = Sockets(Facts())
    watched.watch("0")
    number = next(i for i, each in enumerate(watched._connections) if each.fd == client.fileno())
    before = watched.sent_bytes()[number]
    written = 0
    while True:
        try:
            written += client.send(b"x" * 65_536)
        except BlockingIOError:
            break
    assert written > 100_000
    assert watched.sent_bytes()[number] - before == written
    assert watched.settle()


def test_a_closed_socket_is_none_and_so_is_another_with_its_number(connection):
    client, other = connection
    watched = Sockets(Facts())
    watched.watch("0")
    number = next(i for i, each in enumerate(watched._connections) if each.fd == client.fileno())
    descriptor = client.fileno()
    client.close()
    assert watched.sent_bytes()[number] is None
    os.dup2(other.fileno(), descriptor)
    try:
        assert watched.sent_bytes()[number] is None
    finally:
        os.close(descriptor)


def test_looking_keeps_no_socket_open(connection):
    """gloo's peers learn from a closing socket that a rank has gone: a copy of ours would hide it."""
    client, other = connection
    watched = Sockets(Facts())
    watched.watch("0")
    client.close()
    other.settimeout(5)
    assert other.recv(1) == b""


def test_where_the_system_does_not_count_it_is_said(monkeypatch):
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    facts = Facts()
    Sockets(facts).begin([])
    assert [line.reason for line in facts.lines] == ["darwin tells no process about the bytes in its sockets"]
