"""Steps and bytes in theory, the two constants of a machine, and where two algorithms cross."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import Job

from dlearn.analysis import operations
from dlearn.errors import DlearnError
from dlearn.lessons.trees_and_rings import (
    ALGORITHMS,
    Cost,
    Model,
    cost,
    cost_seen,
    crossover,
    finding,
    fit,
    fit_all_reduce,
    measurements,
    predictions,
)

MS = 1_000_000
MODEL = Model(latency_s=50e-6, bandwidth=2e9)  # latency * bandwidth: 100 kB
MODELS = st.builds(Model, latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e11))


@pytest.mark.parametrize(
    ("algorithm", "ranks", "steps", "size"),
    [
        ("ring", 4, 6, 1500),  # 2 * 3 steps of 1000/4 bytes
        ("ring", 3, 4, 4000 / 3),
        ("halving_doubling", 4, 4, 1500),  # 500, 250, then 250, 500
        ("halving_doubling", 8, 6, 1750),  # 500, 250, 125, and back
        ("halving_doubling", 5, 6, 3500),  # as 4 ranks, and the fifth: all of it before, all of it after
        ("tree", 4, 4, 4000),  # 2 levels inward, 2 outward, all of it each time
        ("tree", 5, 6, 6000),
        ("star", 4, 6, 6000),  # 3 messages in, 3 out
    ],
)
def test_steps_and_bytes(algorithm, ranks, steps, size):
    assert cost(algorithm, ranks, 1000) == Cost(steps, pytest.approx(size))


@given(ranks=st.integers(2, 1000), size=st.integers(0, 10**12))
def test_no_algorithm_is_below_the_bound(ranks, size):
    """In any all-reduce some rank sends 2(n-1)/n bytes a byte; data needs log2(n) steps to get everywhere."""
    for name in ALGORITHMS:
        spent = cost(name, ranks, size)
        assert spent.bytes >= 2 * (ranks - 1) / ranks * size * (1 - 1e-12)
        assert spent.steps >= (ranks - 1).bit_length()


def test_bad_questions_are_refused():
    with pytest.raises(DlearnError, match="no algorithm 'butterfly'"):
        cost("butterfly", 4, 8)
    with pytest.raises(DlearnError, match="at least 2 ranks"):
        cost("ring", 1, 8)


def test_gloo_is_a_ring_with_twice_the_steps_and_the_same_bytes(tmp_path):
    """It cuts each chunk into two segments: 2 * 2 * 3 steps, 2 * 3/4 of the bytes."""
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=8000)
    (operation,) = operations(job.load())
    assert cost_seen(operation) == (12, 12_000)


def test_messages_into_one_rank_are_steps_one_after_another(tmp_path):
    """A gather of 4 ranks is one step of gloo's schedule, but the root receives three messages in it."""
    job = Job(tmp_path, ranks=4)
    job.collective("gather", size=100, root=0)
    (operation,) = operations(job.load())
    assert cost_seen(operation) == (3, 300)


def test_a_cost_that_is_not_known_says_why(tmp_path):
    job = Job(tmp_path, ranks=2, backend="nccl")
    job.collective("all_reduce", size=8)
    (operation,) = operations(job.load())
    assert "nccl" in cost_seen(operation)


@given(model=MODELS, seed=st.integers(0, 1000))
def test_a_fit_finds_the_constants_in_noise(model, seed):
    """Times up to 20 % longer, and one in ten 50 times longer: the medians hardly notice."""
    noise = random.Random(seed)
    middle = model.latency_s * model.bandwidth
    measured = [
        (size, model.time_s(Cost(1, size)) * noise.uniform(1, 1.2) * (50 if noise.random() < 0.1 else 1))
        for size in (middle * 4.0**power for power in range(-5, 6))
        for _ in range(31)
    ]
    found = fit(measured)
    assert found.latency_s == pytest.approx(1.1 * model.latency_s, rel=0.12)
    assert found.bandwidth == pytest.approx(model.bandwidth / 1.1, rel=0.12)
    assert found.medians == 11
    assert found.error < 0.15


def test_two_sizes_are_met_exactly():
    """8 B in 50.004 µs and 2 MB in 1.05 ms: 50 µs, and 2 GB/s."""
    found = fit([(8, 50.004e-6), (2_000_000, 1.05e-3)])
    assert found.latency_s == pytest.approx(50e-6)
    assert found.bandwidth == pytest.approx(2e9)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert str(found) == "50.0 µs latency, 2.00 GB/s (fitted to 2 medians, the worst is 0% off)"


def test_a_fit_to_all_reduces_counts_their_steps_and_bytes():
    """Ring and tree of 4 ranks, one size each: two equations, two constants."""
    times = {name: [(80_000, MODEL.time_s(cost(name, 4, 80_000)))] for name in ("ring", "tree")}
    found = fit_all_reduce(times, 4)
    assert (found.latency_s, found.bandwidth) == (pytest.approx(50e-6), pytest.approx(2e9))
    with pytest.raises(DlearnError, match="at least two sizes"):
        fit_all_reduce({"tree": times["tree"], "star": times["tree"]}, 4)  # S bytes a step, both of them


def test_latency_is_never_negative():
    """Thrice the time for twice the bytes would mean that nothing takes less than no time."""
    found = fit([(1_000_000, 1e-3), (2_000_000, 3e-3)])
    assert found.latency_s == 0
    assert 0.66e9 < found.bandwidth < 1e9, "between the two speeds"


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        ([], "at least two sizes"),
        ([(8, 1e-4), (8, 2e-4)], "at least two sizes"),
        ([(8, 1e-4), (-8, 2e-4)], "a measurement is"),
        ([(8, 0.0), (80, 2e-4)], "a measurement is"),
        ([(8, float("nan")), (80, 2e-4)], "a measurement is"),
        ([(8, 2e-4), (80, 1e-4)], "measure larger ones"),
    ],
)
def test_measurements_that_tell_nothing_are_refused(measured, sentence):
    with pytest.raises(DlearnError, match=sentence):
        fit(measured)


def test_measurements_come_from_a_trace(tmp_path):
    """The recv waits from 0; the message takes from 2 ms, when it is sent, to 5 ms."""
    job = Job(tmp_path, ranks=2)
    job.recv(1, 0, size=1000, start_ns=0, end_ns=5 * MS)
    job.send(0, 1, size=1000, start_ns=2 * MS, end_ns=9 * MS)
    job.collective("all_reduce", size=64, start_ns=10 * MS, end_ns=14 * MS)
    trace = job.load()
    assert measurements(trace) == [(1000, 0.003)]
    assert measurements(trace, op="all_reduce") == [(64, 0.004)]


def test_three_ranks_have_no_crossing():
    """Ring and tree both take 4 steps there."""
    assert crossover(MODEL, 3) is None
    assert crossover(Model(latency_s=0, bandwidth=1e9), 4) is None
    assert crossover(MODEL, 4, "ring", "halving_doubling") is None, "equal bytes"


@given(model=MODELS, ranks=st.integers(2, 200), pair=st.permutations(list(ALGORITHMS)))
def test_at_the_crossing_both_take_the_same_time_and_around_it_they_change_places(model, ranks, pair):
    one, other = pair[:2]
    size = crossover(model, ranks, one, other)

    def lead(size):
        times = [model.time_s(cost(name, ranks, size)) for name in (one, other)]
        return times[0] - times[1]

    if size is None:
        signs = {(lead(size) > 0) - (lead(size) < 0) for size in (0, 1e3, 1e6, 1e12)}
        assert signs - {0} != {-1, 1}
    else:
        assert lead(size) == pytest.approx(0, abs=1e-9 * model.time_s(cost(one, ranks, size)))
        assert lead(size / 2) * lead(size * 2) < 0


@given(model=MODELS, ranks=st.integers(2, 200))
def test_the_sentence_is_true_of_the_times(model, ranks):
    said = finding(model, ranks)
    for size in (1, 1e3, 1e5, 1e7, 1e9):
        time = {name: model.time_s(cost(name, ranks, size)) for name in ALGORITHMS}
        if "nothing beats the ring" in said:
            assert time["ring"] <= min(time.values()) * (1 + 1e-12)
        if "halving-doubling always" in said:
            assert time["halving_doubling"] < time["tree"]
        if "beats both" in said:
            assert time["halving_doubling"] < time["ring"]


def test_the_table_marks_the_fastest():
    """Of 1 MB on 4 ranks, the ring takes 6 * 50 µs + 1.5 MB / 2 GB/s = 1.05 ms."""
    table = predictions(MODEL, 4, [1000, 1_000_000])
    assert str(table).splitlines() == [
        "4 ranks, in theory: below 80.0 kB the tree beats the ring; halving-doubling always beats both."
        " 50.0 µs latency, 2.00 GB/s.",
        "all-reduce        steps  bytes  1.00 kB   1.00 MB",
        "ring                  6  1.5 S  301 µs   1.05 ms",
        "halving_doubling      4  1.5 S  201 µs*   950 µs*",
        "tree                  4    4 S  202 µs   2.20 ms",
        "star                  6    6 S  303 µs   3.30 ms",
    ]


def test_equals_share_the_mark():
    """Two ranks: a ring of two is one exchange of halves and one of sums, as halving and doubling are."""
    assert predictions(MODEL, 2, [1000]).fastest(0) == ("ring", "halving_doubling")
