"""The traffic graph, by its artists: ranks in a circle, an arrow for each pair, the bytes beside it."""

import tempfile
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from traces import Job

from dlearn import draw
from dlearn.analysis import traffic
from dlearn.draw import palette
from dlearn.draw.canvas import TEXT_PT, cut_names, text_width
from dlearn.draw.layout.circle_layout import bend_of, hub_of
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
    assert "no data" in texts(ax)
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
    assert "30 arrows are too many for a number each; draw.traffic has them all." in texts(ax)


def drawn_pairs(ax):
    """The pairs that an eye can read from the picture: by the places of the ends of arrows and lines."""
    places = {}
    for each in ax.patches:
        if isinstance(each, FancyBboxPatch):
            places[each.get_x() + each.get_width() / 2, each.get_y() + each.get_height() / 2] = each.get_gid()
    rank_at = {(round(x, 6), round(y, 6)): int(gid.removeprefix("rank ")) for (x, y), gid in places.items()}
    assert len(rank_at) == len(places), "no two ranks stand in one place"
    ends = [each._posA_posB for each in arrows(ax).values()]
    return sorted(tuple(rank_at[round(x, 6), round(y, 6)] for x, y in each) for each in ends)


@given(data=st.data(), ranks=st.integers(2, MOST_RANKS))
@settings(max_examples=8, deadline=None)
def test_every_pair_that_sends_is_an_edge_and_no_other(data, ranks):
    """Nothing is cut, however many ranks there are and whatever they send: also among equals."""
    every = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    pairs = data.draw(
        st.just(every[:: 1 + len(every) // MOST_ARROWS]) | st.sets(st.sampled_from(every), max_size=MOST_ARROWS)
    )
    with tempfile.TemporaryDirectory() as folder:
        trace = sent(Path(folder), {pair: 100 + 10 * pair[0] for pair in pairs}, ranks=ranks)
        told = traffic(trace)
        ax = draw.traffic_graph(trace)
    assert drawn_pairs(ax) == sorted(pair for pair, size in told.payload_bytes.items() if size)
    plt.close(ax.figure)


@pytest.mark.parametrize("ranks", [3, MOST_RANKS])
def test_a_ring_is_whole(tmp_path, ranks):
    ax = draw.traffic_graph(ring(tmp_path, ranks=ranks))
    assert drawn_pairs(ax) == sorted((rank, (rank - 1) % ranks) for rank in range(ranks))
    assert overlapping(ax) == []
    assert len({each.get_linewidth() for each in arrows(ax).values()}) == 1, "equal bytes, equal width"


def test_what_cannot_be_told_apart_in_a_circle_is_a_matrix(tmp_path):
    """25 ranks in a ring, and 72 arrows between 9 ranks."""
    for trace in (ring(tmp_path / "ring", ranks=MOST_RANKS + 1), full(tmp_path / "full", ranks=9)):
        ax = draw.traffic_graph(trace)
        assert arrows(ax) == {}
        (cells,) = (each for each in ax.collections if each.get_gid() == "cells")
        assert len(cells.get_paths()) == len(trace.ranks) ** 2
        assert title(ax) == title(draw.traffic(trace))


def test_the_colour_of_an_arrow_is_that_of_its_op(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=3000)
    job.send(0, 1, size=9000)
    job.recv(1, 0, size=9000)
    ax = draw.traffic_graph(job.load())
    lines = arrows(ax)
    assert to_rgb(lines["message 0 to 1"].get_edgecolor()) == to_rgb(palette.look("send").line)
    assert to_rgb(lines["message 0 to 2"].get_edgecolor()) == to_rgb(palette.look("all_reduce").line)
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == ["send, recv, observed", "all_reduce, derived"]


def test_names_that_differ_at_their_end_stay_apart(tmp_path):
    job = Job(tmp_path, ranks=4)
    name = "worker-with-a-very-long-name-{}"
    job.headers = [msgspec.structs.replace(each, name=name.format(rank)) for rank, each in enumerate(job.headers)]
    ax = draw.traffic_graph(job.load())
    assert len({text for text in texts(ax) if "name" in text}) == 4


@given(st.lists(st.text("ab-1é", min_size=1, max_size=60), min_size=1, max_size=12), st.integers(30, 300))
@settings(deadline=None, max_examples=60)
def test_distinct_names_stay_distinct(names, width):
    shown = cut_names(names, width)
    assert len({*shown}) == len({*names})
    assert all(text_width(name, size=TEXT_PT) <= width for name in shown)


def test_what_a_rank_sends_itself_is_said(tmp_path):
    ax = draw.traffic_graph(sent(tmp_path, {(0, 0): 8, (0, 1): 4}, ranks=2))
    assert [*arrows(ax)] == ["message 0 to 1"]
    assert "To themselves, and not drawn: rank 0 8 B." in texts(ax)


def test_ends_that_nobody_saw_are_messages_all_the_same(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None, by=NOT_OBSERVED)
    job.recv(1, 0)
    assert [*arrows(draw.traffic_graph(job.load()))] == ["message 0 to 1"]


def test_ranks_that_would_lie_on_each_other_are_a_matrix(tmp_path):
    """Sixteen in a circle have room in a page and none in a column of 400 px."""
    trace = ring(tmp_path, ranks=16)
    assert len(draw.traffic_graph(trace).patches) >= 2 * 16  # a box and an arrow for each
    with draw.small():
        ax = draw.traffic_graph(trace)
        why = "No room for a circle of these ranks, so a matrix as of draw.traffic. "
        assert why in ax.get_label()
        assert ax.get_label().replace(why, "") == draw.traffic(trace).get_label()
