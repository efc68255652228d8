"""The one-liners of docs/export.md: each does what the page says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from traces import Job

from dlearn.trace.event import AutogradNode

PAGE = Path(__file__).parent.parent / "docs" / "export.md"


def blocks() -> list[str]:
    elsewhere = PAGE.read_text().split("## What is one line elsewhere")[1]
    return re.findall(r"```python\n(.*?)```", elsewhere, re.S)


def there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path / "traces" / "ddp", ranks=3)
    job.send(0, 1, size=1000)
    job.recv(1, 0, size=1000)
    job.load()
    job = Job(tmp_path / "traces" / "rpc", ranks=2)
    job.event(AutogradNode, 0, context=1, node=0, name="MulBackward", shapes=((2, 3),), next=(1,))
    job.event(AutogradNode, 0, context=1, node=1, name="AccumulateGrad", parameter="w")
    job.load()
    return tmp_path


@pytest.mark.skipif(not there("pandas", "networkx"), reason="pandas and networkx are not installed")
@pytest.mark.parametrize(("block", "needs", "made"), [
    (1, "pyarrow", ["messages.parquet"]),
    (3, "pydot", ["traffic.dot"]),
    (4, "networkx", ["autograd.gml", "autograd.graphml"]),
])  # fmt: skip
def test_each_line_writes_its_file(block, needs, made, folder):
    if not there(needs):
        pytest.skip(f"{needs} is not installed")
    names: dict[str, object] = {}
    for place in (0, 2, block):
        exec(blocks()[place], names)
    assert (folder / "messages.csv").read_text().splitlines()[1].startswith("0,rank 0,rank 1,send,uint8[1000],1000")
    import networkx

    traffic = networkx.read_graphml(folder / "traffic.graphml")
    assert list(traffic.edges(data="weight")) == [("rank 0", "rank 1", 1000)]
    assert all((folder / name).stat().st_size > 0 for name in made)


def test_the_page_has_no_line_that_is_not_tried():
    assert len(blocks()) == 5
