"""Where MPI is not there, or not as it should be: one line, and what to install."""

from __future__ import annotations

import pytest

from dlearn import Cluster
from dlearn.errors import RankError, SetupError

pytestmark = pytest.mark.usefixtures("own_folder")

pytest.importorskip("mpi4py")


def nothing() -> None:
    """Never called."""


def test_what_does_not_go_together_is_refused():
    with pytest.raises(SetupError, match="has its ranks on this machine, and not beside engines"):
        Cluster(2, backend="mpi", engine=object())


def test_an_mpi_that_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(RankError) as caught:
        Cluster(2, backend="mpi").run(nothing, timeout=60)
    assert (
        "SetupError: mpi4py cannot load MPI here (cannot load MPI library /nonexistent/libmpi.so: " in caught.value.what
    )
    assert "No such file or directory): pip install mpich" in caught.value.what
