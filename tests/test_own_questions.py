"""docs/own-questions.md: each of its answers, on a real trace, is what the library says, too."""

import re
from pathlib import Path
from typing import Any

import frozen_answers
import pytest

from dlearn import Trace, analysis, messages, operations

PAGE = (Path(__file__).parents[1] / "docs" / "own-questions.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_pages_answers_account_for_every_message_and_operation(tmp_path):
    pytest.importorskip("pandas")
    frozen_answers.traces("lesson-ddp_step_by_step", tmp_path)
    answers: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block.replace("traces/ddp", str(tmp_path / "00")), answers)
    trace: Trace = answers["trace"]
    found, asked = messages(trace), operations(trace)
    payload = analysis.traffic(trace).total_bytes
    assert answers["by_line"]["count"].sum() == answers["known"].sum() == len(found)
    assert answers["by_line"]["sum"].sum() == answers["per_ms"].sum() == sum(answers["by_tensor"].values()) == payload
    assert answers["by_pair"].to_numpy().sum() == answers["sent_by"].sum() == payload > 0
    assert 0 < answers["longest_ns"] == max(each.received_ns - each.sent_ns for each in found)
    assert answers["waited"]["count"].sum() == len(asked)
    assert answers["last"].sum() == sum(each.op == "all_reduce" for each in asked)
