"""What is promised: the public names, no more and no fewer, each with a docstring. And where a package is missing that
dlearn does not bring along, one sentence says who needs it and how to get it."""

import inspect
import re
import sys
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

import dlearn
from dlearn import Cluster, analysis, messages
from dlearn.cli import FORMATS, PICTURES
from dlearn.cluster.run import Run
from dlearn.errors import SetupError
from dlearn.lessons import knobs

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text().partition("## The public names")[2]
PROMISED = {name for row in re.findall(r"^\| (`.*?) \|", REFERENCE, re.M) for name in re.findall(r"\w+", row)}
NAMESPACES = [getattr(dlearn, name) for name in sorted(PROMISED) if inspect.ismodule(getattr(dlearn, name))]


def test_the_reference_names_what_there_is():
    assert set(dlearn.__all__) == PROMISED
    drawings = re.findall(r"`([a-z_]+)`", re.search(r"^\| `draw` \|(.*)", REFERENCE, re.M)[1])
    assert {*drawings, *PICTURES} <= {*dlearn.draw.__all__}
    assert {*FORMATS} <= {*dlearn.export.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dlearn.nonsense  # noqa: B018


@pytest.mark.parametrize("module", [dlearn, *NAMESPACES], ids=lambda module: module.__name__)
def test_tab_offers_what_is_promised_and_each_says_what_it_is(module):
    assert dir(module) == sorted(module.__all__)
    assert [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))] == []


def test_every_answer_has_rows_for_a_frame():
    answers = [each for each in vars(dlearn.analysis).values() if hasattr(each, "to_frame")]
    assert len(answers) > 10
    assert [each for each in answers if each.records.__qualname__ == "Result.records"] == []


NO_ROWS = {"autograd_graph", "bandwidth", "iterations"}  # A graph, one operation, a number.
ANALYSES = {*dlearn.analysis.__all__} - NO_ROWS


@pytest.mark.parametrize("name", sorted(name for name in ANALYSES if name.islower() and "assert" not in name))
def test_every_analysis_returns_what_has_a_frame(name):
    kind = get_type_hints(getattr(dlearn.analysis, name))["return"]
    either = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    assert hasattr(get_origin(either[0]) or either[0], "to_frame")


def asks_for_a_trace(function) -> bool:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and str(first.annotation).startswith("Trace")


READERS = [dlearn.analysis, dlearn.draw, dlearn.export, dlearn.play]
FUNCTIONS = [getattr(module, name) for module in READERS for name in module.__all__ if name.islower()]


@pytest.mark.parametrize("function", [*filter(asks_for_a_trace, FUNCTIONS)], ids=lambda each: each.__name__)
def test_who_gives_a_run_in_place_of_its_trace_reads_what_to_give(function, tmp_path):
    run = Run(tmp_path, recorded=True)
    parameters = inspect.signature(function).parameters.values()
    needed = [run for each in parameters if each.default is each.empty and each.kind is not each.KEYWORD_ONLY]
    with pytest.raises(AttributeError, match=r"a Run has no '[a-z_]+'; where a Trace is wanted, give run.trace"):
        list(function(*needed))  # What is exported comes in pieces.


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
def test_one_sentence_says_what_to_install(package, needed_by, install, ask, job, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SetupError) as caught:
        ask(job.load())
    assert str(caught.value) == f"{needed_by} needs {package}, which is not installed: pip install {install}"


def test_no_sentence_installs_the_other_project_that_has_our_name_on_the_index():
    """Ours is `dlearn-trace`. Where `dlearn` is named, it is to say that it is another."""
    sources = [*(ROOT / "dlearn").rglob("*.py"), *(ROOT / "notebooks").glob("*.py"), ROOT / "Dockerfile"]
    sources += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "course" / "examples").rglob("*.[yms]*")]
    install = re.compile(r"pip3? install [^`\n]*\bdlearn\b(?!-trace)")
    assert [(path.name, line) for path in sources for line in install.findall(path.read_text())] == []
