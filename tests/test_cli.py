"""The command `dlearn`, as it is typed."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from text_boxes import watch
from traces import Job

from dlearn import Trace
from dlearn.cli import main

PICTURES = {f"{name}.svg" for name in ("timeline", "traffic", "sequence")}
FILES = {"index.html", "explanation.txt", "messages.csv", "server.txt", "trace", "server-trace"} | PICTURES


def test_demo_trains_explains_and_draws(own_folder, monkeypatch, capfd):
    """In this process, where the pictures can be looked at; test_interrupt_ends_quietly_with_130 starts its own."""
    out = Path("out")
    (out / "trace").mkdir(parents=True)
    (out / "trace" / "of the last time").write_text("goes")
    (out / "mine.txt").write_text("stays")
    (out / "explanation.txt").write_text("goes")

    monkeypatch.setenv("MPLBACKEND", "agg")
    unreadable: list[list[str]] = []
    end = watch(lambda figure, found: unreadable.append(found))
    try:
        status = main(["demo", "--out", "out"])
    finally:
        end()
    told, errors = capfd.readouterr()

    assert (status, errors) == (0, "")
    assert unreadable == [[]] * len(unreadable) != []
    assert accuracies(told)[0] < 30 < 85 < accuracies(told)[1]
    assert len(told.splitlines()) <= 14
    assert "One iteration with a parameter server takes 14 messages, not 4" in told
    assert "residue 0 B" in told
    assert {path.name for path in out.iterdir()} == FILES | {"mine.txt"}
    assert all(path.stat().st_size > 0 for path in out.iterdir())
    assert (out / "mine.txt").read_text() == "stays"
    # 4/3 of 27,990 parameters of 4 bytes.
    assert "In step 79 every rank sends 149,280 B of payload" in (out / "explanation.txt").read_text()
    assert "Iteration 4: 28 messages, 14 for each of 2. 4 of 14 carry" in (out / "server.txt").read_text()
    assert [len(Trace.load(out / name).ranks) for name in ("trace", "server-trace")] == [3, 3]
    page = (out / "index.html").read_text()
    assert len(page) < 300_000
    assert "<h2>One iteration with a parameter server takes 14 messages, not 4</h2>" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def accuracies(text: str) -> list[float]:
    """Of the line "Right on held-out digits: 6.4% before, 94.6% after 100 steps."."""
    [line] = [line for line in text.splitlines() if line.startswith("Right on held-out digits")]
    return [float(word.rstrip("%")) for word in line.split() if word.endswith("%")]


def two_sends(folder: Path) -> str:
    """1,000 B to rank 1 in "step 0", 2.5 ms later 20 B back; and NCCL, whose messages nobody knows."""
    job = Job(folder, ranks=2)
    step = job.span((0, 1), "step 0")
    job.message(0, 1, size=1000, parent=step, start_ns=1_000_000, end_ns=2_000_000)
    job.message(1, 0, size=20, start_ns=3_500_000, end_ns=4_000_000)
    job.group("gpus", (0, 1), backend="nccl")
    job.collective("all_reduce", size=8, group="gpus", start_ns=5_000_000, end_ns=6_000_000)
    job.load()
    return str(folder)


def test_messages_are_a_line_each_and_what_is_not_explained_is_said(tmp_path, capsys):
    assert main(["messages", two_sends(tmp_path)]) == 0
    told, errors = capsys.readouterr()
    head, first, second, *notes = told.splitlines()
    assert head.split() == ["from", "to", "payload", "bytes", "sent,", "ms", "how", "op", "what"]
    assert first.split()[:7] == ["rank", "0", "rank", "1", "1,000", "0.000", "observed"]
    assert second.split()[:7] == ["rank", "1", "rank", "0", "20", "2.500", "observed"]
    assert "2 messages of 2 operations; 1 operation not explained" in notes
    assert any(note.startswith("  not explained: all_reduce: ") for note in notes)
    assert errors == ""


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_messages_for_programs_have_the_same_fields_in_both_forms(form, tmp_path, capsys):
    """Of a trace in a folder from each host; what is not explained, or missing, goes to stderr."""
    here, there = tmp_path / "here", tmp_path / "there"
    two_sends(here)
    there.mkdir()
    file = max(here.glob("*.jsonl"))
    file.rename(there / file.name)
    assert main(["messages", str(here), str(there), form]) == 0
    told, errors = capsys.readouterr()
    rows = json.loads(told) if form == "--json" else list(csv.DictReader(told.splitlines()))
    names = ["from", "to", "payload_bytes", "op", "what", "how", "confirmed", "sent_ns", "received_ns"]
    assert [list(row) for row in rows] == [names, names]
    assert [str(value) for value in rows[0].values()][:3] == ["rank 0", "rank 1", "1000"]
    assert [str(value) for value in rows[0].values()][5:] == ["observed", "False", "1000000", "2000000"]
    assert "not explained: all_reduce" in errors
    assert "processes left a file" not in errors
    assert main(["messages", str(there), form]) == 0
    told, errors = capsys.readouterr()
    assert form == "--csv" or json.loads(told), "the other rank's half is known"
    assert "dlearn: 1 of 2 processes left a file" in errors
    assert "that of rank 0 is missing" in errors


def test_who_has_read_enough_ends_the_table_quietly(tmp_path):
    job = Job(tmp_path, ranks=2)
    for index in range(2000):  # more than a pipe holds
        job.message(0, 1, start_ns=10 + index, end_ns=20 + index)
    job.load()
    command = [sys.executable, "-m", "dlearn.cli", "messages", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("from")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "to_try"),
    [
        (["draw", "traffic", "TRACE", "-o", "picture.gif"], 2, "picture.gif: a picture is saved as .svg, .png, .pdf."),
        (["draw", "traffic", "TRACE", "-o", "no/picture.svg"], 2, "there is no folder no. Make it"),
        (["draw", "traffic", "TRACE", "-o", "x.svg", "--context", "3"], 2, "it goes with `draw autograd` only"),
        (["draw", "autograd", "TRACE", "-o", "x.svg"], 1, "nothing to draw: This trace holds no autograd graph"),
        (["messages", "TRACE", "--within", "step 9"], 2, "its spans are: step 0"),
        (["messages", "TRACE", "--step", "9"], 2, "there is no step 9; this trace has the steps 0"),
        (["explain", "TRACE", "--step", "0", "--op", "all_reduce"], 2, "--op leaves nothing; there is: recv, send"),
        (
            ["explain", "TRACE", "--rank", "0", "--rank", "3"],
            2,
            "no rank 3 in this trace; its ranks are: rank 0,",
        ),
        (["explain", "TRACE", "--phase", "forward"], 2, "--phase leaves nothing; there is: none"),
        (["explain", "TRACE", "--between", "6:"], 2, "nothing; there is: what began from 0.0 to "),
        (["explain", "TRACE", "--between", "soon"], 2, "two times in ms, as 100:200, 100: or :200, not 'soon'"),
        (["compare", "TRACE", "TRACE", "--op", "allreduce"], 2, "TRACE: there is no op 'allreduce'; this trace has:"),
        (["messages"], 2, "traces/, where dlearn run writes, holds none here"),
        (["demo", "--out", "FILE/out"], 1, "FILE/out cannot be made: Not a directory. Give another --out."),
        (["dance"], 2, "'dance'"),
        (["demo", "--size", "3"], 2, "--size 3. See dlearn demo --help."),
        (["draw", "timelin", "TRACE", "-o", "x.svg"], 2, "Did you mean timeline? See dlearn draw --help."),
        (["draw", "steps", "TRACE", "-o", "x.svg", "--arrows"], 2, "--arrows goes with `draw timeline` only."),
        (["explain", "TRACE", "--stpe", "3"], 2, "--stpe 3. Did you mean --step? See dlearn explain --help."),
    ],
)
def test_what_cannot_be_asked_so_is_one_line_with_what_to_try(arguments, status, to_try, own_folder, capsys):
    two_sends(Path("TRACE"))
    Path("FILE").touch()
    ended = main(arguments)
    told, errors = capsys.readouterr()
    [sentence] = errors.splitlines()
    assert (ended, told) == (status, "")
    assert sentence.startswith("dlearn")
    assert to_try in sentence
    assert sorted(os.listdir()) == ["FILE", "TRACE"]


def test_a_picture_is_named_with_its_finding_and_help_tells_of_a_command(own_folder, capsys):
    two_sends(Path("TRACE"))
    assert main(["draw", "traffic", "TRACE", "--step", "0", "-o", "x.svg"]) == 0
    assert capsys.readouterr() == ("x.svg: Rank 0 sends 1.00 kB to rank 1, nothing comes back\n", "")
    assert main(["draw", "timeline", "TRACE", "--arrows", "-o", "y.svg"]) == 0
    for command in ("draw", "run"):
        with pytest.raises(SystemExit, match="0"):
            main(["help", command])
        assert f"usage: dlearn {command} " in capsys.readouterr().out


def test_the_newest_trace_is_read_where_none_is_given_and_a_folder_of_traces_is_listed(own_folder, capsys):
    for folder in (Path("traces", "old"), Path("traces", "new")):
        two_sends(folder)
    dead = max(Path("traces", "old").iterdir())
    dead.write_text("".join(dead.read_text().splitlines(keepends=True)[:-1]))
    for file in Path("traces", "old").iterdir():
        os.utime(file, (10**9, 10**9))
    assert main(["messages", "--step", "0", "--rank", "1", "--op", "recv", "--between", ":2"]) == 0
    told, errors = capsys.readouterr()
    assert told.splitlines()[1].split()[:4] == ["rank", "0", "rank", "1"]
    assert errors == "dlearn: traces/new, the newest in traces/\n"
    assert main(["explain", "traces"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], *row[3:5]) for row in rows] == [("traces/new", "2", "all"), ("traces/old", "2", "1")]
    assert main(["draw", "traffic", "-o", "x.svg", "traces"]) == 2
    assert "traces is no trace, and holds some. Give one of them:\ntrace " in capsys.readouterr().err
    assert main(["compare", "traces/new", "traces/old", "--rank", "0"]) == 0
    assert capsys.readouterr().out.startswith("old sends as many bytes in as many messages as new")
    os.utime(dead, (2e9, 2e9))
    assert main(["messages"]) == 0
    newest = "dlearn: traces/old, the newest in traces/, which did not end well; the one before: traces/new"
    assert newest in capsys.readouterr().err


def test_interrupt_ends_quietly_with_130(tmp_path):
    command = [sys.executable, "-m", "dlearn.cli", "demo"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        while "Training" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
