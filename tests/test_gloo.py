"""Gloo's schedules: do they compute what the operation promises, with as many bytes as the wire has seen?"""

from collections import Counter, defaultdict
from itertools import groupby
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlearn.analysis.gloo import MOST_MESSAGES, Send, schedule

MiB = 1 << 20
RANKS = st.integers(1, 8)
PAYLOAD = st.integers(0, 300) | st.integers(0, 12 * MiB)
ITEMSIZE = st.sampled_from([1, 2, 4, 8, 16])

EXAMPLES = settings(derandomize=True, max_examples=60, deadline=None)


def sends_of(op, ranks, payload, *, itemsize=1, root=None) -> tuple[Send, ...]:
    known = schedule(op, ranks=ranks, payload=payload, itemsize=itemsize, root=root)
    assert not isinstance(known, str)
    return known.sends


def steps_of(sends):
    return [list(step) for _, step in groupby(sends, key=lambda send: send.step)]


@given(RANKS, PAYLOAD, ITEMSIZE)
@EXAMPLES
def test_all_reduce_leaves_every_sum_on_every_rank(ranks, payload, itemsize):
    """Each segment's value on a rank is the set of ranks whose share is in it; a rank's share must never count twice.

    In the first half of the steps the receiver adds, in the second it overwrites, as gloo does.
    """
    payload -= payload % itemsize
    sends = sends_of("all_reduce", ranks, payload, itemsize=itemsize)
    segments = {(send.offset, send.length) for send in sends}
    if ranks == 1 or payload == 0:
        assert sends == ()
        return
    # The segments tile the data, each a whole number of items.
    assert sum(length for _, length in segments) == payload
    assert all(offset % itemsize == 0 and length % itemsize == 0 for offset, length in segments)
    value = {rank: {offset: {rank} for offset, _ in segments} for rank in range(ranks)}
    steps = 1 + max(send.step for send in sends)
    half = next(step for step in range(steps) if step * 2 >= _steps_in_all(sends, ranks))
    for step in steps_of(sends):
        arriving = [(send, frozenset(value[send.src][send.offset])) for send in step]
        for send, sent in arriving:
            if send.step < half:
                assert sent.isdisjoint(value[send.dst][send.offset]), "a share would be added twice"
                value[send.dst][send.offset] |= sent
            else:
                value[send.dst][send.offset] = set(sent)
    everybody = set(range(ranks))
    assert all(value[rank][offset] == everybody for rank in range(ranks) for offset, _ in segments)


def _steps_in_all(sends, ranks):
    """Both halves have the same number of steps, (ranks - 1) times the segments of one rank; late ones may be empty."""
    size = max(send.length for send in sends)
    payload = max(send.offset + send.length for send in sends)
    per_rank = max(2, ceil(ceil(payload / size) / ranks))
    return 2 * (ranks - 1) * per_rank


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
    assert have == (set(range(ranks)) if payload else {root})
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


@given(RANKS, PAYLOAD)
@EXAMPLES
def test_a_ring_sends_each_byte_almost_twice(ranks, payload):
    """2 (ranks-1)/ranks of the payload on average; a rank's own share differs by its last, shorter segment only."""
    sends = sends_of("all_reduce", ranks, payload)
    assert sum(send.length for send in sends) == 2 * (ranks - 1) * payload
    assert all(send.dst == (send.src - 1) % ranks for send in sends)
    if payload % (2 * ranks) == 0 and payload <= 2 * ranks * MiB and ranks > 1 and payload:
        sent = defaultdict(int)
        for send in sends:
            sent[send.src] += send.length
        assert set(sent.values()) == {2 * (ranks - 1) * payload // ranks}


def test_four_ranks_reduce_4_mib_as_on_the_wire():
    """Measured with TCP_INFO: 12 messages to the left, 6,291,456 B of payload = 1.5 x 4 MiB, each of 512 KiB."""
    known = schedule("all_reduce", ranks=4, payload=4 * MiB, itemsize=4, root=None)
    assert not isinstance(known, str)
    assert known.bytes_by_pair == {(rank, (rank - 1) % 4): 6_291_456 for rank in range(4)}
    assert known.count_by_pair == {(rank, (rank - 1) % 4): 12 for rank in range(4)}
    assert {send.length for send in known.sends} == {512 * 1024}


def test_empty_segments_are_skipped():
    """8 B on 4 ranks: 2 segments of 4 B and 6 empty ones. Measured: 200, 200, 400, 400 B with 96 B of framing each."""
    sends = sends_of("all_reduce", 4, 8, itemsize=4)
    assert {send.length for send in sends} == {4}
    on_the_wire = Counter()
    for send in sends:
        on_the_wire[send.src] += send.length + 96
    assert sorted(on_the_wire.values()) == [200, 200, 400, 400]


@pytest.mark.parametrize(
    ("ranks", "payload", "wire"),
    [  # all bytes that each rank put on the wire, measured with TCP_INFO on torch 2.13
        (2, 25 * MiB, [26_218_144, 26_218_144]),
        (3, 7, [778, 679, 875]),
        (3, 15 * MiB // 2, [10_487_490, 10_487_484, 10_487_490]),
        (3, 25 * MiB, [34_957_720, 34_957_712, 34_957_720]),
        (4, 9 * MiB + 3, [14_158_377, 14_158_368, 14_158_368, 14_158_377]),
    ],
)
def test_all_reduce_of_odd_and_large_sizes_as_on_the_wire(ranks, payload, wire):
    sent = Counter()
    for send in sends_of("all_reduce", ranks, payload):
        sent[send.src] += send.length + 96
        sent[send.dst] += 48  # "ready to receive"
    assert [sent[rank] for rank in range(ranks)] == wire


def test_all_gather_sends_even_an_empty_half():
    """1 B on 3 ranks, measured: 386 B to the right = 4 messages of 96 B framing, two of them with 1 B."""
    sends = sends_of("all_gather", 3, 1)
    assert sorted(send.length for send in sends if send.src == 0) == [0, 0, 1, 1]


def test_broadcast_is_a_binomial_tree_rotated_to_the_root():
    assert [(send.src, send.dst) for send in sends_of("broadcast", 4, 4, root=0)] == [(0, 1), (0, 2), (1, 3)]
    assert [(send.src, send.dst) for send in sends_of("broadcast", 4, 4, root=1)] == [(1, 2), (1, 3), (2, 0)]


@pytest.mark.parametrize(
    ("op", "facts", "why"),
    [
        ("all_reduce", {"payload": 2**53}, "its schedule has 51,539,607,552 messages, more than 20,000"),
        ("all_reduce", {"ranks": 1 << 20}, "its schedule has 4,398,042,316,800 messages"),
        ("all_gather", {"ranks": 1 << 20}, "its schedule has 2,199,021,158,400 messages"),
        ("broadcast", {"ranks": 1 << 20, "root": 5}, "its schedule has 1,048,575 messages"),
        ("broadcast", {"root": 4}, "its root is no member of the process group"),
        ("broadcast", {"root": None}, "its root is no member of the process group"),
        ("reduce", {}, "no schedule of gloo's reduce is known here yet"),
    ],
)
def test_what_is_not_unrolled_says_why(op, facts, why):
    told = schedule(op, **{"ranks": 4, "payload": 1000, "itemsize": 4, "root": 0, **facts})
    assert isinstance(told, str)
    assert why in told


def test_a_broadcast_to_many_ranks_is_few_messages():
    """299 messages: what counts is the schedule's length, not the size of the group."""
    assert len(sends_of("broadcast", 300, 10 * MiB, root=0)) == 299 < MOST_MESSAGES
