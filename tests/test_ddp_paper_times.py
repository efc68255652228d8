"""The claims of the DDP paper that are about times: what must hold whatever the machine does meanwhile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_claims import CLAIMS, rules
from ddp_claims.__main__ import main
from ddp_claims.comm_hooks import RoundRobin
from ddp_claims.samples import Samples, ratios
from dlearn import Cluster
from dlearn.lessons import charts


def train_round_robin(count: int) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), bucket_cap_mb=0.0005)
    groups = [dist.new_group() for _ in range(count)]
    if count:
        model.register_comm_hook(None, RoundRobin(groups).hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 16), float(dist.get_rank() + step))).sum().backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()], len(model.reducer._get_zeros_like_grad_buckets())


def test_groups_in_turn_give_what_ddp_itself_gives_bit_by_bit():
    with Cluster(2) as cluster:
        plain, buckets = cluster.run(train_round_robin, 0).results[0]
        in_turn, _ = cluster.run(train_round_robin, 3).results[0]
    assert buckets == 4
    assert all(torch.equal(a, b) for a, b in zip(plain, in_turn, strict=True))


def test_the_best_bucket_is_as_sure_as_its_rounds_are():
    clear = [[2.0] * rules.ROUNDS, [1.0] * rules.ROUNDS, [3.0] * rules.ROUNDS, [4.0] * rules.ROUNDS]
    assert set(rules.best(64, clear)) == {2 * rules.layer_bytes(64)}
    tossed = [[1.0, 2.0] * (rules.ROUNDS // 2), [2.0, 1.0] * (rules.ROUNDS // 2), *clear[2:]]
    assert set(rules.best(64, tossed)) == {rules.layer_bytes(64), 2 * rules.layer_bytes(64)}


@pytest.mark.parametrize(
    ("small", "large", "holds"),
    [(1, 1, False), (0, 3, False), (3, 0, True), (3, 2, True), (2, 1, True), (1, 2, False)],
)
def test_only_a_bucket_that_grows_less_than_the_model_confirms_the_rule(small, large, holds):
    """Which of the four sizes is the best one, for the small model and for the large one."""
    good = {
        width: [rules.LAYERS_IN_BUCKET[place] * rules.layer_bytes(width)] * rules.RESAMPLES
        for width, place in zip(rules.WIDTHS, (small, small, large), strict=True)
    }
    assert rules.buckets_grow_slower(good, "here").holds is holds


def test_samples_say_how_far_the_median_can_be_trusted():
    taken = Samples(tuple(float(each) for each in range(12)))
    assert (taken.median, taken.interval, taken.middle_half) == (5.5, (2.0, 9.0), (3.0, 8.0))
    assert taken.text("ms", digits=1) == "5.5 ms (middle half 3.0 to 8.0, n = 12)"
    assert ratios([2.0] * 10, [1.0] * 10).interval == (2.0, 2.0)
    with pytest.raises(ValueError, match="9 samples; a statement about times needs 10"):
        Samples((1.0,) * 9)


def test_a_chart_has_its_finding_as_title_and_all_its_points():
    ax = charts.lines(
        {"a": charts.Series([1, 2], [3, 4], [(2, 4), (3, 5)]), "b": charts.Series([1, 2], [1, 2], derived=True)},
        title="b is below a",
        x="size",
        y="ms",
    )
    assert ax.get_title(loc="left") == "b is below a"
    assert [list(line.get_ydata()) for line in ax.get_lines()] == [[3, 4], [1, 2]]
    assert ax.get_lines()[1].get_linestyle() == "--"
    stacked = charts.bars(["x"], [charts.Part("p", [1.0]), charts.Part("q", [2.0])], title="t", y="ms", stacked=True)
    assert [(patch.get_y(), patch.get_height()) for patch in stacked.patches] == [(0.0, 1.0), (1.0, 2.0)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_writes_figures_report_and_verdicts(tmp_path):
    command = [sys.executable, "-m", "ddp_claims", "--out", "out", "DD14"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "1 of 1: DD14 averages, and what the constructor sends" in done.stderr
    assert done.stdout.startswith("DD14 averages, and what the constructor sends: ")
    verdicts = json.loads((tmp_path / "out" / "verdicts.json").read_text())
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| DD14 averages, and what the constructor sends | " + verdicts["DD14"]["verdict"] in report
    assert "](dd14.svg)" in report
    assert verdicts["DD14"]["verdict"] in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "dd14.svg", "report.html", "report.md", "verdicts.json",
    }  # fmt: skip


def test_the_command_refuses_an_unknown_claim_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp_paper", "--out", str(tmp_path / "out"), "DD99"])
    assert main() == 1
    assert capsys.readouterr().err.startswith("error: there is no claim 'DD99'; there are: DD1, DD2, ")
    assert not (tmp_path / "out").exists()


def test_the_gallery_has_the_figure_and_the_report_the_verdict_of_every_claim():
    home = Path(__file__).parent.parent
    gallery, report = ((home / "docs" / page).read_text() for page in ("tour.md", "ddp_paper/report.md"))
    verdicts = json.loads((home / "docs" / "ddp_paper" / "verdicts.json").read_text())
    assert list(verdicts) == [each.id for each in CLAIMS] == [f"DD{number}" for number in range(1, 19)]
    for each in CLAIMS:
        picture = f"ddp_paper/{each.id.lower()}.svg"
        assert f"]({picture})" in gallery
        assert "<svg" in (home / "docs" / picture).read_text()
        assert f"## {each.id} {each.title}: {verdicts[each.id]['verdict']}" in report
        assert len(verdicts[each.id]["checks"]) >= 1
