"""What a rendezvous asks of its store, as three real ranks over gloo were seen to ask it."""

import re
from collections import Counter
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

import dlearn
from dlearn import draw, explain, messages


def meet():
    """All others ask for a key that rank 0 sets when they are about to; then each meets alone, twice at one port."""
    import socket
    import time

    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    rank, value = dist.get_rank(), None
    if rank == 0:
        while store.add("asking", 0) < dist.get_world_size() - 1:
            time.sleep(0.01)
        store.set("late", "value")
    else:
        store.add("asking", 1)
        value = store.get("late")
    dist.barrier()
    dist.destroy_process_group()
    del store
    port = 0
    for _ in range(2):
        listener = socket.create_server(("127.0.0.1", port))  # Refused while the last store is alive.
        port = listener.getsockname()[1]
        facts = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = dist.TCPStore("127.0.0.1", port, 1, **facts)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()
        del store
    return value


@pytest.fixture(scope="module")
def trace(recorded):
    assert recorded.results(meet, ranks=3, sources=["tcp_store"]) == {0: None, 1: b"value", 2: b"value"}
    return recorded(meet, ranks=3, sources=["tcp_store"])


def requests(trace, **wanted):
    asked = trace.where(kind="store request").events
    return [each for each in asked if all(getattr(each, name) == value for name, value in wanted.items())]


def test_each_rank_tells_the_others_through_the_store_where_it_is(trace):
    """Gloo on each rank writes its own addresses, and reads those of the two others."""
    for rank in trace.ranks:
        by_gloo = Counter(each.op for each in requests(trace, rank=rank, by="gloo"))
        assert by_gloo["store set"] >= 1
        assert by_gloo["store get"] + by_gloo["store multi_get"] >= 1
    keys = {
        op: {key for each in requests(trace, op=op, by="gloo") for key in each.about.split(", ")}
        for op in ("store set", "store get")
    }
    assert keys["store get"] <= keys["store set"]
    assert all(each.ended_by == "return" and not each.failed for each in requests(trace))
    assert all("?" not in each.about for each in requests(trace))
    assert {each.by == "dlearn" for each in requests(trace) if "dlearn/" in each.about} == {True}


def test_rank_0_hosts_the_store_and_answers_when_a_key_is_there(trace):
    assert 0 in {each.rank for each in requests(trace, hosted=True)}
    sent = [each for each in messages(trace) if each.op.startswith("store ")]
    assert {each.how for each in sent} == {"observed"}
    answers = [each for each in sent if each.op == "store get" and each.step == 1 and "late" in each.what]
    assert sorted((each.src, each.dst, each.payload_bytes) for each in answers) == [(0, 1, 5), (0, 2, 5)]
    assert not [operation for operation, _ in messages(trace).unexplained if operation.op.startswith("store ")]
    (late,) = [each for each in requests(trace, op="store get", rank=1) if each.about.endswith("late")]
    (put,) = [each for each in requests(trace, op="store set") if each.about.endswith("late")]
    assert late.end_ns > put.start_ns
    assert (put.rank, put.one_way, sum(each.payload_bytes for each in put.tensors)) == (0, True, len(put.about) + 5)


def test_it_is_told_and_drawn_and_off_by_default(trace, recorded):
    assert "store get" in str(explain(trace))
    assert "from a rank to itself." in str(explain(trace)), "over a connection of its own"
    legend = draw.timeline(trace).get_legend()
    assert "store" in [text.get_text() for text in legend.get_texts()]
    assert requests(recorded(meet, ranks=3)) == []


def test_every_name_is_given_back_and_the_page_about_it_shows_the_file_as_it_is(tmp_path):
    classes = (Store, PrefixStore, ProcessGroupGloo)
    before = [dict(each.__dict__) for each in classes]
    with dlearn.record(tmp_path, sources=["tcp_store"]):
        assert [dict(each.__dict__) for each in classes] != before
    assert [dict(each.__dict__) for each in classes] == before
    home = Path(__file__).parent.parent
    file = (home / "dlearn" / "sources" / "tcp_store.py").read_text()
    page = (home / "docs" / "new-recorder.md").read_text()
    _, *blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert [block for block in blocks if block not in file] == []
    assert f"{len(file.splitlines())} lines" in page
