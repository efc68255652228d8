"""No text of a picture lies on another, is cut off or stands over other axes: of hard traces, each in each drawing.

The lessons' own pictures are checked where the lessons run (test_notebooks.py), in the same way.
"""

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from text_boxes import drawn_lines, faults, watch
from traces import Job, header, tensor

from dlearn import draw
from dlearn.trace.event import NOT_OBSERVED

US, MS = 1000, 1_000_000
STRANGE = ["a$b$", "<script>alert(1)</script>", "long " * 60, "日本\n\u202e\x00%s{}", "W" * 200]


# The check itself: it finds what is planted ---------------------------------------------------------------------------


def two_axes():
    figure = Figure(figsize=(6, 3), dpi=100)
    left, right = figure.subplots(1, 2)
    left.text(0.1, 0.5, "alone", transform=left.transAxes)
    return figure, left, right


def test_a_picture_that_can_be_read_has_no_faults():
    figure, left, _ = two_axes()
    left.set_title("a title")
    left.text(0.1, 0.1, "on two\nlines", rotation=90)
    assert faults(figure) == []
    assert {"alone", "a title", "on two", "lines", "0.2"} <= {line.text for line in drawn_lines(figure)}


def test_texts_on_each_other_are_found():
    figure, left, _ = two_axes()
    left.text(0.12, 0.5, "over it")
    (fault,) = faults(figure)
    assert fault.startswith("'alone' and 'over it' overlap by")


def test_turned_text_is_where_it_is_drawn():
    """The upright box around the diagonal holds the other text; the diagonal itself passes below it."""
    figure, left, _ = two_axes()
    left.text(0.3, 0.1, "a long diagonal text", rotation=45)
    assert faults(figure) == []
    left.text(0.5, 0.32, "on it")
    assert ["diagonal" in fault and "on it" in fault for fault in faults(figure)] == [True]


def test_ticks_and_legends_count_and_what_is_not_drawn_does_not():
    figure, left, _ = two_axes()
    left.set_xticks([0.4, 0.41], ["one tick", "two tick"])
    left.plot([0, 1], [0, 0], label="in the legend")
    left.legend(loc=(0.05, 0.42))
    left.text(0.1, 0.5, "not to be seen", visible=False)
    assert [fault.split(" overlap")[0] for fault in faults(figure)] == [
        "'one tick' and 'two tick'",
        "'alone' and 'in the legend'",
    ]


def test_what_is_cut_off_or_reaches_into_the_neighbour_or_leaves_is_found():
    figure, left, right = two_axes()
    left.text(0.9, 0.2, "cut off", clip_on=True)
    left.text(0.95, 0.7, "a text that is too long")
    right.text(0.7, 0.9, "a text that is too long, too")
    assert {
        fault.split("' ")[1].split(" by ")[0].split(":")[0] for fault in faults(figure) if "overlap" not in fault
    } == {
        "is cut off at the edge of its axes",
        "stands over other axes",
        "leaves the figure",
    }


def test_every_picture_that_is_saved_is_seen_until_the_end_of_the_watch(tmp_path):
    figure, left, _ = two_axes()
    left.text(0.12, 0.5, "over it")
    seen = []
    end = watch(lambda shown, found: seen.append((shown, len(found))))
    draw.save(left, tmp_path / "one.svg")
    end()
    draw.save(left, tmp_path / "two.svg")
    assert seen == [(figure, 1)]


# Hard traces ----------------------------------------------------------------------------------------------------------


def many_ranks(folder):
    """24 ranks, a large ring, a small one, and a barrier."""
    job = Job(folder, ranks=24)
    for i, op in enumerate(["all_reduce", "all_gather", "barrier"]):
        late = {rank: (10 * i + rank / 4) * MS for rank in range(24)}
        job.collective(op, size=0 if op == "barrier" else 10 ** (3 * i + 3), start_ns=late, end_ns=(10 * i + 9) * MS)
    return job


def strange_names(folder):
    job = Job(folder, ranks=5)
    job.headers = [header(rank, world_size=5, name=name) for rank, name in enumerate(STRANGE)]
    for rank, name in enumerate(STRANGE):
        job.span(rank, name, start_ns=0, end_ns=90 * MS)
        job.span(rank, name, start_ns=10 * MS, end_ns=80 * MS)
    job.group("a group with a long name " * 3, [1, 2, 4])
    job.collective("all_reduce", size=1_234_567, start_ns=MS, end_ns=40 * MS)
    job.collective(
        "broadcast", size=10, group="a group with a long name " * 3, root=1, start_ns=50 * MS, end_ns=51 * MS
    )
    return job


def tiny_bars(folder):
    """40 calls of a microsecond, two together, between two long ones."""
    job = Job(folder, ranks=2)
    job.collective("all_reduce", size=4_000_000, start_ns=0, end_ns=50 * MS)
    for i in range(20):
        for _ in range(2):
            job.collective("broadcast", size=8, start_ns=(51 + i) * MS, end_ns=(51 + i) * MS + US)
    job.collective("all_gather", size=4_000_000, start_ns=80 * MS, end_ns=100 * MS)
    return job


def broken(folder):
    """A hang of a group, a call that fits no other, a receive from anyone, an end that nobody saw."""
    job = Job(folder, ranks=8)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=10 * MS)
    job.collective("all_reduce", size=1000, ranks=[0, 2, 3, 4, 5, 6], start_ns=20 * MS, end_ns=None)
    job.recv(7, None, start_ns=12 * MS, end_ns=None)
    job.send(1, 7, start_ns=12 * MS, end_ns=None, by=NOT_OBSERVED, tag=123456)
    return job


def unknown(folder):
    """Collectives whose messages nobody knows: of one rank, of two neighbours, of all."""
    job = Job(folder, ranks=6, backend="nccl")
    job.group("7", [2, 3], backend="nccl")
    job.group("8", [4], backend="nccl")
    for i, group in enumerate(["world", "7", "8"]):
        job.collective("all_to_all", size=10**6, group=group, start_ns=10 * i * MS, end_ns=(10 * i + 1) * MS)
    return job


def tagged(folder):
    """Messages in both directions at the same time, whose tags tell them apart."""
    job = Job(folder, ranks=3)
    for i, (src, dst, tag) in enumerate([(0, 1, 7), (1, 0, 8), (0, 2, 7), (2, 0, 8), (0, 1, 1_000_000)]):
        job.send(src, dst, tag=tag, size=1000 * i + 1, start_ns=i * MS, end_ns=(i + 1) * MS)
        job.recv(dst, src, tag=tag, size=1000 * i + 1, start_ns=i * MS, end_ns=(i + 1) * MS)
    return job


def crowd(folder):
    """Rank i to i + 1, through 16 ranks and back, 300 times: what is repeated is drawn once."""
    job = Job(folder, ranks=16)
    for i in range(300):
        src, dst = i % 16, (i + 1) % 16
        job.send(src, dst, size=123_456, start_ns=i * MS, end_ns=(i + 1) * MS)
        job.recv(dst, src, size=123_456, start_ns=i * MS, end_ns=(i + 1) * MS)
    return job


JOBS = [many_ranks, strange_names, tiny_bars, broken, unknown, tagged, crowd]


@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("picture", [draw.timeline, draw.sequence, draw.traffic], ids=lambda draw: draw.__name__)
def test_every_text_of_a_hard_trace_can_be_read(make, picture, tmp_path):
    assert faults(picture(make(tmp_path).load()).figure) == []


@pytest.mark.parametrize("make", [tiny_bars, tagged, unknown], ids=lambda make: make.__name__)
@pytest.mark.parametrize("picture", [draw.timeline, draw.sequence, draw.traffic], ids=lambda draw: draw.__name__)
def test_beside_another_picture_it_can_be_read_too(make, picture, tmp_path):
    trace = make(tmp_path).load()
    figure, both = plt.subplots(
        1, 2, figsize=(16, 8), gridspec_kw={"left": 0.19, "wspace": 0.8, "bottom": 0.25, "top": 0.85}
    )
    for ax in both:
        picture(trace, ax=ax)
    assert faults(figure) == []


def training(folder, *, ranks, names=("b", "a"), step_us=300):
    """A step of DDP on these ranks, each a little later than the one before it: gradients, two buckets, stretches."""
    job = Job(folder, ranks=ranks)
    half = len(names) // 2
    parts = (names[:half], names[half:])
    for rank in range(ranks):
        late = rank * 2 * US
        for index, part in enumerate(parts):
            job.bucket(rank, index, dict.fromkeys(part, 20), count=2)
        job.stretch(rank, "forward", late, late + 3 * US)
        for place, name in enumerate(names):
            job.gradient(rank, name, at_ns=late + (10 + place) * US)
        job.stretch(rank, "backward", late + 4 * US, step_us * US)
        job.stretch(rank, "optimizer", step_us * US, (step_us + 1) * US)
    for index, part in enumerate(parts):
        launched = {rank: (2 * rank + 11 + half * (index + 1)) * US for rank in range(ranks)}
        job.collective(
            "all_reduce", inputs=(tensor(20 * len(part)),), start_ns=launched, end_ns=(200 + 50 * index) * US,
            launcher="reducer", backward=0, phase="backward",
        )  # fmt: skip
    return job.load()


LONG = [f"encoder.layers.{i}.self_attention.query.weight" for i in range(30)]


@pytest.mark.parametrize(("ranks", "names"), [(2, ("b", "a")), (12, LONG)])
def test_buckets_and_breakdown_of_many_ranks_and_long_names(ranks, names, tmp_path):
    trace = training(tmp_path, ranks=ranks, names=names)
    assert faults(draw.buckets(trace).figure) == []
    assert faults(draw.breakdown(trace).figure) == []
    assert faults(draw.breakdown({"a run with a name of many words": trace, STRANGE[2]: trace}).figure) == []


@pytest.mark.parametrize("slope", [1, 1_234_567])
def test_scaling_with_lines_close_to_each_other(slope, tmp_path):
    runs = {}
    for size in (1, 2, 3, 64, 65, 1000):
        job = Job(tmp_path / str(size), ranks=2)
        for more in range(9):
            job.send(0, 1, size=slope * (more + 1) * size)
            job.recv(1, 0, size=slope * (more + 1) * size)
        runs[size] = job.load()
    assert faults(draw.scaling(runs).figure) == []
