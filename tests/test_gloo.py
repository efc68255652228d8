"""Gloo's schedules: do they compute what the operation promises, with as many bytes as the wire has seen?"""

from collections import Counter
from itertools import groupby, pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import tensor

from dlearn.join.gloo import MOST_MESSAGES, framed_bytes, schedule, schedule_of
from dlearn.join.gloo_schedules import Send, chunk_bounds
from dlearn.trace.event import Collective

MiB = 1 << 20
RANKS = st.integers(1, 8)
PAYLOAD = st.integers(0, 300) | st.integers(0, 12 * MiB)
ITEMSIZE = st.sampled_from([1, 2, 4, 8])
OPS = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce"),
    *("all_gather", "all_gather_single", "all_gather_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("gather", "scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
)

EXAMPLES = settings(max_examples=60, deadline=None)


def sends_of(op, ranks, *sizes, itemsize=1, root=0) -> tuple[Send, ...]:
    known = schedule(op, ranks, (sizes,), (itemsize,) * len(sizes), root)
    assert known.unknown is None
    return known.sends


def steps_of(sends):
    return [list(step) for _, step in groupby(sends, key=lambda send: send.step)]


# What each operation promises -----------------------------------------------------------------------------------------


@given(RANKS, PAYLOAD, ITEMSIZE)
@EXAMPLES
def test_all_reduce_leaves_every_sum_on_every_rank(ranks, payload, itemsize):
    """Each segment's value on a rank is the set of ranks whose share is in it; a rank's share must never count twice.

    In the first half of the steps the receiver adds, in the second it overwrites, as gloo does.
    Each sends to its left, and 2 (ranks-1)/ranks of the payload on average.
    """
    payload -= payload % itemsize
    sends = sends_of("all_reduce", ranks, payload, itemsize=itemsize)
    if ranks == 1 or payload == 0:
        assert sends == ()
        return
    segments = tiles_of(sends, payload, itemsize)
    value = {rank: {offset: {rank} for offset in segments} for rank in range(ranks)}
    half = _steps_in_all(sends, ranks) // 2
    for step in steps_of(sends):
        arriving = [(send, frozenset(value[send.src][send.offset])) for send in step]
        for send, sent in arriving:
            if send.step < half:
                assert sent.isdisjoint(value[send.dst][send.offset]), "a share would be added twice"
                value[send.dst][send.offset] |= sent
            else:
                value[send.dst][send.offset] = set(sent)
    everybody = set(range(ranks))
    assert all(value[rank][offset] == everybody for rank in range(ranks) for offset in segments)
    assert sum(send.length for send in sends) == 2 * (ranks - 1) * payload
    assert all(send.dst == (send.src - 1) % ranks for send in sends)


def tiles_of(sends, payload, itemsize):
    """The offsets of the segments, in order. They tile the data, each a whole number of items."""
    tiles = sorted({(send.offset, send.length) for send in sends})
    assert all(start + length == following for (start, length), (following, _) in pairwise(tiles))
    assert (tiles[0][0], sum(tiles[-1])) == (0, payload)
    assert all(offset % itemsize == 0 and length % itemsize == 0 for offset, length in tiles)
    return [offset for offset, _ in tiles]


def _steps_in_all(sends, ranks):
    """Both halves have the same number of steps, (ranks - 1) times the segments of one rank; late ones may be empty."""
    size = max(send.length for send in sends)
    payload = max(send.offset + send.length for send in sends)
    per_rank = max(2, ceil(ceil(payload / size) / ranks))
    return 2 * (ranks - 1) * per_rank


@given(RANKS, PAYLOAD, ITEMSIZE)
@EXAMPLES
def test_the_chunks_of_a_ring_tile_the_data_and_each_starts_where_its_rank_begins_to_share_it(ranks, payload, itemsize):
    payload -= payload % itemsize
    bounds = chunk_bounds(ranks, payload, itemsize)
    assert len(bounds) == ranks
    assert sum(length for _, length in bounds) == payload
    assert all(start + length == following for (start, length), (following, _) in pairwise(bounds))
    sends = sends_of("all_reduce", ranks, payload, itemsize=itemsize)
    if sends:
        half = [send for send in sends if send.step == _steps_in_all(sends, ranks) // 2]
        assert {send.src: send.offset for send in half} == {r: at for r, (at, length) in enumerate(bounds) if length}


@given(RANKS, PAYLOAD, ITEMSIZE, st.integers(0, 7))
@EXAMPLES
def test_reduce_brings_every_sum_to_the_root(ranks, payload, itemsize, root):
    """As above with one count for each share, because gloo sends finished segments on; nobody may use those.

    The ring only adds. In the last step the root overwrites its copy with whole chunks.
    """
    payload -= payload % itemsize
    root %= ranks
    sends = sends_of("reduce", ranks, payload, itemsize=itemsize, root=root)
    if ranks == 1 or payload == 0:
        assert sends == ()
        return
    size = ceil(min(ceil(payload / ranks / 2), MiB) / itemsize) * itemsize
    steps = ranks * max(2, ceil(ceil(payload / size) / ranks)) - 2
    ring = [send for send in sends if send.step < steps]
    chunks = sends[len(ring) :]
    segments = tiles_of(ring, payload, itemsize)
    value = {rank: {offset: Counter([rank]) for offset in segments} for rank in range(ranks)}
    for step in steps_of(ring):
        arriving = [(send, Counter(value[send.src][send.offset])) for send in step]
        for send, sent in arriving:
            value[send.dst][send.offset] += sent
    for chunk in chunks:
        assert (chunk.step, chunk.dst) == (steps, root)
        for offset in segments:
            if chunk.offset <= offset < chunk.offset + chunk.length:
                value[root][offset] = value[chunk.src][offset]
    assert all(count == Counter(range(ranks)) for count in value[root].values())


@given(RANKS, PAYLOAD, st.integers(0, 7))
@EXAMPLES
def test_broadcast_reaches_every_rank_from_one_that_has_the_data(ranks, payload, root):
    root %= ranks
    sends = sends_of("broadcast", ranks, payload, root=root)
    have = {root}
    for step in steps_of(sends):
        assert all(send.src in have and send.dst not in have for send in step)
        assert len({send.src for send in step}) == len(step)
        have |= {send.dst for send in step}
    assert have == set(range(ranks))
    assert all((send.offset, send.length) == (0, payload) for send in sends)


@given(RANKS, PAYLOAD)
@EXAMPLES
def test_all_gather_brings_every_block_to_every_rank(ranks, payload):
    sends = sends_of("all_gather", ranks, payload)
    have = {
        rank: {(rank * payload, payload // 2), (rank * payload + payload // 2, payload - payload // 2)}
        for rank in range(ranks)
    }
    for step in steps_of(sends):
        assert all((send.offset, send.length) in have[send.src] for send in step), "sends what it does not have"
        for send in step:
            have[send.dst].add((send.offset, send.length))
    if payload and ranks > 1:
        whole = set.union(*have.values())
        assert all(mine == whole for mine in have.values())
        assert all(send.dst == (send.src + 1) % ranks for send in sends)


@given(RANKS, st.lists(st.integers(0, 300), min_size=1, max_size=4), ITEMSIZE)
@EXAMPLES
def test_reduce_scatter_is_an_all_reduce_of_each_tensor(ranks, counts, itemsize):
    sizes = [count * itemsize for count in counts]
    sends = list(sends_of("reduce_scatter", ranks, *sizes, itemsize=itemsize))
    assert [send.step for send in sends] == sorted(send.step for send in sends)
    start = step = 0
    for size in sizes:
        for send in sends_of("all_reduce", ranks, size, itemsize=itemsize):
            last = step + send.step
            assert sends.pop(0) == send._replace(step=last, offset=start + send.offset)
        start, step = start + size, (last + 1 if size and ranks > 1 else step)
    assert sends == []


@given(st.integers(2, 8), st.integers(0, 300), st.integers(0, 7))
@EXAMPLES
def test_gather_and_scatter_are_stars_around_the_root(ranks, payload, root):
    root %= ranks
    others = [rank for rank in range(ranks) if rank != root]
    inward, outward = (sends_of(op, ranks, payload, root=root) for op in ("gather", "scatter"))
    assert inward == tuple(Send(0, rank, root, rank * payload, payload) for rank in others)
    assert outward == tuple(Send(0, root, rank, rank * payload, payload) for rank in others)


@given(st.data(), st.integers(2, 8))
@EXAMPLES
def test_all_to_all_delivers_to_each_rank_what_each_has_for_it(data, ranks):
    row = st.lists(st.integers(0, 300), min_size=ranks, max_size=ranks).map(tuple)
    rows = data.draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))
    known = schedule("all_to_all_single", ranks, rows)
    assert len(known.sends) == ranks * (ranks - 1), "even what is empty is sent"
    assert {(send.src, send.dst): (send.offset, send.length) for send in known.sends} == {
        (src, dst): (sum(rows[src][:dst]), rows[src][dst]) for src in range(ranks) for dst in range(ranks) if src != dst
    }


@given(st.integers(2, 40))
@EXAMPLES
def test_after_a_barrier_every_rank_has_heard_of_every_rank(ranks):
    heard = {rank: {rank} for rank in range(ranks)}
    for step in steps_of(sends_of("barrier", ranks)):
        said = {send.dst: set(heard[send.src]) for send in step}
        for rank, news in said.items():
            heard[rank] |= news
    assert all(each == set(range(ranks)) for each in heard.values())


def test_a_monitored_barrier_lets_nobody_go_before_rank_0_has_heard_of_everybody():
    come, go = steps_of(sends_of("monitored_barrier", 4))
    assert come == [Send(0, rank, 0, 4 * rank, 4) for rank in (1, 2, 3)]
    assert go == [Send(1, 0, rank, 4 * rank, 4) for rank in (1, 2, 3)]


@pytest.mark.parametrize("op", OPS)
def test_a_group_of_one_sends_nothing(op):
    assert sends_of(op, 1, 1000) == ()


# On the wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "ranks", "sizes", "itemsize", "root", "wire"),
    [  # all bytes that each rank put on the wire, measured with TCP_INFO on torch 2.13
        ("all_reduce", 2, [25 * MiB], 1, None, [26_218_144, 26_218_144]),
        ("all_reduce", 3, [7], 1, None, [778, 679, 875]),
        ("all_reduce", 3, [15 * MiB // 2], 1, None, [10_487_490, 10_487_484, 10_487_490]),
        ("all_reduce", 3, [25 * MiB], 1, None, [34_957_720, 34_957_712, 34_957_720]),
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
        ("scatter", 3, [7], 1, 2, [48, 48, 206]),
        ("barrier", 3, [], 1, None, [288, 288, 288]),
        ("barrier", 5, [], 1, None, [432, 432, 432, 432, 432]),
        ("monitored_barrier", 3, [], 1, None, [296, 148, 148]),
    ],
)
def test_each_rank_writes_what_the_kernel_has_counted(op, ranks, sizes, itemsize, root, wire):
    known = schedule(op, ranks, (tuple(sizes),), (itemsize,) * len(sizes), root)
    sent = Counter()
    for (src, _), size in framed_bytes(known.bytes_by_pair, known.count_by_pair).items():
        sent[src] += size
    assert [sent[rank] for rank in range(ranks)] == wire


def test_an_uneven_all_to_all_as_on_the_wire():
    """Rank 0 has 0, 7 and 1 float32 for the ranks 0, 1 and 2, and so on; rank 1 nothing for rank 2 and 2 for rank 0."""
    rows = ((0, 28, 4), (8, 16, 0), (28, 0, 12))
    measured = {(0, 1): 172, (0, 2): 148, (1, 0): 152, (1, 2): 144, (2, 0): 172, (2, 1): 144}
    known = schedule("all_to_all_single", 3, rows)
    assert framed_bytes(known.bytes_by_pair, known.count_by_pair) == measured


def test_broadcast_is_a_binomial_tree_rotated_to_the_root():
    assert [(send.src, send.dst) for send in sends_of("broadcast", 4, 4, root=0)] == [(0, 1), (0, 2), (1, 3)]
    assert [(send.src, send.dst) for send in sends_of("broadcast", 4, 4, root=1)] == [(1, 2), (1, 3), (2, 0)]


# From the calls of the members ----------------------------------------------------------------------------------------


def tensors(*sizes, dtype="uint8"):
    return tuple(tensor(size, dtype=dtype) for size in sizes)


def call(op, inputs=(), outputs=(), **facts):
    return Collective(number=0, start_ns=0, op=op, group="world", seq=1, inputs=inputs, outputs=outputs, **facts)


@pytest.mark.parametrize(
    ("calls", "same"),
    [
        ([call("all_reduce", tensors(8, dtype="float32"))] * 3, ("all_reduce", 3, ((8,),), (4,))),
        ([call("broadcast", (), tensors(8), root=0)], ("broadcast", 3, ((8,),), (1,), 0)),  # only rank 2 is known
        ([call("gather", tensors(8), (), root=1)], ("gather", 3, ((8,),), (), 1)),
        ([call("scatter", tensors(8, 8, 8), tensors(8), root=0)], ("scatter", 3, ((8,),), (), 0)),
        ([call("reduce_scatter", tensors(8, 8, 8), tensors(8))], ("reduce_scatter", 3, ((8, 8, 8),), (1, 1, 1))),
        ([call("barrier")] * 3, ("barrier", 3)),
        ([call("all_to_all", tensors(4, 4, 4), tensors(4, 4, 4))], ("all_to_all", 3, ((4, 4, 4),))),
        ([call("all_to_all_single", tensors(12), tensors(12))], ("all_to_all_single", 3, ((4, 4, 4),))),
        (  # the program may give the sizes on one rank and leave them out on another, where they are even
            [call("all_to_all_single", tensors(12), splits=(4, 4, 4)), *[call("all_to_all_single", tensors(12))] * 2],
            ("all_to_all_single", 3, ((4, 4, 4),)),
        ),
        (
            [call("all_to_all_single", tensors(6), splits=(rank, 2, 4 - rank)) for rank in range(3)],
            ("all_to_all_single", 3, ((0, 2, 4), (1, 2, 3), (2, 2, 2))),
        ),
        (  # a complex number is two; a rank adds them up one by one, so that a segment may end between the two
            [call("reduce", tensors(8, dtype="complex64"), root=0)],
            ("reduce", 3, ((8,),), (4,), 0),
        ),
        (  # 5 float32 and 7 float16, which torch converts to float32
            [call("all_gather_single_coalesced", tensors(20, dtype="float32") + tensors(14, dtype="float16"))],
            ("all_gather_single_coalesced", 3, ((20, 28),), (4, 2)),
        ),
    ],
)
def test_calls_tell_the_schedule(calls, same):
    assert schedule_of(calls, 3) is schedule(*same) or schedule_of(calls, 3).sends == schedule(*same).sends != ()


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([call("all_reduce", [tensor(80, payload=24)])], "how much is left is not recorded"),
        ([call("all_reduce", [tensor(80, payload=24, indices=16)])] * 2, "calls are not recorded had is not known"),
        ([call("broadcast", tensors(8), root=3)], "its root is no member of the process group"),
        ([call("reduce", tensors(8))], "its root is no member of the process group"),
        ([call("all_to_all_single", tensors(6), splits=(1, 2, 3))] * 2, "calls are not recorded had for each other"),
        ([call("all_to_all_single", tensors(6), splits=(6,))] * 3, "a rank has data for 1 ranks in a group of 3"),
        ([call("all_to_all", tensors(6, 6))] * 3, "a rank has data for 2 ranks in a group of 3"),
        ([call("all_to_none", tensors(8))] * 3, "no schedule of gloo's all_to_none is known here yet"),
        ([call("all_reduce", tensors(2**53))], "its schedule has more than 20,000 messages"),
        ([call("reduce", tensors(2**53), root=0)], "more than 20,000 messages"),
    ],
)
def test_what_is_not_unrolled_says_why(calls, why):
    told = schedule_of(calls, 3)
    assert told.sends == ()
    assert why in str(told.unknown)


@pytest.mark.parametrize("op", OPS)
def test_a_hostile_size_of_group_or_tensor_costs_nothing(op):
    for ranks, size in ((1 << 20, 1000), (1 << 20, 2**53), (300, 2**53)):
        told = schedule_of([call(op, tensors(size), tensors(size), root=0)], ranks)
        few = op in ("broadcast", "gather", "scatter", "barrier", "monitored_barrier") and ranks == 300
        assert few == (told.unknown is None)
        if few:
            assert len(told.sends) < MOST_MESSAGES


def test_nothing_is_reduced_by_many_ranks_in_no_messages():
    assert sends_of("all_reduce", 1 << 20, 0) == sends_of("reduce", 1 << 20, 0) == sends_of("all_gather", 300, 0) == ()
