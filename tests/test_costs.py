"""Steps and bytes in theory, the two constants of a machine, and where two algorithms cross."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import title
from traces import Job

from dlearn import operations
from dlearn.errors import DlearnError
from dlearn.lessons import trees_and_rings as theory
from dlearn.lessons.cost_chart import costs
from dlearn.lessons.trees_and_rings import ALGORITHMS, Cost, Model, cost, crossover, fit

MS = 1_000_000
MODEL = Model(latency_s=50e-6, bandwidth=2e9)  # latency * bandwidth: 100 kB
MODELS = st.builds(Model, latency_s=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e6, 1e11))


@given(ranks=st.integers(2, 1000), size=st.integers(0, 10**12))
def test_no_algorithm_is_below_the_bound(ranks, size):
    """In any all-reduce some rank sends 2(n-1)/n bytes a byte; data needs log2(n) steps to get everywhere."""
    for name in ALGORITHMS:
        spent = cost(name, ranks, size)
        assert spent.bytes >= 2 * (ranks - 1) / ranks * size * (1 - 1e-12)
        assert spent.steps >= (ranks - 1).bit_length()


@pytest.mark.parametrize(
    ("op", "size", "spent"),
    [
        ("all_reduce", 8000, (12, 12_000)),  # Gloo cuts each chunk into two: 2 * 2 * 3 steps, 2 * 3/4 of the bytes.
        ("gather", 100, (3, 300)),  # One step of gloo's schedule, but the root receives three messages in it.
    ],
)
def test_the_cost_of_what_was_recorded(tmp_path, op, size, spent):
    job = Job(tmp_path, ranks=4)
    job.collective(op, size=size, root=0)
    (operation,) = operations(job.load())
    assert theory.cost_seen(operation) == spent


@settings(max_examples=20)
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


def test_no_fit_takes_less_than_no_time():
    """Thrice the time for twice the bytes would mean that nothing takes less than no time."""
    assert fit([(1_000_000, 1e-3), (2_000_000, 3e-3)]).latency_s == 0


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        ([], "at least two sizes"),
        ([(8, float("nan")), (80, 2e-4)], "a measurement is"),
        ([(8, 2e-4), (80, 1e-4)], "measure larger ones"),
    ],
)
def test_measurements_that_tell_nothing_are_refused(measured, sentence):
    with pytest.raises(DlearnError, match=sentence):
        fit(measured)
    with pytest.raises(DlearnError, match="no algorithm 'butterfly'"):
        cost("butterfly", 4, 8)


def test_measurements_come_from_a_trace(tmp_path):
    """The recv waits from 0; the message takes from 2 ms, when it is sent, to 5 ms."""
    job = Job(tmp_path, ranks=2)
    job.message(0, 1, size=1000, start_ns={0: 2 * MS, 1: 0}, end_ns={0: 9 * MS, 1: 5 * MS})
    job.collective("all_reduce", size=64, start_ns=10 * MS, end_ns=14 * MS)
    trace = job.load()
    assert theory.measurements(trace) == [(1000, 0.003)]
    assert theory.measurements(trace, op="all_reduce") == [(64, 0.004)]


@given(model=MODELS, ranks=st.integers(2, 200), pair=st.permutations(list(ALGORITHMS)))
def test_at_the_crossing_both_take_the_same_time_and_around_it_they_change_places(model, ranks, pair):
    assert crossover(model, 3, "ring", "tree") is None  # Both take 4 steps there.
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
    said = theory.finding(model, ranks)
    for size in (1, 1e3, 1e5, 1e7, 1e9):
        time = {name: model.time_s(cost(name, ranks, size)) for name in ALGORITHMS}
        if "nothing beats the ring" in said:
            assert time["ring"] <= min(time.values()) * (1 + 1e-12)
        if "halving-doubling always" in said:
            assert time["halving_doubling"] < time["tree"]


def test_the_title_of_the_chart_says_which_of_the_dots_are_lowest_whatever_the_theory_says():
    star_first = {
        "star": [(64, 1e-4), (10**6, 5e-3)],
        "halving_doubling": [(64, 3e-4), (10**6, 2e-3)],
        "ring": [(64, 4e-4), (10**6, 3e-3)],
    }
    assert title(costs(MODEL, 4, measured=star_first)) == (
        "4 ranks, measured: star is the fastest at 64 B, halving-doubling at 1.00 MB"
    )
    # In theory 6 * 50 µs + 1.5 MB / 2 GB/s = 1.05 ms, measured 3 ms.
    alone = costs(MODEL, 4, measured={"ring": star_first["ring"]})
    assert title(alone) == "4 ranks, measured: the model is up to 2.9 times off"
    with pytest.raises(DlearnError, match="no algorithm 'bus'"):
        costs(MODEL, 4, measured={"bus": []})
