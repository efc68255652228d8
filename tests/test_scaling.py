"""How messages grow with the batch: by hand. (On real workers: the lesson model_parallel.)"""

import pytest
from traces import Job

from dlearn.analysis import scaling
from dlearn.errors import DlearnError


def job(folder, sizes, *, more=0):
    """Rank 0 sends rank 1 tensors of these bytes, and rank 1 answers 4 bytes `1 + more` times."""
    made = Job(folder, ranks=2)
    for size in sizes:
        made.message(0, 1, size=size)
    for _ in range(1 + more):
        made.message(1, 0)
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
