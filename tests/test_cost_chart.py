"""The picture of the costs, by its artists."""

import pytest
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


def title(ax):
    return " ".join(ax.get_title(loc="left").split())


def parts(ax, gid):
    return [artist for panel in ax.child_axes for artist in panel.get_children() if artist.get_gid() == gid]


def test_measured_medians_are_dots_in_their_own_panel_and_the_middle_half_a_bar():
    """1, 2, 3, 4 and 50 times the model's time: the median is thrice, the middle half from twice to four times."""
    ax = costs(MODEL, 4, measured=MEASURED)
    (dots,) = parts(ax, "measured tree")
    time = MODEL.time_s(cost("tree", 4, 4096))
    assert dots.get_ydata()[1] == pytest.approx(3 * time)
    assert list(parts(ax, "spread tree")[1].get_ydata()) == pytest.approx([2 * time, 4 * time])
    (line,) = parts(ax, "line tree")
    assert line.axes is dots.axes
    assert line.get_ydata()[-1] == pytest.approx(MODEL.time_s(cost("tree", 4, line.get_xdata()[-1])))
    assert "Against these dots the model is up to 3 times off." in [text.get_text() for text in ax.texts]


def test_the_title_says_which_of_the_dots_are_lowest_whatever_the_theory_says():
    star_first = {
        "star": [(64, 1e-4), (10**6, 5e-3)],
        "halving_doubling": [(64, 3e-4), (10**6, 2e-3)],
        "ring": [(64, 4e-4), (10**6, 3e-3)],
    }
    assert title(costs(MODEL, 4, measured=star_first)) == (
        "4 ranks, measured: star is the fastest at 64 B, halving-doubling at 1.00 MB"
    )
    alone = costs(MODEL, 4, measured={"ring": star_first["ring"]})
    assert len(alone.child_axes) == 1
    # In theory 6 * 50 µs + 1.5 MB / 2 GB/s = 1.05 ms, measured 3 ms.
    assert title(alone) == "4 ranks, measured: the model is up to 2.9 times off"
    with pytest.raises(DlearnError, match="no algorithm 'bus'"):
        costs(MODEL, 4, measured={"bus": []})


@pytest.mark.parametrize(("model", "ranks"), [(MODEL, 2), (SLOW, 5), (FAST, 64), (NO_LATENCY, 3)])
def test_no_text_is_clipped_or_overlaps(model, ranks):
    check_texts(costs(model, ranks))
    check_texts(costs(model, 4, measured=MEASURED))


def check_texts(ax):
    assert faults(ax.figure) == []
