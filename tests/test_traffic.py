"""Bytes from each rank to each other rank, and those of two runs side by side. (Predicted and measured ones are in
test_reconcile.py.) Bandwidth, as nccl-tests define it; odd cases: frozen/by_hand.zip, "bandwidth-...". And how messages
grow with the batch: by hand. (On real workers: the lesson model_parallel.)
"""

import pytest
from pictures import MS, texts, title
from traces import Job

from dlearn import draw, operations
from dlearn.analysis import bandwidth, compare, measured_traffic, scaling, traffic
from dlearn.errors import DlearnError


def test_a_ring_sends_each_byte_almost_twice(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=1000)
    sent = traffic(job.load())
    assert sent.bytes_from(rank=0) == sent.bytes_to(rank=0) == 1500  # 2 * 3/4 * 1000
    assert sent.payload_bytes == {(0, 3): 1500, (1, 0): 1500, (2, 1): 1500, (3, 2): 1500}
    assert sent.message_count[0, 3] == 12
    assert sent.by_how == {"derived": 6000}


def test_what_came_what_never_came_and_what_is_not_known(tmp_path):
    job = Job(tmp_path, ranks=2, names=("", "trainer <1>"))
    job.message(0, 1, size=1234)
    job.send(0, 1, size=100, end_ns=None)
    for _ in range(3):
        job.collective("all_to_none", size=100)
    trace = job.load()
    sent = traffic(trace)
    assert (sent.by_how, sent.unexplained) == ({"observed": 1234, "missing": 100}, 3)
    assert str(sent).splitlines() == [
        "bytes from \\ to  rank 0  trainer <1>  sent in all",
        "rank 0                .        1,234        1,234",
        "trainer <1>           0            .            0",
        "not counted: 3 operations whose messages are not known",
    ]
    assert "trainer &lt;1&gt;" in sent._repr_html_()
    assert sent.to_frame().loc["rank 0", "trainer <1>"] == sent.to_frame().to_numpy().sum() == 1234


def test_where_no_message_is_known_the_title_does_not_say_that_none_was_sent(job):
    job.collective("all_to_none", size=100)
    assert title(draw.traffic(job.load())) == "No message is known"


def test_many_ranks_are_told_by_pairs(tmp_path):
    """1,000 ranks of which one left a file: no table of a million cells."""
    job = Job(tmp_path, ranks=1000)
    for dst in range(1, 1000):
        job.send(0, dst, size=dst)
    rows = traffic(job.load(without=range(1, 1000))).rows()
    assert rows[:2] == [["from", "to", "bytes"], ["rank 0", "rank 999", "999"]]
    # The 40 largest are 999 ... 960; 1 ... 959 remain: 959 * 960 / 2.
    assert rows[-1] == ["959 more pairs", "", "460,320"]


def test_the_picture_says_which_bytes_it_shows(job):
    """100 B from rank 1 to rank 0: 196 B on the wire, and 48 B back."""
    job.connect()
    job.counters((0, 1), 8)
    job.message(1, 0, size=100)
    for rank, sent in enumerate((48, 196)):
        job.counters(rank, 8 + sent)
    trace = job.load()
    assert measured_traffic(trace).wire_bytes == {(0, 1): 48, (1, 0): 196}
    titles = {bytes: title(draw.traffic(trace, bytes=bytes)) for bytes in ("payload", "predicted", "measured")}
    assert titles == {
        "payload": "Rank 1 sends 100 B to rank 0, nothing comes back",
        "predicted": "Predicted on the wire: 244 B, framing included",
        "measured": "Measured on the wire: 244 B, as the kernel counted it",
    }
    shown = texts(draw.traffic(trace, bytes="measured"))
    # A cell for each pair, and beside it what the rank has sent, below it what it has got.
    assert shown.count("196 B") == shown.count("48 B") == 3
    with pytest.raises(DlearnError, match="no bytes 'wire' to draw; there are: payload, predicted, measured"):
        draw.traffic(trace, bytes="wire")


def test_what_came_and_what_went(tmp_path):
    """`a` all-reduces 1000 B, `b` 500 B, and `b` broadcasts 8 B from rank 0 before."""
    jobs = Job(tmp_path / "a", ranks=2), Job(tmp_path / "b", ranks=2)
    jobs[1].collective("broadcast", size=8, root=0, phase="forward")
    for job, size in zip(jobs, (1000, 500), strict=True):
        job.collective("all_reduce", size=size, phase="backward")
    a, b = (job.load() for job in jobs)
    found = compare(a, b, names=("plain", "<half>"))
    reduced = found.by_kind["backward", "all_reduce"]
    # A ring of two sends each byte once from each rank: 2 · 1/2 · 1000 · 2 ranks, and half of that.
    assert (reduced.a.payload_bytes, reduced.b.payload_bytes, reduced.added_bytes) == (2000, 1000, -1000)
    assert (found.came, found.went) == ((("forward", "broadcast"),), ())
    assert compare(b, a).went == found.came
    # Pairs: rank 1 sends its half of the ring only.
    added = {pair: each.added_bytes for pair, each in found.by_pair.items()}
    assert added == {("rank 1", "rank 0"): -500, ("rank 0", "rank 1"): -500 + 8}
    assert sum(added.values()) == found.total.added_bytes == 8 - 1000
    assert found.sentence.startswith("<half> sends 992 B less than plain (1,008 instead of 2,000 B), in ")
    assert "&lt;half&gt;" in found._repr_html_()
    assert "<half>" not in found._repr_html_()
    nothing = a.where(kind="span")
    assert compare(nothing, a).total.added_bytes == 2000


# op -> what each of 4 ranks hands over, and busbw / algbw. The size is that of the whole: of 4 blocks of 1 MB that are
# gathered 4 MB, as of the 4 MB that are scattered.
BANDWIDTHS = {
    "all_reduce": (4_000_000, 1.5),  # 2 * 3/4
    "all_reduce_coalesced": (4_000_000, 1.5),
    "all_gather": (1_000_000, 0.75),  # 3/4
    "all_gather_single_coalesced": (1_000_000, 0.75),
    "reduce_scatter": (4_000_000, 0.75),
    "reduce_scatter_single": (4_000_000, 0.75),
    "all_to_all_single": (4_000_000, 0.75),
    "gather": (1_000_000, 0.75),
    "broadcast": (4_000_000, 1.0),
    "reduce": (4_000_000, 1.0),
}


def test_size_and_factor_of_each_op(tmp_path):
    job = Job(tmp_path, ranks=4)
    for number, (op, (given, _)) in enumerate(BANDWIDTHS.items()):
        at = 10 * number * MS
        job.collective(op, size=given, root=0, start_ns=at, end_ns=at + 2 * MS)
    found = {each.op: bandwidth(each) for each in operations(job.load())}
    for op, (_, factor) in BANDWIDTHS.items():
        assert found[op].size_bytes == 4_000_000
        assert found[op].algorithm_bandwidth == pytest.approx(2e9)  # 4 MB in 2 ms
        assert found[op].bus_bandwidth == pytest.approx(2e9 * factor), op


def exchange(folder, sizes, *, more=0):
    """Rank 0 sends rank 1 tensors of these bytes, and rank 1 answers 4 bytes `1 + more` times."""
    made = Job(folder, ranks=2)
    for size in sizes:
        made.message(0, 1, size=size)
    for _ in range(1 + more):
        made.message(1, 0)
    return made.load()


def runs(tmp_path, bytes_of, sizes=(1, 8, 32)):
    return {size: exchange(tmp_path / str(size), bytes_of(size)) for size in sizes}


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
    found = {**runs(tmp_path, lambda b: [b], sizes=(1, 8)), 9: exchange(tmp_path / "more", [8], more=1)}
    with pytest.raises(DlearnError, match=error):
        scaling(change(found))
