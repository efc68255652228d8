"""`dlearn doctor`: the whole of it run here, and where torch is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

NEEDED = ("loopback", "torch", "recorder", "gloo")
MPI = "class rc: initialize = True\nclass MPI: Get_library_version = lambda: 'MPICH Version:\\t5.0.2\\nmore'\n"


def doctor(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the command; what stands in the folder `path` is found before what is installed."""
    command = [sys.executable, "-m", "dlearn", "doctor", *arguments]
    paths = [str(each) for each in (path, os.environ.get("PYTHONPATH"), Path(__file__).parent.parent) if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_here_where_these_tests_run_jobs_can_be_recorded(tmp_path, monkeypatch):
    scratch = tmp_path / "a für b"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    (tmp_path / "mpi4py.py").write_text(MPI)
    done = doctor(path=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert lines.pop() == "Jobs can be recorded on this machine."
    found = {line[:15].rstrip(): (line[17:26].rstrip(), line[28:]) for line in lines}
    assert {verdict for verdict, _ in found.values()} <= {"ok", "warning", "missing", "not known"}
    assert [found[name][0] for name in (*NEEDED, "RPC")] == ["ok"] * 5
    assert found["MPI"] == ("ok", "MPICH Version: 5.0.2"), "the library that mpi4py loads"
    if sys.platform == "linux":
        assert "the kernel counted 1,000 of 1,000 B written (TCP_INFO)" in done.stdout


def test_an_mpi_that_no_cluster_can_use_is_a_warning(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (tmp_path / "mpi4py.py").write_text(MPI.replace("MPICH Version:\\t5.0.2", "Open MPI v4.1.6, 2023\\0"))
    found = [[*each.values()] for each in json.loads(doctor("--json", path=tmp_path).stdout)["findings"]]
    told = "Open MPI v4.1.6, 2023; clusters need MPICH's", "for lessons with MPI: pip install mpi4py mpich"
    assert ["MPI", "warning", *told] in found


def test_what_is_missing_is_told_with_what_to_do_and_the_exit_status(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.12: cannot open shared object file')")
    done = doctor("--json", path=tmp_path)
    told = json.loads(done.stdout)
    found = {each["name"]: each for each in told["findings"]}
    assert (done.returncode, told["can_record"]) == (1, False)
    assert found["MPI"]["found"].endswith("ImportError: libmpi.so.12: cannot open shared object file")
    assert (found["torch"]["verdict"], found["gloo"]["verdict"]) == ("missing", "not known")
    assert found["torch"]["found"] == "ModuleNotFoundError: No module named 'torch'"
    assert "tools/install_torch.py" in found["torch"]["remedy"]
    assert done.stderr.splitlines()[-1] == (  # MPI is good to have, and is not needed.
        "dlearn: no job can be recorded on this machine; what it lacks, above: torch, recorder, gloo."
    )
