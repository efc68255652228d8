"""How messages grow with the batch: by hand, on real workers, and by the artists of the picture."""

import pytest
import rpc_jobs
from torch.distributed import rpc
from traces import Job

from dlearn import draw
from dlearn.analysis import scaling
from dlearn.errors import DlearnError


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
    found = runs(tmp_path, lambda b: [100 + 12 * b])
    told = scaling(found)
    assert scaling(dict(reversed(found.items()))) == told
    grows, stays = told.lines
    assert (grows.slope, grows.constant, grows.exact) == (12, 100, True)
    assert (stays.slope, stays.constant, stays.varies) == (0, 4, False)
    assert grows.formula == "100 B + 12 B × B, exactly"
    assert told.finding == "1 of 2 messages grows with B: 12 B for each example"
    assert scaling(found, name="H").finding == "1 of 2 messages grows with H: 12 B for each of H"
    assert told.payload_bytes == (116, 200, 488)  # 104 + 12 B
    still = scaling({1: found[1], 2: found[1], 3: found[1]})
    assert still.finding == "No message depends on B: 2 messages, 116 B at every size"


def test_what_is_no_line_says_so_and_two_sizes_are_none(tmp_path):
    squares = runs(tmp_path, lambda b: [b * b], sizes=(1, 2, 3))
    (line, _) = scaling(squares).lines
    # Least squares of 1, 4, 9 at 1, 2, 3: slope 4, through (2, 14/3): off by -1/3, 2/3 and -1/3.
    assert not line.exact
    assert line.slope == pytest.approx(4)
    assert line.deviation_bytes == pytest.approx(2 / 3)
    assert line.formula.startswith("not linear in B: about -3 B + 4.0 B × B")
    (line, _) = scaling({1: squares[1], 3: squares[3]}).lines
    assert line.slope == 4
    assert "two sizes always lie on a line: add a third B" in line.formula


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda found: {1: found[1]}, "at least two sizes, and got 1"),
        (lambda found: {"one": found[1], 8: found[8]}, "a size is a whole number, not 'one'"),
        (lambda found: {1: found[1], 8: "trace"}, "a dict of sizes and traces"),
        (lambda found: {1: found[1].where(kind="span"), 8: found[8]}, "no message is known in the run with B = 1"),
        (lambda found: {1: found[1], 8: found[9]}, r"B = 8 has send #2 from rank 1 to rank 0 .*, and that with B = 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, change, error):
    found = {**runs(tmp_path, lambda b: [b], sizes=(1, 8)), 9: job(tmp_path / "more", [8], more=1)}
    with pytest.raises(DlearnError, match=error):
        scaling(change(found))


def train_on_trainer(batch):
    if rpc.get_worker_info().name == "trainer1":
        rpc_jobs.train(batch)


@pytest.mark.slow
def test_a_remote_convolution_grows_with_the_batch_to_the_byte(recorded):
    workers = ("ps", "trainer1")
    told = scaling({b: recorded(train_on_trainer, workers, arguments=(b,), rpc=True) for b in (1, 8, 32)})
    # 4 B × C × 16 × 16 with C = 3 in, 4 out, and 4 in the gradient.
    assert [line.slope for line in told.growing] == [3072, 4096, 4096]
    assert all(line.exact and line.deviation_bytes <= 4 for line in told.lines)
    assert told.growing[0].factors == "4 B × C 3 × H 16 × W 16"
    assert "forward(float32[B, 3, 16, 16])" in told.growing[0].what
    assert (told.slope, len(told.lines)) == (11_264, 14)
    ax = draw.scaling(told)
    assert " ".join(ax.get_title(loc="left").split()) == "3 of 14 messages grow with B: 11,264 B for each example"
    # Output and gradient grow alike: one line. The steepest first; last the 11 messages that do not depend on B.
    lines = [each for each in ax.lines if (each.get_gid() or "").startswith("line")]
    assert [each.get_ydata()[1] - each.get_ydata()[0] for each in lines] == pytest.approx([4096 * 32, 3072 * 32, 0])
