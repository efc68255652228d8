"""What is promised: the public names, no more and no fewer, each with a docstring."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import dlearn
from dlearn.cluster.run import Run

ROOT = Path(__file__).parent.parent

REFERENCE = (ROOT / "docs" / "reference.md").read_text().partition("## The public names")[2]
PROMISED = {name for row in re.findall(r"^\| (`.*?) \|", REFERENCE, re.M) for name in re.findall(r"\w+", row)}
NAMESPACES = ["analysis", "collectives", "draw", "export", "lessons", "network", "play"]


def test_public_names():
    assert set(dlearn.__all__) == PROMISED
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dlearn.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_every_name_says_what_it_is(name):
    assert inspect.getdoc(getattr(dlearn, name))


MODULES = [dlearn, *(getattr(dlearn, name) for name in NAMESPACES)]


@pytest.mark.parametrize("module", MODULES)
def test_tab_offers_what_is_promised_and_nothing_else(module):
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_function_of_a_namespace_says_what_it_is(namespace):
    module = getattr(dlearn, namespace)
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def asks_for_a_trace(function) -> bool:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and str(first.annotation).startswith("Trace")


READERS = [dlearn.analysis, dlearn.draw, dlearn.export, dlearn.play]
FUNCTIONS = [getattr(module, name) for module in READERS for name in module.__all__ if name.islower()]


@pytest.mark.parametrize("function", [*filter(asks_for_a_trace, FUNCTIONS)], ids=lambda each: each.__module__)
def test_who_gives_a_run_in_place_of_its_trace_reads_what_to_give(function, tmp_path):
    run = Run(tmp_path, recorded=True)
    parameters = inspect.signature(function).parameters.values()
    needed = [run for each in parameters if each.default is each.empty and each.kind is not each.KEYWORD_ONLY]
    with pytest.raises(AttributeError, match=r"a Run has no '[a-z_]+'; where a Trace is wanted, give run.trace"):
        list(function(*needed))  # What is exported comes in pieces.


def test_no_page_was_left_half_written():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    assert len(pages) >= 3
    assert [page.name for page in pages if "@@" in page.read_text()] == []
