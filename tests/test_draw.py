"""Pictures, by their artists: lanes, bars, arrows, labels, titles; and as bytes."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation, Text
from traces import Job

from dlearn import draw, export, operations, play
from dlearn.analysis import traffic
from dlearn.analysis.findings import sequence_finding, size_text, time_text, traffic_finding
from dlearn.draw import palette, rows
from dlearn.draw.bars import bars_of
from dlearn.draw.canvas import plain, wrap
from dlearn.draw.layout.lanes import ROW_IN
from dlearn.draw.palette import contrast
from dlearn.errors import DlearnError
from dlearn.hooks.c10d.c10d_ops import COLLECTIVES
from dlearn.join.waiting import waiting
from dlearn.trace.event import NOT_OBSERVED, REFUSED
from dlearn.trace.job_facts import Exit
from dlearn.trace.trace import Trace

MS = 1_000_000
PICTURES = [draw.timeline, draw.traffic, draw.traffic_graph, draw.sequence, draw.reconcile]


@pytest.fixture
def late(tmp_path):
    """3 ranks, 3 MB; rank 2 calls 40 ms after rank 0."""
    job = Job(tmp_path, ranks=3)
    calls = {0: 0, 1: 10 * MS, 2: 40 * MS}
    job.collective("all_reduce", size=3_000_000, start_ns=calls, end_ns=100 * MS)
    return job.load()


def picture_parts(ax, gid):
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def boxes(ax, gid):
    """Left and right of each box of a collection, rounded."""
    paths = [path for part in picture_parts(ax, gid) for path in part.get_paths()]
    return [(round(path.get_extents().x0, 3), round(path.get_extents().x1, 3)) for path in paths]


def arrows_of(ax):
    return [part.get_gid() for part in ax.patches if isinstance(part, FancyArrowPatch)]


def texts(ax):
    return [text.get_text() for text in ax.texts]


def title(ax):
    return " ".join(ax.get_title(loc="left").split())


# Timeline -------------------------------------------------------------------------------------------------------------


def test_waiting_is_drawn_apart_from_the_transfer(late):
    ax = draw.timeline(late)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    tops = [lane.get_extents().y0 for lane in picture_parts(ax, "lanes")[0].get_paths()]
    assert tops == sorted(tops)
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "ranks run from the top"
    assert boxes(ax, "waiting all_reduce") == [(0, 40), (10, 40)]
    assert boxes(ax, "transfer all_reduce") == [(40, 100)] * 3
    assert any("all_reduce 3.00 MB" in text for text in texts(ax))
    assert "ms" in ax.get_xlabel()


def test_the_title_is_the_longest_wait_which_stands_on_its_bar(late):
    """Rank 0 waits from 0 to 40 ms, rank 1 from 10. A ring of 3 sends 2 * 2/3 of the payload from each rank: 4 MB."""
    ax = draw.timeline(late)
    assert title(ax) == "Longest wait: rank 0 for rank 2, 40.0 ms in all_reduce #1"
    [on_bar] = [text for text in ax.texts if text.get_text() == "40.0 ms"]
    assert on_bar.get_position()[0] == 20
    assert picture_parts(ax, "waiting all_reduce")[0].get_paths()[0].contains_point(on_bar.get_position())
    notes = [" ".join(text.get_text().split()) for text in ax.texts if text.get_gid() == "note"]
    assert notes[0] == "Each rank sends 4.00 MB = 4/3 × 3.00 MB to the rank before it."


def test_an_arrow_for_each_pair_of_ranks_dashed_because_derived(late):
    ax = draw.timeline(late, arrows=True)
    assert set(arrows_of(ax)) == {"message 0 to 2", "message 1 to 0", "message 2 to 1"}
    assert all(arrow.get_linestyle() != "-" for arrow in ax.patches if isinstance(arrow, FancyArrowPatch))
    unasked = draw.timeline(late)
    assert arrows_of(unasked) == []
    assert any("derived messages without arrows: arrows=True draws them" in text for text in texts(unasked))


def test_a_line_where_the_last_rank_has_come_with_a_mark_on_it(late):
    ax = draw.timeline(late)
    [line, mark] = [line for line in ax.lines if line.get_gid() == "last rank" or line.get_marker() == ">"]
    assert list(line.get_xdata()) == [40, 40]
    middles = {label.get_text(): at for label, at in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)}
    nearest = min(middles, key=lambda name: abs(middles[name] - mark.get_ydata()[0]))
    assert nearest == "rank 2"


def test_each_operation_has_a_hue_on_all_ranks_and_its_name_once(tmp_path):
    job = Job(tmp_path, ranks=3)
    for i in range(2):
        starts = {rank: (100 * i + 10 * rank) * MS for rank in range(3)}
        job.collective("all_reduce", size=1000 * (i + 1), start_ns=starts, end_ns=(100 * i + 90) * MS)
    ax = draw.timeline(job.load())
    parts = picture_parts(ax, "transfer all_reduce")
    hues = {tuple(part.get_facecolor()[0][:3]): len(part.get_paths()) for part in parts}
    assert hues == {to_rgb(color): 3 for color in palette.SERIES[:2]}
    assert [texts(ax).count(f"all_reduce {size} kB") for size in ("1.00", "2.00")] == [1, 1]
    first = [picture_parts(ax, f"{part} all_reduce")[0].get_paths()[0] for part in ("transfer", "waiting")]
    thick, thin = (path.get_extents().height for path in first)
    assert thin < 0.5 * thick


def test_a_message_that_was_seen_is_a_solid_arrow_down_from_the_sender(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=5000, start_ns=0, end_ns=8 * MS)
    job.recv(1, 0, size=5000, start_ns=1 * MS, end_ns=10 * MS)
    ax = draw.timeline(job.load())
    (arrow,) = [part for part in ax.patches if isinstance(part, FancyArrowPatch)]
    assert arrow.get_linestyle() in ("-", "solid")
    (x0, y0), (x1, y1) = arrow._posA_posB
    assert (x0, x1) == (0, 10)
    assert y0 < y1
    assert {"send 5.00 kB", "recv 5.00 kB"} <= set(texts(ax))


def test_a_send_that_ended_before_its_recv_has_waited_for_nobody(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, start_ns=0, end_ns=2 * MS)
    job.recv(1, 0, start_ns=50 * MS, end_ns=51 * MS)
    trace = job.load()
    assert waiting(trace) == {}
    assert picture_parts(draw.timeline(trace), "waiting send, recv") == []


def test_overlapping_operations_of_a_rank_stand_below_each_other(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(3):
        job.collective("all_reduce", size=100, start_ns=i * MS, end_ns=(10 + i) * MS)
    job.collective("all_reduce", size=100, start_ns=20 * MS, end_ns=30 * MS)
    ax = draw.timeline(job.load())
    bars = picture_parts(ax, "transfer all_reduce")
    tops = [round(path.get_extents().y0, 3) for part in bars for path in part.get_paths()]
    assert len(set(tops)) == 6, "three rows in each of two lanes; the fourth call finds the first row free"


def test_what_was_refused_has_a_red_end_and_is_not_called_stuck(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_gather", size=1000, start_ns=0, end_ns=5 * MS, by=REFUSED, error="RuntimeError")
    job.collective("all_reduce", size=1000, start_ns=10 * MS, end_ns=20 * MS)
    ax = draw.timeline(job.load())
    assert len(picture_parts(ax, "stuck")) == 1
    told = [*texts(ax), *(text.get_text() for text in ax.get_legend().get_texts())]
    assert "failed: an error ended it" in told
    assert "refused at once: RuntimeError" in told
    assert not any("tuck" in text for text in told)
    assert title(ax).startswith("Each rank sends 1.00 kB")


def test_a_hang_is_red_and_says_who_never_came(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=10 * MS)
    job.collective("all_reduce", size=1000, ranks=[0, 2], start_ns=20 * MS, end_ns=None)
    ax = draw.timeline(job.load())
    (stuck,) = picture_parts(ax, "stuck")
    assert len(stuck.get_segments()) == 2
    assert tuple(stuck.get_colors()[0][:3]) == to_rgb(palette.MISSING)
    assert boxes(ax, "waiting all_reduce")[0] == (20, 32), "what never ended lasts 60 % beyond all that was seen"
    assert len(boxes(ax, "absent")) == 1
    assert texts(ax).count("never called all_reduce #2") == 1, "said once, where it is missing"
    assert not any("rank 1 never called it" in text for text in texts(ax))
    assert title(ax).startswith("Rank 0 and rank 2 wait for rank 1 in all_reduce #2")


def test_a_hang_of_a_bucket_says_in_the_picture_what_the_sentence_says(tmp_path):
    job = Job(tmp_path, ranks=2)
    facts = {"launcher": "reducer", "phase": "backward", "backward": 0}
    for rank in (0, 1):
        job.bucket(rank, 0, {"a.weight": 4, "a.bias": 4})
        job.gradient(rank, "a.bias", at_ns=2 * MS)
    job.gradient(0, "a.weight", at_ns=3 * MS)
    job.collective("all_reduce", size=8, ranks=[0], start_ns=4 * MS, end_ns=None, **facts)
    job.files[1].append(Exit(status=-9))
    trace = job.load(died=[1])
    never = "never produced the gradients of a.weight in backward pass 1"
    ax = draw.timeline(trace)
    assert title(ax) == "Rank 0 waits for rank 1 in all_reduce #1 (bucket 0: a.weight, a.bias)"
    notes = [" ".join(text.get_text().split()) for text in ax.texts if text.get_gid() == "note"]
    assert notes[0] == f"Rank 1 {never}, it was killed by SIGKILL."
    (stuck, absent) = bars_of(operations(trace), trace, until_ns=9 * MS)
    assert stuck.labels == (
        *[f"all_reduce 8 B: rank 1 {never}, it was killed by SIGKILL", f"rank 1 {never}, it was killed by SIGKILL"],
        *["all_reduce 8 B: rank 1 never produced a.weight", "rank 1 never produced a.weight"],
        *["all_reduce 8 B: rank 1 never called it", "rank 1 never called it", "all_reduce 8 B"],
    )
    assert absent.labels == (
        *[f"{never}, it was killed by SIGKILL", never, "never produced a.weight"],
        *["never called all_reduce #1", "never called"],
    )


def test_gradients_are_ticks_and_spans_brackets_with_their_name(tmp_path):
    job = Job(tmp_path, ranks=1)
    outer = job.span(0, "step 7", start_ns=0, end_ns=100 * MS)
    inner = job.span(0, "brief", start_ns=50 * MS, end_ns=50 * MS + 1000, parent=outer)
    job.collective("barrier", start_ns=50 * MS, end_ns=50 * MS + 1000, parent=inner)
    for name in ("w", "b"):
        job.gradient(0, name)
    ax = draw.timeline(job.load())
    assert len(picture_parts(ax, "gradients")[0].get_segments()) == 2
    assert len(picture_parts(ax, "spans")[0].get_segments()) == 2
    assert "step 7" in texts(ax)
    assert "brief" not in texts(ax), "no room for its name"
    assert picture_parts(ax, "works")[0].get_paths() == []


def test_a_span_without_calls_is_a_box_with_one_shade_for_each_kind(tmp_path):
    job = Job(tmp_path, ranks=2)
    outer = job.span(0, "step 7", start_ns=0, end_ns=100 * MS)
    for place, name in enumerate(("F0", "F1", "B0", "B1")):
        job.span(0, name, start_ns=20 * place * MS, end_ns=20 * (place + 1) * MS, parent=outer)
    ax = draw.timeline(job.load())
    (works,) = picture_parts(ax, "works")
    assert [box.get_extents().width for box in works.get_paths()] == pytest.approx([20] * 4)
    first, second, third, fourth = (tuple(color) for color in works.get_facecolor())
    assert first == second != third == fourth
    assert len(picture_parts(ax, "spans")[0].get_segments()) == 1  # the step around them
    assert {"F0", "F1", "B0", "B1", "step 7"} <= set(texts(ax))
    key = {patch.get_label(): patch.get_facecolor() for patch in ax.get_legend().get_patches()}
    assert key == {"span without calls: F": first, "span without calls: B": third}


def test_too_many_messages_become_a_sentence(tmp_path):
    """3 arrows for each of 100 operations are more than 250; a ring of 3 with 1200 B has 24 messages."""
    job = Job(tmp_path, ranks=3)
    for i in range(100):
        job.collective("all_reduce", size=1200, start_ns=i * MS, end_ns=(i + 1) * MS)
    ax = draw.timeline(job.load(), arrows=True)
    assert arrows_of(ax) == []
    assert "2,400 messages without room for an arrow: choose a shorter part." in texts(ax)


def test_too_many_calls_become_the_share_of_time_in_them_and_a_hang_stays_red(tmp_path):
    """Of each 20 ms, rank 0 waits for 5 and transfers for 5; calls in the same time count once."""
    job = Job(tmp_path, ranks=2)
    times = [20 * i * MS for i in range(1500)]
    for at in times:
        for _ in range(2):
            job.collective("all_reduce", size=1000, start_ns={0: at, 1: at + 5 * MS}, end_ns=at + 10 * MS)
    job.collective("all_reduce", size=8, ranks=[0], start_ns=times[-1] + 20 * MS, end_ns=None)
    ax = draw.timeline(job.load())
    lower, upper = (heights(ax, gid) for gid in ("time in all_reduce", "time waiting in all_reduce"))
    assert len(lower) == len(upper) == 2, "one strip a rank"
    assert lower[0] == pytest.approx(0.25, abs=0.02)
    assert upper[0] == pytest.approx(0.25, abs=0.02)
    assert upper[1] == 0, "rank 1 came last: it waits for nobody"
    assert any("6,001 calls are too many for bars" in text for text in texts(ax))
    assert len(picture_parts(ax, "stuck")) == 1
    assert title(ax).startswith("Rank 0 waits for rank 1")


def heights(ax, gid):
    """How high each strip is where it is highest, as a part of its row: its outline is its top, then its bottom."""
    outlines = [part.get_paths()[0].vertices[:-1, 1] for part in picture_parts(ax, gid)]
    edges = [np.split(outline, 2) for outline in outlines]
    return [max(abs(upper - lower[::-1])) / (0.88 * ROW_IN) for upper, lower in edges]


def test_the_steps_of_a_ring_have_their_own_arrows_where_there_is_room(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=10 * MS)
    ax = draw.timeline(job.load(), arrows=True)
    assert len(arrows_of(ax)) == 8, "2 ranks, 2 segments each: 4 steps of 2 messages"


def test_an_end_that_nobody_saw_is_said(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None, by=NOT_OBSERVED)
    job.recv(1, 0)
    assert any("1 end was not seen" in text for text in texts(draw.timeline(job.load())))


def test_each_rank_has_the_colour_of_what_it_called(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("broadcast", size=8, ranks=[0], root=0, start_ns=0, end_ns=5 * MS)
    job.collective("barrier", ranks=[1], start_ns=0, end_ns=5 * MS)
    ax = draw.timeline(job.load())
    assert len(boxes(ax, "transfer broadcast")) == len(boxes(ax, "transfer barrier")) == 1


def test_while_nobody_knows_whether_all_came_nothing_is_drawn_as_transfer(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=8, end_ns=None)
    ax = draw.timeline(job.load(without=[2]))
    assert boxes(ax, "transfer all_reduce") == []
    assert len(boxes(ax, "waiting all_reduce")) == 2


def test_operations_without_known_messages_are_said(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_to_none")
    told = " ".join(texts(draw.timeline(job.load())))
    assert "No arrows for 1 operation: no schedule of gloo's all_to_none" in told


# Traffic --------------------------------------------------------------------------------------------------------------


def test_the_matrix_has_the_number_in_each_cell(tmp_path):
    job = Job(tmp_path, ranks=3)
    for size, dst in ((1500, 1), (2_000_000, 2)):
        job.send(0, dst, size=size)
        job.recv(dst, 0, size=size)
    ax = draw.traffic(job.load())
    found = {(text.get_position(), text.get_text()) for text in ax.texts}
    assert {((1.5, 0.5), "1.50 kB"), ((2.5, 0.5), "2.00 MB"), ((0.5, 1.5), "·")} <= found, "senders are rows"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "received"]
    assert title(ax) == "Rank 0 sends the most: 2.00 MB of 2.00 MB"


def test_of_many_ranks_every_eighth_has_its_name_and_the_sums_are_bars(tmp_path):
    """Rank 0 sends rank 1 three times what the others send the next."""
    job = Job(tmp_path, ranks=64)
    for rank in range(64):
        job.send(rank, (rank + 1) % 64, size=100 if rank else 300)
        job.recv((rank + 1) % 64, rank, size=100 if rank else 300)
    ax = draw.traffic(job.load())
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == [*(f"rank {rank}" for rank in range(0, 64, 8)), "sent in all"]
    sent, received = ax.containers
    assert [bar.get_width() / sent[1].get_width() for bar in sent] == pytest.approx([3, *[1] * 63])
    assert [bar.get_height() / sent[1].get_width() for bar in received] == pytest.approx([1, 3, *[1] * 62])
    assert "The shade grows with the bytes, to 300 B; the longest bar is 300 B. Grey: a rank" in ax.get_label()


def test_every_number_can_be_read_on_its_cell(late):
    ax = draw.traffic(late)
    faces = picture_parts(ax, "cells")[0].get_facecolors()
    for text in ax.texts:
        x, y = text.get_position()
        if not isinstance(text, Annotation) and x < 3 and y < 3 and text.get_text() != "·":
            assert contrast(text.get_color(), faces[int(y) * 3 + int(x)][:3]) > 4.5


# Sequence -------------------------------------------------------------------------------------------------------------


def test_messages_stand_in_their_order_from_top_to_bottom(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=4, start_ns=0, end_ns=5)
    job.recv(1, 0, size=4, start_ns=0, end_ns=10)
    job.send(1, 0, size=8, start_ns=20, end_ns=25)
    job.recv(0, 1, size=8, start_ns=20, end_ns=30)
    ax = draw.sequence(job.load())
    assert arrows_of(ax) == ["message 0 to 1", "message 1 to 0"]
    heights = [part._posA_posB[0][1] for part in ax.patches if isinstance(part, FancyArrowPatch)]
    assert heights == sorted(heights)
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "time runs downwards"
    assert {"uint8[4] 4 B", "uint8[8] 8 B"} <= set(texts(ax))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["rank 0", "rank 1"]
    assert title(ax) == "Rank 1 sends the most: 8 B of 12 B; 2 messages in all"


def test_what_never_came_is_red_with_its_reason(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=1200, ranks=[0, 2], end_ns=None)
    ax = draw.sequence(job.load())
    red = [part for part in ax.patches if isinstance(part, FancyArrowPatch)]
    assert {to_rgb(arrow.get_edgecolor()) for arrow in red} == {to_rgb(palette.MISSING)}
    assert any(text.startswith("never came: 1.60 kB") for text in texts(ax)), "2 * 2/3 of 1,200 B"
    assert "all_reduce 1.20 kB: rank 1 never called it" in texts(ax)


def test_a_collective_without_known_messages_is_a_bar_with_the_reason(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_to_none")
    ax = draw.sequence(job.load())
    (bar,) = picture_parts(ax, "bar")
    assert bar.get_x() < 0
    assert bar.get_x() + bar.get_width() > 2
    assert "no schedule of gloo's all_to_none is known here yet" in texts(ax)


def test_what_repeats_is_drawn_once_with_the_number_of_times(tmp_path):
    job = Job(tmp_path, ranks=3)
    for _ in range(30):
        job.collective("all_reduce", size=1200)
        job.collective("broadcast", size=64, root=0)
    trace = job.load()
    ax = draw.sequence(trace)
    assert "× 30" in texts(ax)
    assert arrows_of(ax).count("comes in") == 1, "the ring is closed at the sides"
    assert len(arrows_of(ax)) == 6, "4 round the ring, 2 from the root"
    assert "1.60 kB in 8 parts" in texts(ax)


def test_more_than_fits_is_counted(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(100):
        job.send(0, 1, size=4 + i)
        job.recv(1, 0, size=4 + i)
    ax = draw.sequence(job.load())
    assert len(arrows_of(ax)) == 30 < rows.MOST_ROWS, "and the gaps between them"
    told = " ".join(text.get_text() for text in ax.figure.findobj(Text))
    assert "70 later operations not drawn" in told
    assert "An arrow stands for all messages" not in told, "each stands for one"


# All ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", PICTURES)
def test_an_empty_trace_gives_a_sentence(tmp_path, picture):
    ax = picture(Trace(tmp_path, (), ()))
    assert any("This trace holds no" in text for text in texts(ax))
    job = Job(tmp_path, ranks=2)
    draw.save(picture(job.load()), tmp_path / "empty.svg")


OF_TWO = {"compare", "save", "scaling", "small"}
OUTPUTS = [getattr(draw, name) for name in draw.__all__ if name not in OF_TWO]
OUTPUTS += [play.player, play.strip, export.html, export.mermaid, export.perfetto]


@pytest.mark.parametrize("damage", ["lost", "empty", "doubled", "died"])
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_damaged_traces_are_shown_as_far_as_they_go(tmp_path, output, damage):
    """A rank without a file, one that died, a recv from any source, different ops in one exchange."""
    job = Job(tmp_path, ranks=4)
    job.collective("all_gather", size=100, end_ns=90)
    job.send(0, 3, size=8)
    job.recv(3, 0, size=8)
    job.collective("all_reduce", size=100, end_ns=None)
    job.collective("broadcast", size=100, ranks=[0], root=1)
    job.collective("barrier", ranks=[1])
    job.recv(2, None, end_ns=None)
    path = job.write(died=[1])[3]
    if damage == "doubled":
        path.write_bytes((tmp_path / "host-1002.jsonl").read_bytes())
    elif damage != "died":
        path.write_bytes(b"") if damage == "empty" else path.unlink()
    for part in (Trace.load(tmp_path), Trace.load(tmp_path).where(rank=0)):
        shown = output(part)
        if output.__module__.startswith("dlearn.draw"):
            draw.save(shown, tmp_path / "damaged.svg")
        assert shown is not None


@pytest.mark.parametrize("picture", PICTURES)
def test_given_axes_are_used_and_no_figure_is_opened(late, picture):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3))
    assert picture(late, ax=axes[0]) is axes[0]
    assert plt.get_fignums() == [figure.number]
    assert tuple(figure.get_size_inches()) == (9, 3)


@pytest.mark.parametrize("picture", PICTURES)
def test_a_notebook_shows_the_figure_once(late, picture):
    """Pyplot knows exactly one new figure, which the inline backend shows at the end of the cell."""
    ax = picture(late)
    assert [plt.figure(number) for number in plt.get_fignums()] == [ax.figure]
    assert len(repr(ax)) < 120, "which the cell prints beside it"


def test_one_colour_per_operation_and_each_its_own():
    looks = {op.name: palette.look(op.name) for op in COLLECTIVES}
    assert looks["all_gather"] == looks["all_gather_single_coalesced"]
    assert looks["barrier"] == looks["monitored_barrier"]
    assert palette.look("send") == palette.look("recv")
    assert all(look.family != "other" for look in looks.values())


def test_operations_differ_in_grey_by_lightness_or_hatch():
    def grey(look):
        red, green, blue = to_rgb(look.color)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    names = [*(op.name for op in COLLECTIVES), "send"]
    looks = list({palette.look(name).family: palette.look(name) for name in names}.values())
    for i, one in enumerate(looks):
        for other in looks[:i]:
            assert abs(grey(one) - grey(other)) > 0.04 or one.hatch != other.hatch, (one.family, other.family)


def test_text_is_wrapped_between_words_and_never_before_a_unit():
    assert wrap("waits for 234 ms", 60, size=9) == ["waits for", "234\u00a0ms"]
    assert plain("a\nb\u202e") == "a\\nb\\u202e"
    assert len(plain("x" * 1000)) == 40


# Findings -------------------------------------------------------------------------------------------------------------


def test_sizes_and_times_have_three_digits():
    assert [size_text(size) for size in (0, 999, 1000, 28_912, 999_499, 999_500, 4_000_000)] == [
        "0 B", "999 B", "1.00 kB", "28.9 kB", "999 kB", "1.00 MB", "4.00 MB",
    ]  # fmt: skip
    assert [time_text(duration) for duration in (310_000, 3_100_000, 1_500_000_000)] == ["310 µs", "3.10 ms", "1.50 s"]


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
        job.send(src, dst, size=100)
        job.recv(dst, src, size=100)
    assert traffic_finding(traffic(job.load())) == sentence


def test_a_barrier_sends_messages_without_data(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("barrier")
    trace = job.load()
    assert traffic_finding(traffic(trace)) == "No rank sends data"
    assert sequence_finding(trace) == "8 messages without data"


def test_a_receive_waits_for_the_other_rank(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, start_ns=30 * MS, end_ns=40 * MS)
    job.recv(1, 0, start_ns=0, end_ns=40 * MS)
    told = [text.get_text() for text in draw.timeline(job.load()).get_legend().get_texts()]
    assert "thin: waits for the other rank" in told


def test_messages_in_a_title_are_of_those_whose_bytes_stand_there(tmp_path):
    """A ring of 3 has 24 messages, 8 from each rank; with a send more they are no pair's any more."""
    job = Job(tmp_path / "ring", ranks=3)
    job.collective("all_reduce", size=1200)
    told = "Each rank sends 1.60 kB = 4/3 × 1.20 kB to the rank before it"
    assert sequence_finding(job.load()) == f"{told}, in 8 messages"
    job = Job(tmp_path / "more", ranks=3)
    job.collective("all_reduce", size=1200)
    job.send(0, 1, size=4000)
    job.recv(1, 0, size=4000)
    assert sequence_finding(job.load()) == "Rank 0 sends the most: 5.60 kB of 8.80 kB; 25 messages in all"


@pytest.mark.parametrize("view", [draw.sequence, draw.traffic, draw.traffic_graph])
@pytest.mark.parametrize("ranks", [3, 30])
def test_a_hang_is_the_title_of_every_view_and_what_never_came_has_no_solid_line(tmp_path, view, ranks):
    job = Job(tmp_path, ranks=ranks)
    job.collective("all_reduce", size=1200)
    job.collective("all_reduce", size=1200, ranks=range(1, ranks), start_ns=100, end_ns=None)
    trace = job.load()
    ax = view(trace)
    who = "Rank 1 and rank 2 wait" if ranks == 3 else "29 ranks wait"
    assert " ".join(title(ax).split()).startswith(f"{who} for rank 0 in all_reduce #2")
    assert not [arrow for arrow in ax.patches if arrow.get_linestyle() == "solid" and arrow.get_ec() == palette.MISSING]
    told = " ".join(texts(ax))
    assert ("too many for arrows" in told) is (view is draw.traffic_graph and ranks == 30)


@pytest.mark.parametrize(
    ("ranks", "sizes", "says"),
    [
        (4, [1_000_000], "1.50 MB = 1.5 × 1.00 MB"),
        (5, [1_000_000, 500_000], "2.40 MB = 1.6 × 1.50 MB"),
        (3, [1200], "1.60 kB = 4/3 × 1.20 kB"),
        (3, [1000], "about 1.33 kB"),
    ],
)
def test_what_a_ring_sends_is_a_multiple_of_what_is_reduced_where_that_is_exact(tmp_path, ranks, sizes, says):
    """2 (n-1) / n of it; where the parts differ by a byte, that is not exact. What never ran has sent nothing."""
    job = Job(tmp_path, ranks=ranks)
    for size in sizes:
        job.collective("all_reduce", size=size)
    job.collective("all_reduce", size=7_000_000, ranks=[0], end_ns=None)
    assert traffic_finding(traffic(job.load())) == f"Each rank sends {says} to the rank before it"
    job.collective("all_gather", size=8)
    (tmp_path / "more").mkdir()
    job.folder = tmp_path / "more"
    assert "×" not in traffic_finding(traffic(job.load())), "not of all-reduces alone"


def test_overlapping_waits_for_the_same_rank_count_once(tmp_path):
    """From 0 to 40 and from 10 to 50: 50 ms, not 80."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, start_ns={0: 0, 1: 40 * MS}, end_ns=60 * MS)
    job.collective("all_reduce", size=4, start_ns={0: 10 * MS, 1: 50 * MS}, end_ns=60 * MS)
    assert waiting(job.load()) == {1: 50 * MS}


def test_an_unknown_ending_is_refused(late, tmp_path):
    ax = draw.traffic(late)
    for name in ("picture.gif", "picture"):
        with pytest.raises(DlearnError, match=r"\.svg, \.png or \.pdf"):
            draw.save(ax, tmp_path / name)
    draw.save(ax.figure, tmp_path / "WHOLE.SVG")
    assert (tmp_path / "WHOLE.SVG").stat().st_size > 1000
