"""What is promised: the public names, no more and no fewer, each with a docstring."""

import inspect
import re
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

import dlearn
from dlearn.cli import FORMATS, PICTURES
from dlearn.cluster.run import Run

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
