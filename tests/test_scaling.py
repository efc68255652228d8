"""How messages grow with the batch: by hand, on real workers, and by the artists of the picture."""

import pytest
import rpc_jobs
import torch
from torch.nn.parallel import DistributedDataParallel
from traces import Job

from dlearn import Cluster, draw, span
from dlearn.analysis import scaling
from dlearn.analysis.costs.scaling import _factors
from dlearn.errors import DlearnError
from dlearn.trace.event import TensorInfo


def job(folder, sizes, *, more=0):
    """Rank 0 sends rank 1 tensors of these bytes, and rank 1 answers 4 bytes `1 + more` times."""
    made = Job(folder, ranks=2)
    for size in sizes:
        made.send(0, 1, size=size)
        made.recv(1, 0, size=size)
    for _ in range(1 + more):
        made.send(1, 0)
        made.recv(0, 1)
    return made.load()


def runs(tmp_path, bytes_of, sizes=(1, 8, 32)):
    return {size: job(tmp_path / str(size), bytes_of(size)) for size in sizes}


def test_a_line_is_found_in_whole_numbers(tmp_path):
    told = scaling(runs(tmp_path, lambda b: [100 + 12 * b]))
    grows, stays = told.lines
    assert (grows.slope, grows.constant, grows.exact) == (12, 100, True)
    assert (stays.slope, stays.constant, stays.varies) == (0, 4, False)
    assert grows.formula == "100 B + 12 B × B, exactly"
    assert told.finding == "1 of 2 messages grows with B: 12 B for each example"
    assert told.payload_bytes == (116, 200, 488)  # 104 + 12 B
    assert "The other 1 message does not depend on B: 4 B." in told.sentences()


def test_the_order_of_the_dict_does_not_matter(tmp_path):
    found = runs(tmp_path, lambda b: [12 * b])
    assert scaling(dict(reversed(found.items()))) == scaling(found)


def test_what_is_no_line_says_so_with_its_largest_deviation(tmp_path):
    (line, _) = scaling(runs(tmp_path, lambda b: [b * b], sizes=(1, 2, 3))).lines
    # Least squares of 1, 4, 9 at 1, 2, 3: slope 4, through (2, 14/3): off by -1/3, 2/3 and -1/3.
    assert not line.exact
    assert line.slope == pytest.approx(4)
    assert line.deviation_bytes == pytest.approx(2 / 3)
    assert line.formula.startswith("not linear in B: about -3 B + 4.0 B × B")


def test_two_sizes_always_lie_on_a_line_and_that_is_said(tmp_path):
    (line, _) = scaling(runs(tmp_path, lambda b: [b * b], sizes=(1, 3))).lines
    assert line.slope == 4
    assert "two sizes always lie on a line: add a third B" in line.formula


def test_the_name_of_what_was_varied(tmp_path):
    told = scaling(runs(tmp_path, lambda h: [20 * h]), name="H")
    assert told.finding == "1 of 2 messages grows with H: 20 B for each of H"


def test_nothing_depends_on_it(tmp_path):
    told = scaling(runs(tmp_path, lambda b: [100]))
    assert told.finding == "No message depends on B: 2 messages, 104 B at every size"
    assert told.slope == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda found: {1: found[1]}, "at least two sizes, and got 1"),
        (lambda found: {}, "at least two sizes, and got 0"),
        (lambda found: {"one": found[1], 8: found[8]}, "a size is a whole number, not 'one'"),
        (lambda found: {True: found[1], 8: found[8]}, "a size is a whole number, not True"),
        (lambda found: [found[1], found[8]], "a dict of sizes and traces"),
        (lambda found: {1: found[1], 8: "trace"}, "a dict of sizes and traces"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, error):
    with pytest.raises(DlearnError, match=error):
        scaling(change(runs(tmp_path, lambda b: [b])))


def test_the_message_that_one_run_lacks_is_named(tmp_path):
    found = {1: job(tmp_path / "1", [8]), 8: job(tmp_path / "8", [8], more=1)}
    with pytest.raises(DlearnError, match=r"B = 8 has send #2 from rank 1 to rank 0 .*, and that with B = 1 has none"):
        scaling(found)
    with pytest.raises(DlearnError, match="no message is known in the run with B = 2"):
        scaling({2: Job(tmp_path / "2", ranks=2).load(), 8: found[8]})


def tensor(*shape, item=4):
    size = item * torch.Size(shape).numel()
    return TensorInfo(shape, "float32", "cpu", size, size)


@pytest.mark.parametrize(
    ("shapes", "factors"),
    [
        ([(1, 3, 16, 8), (8, 3, 16, 8), (32, 3, 16, 8)], "4 B × C 3 × H 16 × W 8"),
        ([(1, 10), (8, 10), (32, 10)], "4 B × 10"),
        ([(5, 1), (5, 8), (5, 32)], "4 B × 5"),
        ([(2, 10), (16, 10), (64, 10)], "4 B × 2 × 10"),  # two for each example
        ([(1, 3, 1), (8, 3, 8), (32, 3, 32)], ""),  # two dimensions vary: no line
        ([(2, 7), (9, 7), (33, 7)], ""),  # one more than B
    ],
)
def test_factors_come_from_the_shapes(shapes, factors):
    assert _factors([[tensor(*shape)] for shape in shapes], (1, 8, 32), "B") == factors


def data_parallel(batch):
    model = DistributedDataParallel(rpc_jobs.Net())
    for step in range(2):
        with span(f"step {step}"):
            model(torch.ones(batch, 3, 16, 16)).sum().backward()


@pytest.fixture(scope="module")
def real():
    with Cluster(["ps", "trainer1"], rpc=True) as cluster:
        over_rpc = {b: cluster.run({"trainer1": rpc_jobs.train}, b, timeout=60).trace for b in (1, 8, 32)}
        with_ddp = {b: cluster.run(data_parallel, b, timeout=60).trace for b in (1, 8, 32)}
    return scaling(over_rpc), scaling(with_ddp)


def test_a_remote_convolution_grows_with_the_batch_to_the_byte(real):
    told, _ = real
    # 4 B × C × 16 × 16 with C = 3 in, 4 out, and 4 in the gradient.
    assert [line.slope for line in told.growing] == [3072, 4096, 4096]
    assert all(line.exact and line.deviation_bytes <= 4 for line in told.lines)
    assert told.growing[0].factors == "4 B × C 3 × H 16 × W 16"
    assert "forward(float32[B, 3, 16, 16])" in told.growing[0].what
    assert told.slope == 11_264
    assert len(told.lines) == 14


def test_ddp_does_not_depend_on_the_batch(real):
    _, told = real
    assert told.growing == ()
    assert {line.slope for line in told.lines} == {0}
    assert "does not depend on B" in told.lines[0].formula
    assert any("No message depends on B" in text.get_text() for text in draw.scaling(told).texts)


def parts(ax, kind):
    return [artist for artist in ax.lines if (artist.get_gid() or "").startswith(kind)]


def test_lines_go_through_the_points_that_were_measured(real):
    told, _ = real
    ax = draw.scaling(told)
    assert " ".join(ax.get_title(loc="left").split()) == "3 of 14 messages grow with B: 11,264 B for each example"
    lines, points = parts(ax, "line"), parts(ax, "measured")
    assert [list(each.get_xdata()) for each in points] == [[1, 8, 32]] * 4
    flat = [sum(each) for each in zip(*(line.payload_bytes for line in told.lines if not line.varies), strict=True)]
    assert sorted(list(each.get_ydata()) for each in points) == sorted(
        [*(list(each.payload_bytes) for each in told.growing), flat]
    )
    # Output and gradient grow alike: one line. The steepest first; last the 11 messages that do not depend on B.
    assert [each.get_ydata()[1] - each.get_ydata()[0] for each in lines] == pytest.approx([4096 * 32, 3072 * 32, 0])
    assert lines[2].get_ydata()[0] == pytest.approx(sum(flat) / 3)
    assert {each.get_linestyle() for each in lines} == {"--"}
    labels = [text.get_text().splitlines() for text in ax.texts if text.get_gid() == "label"]
    assert [label[0].split(" + ")[0] for label in labels[1:]] == ["3,072 B × B", "4,096 B × B"]
    assert labels[0][1] == "of 11 other messages"


def test_messages_of_one_slope_share_a_line_and_say_their_constants(tmp_path):
    ax = draw.scaling(runs(tmp_path, lambda b: [100 + 12 * b, 7 + 12 * b, 5 * b]))
    texts = [text.get_text().splitlines()[0] for text in ax.texts if text.get_gid() == "label"]
    assert texts == ["4 B at every B", "5 B × B + 0 B", "12 B × B + 7 to 100 B"]
    assert len(parts(ax, "line")) == 3
    assert len(parts(ax, "measured")) == 4


def test_constant_messages_above_all_others_are_told_and_leave_the_picture_its_size(tmp_path):
    """Thirty of 4,000 B are 120,000 at every B; what grows ends at 400."""
    ax = draw.scaling(runs(tmp_path, lambda b: [100 * b, *[4000] * 30]))
    assert len(parts(ax, "line")) == len(parts(ax, "measured")) == 1
    notes = [text.get_text() for text in ax.texts if text.get_gid() == "note"]
    assert any(note.startswith("Above this picture: ") for note in notes)
    assert ax.get_figure().get_size_inches()[1] < 6


def test_it_can_be_drawn_beside_another(real):
    import matplotlib.pyplot as plt

    figure, (left, _) = plt.subplots(1, 2, figsize=(9, 3.4))
    assert draw.scaling(real[0], ax=left) is left
    assert tuple(figure.get_size_inches()) == (9, 3.4)
