"""docs/trace-file.md: every kind of line is in it, and its program for reading a file without dlearn works."""

import re
from pathlib import Path
from typing import Any, get_args

from traces import all_events

from dlearn.trace.event import FORMAT, FORMATS
from dlearn.trace.job_facts import AnyLine
from dlearn.trace.short_lines import ENDED_BY
from dlearn.trace.store import read

PAGE = (Path(__file__).parents[1] / "docs" / "trace-file.md").read_text()


def test_every_kind_of_line_stands_on_the_page_with_its_class():
    table = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    told = {}
    for _, kinds, _, classes, _ in table[1:]:
        names = re.findall(r"`(\w+)`", classes)
        told |= dict(zip(kinds.strip().split(", "), names, strict=True))
    assert told == {kind.__struct_config__.tag: kind.__name__ for kind in get_args(AnyLine)}


def write_example(folder: Path) -> Path:
    """The page's own examples, as a file."""
    (head, foot), event, short = (block.splitlines() for block in re.findall(r"```json\n(.*?)```", PAGE, re.S))
    path = folder / "node1-4711.jsonl"
    path.write_text("\n".join([head, *event, *short, foot.replace("1200", "5")]) + "\n")
    return path


def test_its_examples_are_a_trace(tmp_path):
    file = read(write_example(tmp_path))
    assert (file.problems, file.header.format) == ([], FORMAT)
    one, other = all_events(file)
    assert (one.number, one.ended_by, other.ended_by) == (41, "callback", "callback")
    assert (other.number, other.parent, other.seq, other.backward, other.end_ns) == (97, 96, 8, 2, 93482935107315)
    assert other.inputs == one.inputs
    assert ", ".join(ENDED_BY) in PAGE.replace("\n", " ")
    assert f"Format {FORMATS[0]} had no short lines" in PAGE


def test_its_program_reads_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "traces" / "ddp").mkdir(parents=True)
    path = write_example(tmp_path / "traces" / "ddp")
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(program, names)  # The page's own program.
    assert capsys.readouterr().out == "2 events\n"
    mine = [(event.number, event.start_ns, event.parent, event.seq) for event in all_events(read(path))]
    assert [(each["number"], each["start_ns"], each["parent"], each["seq"]) for each in names["found"]] == mine
