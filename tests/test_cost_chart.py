"""The picture of the costs, by its artists."""

import pytest

from dlearn import draw
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
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def test_a_line_for_each_algorithm_with_its_name_at_the_end():
    ax = costs(MODEL, 4)
    for name in ALGORITHMS:
        (line,), (label,) = parts(ax, f"line {name}"), parts(ax, f"label {name}")
        size, time = line.get_xdata()[-1], line.get_ydata()[-1]
        assert time == pytest.approx(MODEL.time_s(cost(name, 4, size)))
        assert label.xy[0] == pytest.approx(size)
    assert parts(ax, "label ring")[0].get_text() == "ring: 6 steps, 1.5 S"
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_the_title_is_the_finding_and_the_crossing_is_marked():
    ax = costs(MODEL, 4)
    assert " ".join(ax.get_title(loc="left").split()) == (
        "4 ranks, in theory: below 80.0 kB the tree beats the ring; halving-doubling always beats both"
    )
    mark = next(part for part in parts(ax, "crossing") if getattr(part, "get_marker", str)() == "o")
    assert mark.get_xdata()[0] == pytest.approx(80_000)
    assert mark.get_ydata()[0] == pytest.approx(6 * 50e-6 + 1.5 * 80_000 / 2e9)
    assert "ring and tree\ncross at 80.0 kB" in [text.get_text() for text in ax.texts]
    assert parts(costs(MODEL, 3), "crossing") == []


def test_measured_medians_are_dots_and_the_middle_half_a_bar():
    """1, 2, 3, 4 and 50 times the model's time: the median is thrice, the middle half from twice to four times."""
    ax = costs(MODEL, 4, measured=MEASURED)
    (dots,) = parts(ax, "measured tree")
    time = MODEL.time_s(cost("tree", 4, 4096))
    assert dots.get_linestyle() == "None"
    assert list(dots.get_xdata()) == pytest.approx([64, 4096, 10**6], rel=0.5), "side by side"
    assert dots.get_ydata()[1] == pytest.approx(3 * time)
    assert list(parts(ax, "spread tree")[1].get_ydata()) == pytest.approx([2 * time, 4 * time])
    assert ax.get_ylim()[0] < min(dots.get_ydata()) < max(dots.get_ydata()) < ax.get_ylim()[1]
    assert any("Dots: medians" in text.get_text() for text in ax.texts)
    assert any("fitted to 9 medians, the worst is 12% off" in text.get_text() for text in ax.texts)
    assert not any("Dots" in text.get_text() for text in costs(MODEL, 4).texts)


def test_times_below_the_lines_are_seen_too():
    ax = costs(MODEL, 4, measured={"ring": [(1000, 1e-6), (1000, 2e-6)]})
    assert ax.get_ylim()[0] < 1e-6


def test_unknown_algorithms_and_one_rank_are_refused():
    with pytest.raises(DlearnError, match="no algorithm 'bus'"):
        costs(MODEL, 4, measured={"bus": []})
    with pytest.raises(DlearnError, match="at least 2 ranks"):
        costs(MODEL, 1)


def test_lines_that_lie_on_each_other_are_all_seen():
    """On two ranks ring and halving-doubling are one line: the later drawn is the narrower."""
    lines = [parts(costs(MODEL, 2), f"line {name}")[0] for name in ALGORITHMS]
    by_depth = sorted(lines, key=lambda line: line.get_zorder())
    widths = [line.get_linewidth() for line in by_depth]
    assert widths == sorted(widths, reverse=True)
    assert len({line.get_color() for line in lines}) == len(set(widths)) == 4


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 64])
@pytest.mark.parametrize("model", [MODEL, SLOW, FAST, NO_LATENCY], ids=["usual", "slow", "fast", "no latency"])
def test_no_text_is_clipped_or_overlaps(ranks, model):
    check_texts(costs(model, ranks))


def test_no_text_overlaps_beside_another_picture():
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    for ax, measured in ((left, None), (right, MEASURED)):
        assert costs(MODEL, 4, measured=measured, ax=ax) is ax
        check_texts(ax, within=False)
    assert tuple(figure.get_size_inches()) == (9, 3.5)


def check_texts(ax, *, within=True):
    ax.figure.canvas.draw()
    ticks = [label for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels()]
    shown = [text for text in (*ax.texts, ax._left_title, *ticks) if text.get_text()]
    extents = [text.get_window_extent() for text in shown]
    whole = ax.figure.bbox
    for text, extent in zip(shown, extents, strict=True):
        assert not within or (whole.x0 <= extent.x0 < extent.x1 <= whole.x1), text.get_text()
        assert not within or (whole.y0 <= extent.y0 < extent.y1 <= whole.y1), text.get_text()
    inner = [extent.padded(-2) for extent in extents]
    clashes = [
        (shown[i].get_text(), shown[j].get_text())
        for i in range(len(inner)) for j in range(i) if inner[i].overlaps(inner[j])
    ]  # fmt: skip
    assert clashes == []


def test_a_saved_picture_is_the_same_twice(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw.save(costs(MODEL, 4, measured=MEASURED), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
