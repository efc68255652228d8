"""The site: generated pages fit the lessons, and every link of the built site leads somewhere without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def maker():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "course"))
        import make_site

        yield make_site


def test_each_question_has_one_answer_and_the_lessons_that_show_it(maker):
    text = maker.with_lessons((ROOT / "docs" / "questions.md").read_text(), maker.lessons())
    rows = [line for line in text.splitlines() if re.match(r"\| [A-Z]+\d", line)]
    assert len(rows) == 62
    assert all(row.count(" | ") == 3 and ".ipynb)" in row for row in rows)
    with pytest.raises(ValueError, match="differ in"):
        maker.with_lessons("| PS1 | a | b |", maker.lessons())


def test_each_term_of_the_glossary_is_used_by_a_lesson(maker):
    text = maker.with_first_uses((ROOT / "docs" / "glossary.md").read_text(), maker.lessons())
    unused = [line.split(" | ")[0] for line in text.splitlines() if line.endswith("| - |")]
    assert unused == []


def test_results_are_folded_behind_a_prediction_checks_too_and_answers_are_taken_out(maker):
    new, output = maker.nbformat.v4, maker.nbformat.v4.new_output("stream", text="6")
    tagged = [new.new_code_cell(kind, metadata={"tags": [kind]}) for kind in ("check", "exercise", "answer")]
    question, shown = new.new_markdown_cell("**Predict first:** 6?"), new.new_code_cell("run", outputs=[output])
    notebook = new.new_notebook(cells=[question, shown, *tagged])
    tags = {cell.source: cell.metadata.get("tags") for cell in maker.for_readers(notebook).cells[1:]}
    assert tags == {"run": ["hide-output"], "check": ["check", "hide-input"], "exercise": ["exercise"]}


def test_every_lesson_that_builds_on_others_is_in_the_map(maker):
    every = maker.lessons()
    drawn = maker.drawn_map(every)
    assert drawn.count("<rect x=") == len(every)
    assert drawn.count("<path ") == sum(len(each.before) for each in every)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_and_every_link_of_it_leads_somewhere(tmp_path):
    pytest.importorskip("myst_nb", reason="this needs the dependency group `site`")
    out = tmp_path / "out"
    subprocess.run([sys.executable, ROOT / "course" / "make_site.py", "--out", out], check=True)
    pages = {page: page.read_text() for page in (out / "html").rglob("*.html")}
    assert len(pages) > 45
    for page, text in pages.items():
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:', text), page
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="https?:', text), page
        for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            file, _, heading = unquote(target).partition("#")
            led_to = (page.parent / file).resolve() if file else page
            assert led_to.exists(), (page.name, target)
            if heading and led_to in pages:
                assert f'id="{heading}"' in pages[led_to], (page.name, target)
