"""What the assertions of a course's tests pass, and what they catch."""

from __future__ import annotations

import unittest
import zlib
from collections.abc import Sequence
from fractions import Fraction

import pytest
import wrong_rings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import Job, tensor

from dlearn import Cluster, Trace
from dlearn.analysis import assert_fresh, assert_reduces, assert_traffic
from dlearn.analysis.checks.grading import NAMES, edges_of
from dlearn.errors import DlearnError, TrafficError
from dlearn.trace.event import NOT_OBSERVED, Collective

SIZE = 4 * wrong_rings.ITEMS
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def finding(check, trace, **asked) -> str:
    """The first line of the failure; nothing if there is none."""
    try:
        check(trace, **asked)
    except TrafficError as error:
        return str(error).splitlines()[0]
    return ""


def ring_bytes(n: int, size: int = SIZE) -> Fraction:
    return Fraction(2 * (n - 1) * size, n)


# Real ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=range(2, 7), ids="n={}".format)
def rings(request, tmp_path_factory) -> tuple[int, Trace]:
    """Every hand-written ring on so many ranks, each in a span of its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("rings"))
        run = Cluster(request.param, checksums=True).run(wrong_rings.run_all, timeout=100)
    for right in run.results.values():
        assert [ring.__name__ for ring in wrong_rings.RIGHT if not right[ring.__name__]] == []
        # Wrong bytes give no wrong sum, as long as the gather is there: the sum is not what is tested here.
        assert right["whole_tensors"]
        assert right["passed_around"]
        assert right["through_rank_0"]
    return request.param, run.trace


@pytest.mark.parametrize("ring", wrong_rings.RIGHT, ids=lambda ring: ring.__name__)
def test_right_rings_pass(rings, ring):
    n, trace = rings
    mine = trace.within(ring.__name__)
    assert_traffic(mine, op="send", bytes_per_rank=ring_bytes(n), pattern="ring")
    assert_traffic(mine, bytes_per_rank=2 * (n - 1) / n * SIZE)
    assert_fresh(mine, op="send")
    assert_reduces(mine)


def test_wrong_bytes_are_caught(rings):
    n, trace = rings

    def of(ring) -> str:
        return finding(assert_traffic, trace.within(ring.__name__), bytes_per_rank=ring_bytes(n), pattern="ring")

    assert of(wrong_rings.whole_tensors).startswith(f"each rank sends {2 * (n - 1) * SIZE:,} B instead of ")
    assert " B instead of " in of(wrong_rings.one_step_short)
    assert " B instead of " in of(wrong_rings.without_the_gather)
    if n == 2:  # A star of two is a ring, and so are two chunks of any lengths, or two tensors that are exchanged.
        assert of(wrong_rings.through_rank_0) == of(wrong_rings.all_in_one_chunk) == ""
        assert of(wrong_rings.passed_around) == ""
    else:
        told = of(wrong_rings.passed_around)
        assert told.startswith(f"each rank sends {(n - 1) * SIZE:,} B instead of ")
        assert of(wrong_rings.through_rank_0) == "everything goes through rank 0: that is a star, and not a ring"
        assert " B instead of " in of(wrong_rings.all_in_one_chunk)


@pytest.mark.parametrize("ring", wrong_rings.WRONG_DATA, ids=lambda ring: ring.__name__)
def test_wrong_data_are_caught_by_their_checksums(rings, ring):
    n, trace = rings
    mine = trace.within(ring.__name__)
    assert_traffic(mine, bytes_per_rank=ring_bytes(n), pattern="ring")  # The bytes are right.
    told = finding(assert_fresh, mine)
    if ring in (wrong_rings.sends_the_copy, wrong_rings.forgets_to_keep) and n == 2:
        assert told == ""  # As the docstring says.
        return
    assert ("B of zeros" if ring is wrong_rings.zeros else "B of stale data") in told
    assert "wrong_rings.py:" in told


def test_what_is_not_added_is_caught_where_it_happens(rings):
    _, trace = rings
    told = finding(assert_reduces, trace.within("rank_1_never_adds"))
    assert told.startswith("rank 1 passes on ")
    assert told.endswith("they came from rank 0, and rank 1's part cannot be in them yet")
    for ring in (wrong_rings.never_adds, wrong_rings.last_one_is_not_added):
        assert "passes on" in finding(assert_reduces, trace.within(ring.__name__))


@pytest.fixture(scope="module", params=range(2, 7), ids="n={}".format)
def own(request, tmp_path_factory) -> tuple[int, Trace]:
    """Gloo's own collectives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("gloo"))
        return request.param, Cluster(request.param).run(wrong_rings.gloo, timeout=100).trace


def test_gloo_passes_with_the_pattern_that_it_has(own):
    n, trace = own
    size = 4004
    assert_traffic(trace, op="all_reduce", bytes_per_rank=ring_bytes(n, size), pattern="ring")
    assert_traffic(trace, op="all_gather", bytes_per_rank=(n - 1) * size, pattern="ring")
    assert_traffic(trace, op="broadcast", pattern="tree")
    assert_traffic(trace, op="gather", bytes_per_rank={rank: size for rank in range(n) if rank != 1}, pattern="star")
    assert_traffic(trace, op="scatter", bytes_per_rank={1: (n - 1) * size}, pattern="star")
    assert_traffic(trace, op="all_to_all_single", bytes_per_rank=(n - 1) * 40, pattern="all")
    assert_traffic(trace)
    told = finding(assert_traffic, trace, op="all_reduce", bytes_per_rank=0)
    assert "instead of 0 B" in told
    assert ", in all_reduce #1 (" in told
    assert finding(assert_fresh, trace) == (
        "no data of all_reduce can be compared: its messages travel inside the backend, as no sends"
    )


@pytest.fixture(scope="module", params=range(2, 7), ids="n={}".format)
def boxes(request, tmp_path_factory) -> tuple[int, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("boxes"))
        run = Cluster(request.param, checksums=True).run(wrong_rings.glass_boxes, timeout=100)
    return request.param, run.trace


def test_glass_boxes_pass_with_the_pattern_of_their_name(boxes):
    _, trace = boxes
    assert len(trace.spans) == 8
    for name in trace.spans:
        box, op = name.split()
        mine = trace.within(name)
        assert_traffic(mine, pattern="doubling" if box == "halving_doubling" else box)
        assert_fresh(mine)
        if "reduce" in op:
            assert_reduces(mine)


def test_all_reduce_of_the_glass_boxes_sends_what_the_formulas_say(boxes):
    n, trace = boxes
    size = 4004

    def check(box: str, bytes_per_rank) -> None:
        assert_traffic(trace.within(f"{box} all_reduce"), op="all_reduce", bytes_per_rank=bytes_per_rank)

    check("ring", ring_bytes(n, size))
    check("star", {0: (n - 1) * size} | dict.fromkeys(range(1, n), size))
    # Ranks beyond a power of two give all they have to a partner, and get it all back.
    core = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4}[n]
    folded = n - core
    extra = [size if rank < 2 * folded else 0 for rank in range(n)]
    at_work = [0 if rank < 2 * folded and rank % 2 == 0 else ring_bytes(core, size) for rank in range(n)]
    check("halving_doubling", {rank: extra[rank] + at_work[rank] for rank in range(n)})


# By hand --------------------------------------------------------------------------------------------------------------


def message(job: Job, src: int, dst: int, size: int, *, at: int = 10, data: bytes | None = None) -> None:
    """A send and its recv, which takes from `at` to `at + 5`. `data` is what its checksum is of."""
    checksum = None if data is None else zlib.crc32(data)
    job.send(src, dst, size=size, start_ns=at, end_ns=at + 5, checksum=checksum)
    job.recv(dst, src, size=size, start_ns=at, end_ns=at + 5)


def chunks(items: int, n: int) -> list[int]:
    """As torch.chunk cuts: all but the last ones of ceil(items / n)."""
    size = -(-items // n)
    return [max(0, min(size, items - i * size)) for i in range(n)]


def ring(job: Job, sizes: Sequence[int], *, skip: int = -1, double: int = -1) -> None:
    """A ring all-reduce of chunks of so many bytes; message number `skip` is left out, `double` sent twice."""
    n = len(sizes)
    for number in range(2 * (n - 1) * n):
        step, rank = divmod(number, n)
        chunk = (rank - step if step < n - 1 else rank + 1 - (step - n + 1)) % n
        for _ in range((number != skip) + (number == double)):
            message(job, rank, (rank + 1) % n, sizes[chunk])


@given(n=st.integers(2, 6), items=st.integers(0, 2000), data=st.data())
@EXAMPLES
def test_any_ring_of_even_chunks_passes_and_no_other(tmp_path_factory, n, items, data):
    """However its items are spread, as long as n chunks like the largest would hold at most 4 n items more."""
    sizes = chunks(items, n)
    for src, dst in data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40)):
        if sizes[src] and n * (sizes[dst] + 1) - items <= 4 * n:
            sizes[src] -= 1
            sizes[dst] += 1
    assert n * max(sizes) - items <= 4 * n
    job = Job(tmp_path_factory.mktemp("even"), ranks=n)
    ring(job, sizes)
    pattern = "ring" if items else None
    assert_traffic(job.load(), bytes_per_rank=ring_bytes(n, items), pattern=pattern)

    number = data.draw(st.integers(0, 2 * (n - 1) * n - 1))
    for wrong in ({"skip": number}, {"double": number}):
        job = Job(tmp_path_factory.mktemp("wrong"), ranks=n)
        ring(job, [size + 1 for size in sizes], **wrong)
        told = finding(assert_traffic, job.load(), bytes_per_rank=ring_bytes(n, items + n), pattern="ring")
        assert "B instead of" in told


def test_the_failure_shows_both_matrices_side_by_side(tmp_path):
    job = Job(tmp_path, ranks=4)
    ring(job, [1000] * 4)
    with pytest.raises(TrafficError) as caught:
        assert_traffic(job.load(), op="send", bytes_per_rank=1500, pattern="ring")
    assert str(caught.value).splitlines() == [
        "each rank sends 6,000 B instead of 1,500 B",
        "",
        "bytes from (row) to (column)",
        "expected  rank 0  rank 1  rank 2  rank 3  sent in all     seen    rank 0  rank 1  rank 2  rank 3  sent in all",
        "rank 0         .   1,500       .       .        1,500     rank 0       .   6,000       .       .        6,000",
        "rank 1         .       .   1,500       .        1,500     rank 1       .       .   6,000       .        6,000",
        "rank 2         .       .       .   1,500        1,500     rank 2       .       .       .   6,000        6,000",
        "rank 3     1,500       .       .       .        1,500     rank 3   6,000       .       .       .        6,000",
    ]


def test_a_failure_is_an_assertion_for_pytest_and_unittest(tmp_path):
    job = Job(tmp_path, ranks=2)
    message(job, 0, 1, 100)
    trace = job.load()

    class Exercise(unittest.TestCase):
        def test_ring(self) -> None:
            assert_traffic(trace, pattern="ring")

    result = Exercise("test_ring").run()
    assert result is not None
    assert (len(result.failures), len(result.errors)) == (1, 0)
    assert issubclass(TrafficError, DlearnError)


@pytest.mark.parametrize(
    ("edges", "pattern", "words"),
    [
        ([(0, 1), (1, 2), (2, 3)], "ring", "rank 3 sends nothing to rank 0, in a ring it does"),
        ([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)], "ring", "rank 0 sends 100 B to rank 2, in a ring nothing"),
        (
            [(0, 1), (1, 2), (2, 3), (3, 0), (0, 3), (1, 0)],
            "ring",
            "rank 0 sends 100 B to rank 3, in a ring nothing (2 pairs wrong in all)",
        ),
        (
            [(1, 0), (2, 0), (3, 0), (0, 1)],
            "ring",
            "everything goes through rank 0: that is a star, and not a ring",
        ),
        ([(2, 0), (2, 1), (2, 3)], "tree", "everything goes through rank 2: that is a star, and not a binomial tree"),
        ([(0, 1), (0, 2), (1, 3), (2, 3)], "tree", "rank 2 sends 100 B to rank 3, in a binomial tree nothing"),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], "doubling", "rank 0 sends nothing to rank 2"),
        ([(0, 1), (0, 2), (0, 3), (1, 2)], "star", "rank 1 sends 100 B to rank 2, in a star nothing"),
        ([(0, 1)], "all", "rank 0 sends nothing to rank 2, in an all-to-all it does (11 pairs wrong in all)"),
    ],
)
def test_the_pair_that_does_not_fit_is_named(tmp_path, edges, pattern, words):
    job = Job(tmp_path, ranks=4)
    for src, dst in edges:
        message(job, src, dst, 100)
    assert words in finding(assert_traffic, job.load(), pattern=pattern)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("pattern", NAMES)
def test_every_way_of_a_pattern_passes_as_that_pattern(tmp_path_factory, pattern, n):
    ways = edges_of(pattern, n)
    assert {rank for way in ways for edge in way for rank in edge} == (set(range(n)) if n > 1 else set())
    for way in ways[:: max(1, len(ways) // 4)]:
        job = Job(tmp_path_factory.mktemp("way"), ranks=n)
        job.send(0, 0, size=0)  # No data: no pair.
        job.recv(0, 0, size=0)
        for src, dst in way:
            message(job, src, dst, 7)
        assert_traffic(job.load(), op="send", pattern=pattern)


def test_trees_and_hypercubes_have_the_edges_of_the_textbook():
    # Gloo's tree over 6 ranks: step i sends 2^i further. MPICH's clears the lowest bit.
    assert frozenset({(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)}) in edges_of("tree", 6)
    assert frozenset({(0, 1), (0, 2), (2, 3), (0, 4), (4, 5)}) in edges_of("tree", 6)
    both = {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert edges_of("doubling", 4)[0] == frozenset(both | {(b, a) for a, b in both})
    # Of 6 ranks 4 double, 2 hand over to a partner first.
    assert edges_of("doubling", 6)[0] == edges_of("doubling", 4)[0] | {(0, 4), (4, 0), (1, 5), (5, 1)}


def test_ranks_that_differ_are_given_as_a_dict(tmp_path):
    job = Job(tmp_path, ranks=3)
    for leaf in (1, 2):
        message(job, leaf, 0, 600)
        message(job, 0, leaf, 600)
    trace = job.load()
    assert_traffic(trace, bytes_per_rank={0: 1200, 1: 600, 2: 600}, pattern="star")
    assert_traffic(trace, bytes_per_rank={0: 1200, 1: 600, 2: 600}, pattern="tree")  # of three ranks, the same
    told = finding(assert_traffic, trace, bytes_per_rank={0: 1200, 1: 600}, pattern="star")
    assert told == "rank 2 sends 600 B instead of 0 B"
    assert finding(assert_traffic, trace, bytes_per_rank=800) == "rank 0 sends 1,200 B instead of 800 B"


def test_a_group_of_some_ranks_is_a_ring_of_its_own_and_each_collective_counts_by_itself(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.group("odd", [3, 1])
    for src, dst in ((1, 3), (3, 1)):
        job.send(src, dst, size=50, group="odd")
        job.recv(dst, src, size=50, group="odd")
    job.collective("all_reduce", size=1000)
    job.collective("all_reduce", size=2000)
    trace = job.load()
    assert_traffic(trace, op="send", bytes_per_rank=50, pattern="ring")
    assert finding(assert_traffic, trace, op="all_reduce", bytes_per_rank=1500).endswith(", in all_reduce #2")


# What is no silent pass -----------------------------------------------------------------------------------------------


def test_nothing_to_judge_is_a_failure(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("barrier")
    job.collective("all_reduce", size=8)
    trace = job.load()
    assert finding(assert_traffic, trace, op="send") == (
        "there is no send in this trace; there is: 1 × barrier, 1 × all_reduce"
    )
    assert finding(assert_traffic, trace.where(op="barrier")) == (
        "there is no operation with data in this trace; there is: 1 × barrier"
    )
    assert finding(assert_fresh, trace, op="broadcast").startswith("there is no broadcast")
    with pytest.raises(DlearnError, match=r"no pattern 'circle' here; the patterns are: ring, star") as caught:
        assert_traffic(trace, pattern="circle")
    assert not isinstance(caught.value, AssertionError)  # The test is wrong, not what it tests.


def test_what_is_unfinished_or_unknown_is_a_failure(tmp_path):
    def told(name, call, *, died=(), without=()) -> str:
        job = Job(tmp_path / name, ranks=2)
        call(job)
        return finding(assert_traffic, job.load(died=died, without=without))

    assert "rank 1 waits for rank 0 in recv #1" in told("hang", lambda job: job.recv(1, 0, end_ns=None))
    assert told("lost", lambda job: job.send(0, 1, end_ns=None, by=NOT_OBSERVED)) == (
        "send #1: rank 1 never received it"
    )
    assert "no schedule of" in told("unknown", lambda job: job.collective("all_magic", size=4))

    def too_small(job: Job) -> None:
        job.send(0, 1, size=8)
        job.recv(1, 0, size=4)

    assert told("small", too_small) == "send #1: sends 8 B into a buffer of 4 B"
    assert told("absent", lambda job: job.send(0, 1), without=[1]) == (
        "send #1: the file of rank 1 is not here or not whole: what it sent is not known"
    )


# Checksums ------------------------------------------------------------------------------------------------------------


def test_a_trace_may_claim_any_size(tmp_path):
    job = Job(tmp_path, ranks=2)
    message(job, 0, 1, 2**40, data=b"not zeros")
    assert_fresh(job.load())


def test_checksums_are_asked_for(tmp_path):
    job = Job(tmp_path, ranks=2)
    message(job, 0, 1, 4)
    assert finding(assert_fresh, job.load()) == (
        "rank 0 has noted no checksum of send #1: record with `checksums=True`"
    )


def test_stale_data_are_named_with_both_messages(tmp_path):
    job = Job(tmp_path, ranks=3)
    message(job, 0, 1, 4, at=10, data=b"abcd")
    message(job, 1, 2, 4, at=20, data=b"abcd")  # passed on: new for rank 2
    message(job, 2, 0, 4, at=30, data=b"abcd")  # and back to where it came from
    trace = job.load()
    assert finding(assert_fresh, trace) == (
        "rank 2 sends rank 0 4 B of stale data, in send #2: rank 0 has sent the same to rank 1 in send #1"
    )
    assert finding(assert_reduces, trace) == (
        "rank 1 passes on 4 B to rank 2 unchanged, in send #2: they came from rank 0, and rank 1's part cannot be in"
        " them yet"
    )


def test_a_gather_passes_on_unchanged_and_is_fresh_but_reduces_nothing(tmp_path):
    job = Job(tmp_path, ranks=3)
    blocks = [b"aaaa", b"bbbb", b"cccc"]
    for step in range(2):
        for rank in range(3):
            message(job, rank, (rank + 1) % 3, 4, at=10 * step, data=blocks[(rank - step) % 3])
    trace = job.load()
    assert_fresh(trace)
    assert "passes on" in finding(assert_reduces, trace)


def test_a_sum_that_all_have_been_heard_for_may_be_passed_on(tmp_path):
    """A tree of 4: to rank 0, then from it."""
    job = Job(tmp_path, ranks=4)
    for at, (src, dst, data) in enumerate(
        [(1, 0, b"1"), (3, 2, b"3"), (2, 0, b"23"), (0, 2, b"0123"), (0, 1, b"0123"), (2, 3, b"0123")]
    ):
        message(job, src, dst, 4, at=10 * at, data=data)
    trace = job.load()
    assert_fresh(trace)
    assert_reduces(trace)


def test_clocks_of_several_hosts_need_not_agree(tmp_path):
    """Rank 1's clock is far behind: the order of a rank's own calls, and that nothing arrives unsent, is enough."""
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, start_ns=1_000_000, end_ns=1_000_005, checksum=1)
    job.recv(1, 0, start_ns=10, end_ns=15)
    job.send(1, 0, start_ns=20, end_ns=25, checksum=1)
    job.recv(0, 1, start_ns=1_000_010, end_ns=1_000_025)
    assert "stale data" in finding(assert_fresh, job.load())


def test_a_recv_that_nobody_waits_for_and_one_that_ends_too_early(tmp_path):
    job = Job(tmp_path / "unwaited", ranks=2)
    job.send(0, 1, checksum=1)
    job.recv(1, 0, end_ns=None, by=NOT_OBSERVED)
    assert finding(assert_fresh, job.load()) == "rank 1 never waits for its recv #1"
    job = Job(tmp_path / "early", ranks=2)
    for rank in (0, 1):
        job.recv(rank, 1 - rank, start_ns=1, end_ns=2)
        job.send(rank, 1 - rank, start_ns=10, end_ns=20, checksum=rank)
    assert finding(assert_fresh, job.load()) == "recv #1 ended before its data were sent: a damaged trace"


def test_a_glass_box_collective_is_judged_by_its_steps(tmp_path):
    """An all_reduce of two ranks by their own sends, in a group inside the group."""
    job = Job(tmp_path, ranks=2, backend="dlearn_ring")
    job.group("inner", [0, 1])
    sent = {0: (b"0a", b"01b"), 1: (b"1b", b"01a")}
    for rank in (0, 1):
        outer = job.event(
            Collective, rank, op="all_reduce", group="world", seq=1, inputs=(tensor(4),), start_ns=1, end_ns=99
        )
        for step, data in enumerate(sent[rank]):
            during = {"start_ns": 10 * step + 10, "end_ns": 10 * step + 15, "parent": outer}
            job.send(rank, 1 - rank, size=2, group="inner", step=step, checksum=zlib.crc32(data), **during)
            job.recv(rank, 1 - rank, size=2, group="inner", **during)
    trace = job.load()
    assert_traffic(trace, op="all_reduce", bytes_per_rank=4, pattern="ring")
    assert_fresh(trace, op="all_reduce")
    assert_reduces(trace)
