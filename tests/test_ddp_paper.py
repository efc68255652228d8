"""The claims of the paper on DDP: that a verdict is computed, can fail, and is what the essential numbers say.

The notebook ddp_paper runs all of them; `check_finding` looks at each finding after its own cells have.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from torch import nn

from ddp_claims import Check, Claim, Finding, Result, compression
from ddp_claims.__main__ import main
from ddp_claims.compression import powersgd_sizes
from ddp_claims.convergence import hurts, keeps
from dlearn.lessons import models

YES, NO, UNKNOWN = (Check("it is so", "seen", holds) for holds in (True, False, None))


def finding(*checks):
    return Finding(Claim("DD0", "a claim", "section 0", "it is so", "nothing", lambda: Result(())), Result(checks))


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
    found = finding(*checks)
    assert found.verdict == verdict
    assert found.untested == tuple(check for check in checks if check.holds is None)
    assert "<script>" not in finding(*(replace(check, seen="<script>") for check in checks))._repr_html_()


def test_a_loss_is_kept_within_the_seeds_own_spread_and_hurt_beyond_it():
    plain = [0.10, 0.12, 0.14]  # they differ by 0.04
    assert keeps([0.11, 0.15, 0.10], plain)  # at worst higher by 0.03
    assert not keeps([0.11, 0.17, 0.10], plain)  # one seed by 0.05
    assert not hurts([0.11, 0.17, 0.20], plain)  # one seed by 0.01 only
    assert hurts([0.15, 0.17, 0.19], plain)  # each by 0.05
    assert not compression.kept({"plain": plain, "fp16": [0.10, 0.12, 0.20]}, "fp16").holds
    found = compression.as_accurate({"plain": [0.90, 0.91], "fp16": [0.90, 0.91], "PowerSGD 1": [0.90, 0.88]})
    assert not found.holds
    assert "fp16 0.0, PowerSGD 1 3.0" in found.seen


def test_wrong_bytes_are_not_confirmed():
    # 64 x 128 and 128 x 128 and 128 x 10 become thin; 128 + 128 + 10 biases stay: 4·266 = 1,064 B.
    # P has the rows: 128 + 128 + 10, Q the columns: 64 + 128 + 128, each times the rank, times 4 B.
    assert powersgd_sizes(models.MLP(), 4) == (1_064, 4 * 4 * 266, 4 * 4 * 320)
    assert powersgd_sizes(nn.Linear(10, 10, bias=False), 4) == (400, 0, 0)  # 2·(10 + 10)·4 > 10·10: not worth it
    sizes = {"plain": (400,), "fp16": (200,), "bf16": (200,), "PowerSGD 1": powersgd_sizes(models.MLP(), 1)}
    assert compression.halved(sizes).holds
    assert compression.by_formula(sizes, 1).holds
    for wrong in ({"bf16": (204,)}, {"fp16": (100, 100)}, dict.fromkeys(sizes, ())):
        assert not compression.halved({**sizes, **wrong}).holds
    assert not compression.by_formula({**sizes, "PowerSGD 1": (1_064, 1_064, 1_284)}, 1).holds
    assert not compression.by_formula({**sizes, "plain": (200, 200)}, 1).holds, "two buckets"


@pytest.mark.slow
def test_the_command_writes_figures_report_and_verdicts_and_refuses_an_unknown_claim(tmp_path, monkeypatch, capsys):
    command = [sys.executable, "-m", "ddp_claims", "--out", "out", "DD14"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["ddp_claims", "--out", str(tmp_path / "wrong"), "DD99"])
    assert main() == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: there is no claim 'DD99'; there are: DD1, DD2, ")
    assert not (tmp_path / "wrong").exists()
    verdict = json.loads((tmp_path / "out" / "verdicts.json").read_text())["DD14"]["verdict"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| DD14 averages, and what the constructor sends | {verdict}" in report
    assert done.stdout.startswith(f"DD14 averages, and what the constructor sends: {verdict}")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"dd14.svg", "report.md", "verdicts.json"}


EXACT = {"DD1": 1, "DD4": 2, "DD8": 1, "DD9": 2, "DD12": 5, "DD13": 1, "DD17": 1}
"""Of a claim about times or losses: so many checks, the first ones, that no other program on this machine can spoil."""


def check_finding(found: Finding) -> None:
    """What the notebook does not assert itself."""
    checks, name = found.result.checks, found.claim.id
    assert name not in ("DD7", "DD16") or len(found.untested) == 1, found
    if name == "DD2":
        orders = [check.seen for check in checks if "registration" in check.says]
        assert "ready: fc2.bias, fc2.weight, fc1.bias, fc1.weight, conv2.weight, conv1.weight" in orders[0]
        assert "94.6% of all pairs" in orders[2]
    if name in EXACT:
        assert all(check.holds for check in checks[: EXACT[name]]), found
        for check in checks[EXACT[name] :] if name not in ("DD12", "DD13") else ():
            sampled = ("n = ", "resamples", "doublings")
            assert check.holds is None or any(word in check.seen for word in sampled), check
