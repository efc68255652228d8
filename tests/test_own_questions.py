"""docs/own-questions.md: each of its answers, on a real trace, is what the library says, too."""

import importlib.util
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dlearn import Trace, analysis, messages, operations

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "own-questions.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Any]:
    """What the page's programs have found out about a DDP job's trace."""
    folder = tmp_path_factory.mktemp("questions")
    with zipfile.ZipFile(HERE / "frozen" / "lesson-ddp_step_by_step.zip") as archive:
        archive.extractall(folder)
    trace = min(path for path in folder.iterdir() if path.is_dir())
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block.replace("traces/ddp", str(trace)), names)
    return names


def test_no_question_takes_more_than_five_lines():
    assert len(BLOCKS) == 9
    assert all(len(block.splitlines()) <= 5 for block in BLOCKS)


def test_who_sent_how_much_to_whom(answers):
    trace: Trace = answers["trace"]
    traffic = analysis.traffic(trace).to_frame()
    assert answers["by_pair"].to_numpy().sum() == traffic.to_numpy().sum() > 0
    for src in answers["by_pair"].index:
        for dst in answers["by_pair"].columns:
            assert answers["by_pair"].loc[src, dst] == traffic.loc[src, dst]


def test_the_other_answers_account_for_every_message_and_operation(answers):
    trace: Trace = answers["trace"]
    found, asked = messages(trace), operations(trace)
    payload = sum(each.payload_bytes or 0 for each in found)
    assert answers["by_line"]["count"].sum() == answers["known"].sum() == len(found)
    assert answers["by_line"]["sum"].sum() == answers["per_ms"].sum() == sum(answers["by_tensor"].values()) == payload
    assert answers["sent_by"].sum() == payload
    assert 0 < answers["longest_ns"] == max(each.received_ns - each.sent_ns for each in found)
    assert answers["waited"]["count"].sum() == len(asked)
    assert answers["last"].sum() == sum(each.op == "all_reduce" for each in asked)


def test_a_row_says_what_its_operation_or_message_says(answers):
    """The frames are made of columns and of what those that are alike share; the values one by one."""
    trace: Trace = answers["trace"]
    asked, found = operations(trace), messages(trace)
    for frame, items, names in (
        (answers["calls"], asked, ("op", "seq", "start_ns", "transfer_ns", "end_ns", "given_bytes", "problem", "what")),
        (answers["sent"], found, ("op", "what", "payload_bytes", "how", "confirmed", "sent_ns", "received_ns", "step")),
    ):
        for name in names:
            assert frame[name].tolist() == [getattr(each, name) for each in items], name
    ends = [each.ends[0] for each in asked]
    assert answers["calls"].site.tolist() == [end.site for end in ends]
    assert answers["calls"].phase.tolist() == [end.phase for end in ends]
    assert answers["calls"].last_rank.tolist() == [trace.label(each.last_rank) for each in asked]
    buckets = [None if each.bucket is None else each.bucket.index for each in asked]
    assert answers["calls"].bucket.astype(object).where(answers["calls"].bucket.notna(), None).tolist() == buckets
    assert answers["sent"].dst.tolist() == [trace.label(each.dst) for each in found]
    assert answers["sent"].site.tolist() == [each.operation.ends[0].site for each in found]


def test_every_column_stands_on_the_page(answers):
    tables = PAGE.split("## The columns")[1].split("`messages(trace).to_frame()`")
    for table, frame in zip(tables, (answers["calls"].drop(columns="waited_ms"), answers["sent"]), strict=True):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `") and "to_frame" not in line]
        assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(frame.columns)
