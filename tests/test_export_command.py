"""`dlearn export`, as it is typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_export import two_ranks
from traces import Job

from dlearn import export
from dlearn.cli import FORMATS, main


def traced(folder: Path) -> str:
    two_ranks(folder / "trace")
    return str(folder / "trace")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_a_file(form, tmp_path, capsys):
    out = tmp_path / "made.out"
    out.write_text("goes")
    assert main(["export", form, traced(tmp_path), "-o", str(out)]) == 0
    assert capsys.readouterr() == ("", "")
    assert len(out.read_bytes()) > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.out", "trace"]


def test_every_function_of_the_namespace_has_its_word():
    assert sorted(FORMATS) == sorted(export.__all__)


def test_a_part_of_a_trace(tmp_path):
    out = tmp_path / "part.json"
    assert main(["export", "perfetto", traced(tmp_path), "--within", "step 0", "-o", str(out)]) == 0
    names = [event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names == ["send · 1.00 kB", "recv · 1.00 kB", "waiting", "transfer"]


def many(folder: Path) -> str:
    """700 messages, no two the same: two diagrams."""
    job = Job(folder / "trace", ranks=2)
    for i in range(700):
        job.send(0, 1, size=i + 1, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, size=i + 1, start_ns=10 * i, end_ns=10 * i + 5)
    job.write()
    return str(folder / "trace")


def test_several_diagrams_are_several_files_or_one_page(tmp_path, capsys):
    trace = many(tmp_path)
    assert main(["export", "mermaid", trace, "-o", str(tmp_path / "ring.mmd")]) == 0
    assert capsys.readouterr().out == f"2 diagrams: {tmp_path}/ring-1.mmd to {tmp_path}/ring-2.mmd\n"
    diagrams = [(tmp_path / f"ring-{number}.mmd").read_text() for number in (1, 2)]
    assert main(["export", "mermaid", trace, "-o", str(tmp_path / "ring.md")]) == 0
    page = (tmp_path / "ring.md").read_text()
    assert page == "".join(f"```mermaid\n{diagram}```\n\n" for diagram in diagrams)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["export", *arguments])
    out, [told] = (text if not text else text.splitlines() for text in capsys.readouterr())
    assert out == ""
    return status, told


def test_what_cannot_be_done_is_one_sentence(tmp_path, capsys):
    trace = traced(tmp_path)
    there = f"{tmp_path}/no/page.html"
    assert refused(["html", trace, "-o", there], capsys) == (
        2,
        f"dlearn: {there}: there is no folder {tmp_path}/no. Make it, or give another -o.",
    )
    assert refused(["html", trace, "-o", str(tmp_path)], capsys) == (
        2,
        f"dlearn: {tmp_path} is no file that could be replaced. Give another -o.",
    )
    assert refused(["html", trace, "-o", "n" * 300], capsys) == (
        2,
        f"dlearn: {'n' * 60}...: File name too long. Give another -o.",
    )
    assert refused(["html", f"{tmp_path}/nothing", "-o", f"{tmp_path}/x.html"], capsys)[0] == 1
    Job(tmp_path / "empty", ranks=2).write()
    assert refused(["mermaid", f"{tmp_path}/empty", "-o", f"{tmp_path}/x.md"], capsys) == (
        1,
        f"dlearn: nothing was recorded in {tmp_path}/empty: there is nothing to export.",
    )
    assert not (tmp_path / "x.md").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path, capsys):
    trace = traced(tmp_path)
    (tmp_path / "mine").mkdir(mode=0o500)
    status, told = refused(["html", trace, "-o", f"{tmp_path}/mine/x.html"], capsys)
    assert (status, told) == (1, f"dlearn: cannot write {tmp_path}/mine/x.html: Permission denied. Give another -o.")


def test_of_a_file_that_cannot_be_finished_nothing_is_left(tmp_path, capsys, monkeypatch):
    def breaks_off(trace):
        yield "half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "perfetto", breaks_off)
    out = tmp_path / "x.json"
    out.write_text("stays")
    assert refused(["perfetto", traced(tmp_path), "-o", str(out)], capsys) == (
        1,
        f"dlearn: cannot write {out}: No space left on device. Give another -o.",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "x.json"]
    assert out.read_text() == "stays"
