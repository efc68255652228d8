"""What the assertions of a course's tests pass, and what they catch."""

import zlib
from collections.abc import Sequence
from fractions import Fraction

import pytest
import wrong_rings
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn.analysis import assert_fresh, assert_reduces, assert_traffic
from dlearn.errors import DlearnError, TrafficError
from dlearn.events.event import NOT_OBSERVED

SIZE = 4 * wrong_rings.ITEMS
GLOO = 4 * 1001


def finding(check, trace, **asked) -> str:
    """The first line of the failure; nothing if there is none."""
    try:
        check(trace, **asked)
    except TrafficError as error:
        return str(error).splitlines()[0]
    return ""


def ring_bytes(n: int, size: int = SIZE) -> Fraction:
    return Fraction(2 * (n - 1) * size, n)


@pytest.fixture(params=[3, 5], ids="n={}".format)
def seen(request, recorded):
    """The number of ranks, and what they did in a span."""
    trace = recorded(wrong_rings.everything, ranks=request.param, checksums=True)
    return request.param, lambda span: trace.within(getattr(span, "__name__", span))


def test_a_right_ring_passes_and_wrong_data_are_caught_by_checksums_and_where_a_part_misses(seen):
    n, within = seen
    assert_fresh(within("right"), op="send")
    assert_reduces(within("right"))
    for ring in (wrong_rings.right, *wrong_rings.WRONG_DATA):
        assert_traffic(within(ring), op="send", bytes_per_rank=ring_bytes(n), pattern="ring")
    for ring in wrong_rings.WRONG_DATA:
        told = finding(assert_fresh, within(ring))
        assert ("B of zeros" if ring is wrong_rings.zeros else "B of stale data") in told
    told = finding(assert_reduces, within("rank_1_never_adds"))
    assert told.startswith("rank 1 passes on ")
    assert told.endswith("they came from rank 0, and rank 1's part cannot be in them yet")


def test_gloo_passes_with_the_pattern_that_it_has(seen):
    n, within = seen
    trace = within("gloo")
    assert_traffic(trace, op="all_reduce", bytes_per_rank=ring_bytes(n, GLOO), pattern="ring")
    assert_traffic(trace, op="all_gather", bytes_per_rank=(n - 1) * GLOO, pattern="ring")
    assert_traffic(trace, op="gather", bytes_per_rank={rank: GLOO for rank in range(n) if rank != 1}, pattern="star")
    assert_traffic(trace, op="scatter", bytes_per_rank={1: (n - 1) * GLOO}, pattern="star")
    assert_traffic(trace, op="all_to_all_single", bytes_per_rank=(n - 1) * 40)
    told = finding(assert_traffic, trace, op="all_reduce", bytes_per_rank=0)
    assert "instead of 0 B, in all_reduce #1 (" in told
    assert "no data of all_reduce can be compared" in finding(assert_fresh, trace)


def test_glass_boxes_pass_with_the_pattern_of_their_name_and_the_bytes_of_their_formula(seen):
    n, within = seen
    reduces = ("ring all_reduce", "star all_reduce", "halving_doubling all_reduce", "tree reduce")
    for name in (*reduces, "ring reduce_scatter", "ring all_gather", "tree broadcast"):
        box = name.split()[0]
        assert_traffic(within(name), pattern=box if box in ("ring", "star") else None)
        assert_fresh(within(name))
        if "reduce" in name:
            assert_reduces(within(name))
    assert_traffic(within("ring all_reduce"), op="all_reduce", bytes_per_rank=ring_bytes(n, GLOO))
    star = {0: (n - 1) * GLOO} | dict.fromkeys(range(1, n), GLOO)
    assert_traffic(within("star all_reduce"), op="all_reduce", bytes_per_rank=star)


def message(job: Job, src: int, dst: int, size: int, *, at: int = 10, data: bytes | None = None) -> None:
    """A send and its recv, which takes from `at` to `at + 5`. `data` is what its checksum is of."""
    checksum = {src: None if data is None else zlib.crc32(data)}
    job.message(src, dst, size=size, start_ns=at, end_ns=at + 5, checksum=checksum)


def sent(folder, ranks: int, edges, size: int = 100):
    """The trace of a message of `size` bytes for each edge; of what crosses in time, (from, to, data)."""
    job = Job(folder, ranks=ranks)
    for place, (src, dst, *data) in enumerate(edges):
        message(job, src, dst, size, at=10 * place + 10, data=data[0] if data else None)
    return job.load()


def ring(job: Job, sizes: Sequence[int], *, skip: int = -1, double: int = -1) -> None:
    """A ring all-reduce of chunks of so many bytes; message number `skip` is left out, `double` sent twice."""
    n = len(sizes)
    for number in range(2 * (n - 1) * n):
        step, rank = divmod(number, n)
        chunk = (rank - step if step < n - 1 else rank + 1 - (step - n + 1)) % n
        for _ in range((number != skip) + (number == double)):
            message(job, rank, (rank + 1) % n, sizes[chunk])


@given(n=st.integers(2, 6), items=st.integers(0, 2000), data=st.data())
@settings(max_examples=20)
def test_any_ring_of_even_chunks_passes_and_no_other(tmp_path_factory, n, items, data):
    """However its items are spread, as long as n chunks like the largest would hold at most 4 n items more."""
    even = -(-items // n)
    sizes = [max(0, min(even, items - i * even)) for i in range(n)]  # as torch.chunk cuts
    for src, dst in data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40)):
        if sizes[src] and n * (sizes[dst] + 1) - items <= 4 * n:
            sizes[src] -= 1
            sizes[dst] += 1
    job = Job(tmp_path_factory.mktemp("even"), ranks=n)
    ring(job, sizes)
    assert_traffic(job.load(), bytes_per_rank=ring_bytes(n, items), pattern="ring" if items else None)
    number = data.draw(st.integers(0, 2 * (n - 1) * n - 1))
    for wrong in ({"skip": number}, {"double": number}):
        job = Job(tmp_path_factory.mktemp("wrong"), ranks=n)
        ring(job, [size + 1 for size in sizes], **wrong)
        told = finding(assert_traffic, job.load(), bytes_per_rank=ring_bytes(n, items + n), pattern="ring")
        assert "B instead of" in told
    job = Job(tmp_path_factory.mktemp("spread"), ranks=n)
    for rank in range(n):  # as many bytes in all, and each rank sends another number of them
        message(job, rank, (rank + 1) % n, 1000 + 500 * (rank == 0) - 500 * (rank == 1))
    assert finding(assert_traffic, job.load(), bytes_per_rank=1000) == "rank 0 sends 1,500 B instead of 1,000 B"


def test_a_failure_shows_both_matrices_and_is_one_of_an_assertion(tmp_path):
    trace = sent(tmp_path, 2, [(0, 1)] * 60 + [(1, 0)] * 15)
    with pytest.raises(TrafficError) as caught:
        assert_traffic(trace, op="send", bytes_per_rank=1500, pattern="ring")
    assert str(caught.value).splitlines() == [
        "rank 0 sends 6,000 B instead of 1,500 B",
        "",
        "bytes from (row) to (column)",
        "expected  rank 0  rank 1  sent in all     seen    rank 0  rank 1  sent in all",
        "rank 0         .   1,500        1,500     rank 0       .   6,000        6,000",
        "rank 1     1,500       .        1,500     rank 1   1,500       .        1,500",
    ]
    assert isinstance(caught.value, DlearnError)
    assert isinstance(caught.value, AssertionError)  # for pytest and unittest


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize(
    ("edges", "pattern", "words"),
    [
        (RING[:3], "ring", "rank 3 sends nothing to rank 0, in a ring it does"),
        ([*RING, (0, 3), (1, 0)], "ring", "rank 0 sends 100 B to rank 3, in a ring nothing (2 pairs wrong in all)"),
        ([(1, 0), (2, 0), (3, 0), (0, 1)], "ring", "everything goes through rank 0: that is a star, and not a ring"),
        ([(0, 1), (0, 2)], "star", "rank 0 sends nothing to rank 3, in a star it does"),
    ],
)
def test_the_pair_that_does_not_fit_is_named(tmp_path, edges, pattern, words):
    assert words in finding(assert_traffic, sent(tmp_path, 4, edges), pattern=pattern)


@pytest.mark.parametrize(
    ("call", "without", "words"),
    [
        (lambda job: job.recv(1, 0, end_ns=None), (), "rank 1 waits for rank 0 in recv #1"),
        (lambda job: job.send(0, 1, end_ns=None, by=NOT_OBSERVED), (), "send #1: rank 1 never received it"),
        (lambda job: job.collective("all_magic", size=4), (), "no schedule of"),
        (lambda job: job.send(0, 1), [1], "send #1: the file of rank 1 is not here or not whole"),
        (lambda job: job.message(0, 1, size={0: 8, 1: 4}), (), "send #1: sends 8 B into a buffer of 4 B"),
        (lambda job: job.collective("barrier"), (), "there is no operation with data in this trace; there is: 1 × bar"),
    ],
)
def test_what_is_unfinished_unknown_or_not_there_is_a_failure(tmp_path, call, without, words):
    job = Job(tmp_path, ranks=2)
    call(job)
    trace = job.load(without=without)
    assert words in finding(assert_traffic, trace)
    assert finding(assert_fresh, trace, op="broadcast").startswith("there is no broadcast")
    with pytest.raises(DlearnError, match=r"no pattern 'circle' here; the patterns are: ring, star") as caught:
        assert_traffic(trace, pattern="circle")
    assert not isinstance(caught.value, AssertionError)  # The test is wrong, not what it tests.


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        # Passed on to rank 2, for which it is new; and back to where it came from.
        ([(0, 1), (1, 2), (2, 0)], "rank 2 sends rank 0 4 B of {}, in send #2: rank 0 has sent the same to rank 1"),
        ([(0, 1), (0, 1)], "rank 0 sends rank 1 4 B of {}, in send #2: rank 1 has received the same from rank 0"),
    ],
)
def test_stale_data_are_named_with_both_messages(tmp_path, edges, told):
    trace = sent(tmp_path, 3, [(*edge, b"abcd") for edge in edges], size=4)
    assert finding(assert_fresh, trace) == f"{told.format('stale data')} in send #1"


def test_a_tree_passes_its_sum_on_and_a_clock_that_is_far_behind_changes_nothing(tmp_path):
    up = [(1, 0, b"1"), (3, 2, b"3"), (2, 0, b"23")]
    tree = sent(tmp_path / "tree", 4, [*up, (0, 2, b"0123"), (0, 1, b"0123"), (2, 3, b"0123")])
    assert_fresh(tree)
    assert_reduces(tree)
    job = Job(tmp_path / "clocks", ranks=2)
    job.send(0, 1, start_ns=1_000_000, end_ns=1_000_005, checksum=1)
    job.recv(1, 0, start_ns=10, end_ns=15)
    job.send(1, 0, start_ns=20, end_ns=25, checksum=1)
    job.recv(0, 1, start_ns=1_000_010, end_ns=1_000_025)
    assert "stale data" in finding(assert_fresh, job.load())


def test_what_checksums_cannot_tell_is_said(tmp_path):
    assert_fresh(sent(tmp_path / "large", 2, [(0, 1, b"not zeros")], size=2**40))  # a trace may claim any size
    asked = "rank 0 has noted no checksum of send #1: record with `checksums=True`"
    assert finding(assert_fresh, sent(tmp_path / "without", 2, [(0, 1)])) == asked
    job = Job(tmp_path / "unwaited", ranks=2)
    job.send(0, 1, checksum=1)
    job.recv(1, 0, end_ns=None, by=NOT_OBSERVED)
    assert finding(assert_fresh, job.load()) == "rank 1 never waits for its recv #1"
    job = Job(tmp_path / "early", ranks=2)
    for rank in (0, 1):
        job.recv(rank, 1 - rank, start_ns=1, end_ns=2)
        job.send(rank, 1 - rank, start_ns=10, end_ns=20, checksum=rank)
    assert finding(assert_fresh, job.load()) == "recv #1 ended before its data were sent: a damaged trace"
