"""Predicted beside measured, by its artists: bars in bytes, the numbers behind them, the finding above."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from test_reconcile import EXACT, ring_of_two
from traces import Job

from dlearn import draw
from dlearn.draw import palette


def bars(ax):
    """gid -> (left, width) in bytes."""
    return {each.get_gid(): (each.get_x(), each.get_width()) for each in ax.patches}


def texts(ax):
    return [text.get_text().replace("\u00a0", " ") for text in ax.texts]


def title(ax):
    return " ".join(ax.get_title(loc="left").split())


def test_payload_framing_and_what_the_kernel_counted(tmp_path):
    """200 B in 4 messages of 96 B of framing, 4 answers of 48 B: 776 B each way (test_reconcile.py)."""
    ax = draw.reconcile(ring_of_two(tmp_path, measured=EXACT).load())
    found = bars(ax)
    for pair in ("rank 0 to rank 1", "rank 1 to rank 0"):
        assert found[f"payload {pair}"] == (0, 200)
        assert found[f"framing {pair}"] == (200, 576)
        assert found[f"measured {pair}"] == (0, 776)
    assert len(found) == 6, "no residue"
    assert texts(ax).count("payload 200 B + framing 576 B = 776 B predicted") == 2
    assert texts(ax).count("776 B measured, residue 0 B") == 2
    assert title(ax) == "The kernel counted 1,552 B: predicted to the byte"


def test_what_is_predicted_is_dashed_and_what_is_measured_solid(tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=EXACT).load())
    styles = {each.get_gid().split()[0]: each.get_linestyle() for each in ax.patches}
    assert styles["measured"] in ("-", "solid")
    assert styles["payload"] not in ("-", "solid")
    assert styles["framing"] not in ("-", "solid")


@pytest.mark.parametrize(
    ("measured", "residue", "text", "found"),
    [
        (976, (776, 200), "976 B measured, residue 200 B", "1,752 B: 200 B more than predicted"),
        (676, (676, 100), "676 B measured, residue -100 B", "1,452 B: 100 B less than predicted"),
    ],
)
def test_a_residue_is_red_and_says_its_direction(tmp_path, measured, residue, text, found):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(776, measured)).load())
    (bar,) = (each for each in ax.patches if each.get_gid() == "residue rank 1 to rank 0")
    assert (bar.get_x(), bar.get_width()) == residue
    assert to_rgb(bar.get_edgecolor()) == to_rgb(palette.MISSING)
    (label,) = (each for each in ax.texts if each.get_text() == text)
    assert label.get_color() == palette.MISSING
    assert title(ax) == f"The kernel counted {found}"


def test_too_much_here_does_not_hide_too_little_there(tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(676, 876)).load())
    assert title(ax) == "The kernel counted 1,552 B: as many as predicted, but not pair by pair: residue 200 B"


def test_not_measured_says_why(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=200)
    ax = draw.reconcile(job.load())
    assert title(ax) == "1,552 B predicted on the wire, not measured: the trace holds no socket counters"
    assert texts(ax).count("not measured") == 2
    assert not any(gid.startswith("measured") for gid in bars(ax))


def test_one_sender_that_was_not_measured(tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(None, 776)).load())
    assert "not measured" in texts(ax)
    assert "776 B measured, residue 0 B" in texts(ax)
    assert title(ax).startswith("1,552 B predicted on the wire, not measured: 1 connection was not seen")


def test_of_many_pairs_those_that_are_off_come_first_and_the_others_are_counted(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.connect()
    for rank in range(4):
        job.counters(rank, 0, 0, 0)
    for src in range(4):
        for dst in range(4):
            if src != dst:
                job.send(src, dst, size=100)
                job.recv(dst, src, size=100)
    for rank in range(4):
        # 100 B and 96 B of framing, and 48 B in answer; rank 2 writes 77 B more to rank 3.
        job.counters(rank, 244, 244, 244 + 77 * (rank == 2))
    ax = draw.reconcile(job.load())
    names = [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
    assert len(names) == 8
    assert names[0] == "rank 2 to rank 3"
    assert title(ax) == "The kernel counted 3,005 B: 77 B more than predicted"
    assert "4 more pairs of ranks not drawn: see analysis.reconcile." in texts(ax)


def test_nothing_that_could_be_compared(tmp_path):
    ax = draw.reconcile(Job(tmp_path, ranks=2).load())
    assert title(ax) == "Nothing to draw"


def test_narrow_axes_have_shorter_numbers_and_fewer_rows(tmp_path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.2))
    trace = ring_of_two(tmp_path, measured=(776, 976)).load()
    assert draw.reconcile(trace, ax=left) is left
    assert "976 B, residue 200 B" in texts(left), "what is off comes first"
    assert "1 more pair of ranks not drawn" in " ".join(texts(left))
    assert tuple(figure.get_size_inches()) == (7, 2.2)
    assert not right.patches
