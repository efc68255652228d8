"""Where a package is missing that dlearn does not bring along, one sentence says who needs it and how to get it."""

import re
import sys
from pathlib import Path

import pytest
from traces import Job

from dlearn import Cluster, analysis, messages
from dlearn.errors import SetupError
from dlearn.lessons import knobs


@pytest.mark.parametrize(
    ("package", "needed_by", "install", "ask"),
    [
        ("pandas", "to_frame", "pandas", lambda trace: messages(trace).to_frame()),
        ("networkx", "autograd_graph", "networkx", analysis.autograd_graph),
        ("ipywidgets", "knobs", "ipywidgets, and load the page again", lambda _: knobs.knobs()),
        ("ipyparallel", "engine=", "ipyparallel", lambda _: Cluster(engine=object())),
        ("mpi4py", "backend='mpi'", "mpi4py mpich", lambda _: Cluster(2, backend="mpi")),
    ],
)
def test_one_sentence_says_what_to_install(package, needed_by, install, ask, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SetupError) as caught:
        ask(Job(tmp_path, ranks=2).load())
    assert str(caught.value) == f"{needed_by} needs {package}, which is not installed: pip install {install}"


def test_no_sentence_installs_the_other_project_that_has_our_name_on_the_index():
    """Ours is `dlearn-trace`. Where `dlearn` is named, it is to say that it is another."""
    root = Path(__file__).parents[1]
    sources = [*(root / "dlearn").rglob("*.py"), *(root / "notebooks").glob("*.py"), root / "Dockerfile"]
    sources += [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "course" / "examples").rglob("*.[yms]*")]
    install = re.compile(r"pip3? install [^`\n]*\bdlearn\b(?!-trace)")
    assert [(path.name, line) for path in sources for line in install.findall(path.read_text())] == []
