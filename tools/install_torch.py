"""Install the torch that constraints.txt pins, without gigabytes of CUDA where no NVIDIA driver could use it.

    .venv/bin/python tools/install_torch.py [options for pip install]

Standard library only: it runs before anything is installed. First come the pinned pip and what builds dlearn, then
torch alone; what torch depends on comes with the project, in the next step, under constraints.txt.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    constraints = CONSTRAINTS.read_text()
    builders = [f"{name}=={pinned_version(name, constraints)}" for name in ("pip", "flit_core")]
    pip_install("--quiet", "--upgrade", *builders)
    version = pinned_version("torch", constraints)
    if installed_version("torch") == version:
        print(f"torch {version} is already installed.")
        return
    report = what_pip_would_install(f"torch=={version}")
    has_driver = Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))
    arguments, reason = choose_build(report, has_driver=has_driver)
    print(f"torch {version}: {reason}", flush=True)
    pip_install("--no-deps", *arguments, f"torch=={version}")


def pinned_version(name: str, constraints: str) -> str:
    """The version in the line `name==version` of the constraints."""
    start = f"{name}=="
    return next(line.removeprefix(start) for line in constraints.splitlines() if line.startswith(start))


def installed_version(name: str) -> str | None:
    """The installed version without its build, 2.13.0 for 2.13.0+cpu; None if there is none."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def what_pip_would_install(requirement: str) -> dict[str, Any]:
    """pip's report. It goes through a file, since pip may print warnings around a report on stdout.

    Needs a recent pip (the pinned one): older ones, such as those that come with Python 3.11, download
    everything that they report on.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip_install("--quiet", "--dry-run", "--report", str(report), requirement)
        answer: dict[str, Any] = json.loads(report.read_text())
        return answer


def choose_build(report: dict[str, Any], *, has_driver: bool) -> tuple[list[str], str]:
    """Return pip's arguments, and the reason: the CPU index where pip would fetch CUDA in vain."""
    if not any(item["metadata"]["name"].lower().startswith("nvidia") for item in report["install"]):
        return [], "the build that pip chooses; it brings no CUDA packages."
    if has_driver:
        return [], "the build that pip chooses, with CUDA, because there is an NVIDIA driver here."
    why = "because pip would fetch CUDA and there is no NVIDIA driver here"
    return ["--index-url", CPU_INDEX], f"the CPU build from {CPU_INDEX}, {why}."


def pip_install(*arguments: str) -> None:
    """Run pip in this Python; where it fails, it has said why, and we end with its exit status."""
    status = subprocess.run([sys.executable, "-m", "pip", "install", *sys.argv[1:], *arguments]).returncode
    if status != 0:
        sys.exit(status)


if __name__ == "__main__":
    main()
