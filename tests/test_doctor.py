"""`dlearn doctor`: each check told what it would find elsewhere, and the whole of it run here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlearn.doctor import CHECKS, Finding, Wanting, judge_build, lacking, loopback, mpi, other_people, system, tried
from dlearn.hooks.network.sockets import Sockets

NAMES = list(CHECKS)


def wanting(check, *args, **options) -> Wanting:
    """What this check has to complain of."""
    with pytest.raises(Wanting) as caught:
        check(*args, **options)
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


def test_here_where_these_tests_run_jobs_can_be_recorded():
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


# Torch ---------------------------------------------------------------------------------------------------------------


def test_a_build_without_cuda_is_a_pity_beside_a_driver(tmp_path):
    assert judge_build("2.13.0", None, tmp_path / "none") == "2.13.0, no CUDA"
    (tmp_path / "version").touch()
    assert wanting(judge_build, "2.13.0", None, tmp_path / "version").verdict == "warning"
    assert judge_build("2.13.0", "13.0", tmp_path / "version") == "2.13.0, CUDA 13.0"


def test_counters_count_or_it_is_said_why_not(monkeypatch):
    monkeypatch.setattr(Sockets, "sent_bytes", lambda self: [900])
    assert tried("socket counters").found == "the kernel counted 900 of 1,000 B written"
    monkeypatch.setattr(Sockets, "watch", lambda self, group: False)
    found = tried("socket counters")
    assert (found.verdict, found.remedy) == ("missing", "bytes on the wire are not measured; all else works")
    assert found.found.endswith("tells no process about the bytes in its sockets")


# The machine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Darwin", "Windows"])
def test_systems_where_it_was_never_run(name):
    assert wanting(system, name, cores=2).verdict == "warning"


def test_one_core_is_a_warning():
    assert wanting(system, "Linux", cores=1).verdict == "warning"
    assert system("Linux", cores=4).endswith("; 4 usable cores")


# The network ---------------------------------------------------------------------------------------------------------


def test_loopback():
    assert loopback(["eth0", "lo0"]) == "127.0.0.1 works, on lo0"
    assert wanting(loopback, ["eth0"]).verdict == "warning"
    assert wanting(loopback, address="192.0.2.1").verdict == "missing"  # an address that is nobody's (RFC 5737)


def processes(folder: Path, *users: int) -> Path:
    for pid, uid in enumerate(users, start=1):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "status").write_text(f"Name:\tcat\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (folder / "uptime").touch()
    return folder


def test_other_people_are_neither_the_system_nor_me(tmp_path):
    found = other_people(processes(tmp_path, 0, 33, 65534, 4_000_001), mine=4_000_001)
    assert found == "none has a process here now"
    found = wanting(other_people, tmp_path, mine=1000)
    assert found.verdict == "warning"
    assert str(found).startswith("also used by user 4000001. Loopback is not private")


def test_where_processes_are_hidden_people_are_not_known(tmp_path):
    assert wanting(other_people, tmp_path / "none").verdict == "not known"
    (processes(tmp_path, 0, 1000) / "1" / "status").unlink()  # only one's own are shown
    assert wanting(other_people, tmp_path, mine=1000).verdict == "not known"


# MPI --------------------------------------------------------------------------------------------------------


def python_with(folder: Path, mpi4py: str) -> str:
    """An environment's Python that imports this as mpi4py."""
    python = folder / "python"
    (folder / "mpi4py.py").write_text(mpi4py)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


LIBRARY = "class rc: initialize = True\nclass MPI: Get_library_version = lambda: 'MPICH Version:\\t5.0.2\\nmore'\n"


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_mpi_is_the_library_that_mpi4py_loads(tmp_path):
    assert mpi(python_with(tmp_path, LIBRARY)) == "MPICH Version: 5.0.2"


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_an_mpi_that_fails_or_hangs_is_told(tmp_path):
    python = python_with(tmp_path, "raise ImportError('libmpi.so.12: cannot open shared object file')")
    assert str(wanting(mpi, python)).endswith("ImportError: libmpi.so.12: cannot open shared object file")
    python = python_with(tmp_path, "import time; time.sleep(1000)")
    assert str(wanting(mpi, python, seconds=0.1)) == "mpi4py was not loaded within 0.1 s"
