"""What is installed beside torch: how ranks are started, JupyterLab, MPI."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dlearn.doctor.finding import Finding

ITSELF = ("python", "python3", f"python3.{sys.version_info.minor}")
"""In a kernel spec: the Python that Jupyter itself runs in."""
QUIET_SECONDS = 2.0
MPI_SECONDS = 10.0


def start_method(platform: str = sys.platform) -> Finding:
    """How `Cluster` starts ranks."""
    if platform == "win32":
        remedy = "use WSL2; traces can be read and drawn here"
        return Finding("start method", "missing", "Cluster needs Linux or macOS", remedy)
    from dlearn.cluster.launch import DEFAULT_START

    how = {"forkserver": "forked from a server that has loaded torch", "spawn": "each rank loads torch by itself"}
    return Finding("start method", "ok", f"{DEFAULT_START}: {how[DEFAULT_START]}")


def jupyter(python: str = sys.executable) -> Finding:
    """JupyterLab, and whether its Python 3 kernel is this Python."""
    remedy = "pip install jupyterlab ipywidgets anywidget"
    try:
        version = importlib.metadata.version("jupyterlab")
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return Finding("JupyterLab", "missing", "not installed for this Python", remedy)
    try:
        kernel = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Finding("JupyterLab", "missing", f"{version}, without a Python 3 kernel", remedy)
    return judge_kernel(version, kernel, python)


def judge_kernel(version: str, kernel: str, python: str) -> Finding:
    """`kernel` is the Python that the notebooks' cells run in."""
    # By their folders: the Pythons of two environments are links to the same file.
    if kernel in ITSELF or Path(kernel).absolute().parent == Path(python).absolute().parent:
        return Finding("JupyterLab", "ok", f"{version}, its Python 3 kernel is this Python")
    remedy = f"{python} -m ipykernel install --sys-prefix"
    return Finding("JupyterLab", "warning", f"{version}, but its Python 3 kernel is {kernel}", remedy)


_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def mpi(tell: Callable[[str], None], python: str = sys.executable, *, seconds: float = MPI_SECONDS) -> Finding:
    """mpi4py with its library, asked in a process of its own: a library that does not fit ends the process."""
    remedy = "for lessons with MPI: pip install mpi4py mpich"
    pipe = subprocess.PIPE
    with subprocess.Popen([python, "-P", "-c", _MPI], stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        try:
            text, errors = process.communicate(timeout=min(seconds, QUIET_SECONDS))
        except subprocess.TimeoutExpired:
            tell(f"trying MPI (for up to {seconds:g} s) ...")
            try:
                text, errors = process.communicate(timeout=max(0.0, seconds - QUIET_SECONDS))
            except subprocess.TimeoutExpired:
                process.kill()
                return Finding("MPI", "missing", f"mpi4py was not loaded within {seconds:g} s", remedy)
    if process.returncode != 0:
        said = (errors.strip().splitlines() or [f"its process ended with {process.returncode}"])[-1]
        return Finding("MPI", "missing", f"mpi4py cannot be imported: {said}", remedy)
    library = " ".join(text.strip("\x00\n").partition("\n")[0].split())
    # The one that belongs to this library stands beside the interpreter.
    mpiexec = shutil.which("mpiexec.gforker", path=str(Path(python).parent))
    if mpiexec is None:
        return Finding("MPI", "missing", f"{library}, but no mpiexec.gforker beside {python}", remedy)
    return Finding("MPI", "ok", f"{library}, {mpiexec}")
