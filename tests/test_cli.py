"""The command `dlearn`, as it is typed."""

import csv
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlearn.cli import main
from dlearn.trace.trace import Trace

PICTURES = {f"{name}.{ending}" for name in ("timeline", "traffic", "sequence") for ending in ("svg", "png")}
FILES = {"explanation.txt", "messages.csv", "server.txt", "server-player.html"} | PICTURES


def dlearn(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlearn.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_demo_trains_explains_and_draws(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("stays")
    (tmp_path / "out" / "explanation.txt").write_text("goes")

    done = dlearn("demo", "--out", "out", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert accuracies(done.stdout)[0] < 30 < 85 < accuracies(done.stdout)[1]
    # 4/3 of 27,990 parameters of 4 bytes.
    assert "In step 79 every rank sends 149,280 B of payload" in done.stdout
    assert "Iteration 4: 28 messages, 14 for each of 2. 4 of 14 carry what was asked for:" in done.stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == FILES | {"mine.txt"}
    assert all(path.stat().st_size > 0 for path in out.iterdir())
    assert all(name in done.stdout for name in FILES)
    assert (out / "mine.txt").read_text() == "stays"
    assert (out / "explanation.txt").read_text().strip() in done.stdout
    check_messages(out / "messages.csv")
    traces = [Trace.load(folder / "trace") for folder in sorted((tmp_path / ".dlearn" / "runs").iterdir())]
    assert [len(trace.ranks) for trace in traces] == [3, 3]


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


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["dance"], ["demo", "--size", "3"]])
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


def hear_interrupts() -> None:
    """A shell that puts these tests in the background has interrupts ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("line", ["Training", "epoch 1"])
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
