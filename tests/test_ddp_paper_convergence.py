"""DD12 and DD13: bytes of compressed gradients to the byte, and losses judged by a criterion that can fail."""

import pytest
from torch import nn

from ddp_claims import compression, skipping
from ddp_claims.compression import METHODS, powersgd_sizes, sent
from ddp_claims.convergence import hurts, keeps
from ddp_claims.skipping import LARGE, SMALL
from dlearn import Cluster
from dlearn.lessons import models


def test_a_loss_is_kept_within_the_seeds_own_spread_and_hurt_beyond_it():
    plain = [0.10, 0.12, 0.14]  # they differ by 0.04
    assert keeps([0.11, 0.15, 0.10], plain)  # at worst higher by 0.03
    assert not keeps([0.11, 0.17, 0.10], plain)  # one seed by 0.05
    assert not hurts([0.11, 0.17, 0.20], plain)  # one seed by 0.01 only
    assert hurts([0.15, 0.17, 0.19], plain)  # each by 0.05
    assert not hurts(plain, plain)


def test_the_formula_of_powersgd():
    # 64 x 128 and 128 x 128 and 128 x 10 become thin; 128 + 128 + 10 biases stay: 4·266 = 1,064 B.
    # P has the rows: 128 + 128 + 10, Q the columns: 64 + 128 + 128, each times the rank, times 4 B.
    assert powersgd_sizes(models.MLP(), 1) == (1_064, 4 * 266, 4 * 320)
    assert powersgd_sizes(models.MLP(), 4) == (1_064, 4 * 4 * 266, 4 * 4 * 320)
    # 2·(10 + 10)·4 is more than 10·10: not worth it; at rank 2 it is.
    assert powersgd_sizes(nn.Linear(10, 10, bias=False), 4) == (400, 0, 0)
    assert powersgd_sizes(nn.Linear(10, 10, bias=False), 2) == (0, 80, 80)


@pytest.mark.slow
def test_each_method_sends_what_its_formula_says():
    trace = Cluster(2).run(compression.recorded_steps).trace
    sizes = {method: sent(trace, method) for method in METHODS}
    parameters = sum(each.numel() for each in models.MLP().parameters())
    assert sizes["plain"] == (4 * parameters,)
    assert sizes["fp16"] == sizes["bf16"] == (2 * parameters,)
    for rank in (1, 2, 4):
        assert sizes[f"PowerSGD {rank}"] == powersgd_sizes(models.MLP(), rank)
    assert compression.halved(sizes).holds
    assert all(compression.by_formula(sizes, rank).holds for rank in (1, 2, 4))


def test_wrong_bytes_are_not_confirmed():
    sizes = {"plain": (400,), "fp16": (200,), "bf16": (200,), "PowerSGD 1": (1_064, 1_064, 1_280)}
    assert compression.halved(sizes).holds
    assert not compression.halved({**sizes, "bf16": (204,)}).holds
    assert not compression.halved({**sizes, "fp16": (100, 100)}).holds
    assert not compression.halved(dict.fromkeys(sizes, ())).holds
    assert compression.by_formula(sizes, 1).holds
    assert not compression.by_formula({**sizes, "PowerSGD 1": (1_064, 1_064, 1_284)}, 1).holds
    assert not compression.by_formula({**sizes, "plain": (200, 200)}, 1).holds, "two buckets"


def test_a_loss_that_is_not_kept_is_not_confirmed():
    plain = [0.10, 0.12, 0.14]
    assert compression.kept({"plain": plain, "fp16": plain}, "fp16").holds
    assert not compression.kept({"plain": plain, "fp16": [0.10, 0.12, 0.20]}, "fp16").holds
    found = compression.as_accurate({"plain": [0.90, 0.91], "fp16": [0.90, 0.91], "PowerSGD 1": [0.90, 0.88]})
    assert not found.holds
    assert "fp16 0.0, PowerSGD 1 3.0" in found.seen


def one_run_of_each():
    few = skipping.Setting(SMALL.batch, SMALL.learning_rate, 80)
    return compression.train("PowerSGD 1", 0), skipping.train(few, 8, 0)


@pytest.mark.slow
def test_training_learns_and_ranks_agree():
    runs = Cluster(2, record=False).run(one_run_of_each).results
    for trained, skipped in runs.values():
        assert len(trained.losses) == compression.EPOCHS + 1
        assert trained.losses[-1] < 0.5 < trained.losses[0]
        assert trained.accuracy > 0.7
        assert len(skipped) == skipping.POINTS + 1
        assert skipped[-1] < skipped[0]
    assert runs[0] == runs[1], "both ranks end with the same model"


def test_every_n_steps_at_each_point_of_the_curve():
    for setting in (SMALL, LARGE):
        assert all(setting.iterations // skipping.POINTS % n == 0 for n in skipping.EVERY)
