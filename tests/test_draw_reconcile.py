"""Predicted beside measured, by its artists: bars in bytes, the numbers behind them, the finding above."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from test_draw import title
from test_reconcile import EXACT, ring_of_two
from traces import Job

from dlearn import draw
from dlearn.draw import palette


def bold(ax):
    return [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]


def texts(ax):
    return [text.get_text().replace("\u00a0", " ") for text in ax.texts]


def rows(ax):
    """The table as it is read: the texts that stand in one line, from the left."""
    lines = {}
    for text in ax.texts:
        if text.get_gid() != "note":
            lines.setdefault(text.get_position()[1], []).append(text)
    return [
        [text.get_text() for text in sorted(line, key=lambda each: each.get_position()[0])] for line in lines.values()
    ]


def test_payload_framing_and_what_the_kernel_counted(tmp_path):
    """200 B in 4 messages of 96 B of framing, 4 answers of 48 B: 776 B each way (test_reconcile.py)."""
    ax = draw.reconcile(ring_of_two(tmp_path, measured=EXACT).load())
    assert rows(ax) == [
        ["", "payload", "framing", "predicted", "measured", "residue"],
        ["rank 0 to rank 1", "200 B", "576 B", "776 B", "776 B", "0 B"],
        ["rank 1 to rank 0", "200 B", "576 B", "776 B", "776 B", "0 B"],
        ["in all (2 pairs)", "400 B", "1.15 kB", "1.55 kB", "1.55 kB", "0 B"],
    ]
    assert sorted(bold(ax)) == sorted([*rows(ax)[0], *rows(ax)[-1]]), "the head and the sum"
    assert title(ax) == "The kernel counted 1,552 B: predicted to the byte"
    assert "Exactly, in all: payload 400 B, predicted on the wire 1,552 B, measured 1,552 B, residue 0 B." in texts(ax)


@pytest.mark.parametrize(
    ("measured", "text", "found"),
    [(976, "+200 B", "1,752 B: 200 B more than predicted"), (676, "-100 B", "1,452 B: 100 B less than predicted")],
)
def test_a_residue_is_bold_and_not_red(measured, text, found, tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(776, measured)).load())
    assert [row[-1] for row in rows(ax)] == ["residue", "0 B", text, text]
    assert text in bold(ax)
    assert "0 B" not in bold(ax)
    assert not any(to_rgb(each.get_color()) == to_rgb(palette.MISSING) for each in ax.texts)
    assert title(ax) == f"The kernel counted {found}"


def test_too_much_here_does_not_hide_too_little_there(tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(676, 876)).load())
    assert title(ax) == "The kernel counted 1,552 B: as many as predicted, but not pair by pair: residue 200 B"
    assert [row[-1] for row in rows(ax)] == ["residue", "-100 B", "+100 B", "0 B"]
    assert any("residue 0 B (200 B, each pair's taken as positive)." in text for text in texts(ax))


def test_not_measured_says_why(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=200)
    ax = draw.reconcile(job.load())
    assert title(ax) == "1,552 B predicted on the wire, not measured"
    assert rows(ax)[0] == ["", "payload", "framing", "predicted"]
    assert [row[-1] for row in rows(ax)[1:]] == ["776 B", "776 B", "1.55 kB"]
    assert "Why: the trace holds no socket counters." in texts(ax)
    assert not ax.patches


def test_one_sender_that_was_not_measured(tmp_path):
    ax = draw.reconcile(ring_of_two(tmp_path, measured=(None, 776)).load())
    assert [row[-2:] for row in rows(ax)[1:]] == [["not measured", "?"], ["776 B", "0 B"], ["not measured", "?"]]
    assert title(ax) == "1,552 B predicted on the wire, not measured"
    assert any(text.startswith("Why: 1 connection was not seen") for text in texts(ax))


def test_of_many_pairs_those_that_are_off_come_first_and_the_others_are_counted(tmp_path):
    job = Job(tmp_path, ranks=5)
    job.connect()
    for rank in range(5):
        job.counters(rank, 0, 0, 0, 0)
    for src in range(5):
        for dst in range(5):
            if src != dst:
                job.send(src, dst, size=100)
                job.recv(dst, src, size=100)
    for rank in range(5):
        # 100 B and 96 B of framing, and 48 B in answer; rank 2 writes 77 B more to rank 4.
        job.counters(rank, 244, 244, 244, 244 + 77 * (rank == 2))
    ax = draw.reconcile(job.load())
    # A head, 12 pairs, the sum.
    assert len(rows(ax)) == 1 + 12 + 1
    assert rows(ax)[1][0] == "rank 2 to rank 4"
    assert rows(ax)[-1][0] == "in all (20 pairs)"
    assert title(ax) == "The kernel counted 4,957 B: 77 B more than predicted"
    assert "8 more pairs of ranks not drawn: see analysis.reconcile." in texts(ax)


@pytest.mark.parametrize("measured", [(776, 976), (None, None)])
def test_a_narrow_column_keeps_what_is_predicted(tmp_path, measured):
    with draw.small():
        found = rows(draw.reconcile(ring_of_two(tmp_path, measured=measured).load()))
    assert found[0][found[1].index("776 B")] in ("predicted", "measured")
    assert "predicted" in found[0]
    assert ("residue" in found[0]) is (measured[0] is not None)


def test_narrow_axes_have_fewer_columns_and_rows(tmp_path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 1.1))
    trace = ring_of_two(tmp_path, measured=(776, 976)).load()
    assert draw.reconcile(trace, ax=left) is left
    assert rows(left)[:2] == [["", "measured", "residue"], ["rank 1 to rank 0", "976 B", "+200 B"]]
    assert "1 more pair of ranks not drawn" in " ".join(texts(left))
    assert tuple(figure.get_size_inches()) == (7, 1.1)
    assert not right.texts
