"""Where MPI is not there, or not as it should be: one line, and what to install."""

from __future__ import annotations

import pytest

from dlearn import Cluster
from dlearn.cluster import mpi_launch
from dlearn.errors import RankError, SetupError

pytest.importorskip("mpi4py")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def nothing() -> None:
    """Never called."""


def test_what_does_not_go_together_is_refused():
    with pytest.raises(SetupError, match="starts its ranks by an mpiexec on this machine, and not beside engines"):
        Cluster(2, backend="mpi", engine=object())


def test_an_mpi_that_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(RankError) as caught:
        Cluster(2, backend="mpi").run(nothing, timeout=60)
    assert (
        "SetupError: mpi4py cannot load MPI here (cannot load MPI library /nonexistent/libmpi.so: " in caught.value.what
    )
    assert "No such file or directory): pip install mpich" in caught.value.what


def test_without_mpiexec_it_is_said_what_to_install(tmp_path):
    with pytest.raises(SetupError, match=rf"there is no mpiexec.gforker in {tmp_path}: pip install mpich$"):
        mpi_launch.find_mpiexec(str(tmp_path))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'no slots left' >&2; exit 1", "no slots left"),
        ("exit 0", "it ended without a word"),
        ('shift 2; exec "$@"', "this mpiexec is not MPICH's (it gives no PMI_FD): pip install"),
    ],
)
def test_an_mpiexec_that_does_not_start_ranks(script, said, tmp_path, monkeypatch):
    fake = tmp_path / "mpiexec"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(mpi_launch, "find_mpiexec", lambda: fake)
    with pytest.raises(SetupError) as caught:
        Cluster(2, backend="mpi").run(nothing)
    assert str(caught.value).startswith(f"{fake} did not start 2 MPI ranks: {said}")
