"""The claims of the paper on DDP: that a verdict is computed, can fail, and is what the essential numbers say.

The notebook ddp_paper runs all of them; `check_finding` looks at each finding after its own cells have.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ddp_claims import Check, Claim, Finding, Result
from ddp_claims.__main__ import main
from ddp_claims.skipping import hurts, keeps

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


@pytest.mark.slow
def test_the_command_writes_figures_report_and_verdicts_and_refuses_an_unknown_claim(tmp_path, monkeypatch, capsys):
    command = [sys.executable, "-m", "ddp_claims", "--out", "out", "DD1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", ["ddp_claims", "--out", str(tmp_path / "wrong"), "DD99"])
    assert main() == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: there is no claim 'DD99'; there are: DD1, DD8, ")
    assert not (tmp_path / "wrong").exists()
    verdict = json.loads((tmp_path / "out" / "verdicts.json").read_text())["DD1"]["verdict"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| DD1 small collectives are slow per byte | {verdict}" in report
    assert done.stdout.startswith(f"DD1 small collectives are slow per byte: {verdict}")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"dd1.svg", "report.md", "verdicts.json"}


EXACT = {"DD1": 1, "DD8": 1, "DD9": 2, "DD13": 1, "DD17": 1}
"""Of a claim about times or losses: so many checks, the first ones, that no other program on this machine can spoil."""


def check_finding(found: Finding) -> None:
    """What the notebook does not assert itself."""
    checks, name = found.result.checks, found.claim.id
    for check in checks[EXACT[name] :] if name != "DD13" else ():
        sampled = ("n = ", "resamples", "doublings")
        assert check.holds is None or any(word in check.seen for word in sampled), check
