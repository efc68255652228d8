"""Bytes from each rank to each other rank."""

import html

import pytest
from traces import Job, header

from dlearn.analysis import messages, traffic


def test_a_ring_sends_each_byte_almost_twice(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=1000)
    sent = traffic(job.load())
    assert sent.bytes_from(rank=0) == 1500  # 2 * 3/4 * 1000
    assert sent.payload_bytes == {(0, 3): 1500, (1, 0): 1500, (2, 1): 1500, (3, 2): 1500}
    assert sent.message_count[0, 3] == 12
    assert sent.bytes_to(rank=0) == 1500
    assert sent.total_bytes == 6000
    assert sent.by_how == {"derived": 6000}


def test_the_table(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers[1] = header(1, world_size=2, name="trainer <1>")
    job.send(0, 1, size=1234)
    job.recv(1, 0, size=1234)
    sent = traffic(job.load())
    assert str(sent).splitlines() == [
        "bytes from \\ to  rank 0  trainer <1>  sent in all",
        "rank 0                .        1,234        1,234",
        "trainer <1>           0            .            0",
    ]
    assert "trainer &lt;1&gt;" in sent._repr_html_()
    assert html.escape("<1>") in sent._repr_html_()


def test_what_never_came_is_counted_apart(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=100, end_ns=None)
    sent = traffic(job.load())
    assert (sent.total_bytes, sent.by_how) == (0, {"missing": 100})


def test_what_is_not_known_is_said(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_to_none", size=100)
    sent = traffic(job.load())
    assert sent.unexplained == 1
    assert str(sent).endswith("not counted: 1 operation whose messages are not known")


def test_bytes_to_oneself_are_shown_where_there_are_any(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.send(0, 0, size=5)
    job.recv(0, 0, size=5)
    assert traffic(job.load()).rows()[1] == ["rank 0", "5", "5"]


def test_sums_agree_with_messages(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_gather", size=11)
    job.collective("broadcast", size=7, root=2)
    job.send(0, 2, size=3)
    job.recv(2, 0, size=3)
    trace = job.load()
    sent = traffic(trace)
    assert sent.total_bytes == sum(each.payload_bytes for each in messages(trace))
    assert sum(sent.message_count.values()) == len(messages(trace))
    assert sum(sent.bytes_from(rank=rank) for rank in trace.ranks) == sent.total_bytes


def test_many_ranks_are_told_by_pairs(tmp_path):
    """1,000 ranks of which one left a file: no table of a million cells."""
    job = Job(tmp_path, ranks=1000)
    for dst in range(1, 1000):
        job.send(0, dst, size=dst)
    sent = traffic(job.load(without=range(1, 1000)))
    assert len(sent.ranks) == 1000
    rows = sent.rows()
    assert rows[:2] == [["from", "to", "bytes"], ["rank 0", "rank 999", "999"]]
    # The 40 largest are 999 ... 960; 1 ... 959 remain: 959 * 960 / 2.
    assert rows[-1] == ["959 more pairs", "", "460,320"]


def test_traffic_as_a_matrix(tmp_path):
    pytest.importorskip("pandas")
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=100)
    job.recv(1, 0, size=100)
    frame = traffic(job.load()).to_frame()
    assert frame.loc["rank 0", "rank 1"] == 100
    assert frame.to_numpy().sum() == 100
