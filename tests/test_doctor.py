"""`dlearn doctor`: each check told what it would find elsewhere, and the whole of it run here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dlearn import doctor as checks
from dlearn.doctor import CHECKS, Finding, Wanting, lacking, loopback, mpi, system, tried
from dlearn.hooks.network.sockets import Sockets

NAMES = list(CHECKS)


def wanting(check) -> Wanting:
    """What this check has to complain of."""
    with pytest.raises(Wanting) as caught:
        check()
    return caught.value


def doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; what stands in the folder `path` is found before what is installed."""
    command = [sys.executable, "-m", "dlearn.cli", "doctor", *arguments]
    paths = [str(each) for each in (path, os.environ.get("PYTHONPATH"), Path(__file__).parent.parent) if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def without_torch(folder: Path) -> Path:
    """A folder whose torch cannot be imported."""
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    return folder


# The command ---------------------------------------------------------------------------------------------------------


def test_here_where_these_tests_run_jobs_can_be_recorded(tmp_path, monkeypatch):
    scratch = tmp_path / "a für b"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    done = doctor()
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert lines.pop() == "Jobs can be recorded on this machine."
    verdicts = {line[:15].rstrip(): line[17:26].rstrip() for line in lines}
    assert list(verdicts) == NAMES
    assert set(verdicts.values()) <= {"ok", "warning", "missing", "not known"}
    assert [verdicts[name] for name in ("loopback", "recorder", "gloo", "RPC")] == ["ok"] * 4
    if sys.platform == "linux":
        assert "the kernel counted 1,000 of 1,000 B written (TCP_INFO)" in done.stdout


def test_without_torch_it_says_so_and_ends_with_1(tmp_path):
    done = doctor("--json", path=without_torch(tmp_path))
    told = json.loads(done.stdout)
    found = {each["name"]: each for each in told["findings"]}
    assert list(found) == NAMES
    assert done.returncode == 1
    assert told["can_record"] is False
    assert found["torch"]["verdict"] == "missing"
    assert found["torch"]["found"] == "ModuleNotFoundError: No module named 'torch'"
    assert "tools/install_torch.py" in found["torch"]["remedy"]
    assert found["gloo"]["verdict"] == "not known"
    assert done.stderr.splitlines()[-1] == (
        "dlearn: no job can be recorded on this machine; what it lacks, above: torch, recorder, gloo."
    )


def test_what_is_good_to_have_is_not_needed():
    fit = [Finding(name, "ok", "") for name in ("loopback", "torch", "recorder", "gloo")]
    assert lacking([*fit, Finding("MPI", "missing", ""), Finding("RPC", "missing", "")]) == []
    assert lacking([*fit[1:], Finding("loopback", "missing", "")]) == ["loopback"]
    assert lacking([]) == ["loopback", "torch", "recorder", "gloo"]


def test_counters_count_or_it_is_said_why_not(monkeypatch):
    monkeypatch.setattr(Sockets, "sent_bytes", lambda self: [900])
    assert tried("socket counters").found == "the kernel counted 900 of 1,000 B written"
    monkeypatch.setattr(Sockets, "watch", lambda self, group: False)
    found = tried("socket counters")
    assert (found.verdict, found.remedy) == ("missing", "bytes on the wire are not measured; all else works")
    assert found.found.endswith("tells no process about the bytes in its sockets")


# The machine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Darwin", "Windows"])
def test_systems_where_it_was_never_run(name, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: name)
    assert wanting(system).verdict == "warning"


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert wanting(system).verdict == "warning"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert system().endswith("; 4 usable cores")


# The network ---------------------------------------------------------------------------------------------------------


def test_loopback(monkeypatch):
    interfaces = [(1, "eth0"), (2, "lo0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    assert loopback() == "127.0.0.1 works, on lo0"
    interfaces.pop()
    assert wanting(loopback).verdict == "warning"
    monkeypatch.setattr(checks, "LOOPBACK", "192.0.2.1")  # an address that is nobody's (RFC 5737)
    assert wanting(loopback).verdict == "missing"


# MPI --------------------------------------------------------------------------------------------------------


def python_with(folder: Path, mpi4py: str) -> str:
    """An environment's Python that imports this as mpi4py."""
    python = folder / "python"
    (folder / "mpi4py.py").write_text(mpi4py)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


LIBRARY = "class rc: initialize = True\nclass MPI: Get_library_version = lambda: 'MPICH Version:\\t5.0.2\\nmore'\n"


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_mpi_is_the_library_that_mpi4py_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python_with(tmp_path, LIBRARY))
    assert mpi() == "MPICH Version: 5.0.2"


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_an_mpi_that_fails_or_hangs_is_told(tmp_path, monkeypatch):
    python = python_with(tmp_path, "raise ImportError('libmpi.so.12: cannot open shared object file')")
    monkeypatch.setattr(sys, "executable", python)
    assert str(wanting(mpi)).endswith("ImportError: libmpi.so.12: cannot open shared object file")
    (tmp_path / "mpi4py.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(checks, "MPI_SECONDS", 0.1)
    assert str(wanting(mpi)) == "mpi4py was not loaded within 0.1 s"
