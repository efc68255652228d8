"""What pictures say of hard cases, by their artists: bars, arrows, labels, titles. All kinds: test_every_picture.py."""

from collections import Counter

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch
from pictures import MS, lanes, parts, pipeline, texts, title, words
from text_boxes import faults
from traces import Job, tensor

from dlearn import draw
from dlearn.draw import palette
from dlearn.events.event import NOT_OBSERVED, REFUSED


def boxes(ax, gid):
    """Left and right of each box of a collection, rounded."""
    found = [path.get_extents() for part in parts(ax, gid) for path in part.get_paths()]
    return [(round(box.x0, 3), round(box.x1, 3)) for box in found]


def arrows(ax):
    """Those that are messages."""
    found = [each for each in ax.patches if isinstance(each, FancyArrowPatch)]
    return [each for each in found if str(each.get_gid()).startswith("message")]


def ways(ax):
    return [arrow.get_gid().removeprefix("message ") for arrow in arrows(ax)]


def send(job, src, dst, at=0, *, posted=0, **facts):
    """One message that is sent at `at` ms; its receive is posted `posted` ms before."""
    job.message(src, dst, start_ns={src: at * MS, dst: (at - posted) * MS}, end_ns=(at + 1) * MS, **facts)


# Timeline -------------------------------------------------------------------------------------------------------------


def test_waiting_is_apart_from_transfer_and_what_is_derived_is_dashed(tmp_path):
    """3 ranks, 3 MB; rank 2 calls 40 ms after rank 0. A ring of 3 sends 2 * 2/3 of the payload from each rank."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=3_000_000, start_ns={0: 0, 1: 10 * MS, 2: 40 * MS}, end_ns=100 * MS)
    trace = job.load()
    ax = draw.timeline(trace, arrows=True)
    assert lanes(ax) == ["rank 0", "rank 1", "rank 2"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "ranks run from the top"
    assert boxes(ax, "waiting all_reduce") == [(0, 40), (10, 40)]
    assert boxes(ax, "transfer all_reduce") == [(40, 100)] * 3
    assert title(ax) == "Longest wait: rank 0 for rank 2, 40.0 ms in all_reduce #1"
    assert "Each rank sends 4.00 MB = 4/3 × 3.00 MB to the rank before it." in words(ax)
    assert {*ways(ax)} == {"0 to 2", "1 to 0", "2 to 1"}
    assert all(arrow.get_linestyle() != "-" for arrow in arrows(ax))
    assert "derived messages without arrows: arrows=True, or --arrows, draws them" in words(draw.timeline(trace))


def test_a_message_that_was_seen_is_a_solid_arrow_from_its_sender(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.message(0, 1, size=5000, start_ns={0: 0, 1: 1 * MS}, end_ns={0: 8 * MS, 1: 10 * MS})
    (arrow,) = arrows(draw.timeline(job.load()))
    assert arrow.get_linestyle() in ("-", "solid")
    (x0, y0), (x1, y1) = arrow._posA_posB
    assert (x0, x1) == (0, 10)
    assert y0 < y1


def test_nothing_is_drawn_as_waiting_or_transfer_that_was_none(tmp_path):
    """A send whose data went ahead; a call of which a rank's file is missing; calls that do not fit each other."""
    ahead = Job(tmp_path / "ahead", ranks=2)
    ahead.message(0, 1, start_ns={0: 0, 1: 50 * MS}, end_ns={0: 2 * MS, 1: 51 * MS})
    assert boxes(draw.timeline(ahead.load()), "waiting send, recv") == []
    unknown = Job(tmp_path / "unknown", ranks=3)
    unknown.collective("all_reduce", size=8, end_ns=None)
    ax = draw.timeline(unknown.load(without=[2]))
    assert boxes(ax, "transfer all_reduce") == []
    assert len(boxes(ax, "waiting all_reduce")) == 2
    differ = Job(tmp_path / "differ", ranks=2)
    differ.collective("broadcast", size=8, ranks=[0], root=0, start_ns=0, end_ns=5 * MS)
    differ.collective("barrier", ranks=[1], start_ns=0, end_ns=5 * MS)
    ax = draw.timeline(differ.load())
    assert len(boxes(ax, "transfer broadcast")) == len(boxes(ax, "transfer barrier")) == 1


def test_a_hang_is_red_and_says_once_who_never_came(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=10 * MS)
    job.collective("all_reduce", size=1000, ranks=[0, 2], start_ns=20 * MS, end_ns=None)
    ax = draw.timeline(job.load())
    (stuck,) = parts(ax, "stuck")
    assert len(stuck.get_segments()) == 2
    assert tuple(stuck.get_colors()[0][:3]) == to_rgb(palette.MISSING)
    assert len(boxes(ax, "absent")) == 1
    assert texts(ax).count("never called all_reduce #2") == 1
    assert title(ax).startswith("Ranks 0 and 2 wait for rank 1 in all_reduce #2")
    left = Job(tmp_path / "left by Ctrl-C", ranks=2)
    left.collective("all_reduce", ranks=[1], start_ns=0, end_ns=40 * MS)
    assert title(draw.timeline(left.load())).startswith("Longest wait: rank 1 for rank 0, 40.0 ms")


def test_what_was_refused_is_not_called_stuck_and_an_unseen_end_is_said(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_gather", size=1000, start_ns=0, end_ns=5 * MS, by=REFUSED, error="RuntimeError")
    job.collective("all_reduce", size=1000, start_ns=10 * MS, end_ns=20 * MS)
    ax = draw.timeline(job.load())
    assert len(parts(ax, "stuck")) == 1
    assert "failed: an error ended it" in words(ax)
    assert "refused at once: RuntimeError" in words(ax)
    assert "tuck" not in words(ax)
    job = Job(tmp_path / "more", ranks=2)
    job.send(0, 1, end_ns=None, by=NOT_OBSERVED)
    job.recv(1, 0)
    job.collective("all_to_none")
    ax = draw.timeline(job.load())
    assert "1 end was not seen" in words(ax)
    assert "No arrows for 1 operation: no schedule of gloo's all_to_none" in words(ax)


def test_overlapping_calls_stand_below_each_other_and_what_is_computed_is_their_ground(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(3):
        job.collective("all_reduce", size=100, start_ns=i * MS, end_ns=(10 + i) * MS)
    job.collective("all_reduce", size=100, start_ns=20 * MS, end_ns=30 * MS)
    for begin in (0, 10):
        job.stretch(0, "backward", begin * MS, (begin + 1) * MS)
    ax = draw.timeline(job.load())
    tops = [round(path.get_extents().y0, 3) for part in parts(ax, "transfer all_reduce") for path in part.get_paths()]
    assert len(set(tops)) == 6, "three rows in each of two lanes; the fourth call finds the first row free"
    assert boxes(ax, "backward") == [(0, 1), (10, 11)]


def test_what_is_too_much_is_a_sentence_and_a_hang_stays_red(tmp_path):
    job = Job(tmp_path, ranks=2)
    for at in range(0, 30_000 * MS, 15 * MS):
        job.collective("all_reduce", size=1000, start_ns={0: at, 1: at + 5 * MS}, end_ns=at + 10 * MS)
    job.collective("all_reduce", size=8, ranks=[0], start_ns=30_000 * MS, end_ns=None)
    ax = draw.timeline(job.load())
    assert "4,001 calls are too many for bars: around the longest wait 61 are drawn." in words(ax)
    assert len(parts(ax, "stuck")) == 1
    assert title(ax).startswith("Rank 0 waits for rank 1")


def two_reductions(folder, *, ranks=64, late=None, never=None, odd=None):
    """Two all-reduces; to the second one rank comes 2 ms late, or never. One has a span of another name."""
    made = Job(folder, ranks=ranks)
    for rank in range(ranks):
        made.span(rank, "other" if rank == odd else "step 0", start_ns=0, end_ns=10 * MS)
    made.collective("all_reduce", size=64, start_ns={rank: MS + 1000 * rank for rank in range(ranks)}, end_ns=3 * MS)
    starts = {rank: 4 * MS + (2 * MS if rank == late else 0) for rank in range(ranks) if rank != never}
    made.collective("all_reduce", size=64, ranks=starts, start_ns=starts, end_ns=8 * MS if never is None else None)
    return made.load()


@pytest.mark.parametrize(
    ("ranks", "happened", "shown", "said"),
    [
        (64, {"late": 17}, ["rank 0", "rank 17", "61 alike"], "for rank 17, 2.00 ms"),
        (64, {"never": 5}, ["rank 5", "62 alike"], "wait for rank 5"),
        (24, {"late": 17}, [f"rank {rank}" for rank in range(24)], "for rank 17, 2.00 ms"),
    ],
)
def test_the_odd_rank_has_a_lane_of_its_own_and_the_others_share_one(tmp_path, ranks, happened, shown, said):
    ax = draw.timeline(two_reductions(tmp_path, ranks=ranks, **happened))
    assert [name.split("\nand ")[-1] for name in lanes(ax)] == shown
    assert said in title(ax)
    assert any("each call within 3% of the picture's width" in text for text in texts(ax)) == (ranks > 24)


@pytest.mark.parametrize(("ranks", "odd", "once"), [(3, None, False), (16, None, True), (16, 9, False)])
def test_spans_that_all_ranks_have_are_named_once(tmp_path, ranks, odd, once):
    ax = draw.timeline(two_reductions(tmp_path, ranks=ranks, odd=odd))
    assert len(lanes(ax)) == ranks
    assert (texts(ax).count("step 0") == 1) == once
    drawn = len(parts(ax, "spans")[0].get_segments()) + len(boxes(ax, "works"))
    assert (drawn == 1) == once
    assert ("other" in texts(ax)) == (odd is not None)
    assert any("Spans are those of rank 0" in text for text in texts(ax)) == once


# Titles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "sentence"),
    [
        ([], "No rank was seen sending anything"),
        ([(0, 1)], "Rank 0 sends 100 B to rank 1, nothing comes back"),
        ([(0, 2), (1, 0), (2, 1)], "Each rank sends 100 B to the rank before it"),
        ([(0, 1), (1, 2), (2, 0)], "Each rank sends 100 B to the rank after it"),
        ([(0, 1), (0, 2)], "Rank 0 sends 100 B to every other rank"),
        ([(1, 0), (2, 0)], "2 ranks send 100 B each to rank 0"),
        ([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)], "Each rank sends 100 B to every other rank"),
        ([(0, 1), (0, 2), (1, 0)], "Rank 0 sends the most: 200 B of 300 B"),
        ([(0, 1), (0, 1), (1, 2), (1, 0), (2, 0)], "Rank 0 and rank 1 send 200 B each, rank 2 100 B"),
    ],
)
def test_the_pattern_of_the_bytes_is_named(tmp_path, pairs, sentence):
    job = Job(tmp_path, ranks=3)
    for src, dst in pairs:
        send(job, src, dst, size=100)
    assert title(draw.traffic(job.load())).replace("\u00a0", " ") == sentence


@pytest.mark.parametrize("view", [draw.sequence, draw.traffic, draw.traffic_graph])
def test_a_hang_is_the_title_of_every_view_and_what_never_came_has_no_solid_line(tmp_path, view):
    job = Job(tmp_path, ranks=30)
    job.collective("all_reduce", size=1200)
    job.collective("all_reduce", size=1200, ranks=range(1, 30), start_ns=100, end_ns=None)
    ax = view(job.load())
    assert title(ax).startswith("29 ranks wait for rank 0 in all_reduce #2")
    assert not [arrow for arrow in ax.patches if arrow.get_linestyle() == "solid" and arrow.get_ec() == palette.MISSING]


def test_what_goes_along_a_tree_stands_in_layers(tmp_path):
    """Of 8 ranks: rank 0; then 1, 2 and 4; then 3, 5 and 6; then 7."""
    job = Job(tmp_path, ranks=8)
    job.collective("broadcast", size=800, root=0)
    boxes = [each for each in draw.traffic_graph(job.load()).patches if str(each.get_gid()).startswith("rank ")]
    heights = Counter(round(box.get_y()) for box in boxes)
    assert [heights[y] for y in sorted(heights, reverse=True)] == [1, 3, 3, 1]


# Sequence -------------------------------------------------------------------------------------------------------------


def folded(ax):
    """The numbers of times that stand at brackets; the picture can be read."""
    assert faults(ax.figure) == []
    return [text for text in texts(ax) if text.startswith("×")]


def test_the_order_is_that_of_sending_however_early_a_receive_was_posted(tmp_path):
    job = Job(tmp_path, ranks=3)
    send(job, 0, 1, 1, size=4, tag=1)
    send(job, 2, 1, 5, size=8, tag=2, posted=5)
    ax = draw.sequence(job.load())
    assert ways(ax) == ["0 to 1", "2 to 1"]
    heights = [arrow._posA_posB[0][1] for arrow in arrows(ax)]
    assert heights == sorted(heights)
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "time runs downwards"
    assert {"uint8[4] 4 B, tag 1", "uint8[8] 8 B, tag 2"} <= {*texts(ax)}


def test_sends_of_a_pipeline_stand_side_by_side_and_keep_their_order_on_each_lifeline(tmp_path):
    ax = draw.sequence(pipeline(tmp_path / "pipeline", stages=4, micro_batches=6))
    heights: dict[str, list[float]] = {}
    for arrow in arrows(ax):
        for rank in arrow.get_gid().removeprefix("message ").split(" to "):
            heights.setdefault(rank, []).append(arrow._posA_posB[0][1])
    assert [len(heights[rank]) for rank in "0123"] == [12, 24, 24, 12]  # 6 forwards and backwards
    assert all(mine == sorted({*mine}) for mine in heights.values())
    assert ax.get_ylim()[0] < 0.7 * len(arrows(ax))  # rows, if each had one
    assert (folded(ax), faults(ax.figure)) == ([], [])
    assert "33% of it bubble: draw.pipeline shows it." in words(ax)  # (6 + 3) x 30 ms, and 3 of 9


def test_equal_steps_are_folded_though_their_messages_change_places(tmp_path):
    """A server and two workers, who answer now in this, now in that order."""
    job = Job(tmp_path, ranks=3)
    for step in range(10):
        first, second = (1, 2) if step % 3 else (2, 1)
        for i, (src, dst) in enumerate([(0, 1), (0, 2), (first, 0), (second, 0)]):
            send(job, src, dst, 10 * step + 2 * i, posted=2 * i, size=4 * src + 4)
    ax = draw.sequence(job.load())
    assert folded(ax) == ["× 10"], "nobody has said that these are steps"
    assert ways(ax) == ["0 to 1", "0 to 2", "2 to 0", "1 to 0"]
    assert "What is repeated is drawn as it was the first time; who sends first may change." in texts(ax)


@pytest.mark.parametrize("ranks", [3, 64])
def test_every_arrow_of_a_ring_goes_to_the_rank_before_and_what_is_not_drawn_is_counted(tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    for _ in range(30):
        job.collective("all_reduce", size=64_000, phase="backward", end_ns=MS)
    ax = draw.sequence(job.load())
    assert folded(ax) == ["× 30"]
    assert "to the rank before it" in title(ax)
    drawn = [[int(rank) for rank in way.split(" to ")] for way in ways(ax)]
    assert drawn
    assert all(dst == (src - 1) % ranks for src, dst in drawn)
    closing = [arrow.get_gid() for arrow in ax.patches if arrow.get_gid() == "comes in"]
    assert len(closing) == 1, "the ring is closed at the sides"
    if ranks == 64:
        lifelines = [label.get_text() for label in ax.get_xticklabels()]
        assert lifelines == ["rank 0", "rank 1", "rank 2", "… 59 more", "rank 62", "rank 63"]
        assert "messages of ranks without a lifeline" in words(ax)


def test_more_than_fits_is_counted_and_an_all_to_all_is_one_row(tmp_path):
    job = Job(tmp_path / "many", ranks=2)
    for i in range(100):
        send(job, 0, 1, i, size=4 + i)
    ax = draw.sequence(job.load())
    left_out = int(words(ax).partition(" later operations not drawn")[0].split()[-1])
    assert len(arrows(ax)) + left_out == 100
    job = Job(tmp_path / "step of FSDP2", ranks=2)
    for i in range(14):
        facts = {"start_ns": i * MS, "end_ns": (i + 1) * MS, "outputs": (tensor(2 * (30_000 + i)),)}
        job.collective("all_gather_single", size=30_000 + i, **facts)
    ax = draw.sequence(job.load())
    assert (len(arrows(ax)), "not drawn" in words(ax)) == (2 * 14, False)
    job = Job(tmp_path / "all", ranks=64)
    job.collective("all_to_all_single", size=6400, end_ns=MS)
    ax = draw.sequence(job.load())
    assert arrows(ax) == []
    assert "each of 64 to each other, 100 B (derived)" in words(ax)


# Traffic --------------------------------------------------------------------------------------------------------------


def test_how_most_bytes_are_known_is_the_style_of_the_line_and_its_op_the_colour(tmp_path):
    """An all-reduce of 300 B on 3 ranks goes to the left: from 2 to 1, too, 400 B derived, beside 5,000 B seen."""
    job = Job(tmp_path, ranks=3)
    send(job, 2, 1, size=5000)
    job.collective("all_reduce", size=300)
    ax = draw.traffic_graph(job.load())
    lines = {arrow.get_gid().removeprefix("message "): arrow for arrow in arrows(ax)}
    solid = {way: arrow.get_linestyle() in ("-", "solid") for way, arrow in lines.items()}
    assert solid == {"0 to 2": False, "1 to 0": False, "2 to 1": True}
    assert lines["2 to 1"].get_linewidth() > lines["1 to 0"].get_linewidth()
    assert to_rgb(lines["2 to 1"].get_edgecolor()) == to_rgb(palette.look("send").line)
    assert to_rgb(lines["0 to 2"].get_edgecolor()) == to_rgb(palette.look("all_reduce").line)
    assert "rank 2 sends rank 1 5.40 kB (observed, partly derived)." in ax.get_label()


def test_what_never_came_and_what_a_rank_sends_itself_is_said(tmp_path):
    job = Job(tmp_path, ranks=3)
    send(job, 0, 0, size=8)
    job.collective("all_reduce", size=1200, ranks=[0, 2], end_ns=None)
    trace = job.load()
    ax = draw.traffic_graph(trace)
    assert {to_rgb(each.get_edgecolor()) for each in arrows(ax)} == {to_rgb(palette.MISSING)}
    assert words(ax).count("never came: 1.60 kB") == 3, "2 * 2/3 of 1,200 B"
    assert "To themselves, and not drawn: rank 0 8 B." in words(ax)
    assert "4.80 kB expected that never came" in words(ax)
    assert len(boxes(draw.traffic(trace), "never came")) == 3
