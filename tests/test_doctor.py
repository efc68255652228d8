"""`dlearn doctor`: each check told what it would find elsewhere, and the whole of it run here."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dlearn.doctor import machine, network, software
from dlearn.doctor.examination import lacking
from dlearn.doctor.finding import Finding
from dlearn.doctor.probe import STEPS
from dlearn.doctor.torch_answers import Probe, findings, judge_build, judge_counters, judge_gpu

MACHINE = ["system", "Python", "cores", "memory", "shared memory", "hostname", "loopback", "other people"]
SOFTWARE = ["start method", "JupyterLab", "MPI", *STEPS]
GIB = 2**30


def doctor(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; what stands in the folder `path` is found before what is installed."""
    command = [sys.executable, "-m", "dlearn.cli", "doctor", *arguments]
    return subprocess.run(command, env=environment_with(path), capture_output=True, text=True, timeout=100)


def environment_with(path: Path | None) -> dict[str, str]:
    paths = [str(each) for each in (path, os.environ.get("PYTHONPATH"), Path(__file__).parent.parent) if each]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def without_torch(folder: Path) -> Path:
    """A folder whose torch cannot be imported."""
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    return folder


# The command ---------------------------------------------------------------------------------------------------------


def test_here_where_these_tests_run_jobs_can_be_recorded():
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert lines.pop() == "Jobs can be recorded on this machine."
    verdicts = {line[:15].rstrip(): line[17:26].rstrip() for line in lines}
    assert list(verdicts) == MACHINE + SOFTWARE
    assert set(verdicts.values()) <= {"ok", "warning", "missing", "not known"}
    assert [verdicts[name] for name in ("loopback", "recorder", "gloo", "RPC")] == ["ok"] * 4
    if sys.platform == "linux":
        assert "the kernel counted 1,000 of 1,000 B written (TCP_INFO)" in done.stdout


def test_without_torch_it_says_so_and_ends_with_1(tmp_path):
    done = doctor("--json", path=without_torch(tmp_path))
    told = json.loads(done.stdout)
    found = {each["name"]: each for each in told["findings"]}
    assert list(found) == MACHINE + SOFTWARE
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


# What torch is asked -------------------------------------------------------------------------------------------------


def asked(code: str, seconds: float = 50.0) -> tuple[list[Finding], list[str]]:
    """The findings where the probe is this program, and what is told meanwhile."""
    told: list[str] = []
    probe = Probe([sys.executable, "-c", code], step_seconds=seconds)
    try:
        return list(findings(probe, told.append)), told
    finally:
        probe.end()


FITS = 'print(\'{"step": "torch", "version": "2.13.0", "cuda": null}\', flush=True)\n'


def test_a_torch_that_aborts_is_told_with_its_last_words_and_the_rest_was_not_asked():
    found, _ = asked(f"import os, sys\n{FITS}print('GLIBC too old', file=sys.stderr, flush=True)\nos._exit(3)")
    assert [each.name for each in found] == list(STEPS)
    assert [each.verdict for each in found] == ["ok", "missing"] + ["not known"] * 4
    assert found[1].found == "its process ended with 3: GLIBC too old"
    assert found[2].found == "not asked, because of recorder"


def test_a_torch_that_hangs_is_left_after_a_while():
    found, told = asked(f"import time\n{FITS}time.sleep(1000)", seconds=0.2)
    assert found[1 if found[0].verdict == "ok" else 0].found == "no answer within 0.2 s"
    assert told[-1].endswith("(for up to 0.2 s) ...")


def test_the_probe_does_not_outlive_who_asks(tmp_path):
    """Torch hangs here; the doctor is killed."""
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'loading')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'loading')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(1000)\n"
    )
    environment = environment_with(tmp_path)
    command = [sys.executable, "-m", "dlearn.cli", "doctor"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        soon(lambda: (tmp_path / "pid").exists())
        process.kill()
    pid = int((tmp_path / "pid").read_text())
    soon(lambda: gone(pid))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_build_without_cuda_is_a_pity_beside_a_driver(tmp_path):
    assert judge_build("2.13.0", None, tmp_path / "none").verdict == "ok"
    (tmp_path / "version").touch()
    assert judge_build("2.13.0", None, tmp_path / "version").verdict == "warning"
    assert judge_build("2.13.0", "13.0", tmp_path / "version") == Finding("torch", "ok", "2.13.0, CUDA 13.0")


def test_no_gpu_is_no_failure():
    assert judge_gpu([], None) == Finding("GPU", "ok", "no GPU here, and none is needed; NCCL not built in")
    assert judge_gpu(["A100", "A100"], "2.27.3").found.startswith("2 x A100; NCCL 2.27.3 built in")
    assert judge_gpu(["A100"], None).verdict == "warning"


def test_counters_count_or_it_is_said_why_not():
    assert judge_counters(1000, "").verdict == "ok"
    assert judge_counters(900, "").found == "the kernel counted 900 of 1,000 B written"
    assert judge_counters(None, "darwin tells nothing").found == "darwin tells nothing"


# The machine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "verdict"), [("Linux", "ok"), ("Darwin", "warning"), ("Windows", "warning")])
def test_systems(name, verdict):
    assert machine.system(name, "1.0").verdict == verdict


def test_pythons():
    assert machine.python((3, 10)).verdict == "missing"
    assert machine.python((3, 11)).verdict == "ok"


def test_cores():
    assert machine.cores(1).verdict == "warning"
    assert machine.cores(4).found.startswith("4 usable")
    assert machine.cores().verdict in ("ok", "warning")


def test_memory_is_what_the_container_leaves_of_it(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    # 4 GiB / 17 MB a rank = 252.6
    assert machine.memory(meminfo, tmp_path).found.startswith("4.0 GiB available: 252 ranks of 17 MB")
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert machine.memory(meminfo, tmp_path).found.startswith("1.0 GiB available: 63 ranks")
    assert machine.memory(meminfo, tmp_path, start="spawn").found.startswith("1.0 GiB available: 7 ranks of 151 MB")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    assert machine.memory(meminfo, tmp_path).verdict == "warning"
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory(meminfo, tmp_path).found.startswith("4.0 GiB")
    assert machine.memory(tmp_path / "none", tmp_path).verdict == "not known"


def test_no_shared_memory_to_look_at_is_not_known(tmp_path):
    assert machine.shared_memory(tmp_path / "none").verdict == "not known"
    assert machine.shared_memory(tmp_path).verdict in ("ok", "warning")


# The network ---------------------------------------------------------------------------------------------------------


def test_hostnames():
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    assert network.hostname("here", lambda _: "127.0.1.1").found == "here resolves to 127.0.1.1"
    assert "gloo listens there" in network.hostname("here", lambda _: "10.0.0.7").found
    assert network.hostname("here", unknown).verdict == "warning"


def test_a_name_server_that_does_not_answer_is_left():
    answered = threading.Event()
    try:
        assert network.hostname("here", lambda _: str(answered.wait()), seconds=0.05).verdict == "warning"
    finally:
        answered.set()


def test_loopback():
    assert network.loopback().verdict == "ok"
    assert network.loopback(["eth0", "lo0"]).found == "127.0.0.1 works, on lo0"
    assert network.loopback(["eth0"]).verdict == "warning"
    assert network.loopback(address="192.0.2.1").verdict == "missing"  # an address that is nobody's (RFC 5737)


def processes(folder: Path, *users: int) -> Path:
    for pid, uid in enumerate(users, start=1):
        (folder / str(pid)).mkdir()
        (folder / str(pid) / "status").write_text(f"Name:\tcat\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (folder / "uptime").touch()
    return folder


def test_other_people_are_neither_the_system_nor_me(tmp_path):
    assert network.other_people(processes(tmp_path, 0, 33, 65534, 4_000_001), mine=4_000_001).verdict == "ok"
    found = network.other_people(tmp_path, mine=1000)
    assert found.verdict == "warning"
    assert found.found.startswith("also used by user 4000001. Loopback is not private")
    assert "no rpc=True" in found.remedy


def test_where_processes_are_hidden_people_are_not_known(tmp_path):
    assert network.other_people(tmp_path / "none").verdict == "not known"
    (processes(tmp_path, 0, 1000) / "1" / "status").unlink()  # only one's own are shown
    assert network.other_people(tmp_path, mine=1000).verdict == "not known"


# The software --------------------------------------------------------------------------------------------------------


def test_start_methods():
    assert software.start_method("win32").verdict == "missing"
    assert software.start_method().verdict == "ok"


@pytest.mark.parametrize(
    ("kernel", "verdict"), [("python3", "ok"), ("/env/bin/python3.11", "ok"), ("/other/bin/python", "warning")]
)
def test_the_kernel_may_be_another_python(kernel, verdict):
    assert software.judge_kernel("4.6.6", kernel, "/env/bin/python").verdict == verdict


def python_with(folder: Path, mpi4py: str) -> str:
    """An environment's Python that imports this as mpi4py."""
    python = folder / "python"
    (folder / "mpi4py.py").write_text(mpi4py)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


LIBRARY = "class rc: initialize = True\nclass MPI: Get_library_version = lambda: 'MPICH Version:\\t5.0.2\\nmore'\n"


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_mpi_is_a_library_with_the_mpiexec_beside_it(tmp_path):
    python = python_with(tmp_path, LIBRARY)
    assert "but no mpiexec.gforker beside" in software.mpi(print, python).found
    (tmp_path / "mpiexec.gforker").touch(mode=0o755)
    found = f"MPICH Version: 5.0.2, {tmp_path}/mpiexec.gforker"
    assert software.mpi(print, python) == Finding("MPI", "ok", found)


@pytest.mark.skipif(shutil.which("sh") is None, reason="its Pythons are shell scripts")
def test_an_mpi_that_fails_or_hangs_is_told(tmp_path):
    python = python_with(tmp_path, "raise ImportError('libmpi.so.12: cannot open shared object file')")
    assert software.mpi(print, python).found.endswith("ImportError: libmpi.so.12: cannot open shared object file")
    told: list[str] = []
    python = python_with(tmp_path, "import time; time.sleep(1000)")
    assert software.mpi(told.append, python, seconds=0.1).found == "mpi4py was not loaded within 0.1 s"
    assert told == ["trying MPI (for up to 0.1 s) ..."]
