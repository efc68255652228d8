"""The command `dlearn`, as it is typed."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from text_boxes import watch
from traces import Job, header

from dlearn.cli import main
from dlearn.scripts.command import USAGE
from dlearn.scripts.summary import summary
from dlearn.trace.source import OFF_BY_DEFAULT
from dlearn.trace.trace import Trace

PICTURES = {f"{name}.svg" for name in ("timeline", "traffic", "sequence")}
FILES = {"index.html", "explanation.txt", "messages.csv", "server.txt", "trace", "server-trace"} | PICTURES


def test_demo_trains_explains_and_draws(tmp_path, monkeypatch, capfd):
    """In this process, where the pictures can be looked at; test_interrupt_ends_quietly_with_130 starts its own."""
    out = tmp_path / "out"
    (out / "trace").mkdir(parents=True)
    (out / "trace" / "of the last time").write_text("goes")
    (out / "mine.txt").write_text("stays")
    (out / "explanation.txt").write_text("goes")

    monkeypatch.chdir(tmp_path)
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
    assert "You were told 4 messages an iteration; it is 14" in told
    assert "residue 0 B" in told
    assert {path.name for path in out.iterdir()} == FILES | {"mine.txt"}
    assert all(path.stat().st_size > 0 for path in out.iterdir())
    assert (out / "mine.txt").read_text() == "stays"
    # 4/3 of 27,990 parameters of 4 bytes.
    assert "In step 79 every rank sends 149,280 B of payload" in (out / "explanation.txt").read_text()
    assert "Iteration 4: 28 messages, 14 for each of 2. 4 of 14 carry" in (out / "server.txt").read_text()
    check_messages(out / "messages.csv")
    assert [len(Trace.load(out / name).ranks) for name in ("trace", "server-trace")] == [3, 3]
    page = (out / "index.html").read_text()
    assert len(page) < 300_000
    assert "<h2>You were told 4 messages an iteration; it is 14</h2>" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def accuracies(text: str) -> list[float]:
    """Of the line "Right on held-out digits: 6.4% before, 94.6% after 100 steps."."""
    [line] = [line for line in text.splitlines() if line.startswith("Right on held-out digits")]
    return [float(word.rstrip("%")) for word in line.split() if word.endswith("%")]


def check_messages(path: Path) -> None:
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    first_bucket = [row for row in rows if row["what"].startswith("gradient of bucket 0: fc2.bias")]
    assert {(row["from"], row["to"]) for row in first_bucket} == {
        ("rank 0", "rank 2"),
        ("rank 1", "rank 0"),
        ("rank 2", "rank 1"),
    }
    # Its 25,290 numbers go round in 6 segments: 2 (n-1) · 2 = 8 messages from each of 3 ranks, in each of 80 steps but
    # the first, in which DDP has one bucket for all.
    assert len(first_bucket) == 8 * 3 * 79


def test_alone_it_lists_its_commands(tmp_path):
    """`python -m dlearn`, which is there where no folder of commands is on PATH."""
    done = subprocess.run([sys.executable, "-m", "dlearn"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("usage: dlearn")
    assert all(f"  {name} " in done.stdout for name in ("demo", "run", "doctor", "explain", "draw", "export"))


@pytest.mark.parametrize("arguments", [["dance"], ["demo", "--size", "3"], ["draw", "dance", "t", "-o", "x.svg"]])
def test_wrong_arguments_are_told_and_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    usage, sentence = capsys.readouterr().err.strip().rsplit("\n", 1)
    assert usage.startswith("usage: dlearn")
    assert sentence.startswith("dlearn")


def test_a_folder_that_cannot_be_made_is_told_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert error == f"dlearn: the folder {tmp_path}/file/out cannot be made: Not a directory. Give another --out.\n"


def two_sends(folder: Path) -> str:
    """1,000 B to rank 1 in "step 0", 2.5 ms later 20 B back; and NCCL, whose messages nobody knows."""
    job = Job(folder, ranks=2)
    steps = {rank: job.span(rank, "step 0") for rank in (0, 1)}
    job.send(0, 1, size=1000, parent=steps[0], start_ns=1_000_000, end_ns=2_000_000)
    job.recv(1, 0, size=1000, parent=steps[1], start_ns=1_000_000, end_ns=2_000_000)
    job.send(1, 0, size=20, start_ns=3_500_000, end_ns=4_000_000)
    job.recv(0, 1, size=20, start_ns=3_500_000, end_ns=4_000_000)
    job.group("gpus", (0, 1), backend="nccl")
    job.collective("all_reduce", size=8, group="gpus", start_ns=5_000_000, end_ns=6_000_000)
    job.load()
    return str(folder)


def test_a_terminal_that_lacks_a_character_gets_its_number(tmp_path, monkeypatch):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=3000)
    job.load()
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    assert main(["explain", str(tmp_path)]) == 0
    assert rb"; 0\u21922, 1\u21920, 2\u21921: 4,000 B each" in latin.buffer.getvalue()


def test_messages_are_a_line_each_and_what_is_not_explained_is_said(tmp_path, capsys):
    assert main(["messages", two_sends(tmp_path)]) == 0
    told, errors = capsys.readouterr()
    head, first, second, *notes = told.splitlines()
    assert head.split() == ["from", "to", "payload", "bytes", "sent,", "ms", "how", "op", "what"]
    assert first.split()[:7] == ["rank", "0", "rank", "1", "1,000", "0.000", "observed"]
    assert second.split()[:7] == ["rank", "1", "rank", "0", "20", "2.500", "observed"]
    assert "2 messages of 2 operations; 1 operations not explained" in notes
    assert any(note.startswith("  not explained: all_reduce: ") for note in notes)
    assert errors == ""


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_messages_for_programs_have_the_same_fields_in_both_forms(form, tmp_path, capsys):
    assert main(["messages", two_sends(tmp_path), form]) == 0
    told, errors = capsys.readouterr()
    rows = json.loads(told) if form == "--json" else list(csv.DictReader(told.splitlines()))
    names = ["from", "to", "payload_bytes", "op", "what", "how", "confirmed", "sent_ns", "received_ns"]
    assert [list(row) for row in rows] == [names, names]
    assert [str(value) for value in rows[0].values()][:3] == ["rank 0", "rank 1", "1000"]
    assert [str(value) for value in rows[0].values()][5:] == ["observed", "False", "1000000", "2000000"]
    assert "not explained: all_reduce" in errors


def test_no_messages_are_an_empty_array(tmp_path, capsys):
    Job(tmp_path, ranks=2).load()
    assert main(["messages", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_trace_may_be_in_a_folder_from_each_host(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    two_sends(here)
    there.mkdir()
    file = max(here.glob("*.jsonl"))
    file.rename(there / file.name)
    assert main(["messages", str(here), str(there), "--json"]) == 0
    told, errors = capsys.readouterr()
    assert [row["payload_bytes"] for row in json.loads(told)] == [1000, 20]
    assert "processes left a file" not in errors


def test_problems_of_a_trace_go_to_stderr(tmp_path, capsys):
    folder = two_sends(tmp_path)
    min(tmp_path.glob("*.jsonl")).unlink()
    assert main(["messages", folder, "--json"]) == 0
    told, errors = capsys.readouterr()
    json.loads(told)
    assert "dlearn: 1 of 2 processes left a file" in errors
    assert "that of rank 0 is missing" in errors


def test_who_has_read_enough_ends_the_table_quietly(tmp_path):
    job = Job(tmp_path, ranks=2)
    for index in range(2000):  # more than a pipe holds
        job.send(0, 1, start_ns=10 + index, end_ns=20 + index)
        job.recv(1, 0, start_ns=10 + index, end_ns=20 + index)
    job.load()
    command = [sys.executable, "-m", "dlearn.cli", "messages", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("from")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize("kind", ["autograd", "breakdown", "buckets", "sequence", "timeline", "traffic"])
def test_every_kind_of_picture_can_be_drawn_of_a_span_or_says_that_there_is_nothing(kind, tmp_path, capsys):
    out = tmp_path / "picture.svg"
    out.write_text("old")
    assert main(["draw", kind, two_sends(tmp_path / "trace"), "--within", "step 0", "-o", str(out)]) == 0
    nothing = {
        "autograd": "no autograd graph",
        "breakdown": "no training step of a DDP model",
        "buckets": "no backward pass through a DDP model",
    }
    assert nothing.get(kind, "1.00\N{NO-BREAK SPACE}kB to rank 1") in out.read_text()
    said = capsys.readouterr().err
    assert said.startswith("dlearn: nothing to draw: This trace holds no ") if kind in nothing else said == ""


@pytest.mark.parametrize(
    ("arguments", "to_try"),
    [
        (["draw", "traffic", "TRACE", "-o", "picture.gif"], "picture.gif: a picture is saved as .svg, .png, .pdf."),
        (["draw", "traffic", "TRACE", "-o", "no/picture.svg"], "there is no folder no. Make it"),
        (["draw", "traffic", "TRACE", "-o", "x.svg", "--context", "3"], "it goes with `draw autograd` only"),
        (
            ["draw", "autograd", "TRACE", "-o", "x.svg", "--context", "3"],
            "none (dlearn run --graph records it)",
        ),
        (["draw", "traffic", "TRACE", "-o", "x.svg", "--within", "step 9"], "its spans are: step 0"),
        (["messages", "TRACE", "--within", "step 9"], "its spans are: step 0"),
    ],
)
def test_what_cannot_be_asked_so_is_one_line_with_what_to_try(arguments, to_try, tmp_path, capsys):
    trace = two_sends(tmp_path)
    assert main([trace if argument == "TRACE" else argument for argument in arguments]) == 2
    told, errors = capsys.readouterr()
    assert told == ""
    assert errors.startswith("dlearn: ")
    assert errors.count("\n") == 1
    assert to_try in errors
    assert not Path("x.svg").exists()


def test_explain_tells_the_story_and_the_attempt_can_be_chosen(tmp_path, capsys):
    for number in (0, 1):
        job = Job(tmp_path, ranks=2)
        job.headers = [header(rank, pid=10 * number + rank, world_size=2, restart=number) for rank in (0, 1)]
        job.collective("all_reduce", ranks=[0] if number == 0 else [0, 1], size=8, end_ns=20 if number else None)
        job.write(died=[] if number else [0, 1])
    assert main(["explain", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "never called it" not in told
    assert "this is attempt 1" in told
    assert main(["explain", str(tmp_path), "--attempt", "0"]) == 0
    told = capsys.readouterr().out
    assert "rank 0 waits for rank 1 in all_reduce #1; rank 1 never called it." in told
    assert "rank 1 left a file without an end: it was killed, or still runs." in told


def as_one_user_of_many(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of a user whom permissions bind: of root without the right to read everything."""
    command = [sys.executable, "-m", "dlearn", *arguments]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv here")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("command", "locked", "status", "told"),
    [
        (["explain", "trace"], "trace", 1, "trace: cannot be read: Permission denied"),
        (["explain", "trace"], "trace/host-1000.jsonl", 1, "trace/host-1000.jsonl: cannot be read: Permission denied"),
        (["explain", "trace/below"], "trace", 1, "trace/below: cannot be read: Permission denied"),
        (["import", "-o", "new", "trace/below"], "trace", 1, "trace/below: cannot be read: Permission denied"),
        (["run", "--trace", "trace/x", "a.py"], "trace", 2, "the folder {}/trace/x cannot be made: Permission denied"),
        (["run", "--trace", "trace", "a.py"], "trace", 2, "nothing can be written into the folder {}/trace"),
    ],
)
def test_what_is_not_permitted_is_told_as_that(command, locked, status, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_sends(tmp_path / "trace")
    (tmp_path / locked).chmod(0)
    done = as_one_user_of_many(*command)
    (tmp_path / locked).chmod(0o700)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"dlearn: {told.format(tmp_path)}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nproc-per-node=two", "a.py"], "torchrun: Unsupported nproc_per_node value: two; see torchrun --help."),
        (["--nproc-per-node=2", "missing.py"], "there is no script missing.py."),
        (["torchrun", "--nproc-per-node=2", "a.py"], "there is no script torchrun. Drop the word torchrun: dlearn run"),
        (["--sources", "bogus", "a.py"], "dlearn run --sources: no source 'bogus' is installed"),
        (["--steps", "5", "a.py"], "dlearn run --steps is two numbers"),
        (["--network", "2 apples", "--nproc-per-node=2", "a.py"], "dlearn run --network: "),
        (["--frobnicate", "a.py"], "error: unrecognized arguments: --frobnicate"),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.py").touch()
    with suppress(SystemExit):  # of torchrun's own parser
        assert main(["run", *arguments]) == 2
    *usage, sentence = capsys.readouterr().err.splitlines()
    assert sentence.partition(": ")[2].startswith(told)
    assert usage in ([], ["usage: see dlearn run --help, and torchrun --help"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_a_second_run_into_the_folder_of_one_that_has_not_ended_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("waits.py").write_text("print('runs', flush=True); input()")
    command = [sys.executable, "-m", "dlearn", "run", "--trace", "t", "waits.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"runs\n"
        assert main(["run", "--trace", "t", "waits.py"]) == 2
        assert capsys.readouterr().err == f"dlearn: another run writes into {tmp_path}/t now. Give another --trace.\n"
        assert (tmp_path / "t").is_dir()
        first.communicate(b"go on\n", timeout=60)
    assert first.returncode == 0


def test_the_wait_of_a_short_job_is_told_in_its_own_unit(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, start_ns={0: 1_000, 1: 301_000}, end_ns=401_000)
    job.write()
    assert "the others waited 300 µs of 400 µs for rank 1; in words:" in summary(tmp_path)


def test_who_asks_for_a_step_where_none_is_marked_reads_how_to_mark_them(tmp_path, capsys):
    Job(tmp_path, ranks=2).write()
    assert main(["explain", str(tmp_path), "--within", "step 8"]) == 2
    assert "its spans are: none. dlearn run --steps A:B makes a span of each step" in capsys.readouterr().err


def test_the_help_of_run_names_every_source():
    assert all(name in USAGE for name in OFF_BY_DEFAULT)


def hear_interrupts() -> None:
    """A shell that puts these tests in the background has interrupts ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("line", ["Training", pytest.param("epoch 1", marks=pytest.mark.slow)])
def test_interrupt_ends_quietly_with_130(line, tmp_path):
    command = [sys.executable, "-m", "dlearn.cli", "demo"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_interrupts
    ) as process:
        while line not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
