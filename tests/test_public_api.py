"""What is promised: the public names, no more and no fewer, each with a docstring."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import dlearn

ROOT = Path(__file__).parent.parent

PROMISED = {
    "Cluster",
    "DlearnError",
    "Event",
    "Message",
    "Operation",
    "Trace",
    "analysis",
    "collectives",
    "draw",
    "explain",
    "export",
    "lessons",
    "messages",
    "network",
    "operations",
    "play",
    "record",
    "span",
}


def test_public_names():
    assert set(dlearn.__all__) == PROMISED
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dlearn.nonsense  # noqa: B018


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_every_name_says_what_it_is(name):
    assert inspect.getdoc(getattr(dlearn, name))


@pytest.mark.parametrize("module", [dlearn, dlearn.analysis])
def test_tab_offers_what_is_promised_and_nothing_else(module):
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("namespace", ["analysis", "collectives", "draw", "export", "lessons", "network", "play"])
def test_every_function_of_a_namespace_says_what_it_is(namespace):
    module = getattr(dlearn, namespace)
    assert sorted(module.__all__) == list(module.__all__)
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), name


def test_the_reference_names_them_all():
    readme = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in sorted(PROMISED) if f"`{name}" not in readme and f"`dlearn.{name}" not in readme] == []


def test_no_page_was_left_half_written():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md")]
    assert len(pages) >= 3
    assert [page.name for page in pages if "@@" in page.read_text()] == []
