"""Counters of real sockets: exact, of the right group, and read without a trace left behind."""

from datetime import timedelta
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist

import dlearn
from dlearn import Cluster, Trace, messages, span
from dlearn.analysis import reconcile
from dlearn.errors import SetupError
from dlearn.events.event import Counters

kept: list[object] = []


def two_groups_and_the_store() -> None:
    pair = dist.new_group([0, 2])
    all_ranks = dist.new_group()
    # The store's connection carries more than all of them.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"large {dist.get_rank()}", "x" * 1_000_000)
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(1000), group=pair)
        half = torch.ones(2)
        dist.send(half, 2, pair) if dist.get_rank() == 0 else dist.recv(half, 0, pair)
    dist.all_reduce(torch.ones(50), group=all_ranks)


def test_groups_have_their_own_connections_and_the_store_is_not_counted(recorded):
    trace = recorded(two_groups_and_the_store, ranks=3)
    found = reconcile(trace)
    seen = {process.rank: process.sockets.values() for process in trace.processes}
    assert {rank: len(sockets) for rank, sockets in seen.items()} == {0: 5, 1: 4, 2: 5}
    assert {each.group for each in seen[1]} == {"0", "2"}
    assert all(each.local.startswith("127.0.0.1 ") for each in seen[0])
    large = {(pair.group, pair.src, pair.dst) for pair in found.whole.pairs if pair.payload_bytes > 1000}
    assert large == {("1", 0, 2), ("1", 2, 0)}
    assert found.exact
    (sent,) = [each for each in messages(trace) if each.op == "send"]
    assert (sent.src, sent.dst, sent.payload_bytes, sent.how) == (0, 2, 8, "observed"), "ranks of the job"


def meet() -> None:
    """By the store, and so by none of gloo's connections."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"here {dist.get_rank()}", "")
    store.wait(["here 0", "here 1"])


def init_destroy_init() -> None:
    # A store of the program's own, and a connection to this machine that is none between ranks.
    kept.append(dist.TCPStore("127.0.0.1", 0, 1, is_master=True))
    for size in (10, 1000):
        dist.init_process_group("gloo")
        with span("sum"):
            dist.all_reduce(torch.ones(size))
        meet()  # Else one may close the other's connections before they are read.
        dist.destroy_process_group()


def test_after_destroy_and_init_again_both_groups_are_counted(recorded):
    """The second group has the name of the first: in the trace it is another, and counts anew."""
    trace = recorded(init_destroy_init, init=False)
    met = [(each.group.name, each.seq, len(each.ends)) for each in trace.matches]
    assert met == [("0", 1, 2), ("0~2", 1, 2)]
    assert {pair.group for pair in reconcile(trace).whole.pairs} == {"0", "0~2"}
    assert reconcile(trace).exact


def record_late() -> Path:
    """Recording begins when the connections are there already, and have carried something."""
    for groups in (1, 3):
        others = [dist.new_group() for _ in range(groups - 1)]
        dist.all_reduce(torch.ones(1000))
        dist.barrier()
        with dlearn.record(f"of {groups}"):
            for group in (None, *others):
                dist.all_reduce(torch.ones(50), group=group)
            dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(2), 0)
    return Path.cwd()


def test_connections_older_than_the_recording(recorded):
    """Of several groups nobody can tell whose they are; the bytes between two ranks are exact all the same."""
    folder = recorded.results(record_late, record=False)[0]
    for groups, name in ((1, "0"), (3, "?")):
        found = reconcile(Trace.load(folder / f"of {groups}"))
        assert [pair.group for pair in found.whole.pairs] == [name, name]
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


@pytest.mark.parametrize(("beside", "handshake"), [(False, 0), (True, 8)])
def test_what_goes_past_the_recorder_is_counted_and_said(beside, handshake, recorded):
    """As many bytes as the recorded call has; and 8 B that gloo writes when it connects."""
    whole = reconcile(recorded(past_the_recorder, arguments=(beside,))).whole
    assert whole.not_seen_bytes == whole.predicted_bytes + handshake
    where = "connections of no known group" if beside else "the connections of group 0"
    assert whole.note == (
        f"not seen: {whole.not_seen_bytes:,} B were written on {where} that no recorded call accounts for"
    )


def train_when_all_are_there() -> None:
    meet()  # Else a rank may talk to one that has not yet looked at its group, which then has a connection.
    programs.train_ddp(1)


def test_connections_made_later_are_not_measured_and_not_guessed(monkeypatch, recorded):
    """Told to, gloo connects two ranks only when they first talk: whose connection that is, is not known here."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    found = reconcile(recorded(train_when_all_are_there))
    assert {pair.measured_bytes for pair in found.whole.pairs} == {None}
    assert {each.confirmed for each in messages(recorded(train_when_all_are_there))} == {False}
    assert "not measured" in found.sentence


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


def test_measured_by_phase_what_overlaps_is_counted_together_and_by_none_nothing(recorded):
    found = reconcile(recorded(overlapping, measure="phase"))
    assert found.exact
    assert found.intrusive
    assert all(part.residue_bytes == 0 for part in found.parts)
    assert any(part.what.startswith("barrier #4") for part in found.parts)
    trace = recorded(overlapping, measure=None)
    assert [list(process.sockets) for process in trace.processes] == [[], []]
    assert trace.of(Counters) == []
    assert "not measured" in reconcile(trace).sentence
    with pytest.raises(SetupError, match='measure is "span", "phase" or None, not \'all\''):
        Cluster(2, measure="all")
