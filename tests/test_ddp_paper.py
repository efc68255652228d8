"""The claims of the paper on DDP: that a verdict is computed, can fail, and is what the essential numbers say."""

from dataclasses import replace
from math import comb

import pytest
import torch
import torch.distributed as dist
from test_cost_chart import check_texts
from text_boxes import faults
from torch import nn

from ddp_claims import (
    CLAIMS,
    Check,
    Claim,
    Finding,
    Report,
    Result,
    accumulation,
    claim,
    construction,
    figures,
    hooks,
    interception,
    knobs,
    order,
    ready_gradients,
    scaling_out,
    seen,
    unused,
)
from ddp_claims.samples import Samples, depth
from dlearn.cluster import Cluster
from dlearn.lessons import charts, models
from dlearn.recorder import span

YES, NO, UNKNOWN = (Check("it is so", "seen", holds) for holds in (True, False, None))


def finding(*checks):
    return Finding(Claim("DD0", "a claim", "section 0", "it is so", "nothing", lambda: Result(())), Result(checks))


# Verdicts, samples, charts: no ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([YES], "confirmed"),
        ([YES, NO], "not confirmed here"),
        ([NO, UNKNOWN], "not confirmed here"),
        ([YES, UNKNOWN], "partly tested"),
        ([UNKNOWN, UNKNOWN], "cannot be tested here"),
        ([], "cannot be tested here"),
    ],
)
def test_one_failed_check_is_enough_and_what_is_untested_confirms_nothing(checks, verdict):
    assert finding(*checks).verdict == verdict


def test_a_finding_says_what_failed_and_what_was_not_tested():
    found = finding(YES, NO, UNKNOWN)
    assert found.headline.endswith("1 check of 3 failed; 1 of 3 checks cannot be tested here")
    assert found.untested == (UNKNOWN,)
    assert "cannot be tested here. seen" in str(found)


def test_what_was_seen_is_escaped_in_html():
    assert "<script>" not in finding(replace(YES, seen="<script>"))._repr_html_()


def test_each_claim_says_what_it_is_and_what_it_runs():
    for each in CLAIMS:
        assert all((each.title, each.paper, each.says, each.runs)), each.id
        assert claim(each.id) is each


@pytest.mark.parametrize("n", [10, 11, 12, 15, 20, 35, 60])
def test_the_interval_holds_the_median_in_95_of_100_cases_and_no_wider_one_is_needed(n):
    def tail(k):
        """P(at most k of n fair coins show heads)."""
        return sum(comb(n, i) for i in range(k + 1)) / 2**n

    assert tail(depth(n)) <= 0.025 < tail(depth(n) + 1)


def test_no_text_of_a_chart_is_clipped_or_overlaps():
    series = {name: charts.Series([1, 2, 4, 8], [1, 10, 100, 1000]) for name in ("measured", "predicted", "other")}
    ticks, title = [(size, f"{size} B") for size in (1, 2, 4, 8)], "A long finding " * 8
    check_texts(charts.lines(series, title=title, x="bytes", y="ms", ticks=ticks, log="x", mark=(4, "knee")))
    check_texts(charts.lines(series, title="A finding", x="bytes", y="ms", notes=["A note. " * 30]))
    parts = [charts.Part("one", [1, 2, 100_000]), charts.Part("two", [3, 4, 5])]
    names = ["a name of several words", "another name of several words", "short"]
    check_texts(charts.bars(names, parts, title="A finding", y="bytes", text=lambda size: f"{size:,.0f} B"))


def test_a_picture_of_hooks_writes_names_side_by_side_or_together():
    fired = [hooks.Fired(kind, "2.weight") for kind in hooks.KINDS]
    fired += [hooks.Fired(hooks.ARRIVED, name) for name in ("0.bias", "0.weight")]
    check_texts(hooks.picture(fired, 3, 4))
    assert hooks.labels_of(fired, [0, 9], 20.0) == [("2.weight", 0, True), ("2.weight", 9, True)]
    assert hooks.labels_of(fired, [3, 15, 16], 20.0) == [("2.weight", 3, True), ("0.bias, 0.weight", 16, False)]


def test_a_figure_of_pairs_shows_every_measurement_its_median_and_its_interval():
    first, second = [float(10 + i) for i in range(11)], [float(20 + i) for i in range(11)]
    columns = {"cable\nwith": first, "cable\nwithout": second, "loopback\nwith": second, "loopback\nwithout": first}
    ax = figures.dots(columns, title="A finding", y="ms", between=["1.7 times", "0.6 times"], notes=["A note."])
    found = {
        gid: [line for line in ax.lines if line.get_gid() == gid] for gid in ("pairs", "dots", "median", "interval")
    }
    assert [len(each) for each in found.values()] == [22, 4, 4, 4]
    assert [list(line.get_ydata()) for line in found["pairs"][:2]] == [[10, 20], [11, 21]]
    assert [list(line.get_ydata()) for line in found["median"]] == [[15], [25], [25], [15]]
    # Of 11, one may be left out at either end (test above).
    assert list(found["interval"][0].get_ydata()) == list(Samples(tuple(first)).interval) == [11, 19]
    assert faults(ax.figure) == []


def test_a_table_tints_what_differs_from_its_first_row():
    rows = [
        ["a step", "gradients", "map"],
        ["default", "85 B", "4 B"],
        ["one", "85 B", "4 B"],
        ["other", "69 B", "4 B"],
    ]
    ax = figures.table(rows, title="A finding")
    (tinted,) = ax.patches
    assert tinted.get_y() < 3.5 * figures._ROW_IN < tinted.get_y() + tinted.get_height()
    assert [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"] == [
        *rows[0][:2],
        "69 B",
        rows[0][2],
    ]
    assert faults(ax.figure) == []


@pytest.mark.parametrize(
    ("checks", "tag"), [([YES], "✓ confirmed"), ([NO], "✗ not confirmed here"), ([UNKNOWN], "? cannot be tested here")]
)
def test_what_the_paper_says_and_our_verdict_stand_below_the_figure(checks, tag):
    picture = charts.bars(["one", "two"], [charts.Part("part", [1, 2])], title="A finding", y="bytes")
    size = picture.get_window_extent().size
    says = "All-reduces that run during the backward pass make a step faster (there by 38.0 %). " * 2
    found = Claim("DD0", "a claim", "section 0", says, "nothing", lambda: Result(tuple(checks), picture)).find()
    told = [text.get_text() for text in picture.figure.texts]
    assert told[-1] == tag
    assert " ".join(told[:-1]) == f"The paper (section 0): {says}".strip()
    assert picture.get_window_extent().size == pytest.approx(size), "the figure grows, and not the axes"
    assert faults(picture.figure) == []
    page = Report((found,))._page("here")
    assert '<a href="dd0.svg"><img src="dd0.svg" alt="" width="150"></a>' in page
    assert f"{tag[0]} {found.verdict}</td>" in page
    assert "width=" not in Report((found,))._repr_html_(), "a notebook has no files beside it"


# What the checks are made of: no ranks --------------------------------------------------------------------------------


def test_gradients_that_come_at_the_end_have_no_spread():
    late = ready_gradients.Pass(("b", "a"), (0.97, 0.99), (400, 4))
    assert late.spread < ready_gradients.LEAST_SPREAD
    assert late.half == 0.97


def test_what_the_prose_says_of_the_models_is_so():
    tower = unused.Tower()
    assert sum(each.numel() for each in tower.parameters()) == 21_450
    assert len(list(tower.parameters())) == 12
    assert seen.parameter_bytes(tower.layers[1]) == 16_640
    assert sum(each.numel() for each in scaling_out.even().parameters()) == 5200 == 16 * 325
    assert seen.parameter_bytes(models.ConvNet()) == 111_960


def test_the_graph_of_a_layer_ends_in_its_parameters():
    names = [node.name() for node in hooks.graph_of(nn.Linear(3, 2)(torch.ones(1, 3)).sum().grad_fn)]
    assert sum("AccumulateGrad" in name for name in names) == 2


# Every check can fail -------------------------------------------------------------------------------------------------


def holds(result):
    return [check.holds for check in result.checks]


def test_a_sum_instead_of_a_mean_is_not_confirmed(monkeypatch):
    original = construction.build

    def build_and_sum():
        built = original()
        return built._replace(under_ddp=built.under_ddp * dist.get_world_size())

    monkeypatch.setattr(construction, "build", build_and_sum)
    result = construction.construct()
    assert holds(result) == [False, True, True, True]
    assert "under DDP: 3, 3" in result.checks[0].seen


@pytest.mark.slow
def test_another_model_than_expected_is_not_confirmed(monkeypatch):
    monkeypatch.setattr(seen, "parameter_bytes", lambda model: 111_956)
    assert holds(accumulation.accumulate()) == [False, False]


@pytest.mark.slow
def test_a_rank_that_sends_once_too_often_is_seen(monkeypatch):
    original = knobs.train

    def train_and_log():
        original()
        with span(f"{knobs.DEFAULT}, step {knobs.STEPS - 1}"):
            dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(knobs, "train", train_and_log)
    found = {check.says: check.holds for check in knobs.turn_knobs().checks}
    assert found["nothing else is sent"] is False


@pytest.mark.slow
def test_a_program_that_sends_by_itself_is_not_ddp_alone(monkeypatch):
    original = interception.of_this_rank

    def and_a_barrier():
        learned = original()
        dist.barrier()
        return learned

    monkeypatch.setattr(interception, "of_this_rank", and_a_barrier)
    (check,) = (each for each in interception.interception().checks if "every collective" in each.says)
    assert check.holds is False
    assert check.seen == "8 of 9"


@pytest.mark.slow
def test_gradients_in_one_order_on_all_ranks_prove_nothing():
    def never_swapped():
        order.Branches.forward = lambda self, x, swapped: self.left(x) + self.right(x)
        return order.train_branches()

    run = Cluster(2).run(never_swapped)
    gradients = [run.results[rank][name] for rank in (0, 1) for name in (order.ORDERED, order.SWAPPED)]
    assert order.harmless(run.trace, gradients).holds is False
