"""The picture of the costs, by its artists."""

import pytest
from test_draw import title
from text_boxes import faults

from dlearn.errors import DlearnError
from dlearn.lessons.cost_chart import costs
from dlearn.lessons.trees_and_rings import ALGORITHMS, Model, cost

MODEL = Model(latency_s=50e-6, bandwidth=2e9, error=0.12, medians=9)
SLOW = Model(latency_s=2e-3, bandwidth=1e7)
FAST = Model(latency_s=1e-6, bandwidth=3e11)
NO_LATENCY = Model(latency_s=0.0, bandwidth=1e9)
MEASURED = {
    name: [(size, MODEL.time_s(cost(name, 4, size)) * late) for size in (64, 4096, 10**6) for late in (1, 2, 3, 4, 50)]
    for name in ALGORITHMS
}


def parts(ax, gid):
    return [artist for panel in ax.child_axes for artist in panel.get_children() if artist.get_gid() == gid]


def test_each_algorithm_has_a_panel_with_its_name_and_its_line():
    ax = costs(MODEL, 4)
    for name, panel in zip(("star", "tree", "ring", "halving_doubling"), ax.child_axes, strict=True):
        (line,) = parts(ax, f"line {name}")
        assert line.axes is panel
        size, time = line.get_xdata()[-1], line.get_ydata()[-1]
        assert time == pytest.approx(MODEL.time_s(cost(name, 4, size)))
        assert len(parts(ax, f"behind {name}")) == 4, "in grey in every panel"
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert parts(ax, "label ring")[0].get_text() == "ring: 6 steps, 1.5 S"
    assert len({(panel.get_xlim(), panel.get_ylim()) for panel in ax.child_axes}) == 1


def test_without_dots_the_title_is_the_theory_and_the_crossing_is_marked():
    ax = costs(MODEL, 4)
    assert title(ax) == "4 ranks, in theory: below 80.0 kB the tree beats the ring; halving-doubling always beats both"
    marks = parts(ax, "crossing")
    assert len(marks) == 2, "in the ring's panel and in the tree's"
    for mark in marks:
        assert mark.get_xdata()[0] == pytest.approx(80_000)
        assert mark.get_ydata()[0] == pytest.approx(6 * 50e-6 + 1.5 * 80_000 / 2e9)
    told = [text.get_text().replace("\u00a0", " ") for text in ax.texts]
    assert "White circle: in the model, ring and tree take the same time for 80.0 kB." in told
    assert parts(costs(MODEL, 3), "crossing") == []


def test_measured_medians_are_dots_in_their_own_panel_and_the_middle_half_a_bar():
    """1, 2, 3, 4 and 50 times the model's time: the median is thrice, the middle half from twice to four times."""
    ax = costs(MODEL, 4, measured=MEASURED)
    (dots,) = parts(ax, "measured tree")
    time = MODEL.time_s(cost("tree", 4, 4096))
    assert dots.get_linestyle() == "None"
    assert list(dots.get_xdata()) == [64, 4096, 10**6]
    assert dots.get_ydata()[1] == pytest.approx(3 * time)
    assert list(parts(ax, "spread tree")[1].get_ydata()) == pytest.approx([2 * time, 4 * time])
    low, high = dots.axes.get_ylim()
    assert low < min(dots.get_ydata()) < max(dots.get_ydata()) < high
    told = [text.get_text() for text in ax.texts]
    assert "Both constants are fitted to 9 medians, the worst is 12% off." in told
    assert "Against these dots the model is up to 3 times off." in told
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "measured: median, and the middle half" in labels
    # Thrice the model is a model, too: its line goes through the dots.
    (fitted,) = parts(ax, "fitted tree")
    assert fitted.get_ydata()[-1] == pytest.approx(3 * parts(ax, "line tree")[0].get_ydata()[-1])


def test_the_title_says_which_of_the_dots_are_lowest_whatever_the_theory_says():
    star_first = {
        "star": [(64, 1e-4), (10**6, 5e-3)],
        "halving_doubling": [(64, 3e-4), (10**6, 2e-3)],
        "ring": [(64, 4e-4), (10**6, 3e-3)],
    }
    assert title(costs(MODEL, 4, measured=star_first)) == (
        "4 ranks, measured: star is the fastest at 64 B, halving-doubling at 1.00 MB"
    )
    small = {name: found[:1] for name, found in star_first.items()}
    assert title(costs(MODEL, 4, measured=small)) == "4 ranks, measured: star is the fastest at every size"
    alone = costs(MODEL, 4, measured={"ring": star_first["ring"]})
    assert len(alone.child_axes) == 1
    # In theory 6 * 50 µs + 1.5 MB / 2 GB/s = 1.05 ms, measured 3 ms.
    assert title(alone) == "4 ranks, measured: the model is up to 2.9 times off"


def test_times_below_the_lines_are_seen_too():
    ax = costs(MODEL, 4, measured={"ring": [(1000, 1e-6), (1000, 2e-6)]})
    assert ax.child_axes[0].get_ylim()[0] < 1e-6


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(DlearnError, match="no algorithm 'bus'"):
        costs(MODEL, 4, measured={"bus": []})


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 64])
@pytest.mark.parametrize("model", [MODEL, SLOW, FAST, NO_LATENCY], ids=["usual", "slow", "fast", "no latency"])
def test_no_text_is_clipped_or_overlaps(ranks, model):
    check_texts(costs(model, ranks))


def check_texts(ax):
    assert faults(ax.figure) == []


def test_no_text_overlaps_beside_another_picture():
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    for ax, measured in ((left, None), (right, MEASURED)):
        assert costs(MODEL, 4, measured=measured, ax=ax) is ax
    assert not [each for each in faults(figure) if "leaves the figure" not in each]
    assert tuple(figure.get_size_inches()) == (12, 5)
