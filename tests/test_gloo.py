"""What gloo sends for a collective: does it compute what it promises, with as many bytes as the wire has seen?"""

from itertools import chain, groupby, pairwise
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job, tensor

from dlearn import messages
from dlearn.analysis import predicted_traffic

MiB = 1 << 20
DTYPES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}


def sends_of(trace, op):
    """Its messages, step by step."""
    found = sorted((each for each in messages(trace) if each.op == op), key=attrgetter("step"))
    return [list(step) for _, step in groupby(found, key=attrgetter("step"))]


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 8),
    payload=st.integers(0, 300) | st.integers(0, 12 * MiB),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    root=st.integers(0, 7),
)
def test_each_collective_brings_to_each_rank_what_it_promises(tmp_path_factory, ranks, payload, itemsize, root):
    payload, root = payload - payload % itemsize, root % ranks
    given = (tensor(payload, dtype=DTYPES[itemsize]),)
    job = Job(tmp_path_factory.mktemp("job"), ranks=ranks)
    for op in ("all_reduce", "all_gather", "barrier"):
        job.collective(op, inputs=() if op == "barrier" else given)
    for op in ("broadcast", "gather"):
        job.collective(op, inputs=given, root=root)
    job.collective("scatter", inputs=given * ranks, outputs=given, root=root)
    trace = job.load()
    sends = {op: sends_of(trace, op) for op in ("all_reduce", "all_gather", "barrier", "broadcast")}
    gather, scatter = (list(chain(*sends_of(trace, op))) for op in ("gather", "scatter"))
    adds_up_once(sends["all_reduce"], ranks, payload, itemsize)
    reaches_all(sends["broadcast"], ranks, payload, root)
    brings_every_block(sends["all_gather"], ranks, payload)
    tells_of_everybody(sends["barrier"], ranks)
    blocks = {(rank, rank * payload, payload) for rank in range(ranks) if rank != root}
    assert {(each.src, each.offset_bytes, each.payload_bytes) for each in gather} == blocks
    assert {(each.dst, each.offset_bytes, each.payload_bytes) for each in scatter} == blocks
    assert {each.dst for each in gather} | {each.src for each in scatter} == ({root} if ranks > 1 else set())


def adds_up_once(steps, ranks, payload, itemsize):
    """Each segment's value on a rank is the set of ranks whose share is in it; a rank's share must never count twice.

    A receiver adds until a segment is complete, and then takes it as it is. Each rank sends to its left.
    """
    tiles = sorted({(each.offset_bytes, each.payload_bytes) for step in steps for each in step})
    assert all(start + length == following for (start, length), (following, _) in pairwise(tiles))
    assert all(offset % itemsize == length % itemsize == 0 for offset, length in tiles)
    all_ranks = set(range(ranks))
    value = {(rank, offset): {rank} for rank in range(ranks) for offset, _ in tiles}
    for step in steps:
        arriving = [(each, value[each.src, each.offset_bytes]) for each in step]
        for each, sent in arriving:
            assert each.dst == (each.src - 1) % ranks
            mine = value[each.dst, each.offset_bytes]
            assert sent.isdisjoint(mine) or sent == all_ranks, "a share would be added twice"
            value[each.dst, each.offset_bytes] = sent | mine
    assert all(each == all_ranks for each in value.values())
    assert sum(each.payload_bytes for step in steps for each in step) == 2 * (ranks - 1) * payload


def reaches_all(steps, ranks, payload, root):
    have = {root}
    for step in steps:
        assert all(each.src in have and each.dst not in have for each in step)
        assert len({each.src for each in step}) == len(step)
        have |= {each.dst for each in step}
    assert have == set(range(ranks))
    assert [each.payload_bytes for step in steps for each in step] == [payload] * (ranks - 1)


def brings_every_block(steps, ranks, payload):
    """In halves: of an odd size, the second is a byte larger."""
    halves = [(0, payload // 2), (payload // 2, payload - payload // 2)]
    have = {rank: {(rank * payload + start, length) for start, length in halves} for rank in range(ranks)}
    for step in steps:
        assert all((each.offset_bytes, each.payload_bytes) in have[each.src] for each in step)
        for each in step:
            assert each.dst == (each.src + 1) % ranks
            have[each.dst].add((each.offset_bytes, each.payload_bytes))
    assert sum(each.payload_bytes for each in chain(*steps)) == ranks * (ranks - 1) * payload
    if payload:
        assert all(mine == set.union(*have.values()) for mine in have.values())


def tells_of_everybody(steps, ranks):
    heard = {rank: {rank} for rank in range(ranks)}
    for step in steps:
        for dst, news in [(each.dst, set(heard[each.src])) for each in step]:
            heard[dst] |= news
    assert all(each == set(range(ranks)) for each in heard.values())


@pytest.mark.parametrize(
    ("op", "ranks", "sizes", "itemsize", "root", "wire"),
    [  # all bytes that each rank put on the wire, measured with TCP_INFO on torch 2.13
        ("all_reduce", 2, [25 * MiB], 1, None, [26_218_144, 26_218_144]),
        ("all_reduce", 3, [7], 1, None, [778, 679, 875]),
        ("all_reduce", 3, [15 * MiB // 2], 1, None, [10_487_490, 10_487_484, 10_487_490]),
        ("all_reduce", 4, [9 * MiB + 3], 1, None, [14_158_377, 14_158_368, 14_158_368, 14_158_377]),
        ("reduce", 3, [4], 4, 1, [148, 196, 100]),  # one segment, of rank 0: 2 -> 1 -> 0, and 0 -> 1
        ("reduce", 3, [1000], 1, 2, [1672, 1672, 1340]),
        ("reduce", 3, [25 * MiB], 1, 0, [24_120_656, 33_557_936, 33_558_032]),
        # A ring needs 7 MiB, its chunk 3 more: gloo takes its 4 segments for 2, sends two again.
        ("reduce", 2, [7 * MiB], 1, 0, [5_243_696, 9_438_096]),
        ("broadcast", 3, [0], 4, 0, [192, 48, 48]),  # it sends even nothing
        ("all_gather", 3, [1], 4, None, [578, 578, 578]),  # 4 messages to the right, two of them empty
        ("all_gather_coalesced", 3, [1, 2, 3], 1, None, [588, 588, 588]),
        ("reduce_scatter", 3, [4000] * 3, 4, None, [19_464, 19_440, 19_464]),
        ("reduce_scatter_single", 3, [12_000], 4, None, [17_152, 17_152, 17_152]),  # 12 kB x 4/3 + 8 x 96 + 8 x 48
        ("gather", 3, [7], 1, 1, [103, 96, 103]),
        ("gather", 3, [0], 4, 1, [96, 96, 96]),
        ("barrier", 3, [], 1, None, [288, 288, 288]),
        ("barrier", 5, [], 1, None, [432, 432, 432, 432, 432]),
        ("monitored_barrier", 3, [], 1, None, [296, 148, 148]),
    ],
)
def test_each_rank_writes_what_the_kernel_has_counted(op, ranks, sizes, itemsize, root, wire, tmp_path):
    job = Job(tmp_path, ranks=ranks)
    job.collective(op, inputs=[tensor(size, dtype=DTYPES[itemsize]) for size in sizes], root=root)
    predicted = predicted_traffic(job.load())
    assert [predicted.bytes_from(rank=rank) for rank in range(ranks)] == wire


def job_of(folder, op, calls):
    """Three ranks that have called it."""
    job = Job(folder, ranks=3)
    for rank, facts in enumerate(calls):
        job.collective(op, ranks=[rank], **{"inputs": (), **facts})
    return job.load()


def sizes(*sizes, dtype="uint8"):
    return tuple(tensor(size, dtype=dtype) for size in sizes)


EVEN, UNEVEN = {"inputs": sizes(12)}, [{"inputs": sizes(each), "splits": (each - 6, 2, 4)} for each in (6, 7, 8)]


@pytest.mark.parametrize(
    ("op", "calls", "to_1"),
    [  # the payload that rank 1 gets from rank 0
        ("all_to_all", [{"inputs": sizes(1, 2, 3)}] * 3, 2),
        ("all_to_all_single", [EVEN] * 3, 4),
        # The program may give the sizes on one rank and leave them out on another, where they are even.
        ("all_to_all_single", [EVEN | {"splits": (4, 4, 4)}, EVEN, EVEN], 4),
        ("all_to_all_single", UNEVEN, 2),
        # 5 float32 and 7 float16, which torch converts to float32: 48 B of rank 0, and what came from rank 2.
        ("all_gather_single_coalesced", [{"inputs": sizes(20, dtype="float32") + sizes(14, dtype="float16")}] * 3, 96),
    ],
)
def test_calls_tell_the_messages(op, calls, to_1, tmp_path):
    found = messages(job_of(tmp_path, op, calls))
    assert sum(each.payload_bytes for each in found if (each.src, each.dst) == (0, 1)) == to_1
    assert found.unexplained == ()


@pytest.mark.parametrize(
    ("op", "facts", "why"),
    [
        ("all_reduce", {"inputs": [tensor(80, payload=24)]}, "how much is left is not recorded"),
        ("broadcast", {"inputs": sizes(8), "root": 3}, "its root is no member of the process group"),
        ("all_to_all_single", {"inputs": sizes(6), "splits": (6,)}, "a rank has data for 1 ranks in a group of 3"),
        ("all_to_all", {"inputs": sizes(6, 6)}, "a rank has data for 2 ranks in a group of 3"),
        ("all_to_none", {"inputs": sizes(8)}, "no schedule of gloo's all_to_none is known here yet"),
        ("all_reduce", {"inputs": sizes(2**40)}, "its schedule has more than 20,000 messages"),
        ("reduce", {"inputs": sizes(2**40), "root": 0}, "its schedule has more than 20,000 messages"),
    ],
)
def test_what_is_not_unrolled_says_why_at_once(op, facts, why, tmp_path):
    found = messages(job_of(tmp_path, op, [facts] * 3))
    assert list(found) == []
    ((_, told),) = found.unexplained
    assert why in str(told)
