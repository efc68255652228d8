"""Bytes from each rank to each other rank."""

import html

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from traces import Job, header

from dlearn import draw
from dlearn.analysis import measured_traffic, predicted_traffic, traffic
from dlearn.errors import DlearnError


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


def counted(folder, *, sent=(776, 776), op="all_reduce") -> Job:
    """An all_reduce of 200 B on 2 ranks, in a span with a sample at each end: 4 messages each way.

    200 B of payload + 4 x 96 B of framing, and 4 x 48 B in answer to the other's: 776 B each way.
    """
    job = Job(folder, ranks=2)
    job.connect()
    for rank in (0, 1):
        span = job.span(rank, "step 0")
        job.counters(rank, 8, parent=span)
        job.collective(op, size=200, ranks=[rank], seq=1, parent=span)
        job.counters(rank, 8 + sent[rank], parent=span)
    return job


def test_measured_on_the_wire_where_the_kernel_counted_just_this_part(tmp_path):
    """What it counted stands there, not what was predicted; of a part without samples around it nothing does."""
    job = counted(tmp_path, sent=(776, 800))
    job.collective("all_reduce", size=200)
    trace = job.load()
    found = measured_traffic(trace.within("step 0"))
    assert (found.counted, found.wire_bytes, found.not_measured) == ("measured", {(0, 1): 776, (1, 0): 800}, "")
    later = "no two samples of rank 0's counters in this part are around all that it sends"
    assert measured_traffic(trace).not_measured == later
    assert measured_traffic(trace.where(op="all_reduce")).wire_bytes == {}
    assert measured_traffic(trace.where(op="all_reduce")).not_measured.startswith("fewer than two samples")


def test_what_was_counted_with_others_is_not_measured(tmp_path):
    """Two operations between two samples: of one of them alone nobody knows the bytes."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    for rank in (0, 1):
        job.counters(rank, 8)
    job.collective("all_reduce", size=200)
    job.collective("all_reduce", size=200, phase="backward")
    for rank in (0, 1):
        job.counters(rank, 8 + 2 * 776)
    trace = job.load()
    assert measured_traffic(trace).wire_bytes == {(0, 1): 1552, (1, 0): 1552}
    part = trace.where(phase="none")
    assert predicted_traffic(part).total_bytes == 1552
    assert measured_traffic(part).not_measured == "what rank 0 sent for other operations was counted with it"


def test_what_cannot_be_predicted_is_no_zero(tmp_path):
    job = Job(tmp_path, ranks=2, backend="nccl")
    job.send(0, 1, size=100)
    job.recv(1, 0, size=100)
    found = predicted_traffic(job.load())
    assert found.wire_bytes == {}
    assert str(found).endswith("not counted: 1 operation: how nccl frames its messages is not known here")


def test_the_picture_says_which_bytes_it_shows(tmp_path, monkeypatch):
    trace = counted(tmp_path).load()
    # No window, none left open.
    monkeypatch.setattr(plt, "figure", lambda FigureClass=Figure, **more: FigureClass(**more))
    found = {bytes: draw.traffic(trace, bytes=bytes) for bytes in ("payload", "predicted", "measured")}
    titles = {bytes: ax.get_title(loc="left").replace("\N{NO-BREAK SPACE}", " ") for bytes, ax in found.items()}
    assert titles == {
        "payload": "Each rank sends 200 B to the other",
        "predicted": "Predicted on the wire: 1.55 kB, framing included",
        "measured": "Measured on the wire: 1.55 kB, as the kernel counted it",
    }
    for bytes in ("predicted", "measured"):
        assert "776 B" in {text.get_text() for text in found[bytes].texts}
    assert draw.traffic(trace.where(rank=0), bytes="measured").get_title(loc="left") == "Nothing to draw"
    with pytest.raises(DlearnError, match="no bytes 'wire' to draw; there are: payload, predicted, measured"):
        draw.traffic(trace, bytes="wire")
