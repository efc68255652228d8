"""Where a package is missing that dlearn does not bring along, one sentence says who needs it and how to get it."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import IPython
import pytest
from traces import Job

import dlearn
from dlearn import Cluster, analysis, messages, play
from dlearn.errors import SetupError, optional
from dlearn.lessons.knobs import knobs
from dlearn.play import bridge

RELOAD = "ipywidgets, and load the page again"


@pytest.mark.parametrize(
    ("package", "needed_by", "install", "ask"),
    [
        ("pandas", "to_frame", "pandas", lambda trace: messages(trace).to_frame()),
        ("networkx", "autograd_graph", "networkx", analysis.autograd_graph),
        ("ipywidgets", "knobs", RELOAD, lambda _: knobs()),
        ("ipyparallel", "engine=", "ipyparallel", lambda _: Cluster(engine=object())),
        ("mpi4py", "backend='mpi'", "mpi4py mpich", lambda _: Cluster(2, backend="mpi")),
    ],
)
def test_one_sentence_says_what_to_install(package, needed_by, install, ask, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SetupError) as caught:
        ask(Job(tmp_path, ranks=2).load())
    said = f"{needed_by} needs {package}, which is not installed: pip install {install}"
    assert str(caught.value) == said


def test_a_page_that_cannot_follow_python_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(bridge, "_widget", bridge._widget.__wrapped__)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=1000, start_ns=10, end_ns=50)
    player = play.player(job.load())
    player.step = 1
    player._repr_mimebundle_()
    with pytest.warns(UserWarning, match="needs anywidget, which is not installed: pip install anywidget$"):
        player.step = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        player.on_step(print)


def test_a_package_that_is_there_and_broken_says_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import another_that_is_missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="another_that_is_missing"):
        optional("broken", needed_by="this test")


def test_no_sentence_installs_the_other_project_that_has_our_name_on_the_index():
    """Ours is `dlearn-trace`. Where `dlearn` is named, it is to say that it is another."""
    root = Path(dlearn.__file__).parents[1]
    sources = [*(root / "dlearn").rglob("*.py"), *(root / "notebooks").glob("*.py"), root / "Dockerfile"]
    sources += [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "course" / "examples").rglob("*.[yms]*")]
    install = re.compile(r"pip3? install [^`\n]*\bdlearn\b(?!-trace)")
    assert [(path.name, line) for path in sources for line in install.findall(path.read_text())] == []
