"""The traffic graph, by its artists: ranks in a circle, an arrow for each pair, the bytes beside it."""

from itertools import combinations

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from traces import Job

from dlearn import draw
from dlearn.draw import palette
from dlearn.draw.circle_layout import bend_of, hub_of
from dlearn.draw.traffic_graph import MOST_ARROWS, MOST_RANKS
from dlearn.trace.event import NOT_OBSERVED


def sent(folder, pairs, *, ranks):
    """A message for each of {(src, dst): bytes}."""
    job = Job(folder, ranks=ranks)
    for (src, dst), size in pairs.items():
        job.send(src, dst, size=size)
        job.recv(dst, src, size=size)
    return job.load()


def ring(folder, *, ranks):
    return sent(folder, {(rank, (rank - 1) % ranks): 1500 for rank in range(ranks)}, ranks=ranks)


def full(folder, *, ranks):
    pairs = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    return sent(folder, {(src, dst): 1000 * (src + 1) for src, dst in pairs}, ranks=ranks)


def arrows(ax):
    """gid -> line, without the heads."""
    return {
        each.get_gid(): each for each in ax.patches if isinstance(each, FancyArrowPatch) and each.get_gid() != "head"
    }


def middles(ax):
    """Of the boxes of the ranks, in points from the lower left."""
    boxes = {each.get_gid(): each for each in ax.patches if isinstance(each, FancyBboxPatch)}
    return {gid: (b.get_x() + b.get_width() / 2, b.get_y() + b.get_height() / 2) for gid, b in boxes.items()}


def texts(ax):
    return [text.get_text().replace("\u00a0", " ") for text in ax.texts]


def title(ax):
    return " ".join(ax.get_title(loc="left").split())


def overlapping(ax):
    """Pairs of texts whose boxes meet, and texts that leave the figure."""
    ax.figure.canvas.draw()
    legend = ax.get_legend().get_texts() if ax.get_legend() else []
    shown = [text for text in (*ax.texts, ax._left_title, *legend) if text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    whole = ax.figure.bbox
    outside = [name for name, box in boxes if not (whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0)]
    return outside + [(one, two) for (one, a), (two, b) in combinations(boxes, 2) if a.padded(-1).overlaps(b)]


def test_the_ranks_stand_clockwise_from_the_top(tmp_path):
    ax = draw.traffic_graph(ring(tmp_path, ranks=4))
    at = middles(ax)
    assert max(at, key=lambda rank: at[rank][1]) == "rank 0"
    assert max(at, key=lambda rank: at[rank][0]) == "rank 1"
    assert min(at, key=lambda rank: at[rank][1]) == "rank 2"
    assert title(ax) == "Each rank sends 1.50 kB to the rank before it"
    assert [*arrows(ax)] == ["message 0 to 3", "message 1 to 0", "message 2 to 1", "message 3 to 2"]
    assert texts(ax).count("1.50 kB") == 4


def test_the_number_stands_beside_its_arrow(tmp_path):
    pairs = {(0, 1): 1000, (1, 0): 2000, (1, 2): 3000, (2, 1): 4000}
    ax = draw.traffic_graph(sent(tmp_path, pairs, ranks=3))
    ax.figure.canvas.draw()
    to_data = ax.transData.inverted()
    for (src, dst), size in pairs.items():
        (label,) = (text for text in ax.texts if text.get_text() == f"{size // 1000}.00 kB")
        near = {
            gid: min(
                abs(x - label.get_position()[0]) + abs(y - label.get_position()[1])
                for x, y in to_data.transform(arrow.get_transform().transform_path(arrow.get_path()).vertices)
            )
            for gid, arrow in arrows(ax).items()
        }
        assert min(near, key=near.get) == f"message {src} to {dst}"


def test_two_ways_bend_apart_and_one_way_is_straight():
    assert bend_of((0, 1), [(0, 1), (1, 0)]) > 0
    assert bend_of((0, 1), [(0, 1), (1, 2)]) == 0


def test_a_server_stands_in_the_middle(tmp_path):
    pairs = {(1, 0): 400, (0, 1): 100, (2, 0): 400, (0, 2): 100, (3, 0): 400, (0, 3): 100}
    ax = draw.traffic_graph(sent(tmp_path, pairs, ranks=4))
    at = middles(ax)
    others = [at[f"rank {rank}"] for rank in (1, 2, 3)]
    assert at["rank 0"][0] == pytest.approx(sum(x for x, _ in others) / 3, abs=1)
    assert min(y for _, y in others) < at["rank 0"][1] < max(y for _, y in others)
    assert hub_of((0, 1, 2), [(0, 1), (1, 2), (2, 0)]) is None
    assert hub_of((0, 1), [(0, 1), (1, 0)]) is None


def test_the_width_says_how_many_bytes_and_the_note_says_how(tmp_path):
    ax = draw.traffic_graph(sent(tmp_path, {(0, 1): 10_000, (1, 2): 2500, (2, 0): 0}, ranks=3))
    wide, half, none = (
        arrows(ax)[gid].get_linewidth() for gid in ("message 0 to 1", "message 1 to 2", "message 2 to 0")
    )
    assert half - none == pytest.approx((wide - none) / 2), "a quarter of the bytes: half of the width"
    assert "1 message without data" in texts(ax)
    assert "The width of an arrow grows with the square root of its bytes." in texts(ax)


def test_how_most_bytes_are_known_is_the_style_of_the_line(tmp_path):
    """An all-reduce of 300 B on 3 ranks goes to the left: from 2 to 1, too, 400 B derived, beside 5,000 B seen."""
    job = Job(tmp_path, ranks=3)
    job.send(2, 1, size=5000)
    job.recv(1, 2, size=5000)
    job.collective("all_reduce", size=300)
    ax = draw.traffic_graph(job.load())
    solid = {gid: arrow.get_linestyle() in ("-", "solid") for gid, arrow in arrows(ax).items()}
    assert solid == {"message 0 to 2": False, "message 1 to 0": False, "message 2 to 1": True}
    assert "An arrow is drawn as most of its bytes are known." in texts(ax)
    assert "rank 2 sends rank 1 5.40 kB (observed, partly derived)." in ax.get_label()
    heads = [each for each in ax.patches if each.get_gid() == "head"]
    assert [head.get_linewidth() for head in heads] == [0, 0, 0], "a head is never dashed"


def test_what_never_came_is_red(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1200, ranks=[0, 2], end_ns=None)
    ax = draw.traffic_graph(job.load())
    assert {to_rgb(each.get_edgecolor()) for each in arrows(ax).values()} == {to_rgb(palette.MISSING)}
    assert texts(ax).count("never came: 1.60 kB") == 3, "2 * 2/3 of 1,200 B"
    assert "Payload bytes: 4.80 kB expected that never came (not counted)." in texts(ax)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("pattern", [ring, full])
def test_nothing_overlaps(tmp_path, ranks, pattern):
    if ranks == 1:
        ax = draw.traffic_graph(sent(tmp_path, {}, ranks=1))
        assert "rank 0" in texts(ax)
        return
    assert overlapping(draw.traffic_graph(pattern(tmp_path, ranks=ranks))) == []


def test_of_too_many_arrows_the_sums_are_left_and_a_sentence(tmp_path):
    ax = draw.traffic_graph(full(tmp_path, ranks=6))
    assert len(arrows(ax)) == 30
    assert "15.0 kB" in texts(ax), "rank 2 sends 5 times 3 kB"
    assert any(text.startswith("30 arrows are too many for a number each: beside each rank") for text in texts(ax))


def test_of_far_too_many_none_is_drawn(tmp_path):
    ax = draw.traffic_graph(full(tmp_path, ranks=9))
    assert MOST_ARROWS < 9 * 8
    assert arrows(ax) == {}
    assert any(text.startswith("72 arrows are too many to be seen") for text in texts(ax))


def test_of_too_many_ranks_the_busiest_are_drawn(tmp_path):
    """Rank 39 sends 40 messages to rank 38, every other rank one to the next."""
    pairs = {(rank, rank + 1): 100 for rank in range(39)} | {(39, 38): 4000}
    ax = draw.traffic_graph(sent(tmp_path, pairs, ranks=40))
    assert len(middles(ax)) == MOST_RANKS
    assert {"rank 38", "rank 39"} <= {*middles(ax)}
    assert "the 24 of 40 ranks that send and receive most" in " ".join(texts(ax))


def test_what_a_rank_sends_itself_is_said(tmp_path):
    ax = draw.traffic_graph(sent(tmp_path, {(0, 0): 8, (0, 1): 4}, ranks=2))
    assert [*arrows(ax)] == ["message 0 to 1"]
    assert "To themselves, and not drawn: rank 0 8 B." in texts(ax)


def test_given_axes_are_used(tmp_path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    assert draw.traffic_graph(ring(tmp_path, ranks=4), ax=left) is left
    assert tuple(figure.get_size_inches()) == (9, 3)
    assert plt.get_fignums() == [figure.number]
    assert not right.patches


def test_ends_that_nobody_saw_are_messages_all_the_same(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None, by=NOT_OBSERVED)
    job.recv(1, 0)
    assert [*arrows(draw.traffic_graph(job.load()))] == ["message 0 to 1"]
