"""Files that come through the job's store: whole, or in part and told. Over two real hosts it is in test_hosts.py."""

import zlib
from datetime import timedelta

from torch.distributed import HashStore, TCPStore

from dlearn.hooks.c10d.collectives import _Probe
from dlearn.hooks.network.clock import _END, Desk, _receive, gather


def test_a_file_that_stops_coming_is_kept_as_far_as_it_came_and_told(tmp_path, capsys):
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    for piece in (b"one\n", b"two\n"):
        store.queue_push("whole", zlib.compress(piece))
        store.queue_push("cut", zlib.compress(piece))
    store.queue_push("whole", _END)
    store.set_timeout(timedelta(milliseconds=200))
    for name in ("whole", "cut"):
        _receive(store, name, tmp_path / name, f"the {name} one")
    assert [(tmp_path / name).read_text() for name in ("whole", "cut")] == ["one\ntwo\n"] * 2
    assert capsys.readouterr().err.startswith("dlearn: the cut one did not come whole (")


def test_a_store_that_reaches_nobody_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    desk = Desk(_Probe(), tmp_path / "a-1.jsonl", lambda: 0, lambda port: None, keep_store=True)
    desk.join("group", HashStore(), 0, 2)
    gather(desk, tmp_path / "a-1.jsonl")
    assert "the job's store is no TCPStore. Copy them by hand." in capsys.readouterr().err
