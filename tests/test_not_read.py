"""Formats that are known and not read yet: a file of one is refused by a sentence that says what it is."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlearn import Trace
from dlearn.cli import main
from dlearn.errors import TraceError
from dlearn.trace.readers.not_read import known_as

SAMPLES = Path(__file__).with_name("samples")
FOLDER = SAMPLES / "not-read"
KNOWN = {
    "all_reduce.0.et": "a Chakra execution trace (.et)",
    "ncv4-topo.xml": "NCCL's topology (XML)",
    "ncv4-graph.xml": "NCCL's graphs (XML)",
    "inspector-v4.0-readme.jsonl": "a record of NCCL's Inspector (JSON lines)",
    "gloo-et-1.1.1.json.gz": "a PyTorch execution trace of schema 1.1.1-chakra.0.0.4",
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_that_is_not_read_is_refused_by_what_it_is(name, tmp_path):
    where = FOLDER / name
    told = f"{where}: it is {KNOWN[name]}, a format that is not read yet (what is read: docs/from-your-cluster.md)."
    with pytest.raises(TraceError) as error:
        Trace.load(where)
    assert str(error.value) == told
    # By what is in it, and not by its name.
    shutil.copy(where, tmp_path / "host-pid7.log")
    with pytest.raises(TraceError) as error:
        Trace.load(tmp_path)
    assert KNOWN[name] in str(error.value)


def test_a_command_says_it_in_one_line(capsys):
    assert main(["explain", str(FOLDER / "all_reduce.0.et")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert KNOWN["all_reduce.0.et"] in said


def test_beside_files_that_are_read_they_are_counted(tmp_path):
    for path in [*FOLDER.iterdir(), *(SAMPLES / "kineto-gloo-3ranks").iterdir()]:
        shutil.copy(path, tmp_path)
    trace = Trace.load(tmp_path)
    assert trace.ranks == (0, 1, 2)
    assert any(f"{len(KNOWN)} more files not read" in problem for problem in trace.problems)


@given(st.binary(max_size=100), st.sampled_from([b"", b"\n\x0a\x05", b"<system ", b'{"nodes": 1, "schema":']))
def test_any_bytes_are_known_or_not(data, start):
    assert known_as(start + data).isprintable()
