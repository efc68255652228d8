"""What holds for every test."""

import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

import matplotlib
import pytest
from hypothesis import settings
from recorded import Recorder
from traces import Job

from dlearn import Cluster
from dlearn.errors import SetupError

matplotlib.use("agg")  # Pictures are drawn into memory: no window opens.

# Random input is the same in every run. `pytest --hypothesis-profile=other` tries other.
settings.register_profile("other", deadline=None)
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

# A shell that puts these tests in the background has interrupts ignored, and whoever it starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """What fails in CI is tried again, alone, when all other tests are done: .ci/run does so."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED and "DLEARN_SECOND_TRY" in os.environ:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def leave_no_figures():
    """Pyplot keeps every figure that nobody closes, and a later test would find it."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """What the test leaves in its folder, as clusters do, is left in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job(tmp_path):
    """Two ranks, of which the test says what they did."""
    return Job(tmp_path, ranks=2)


def skip_where_refused(folder, **options):
    """Skips what needs such a cluster where this machine lets nobody have one."""
    try:
        with contextlib.chdir(folder):
            Cluster(1, **options).run(os.getpid)
    except SetupError as refused:
        pytest.skip(str(refused))


@pytest.fixture(scope="session")
def permitted(tmp_path_factory):
    skip_where_refused(tmp_path_factory.mktemp("network"), network="1 ms")


@pytest.fixture(scope="session")
def private_permitted(tmp_path_factory):
    skip_where_refused(tmp_path_factory.mktemp("private"), private=True)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The trace of a program on real ranks, which runs once in a test run: tests/recorded.py."""
    home = tmp_path_factory.getbasetemp()
    return Recorder((home.parent if "PYTEST_XDIST_WORKER" in os.environ else home) / "recorded")


def script(path):
    """A script of the repository, which belongs to no package; with jupytext it takes 3 s."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), Path(__file__).parent.parent / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build():
    return script("notebooks/build")


@pytest.fixture(scope="session")
def course():
    return script("course/build")
