"""What students are handed: no outputs, and no answer in sight before it is asked for."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted(path.with_suffix(".py") for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def course():
    spec = importlib.util.spec_from_file_location("course_build", ROOT / "course" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(course, tmp_path_factory):
    out = tmp_path_factory.mktemp("course") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["build.py", "--out", str(out)])
        course.main()
        course.main()  # once more, into the same folder
    return out


def test_students_get_every_lesson_without_outputs_and_without_solutions(course, made):
    lessons = {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    assert {path.name for path in (made / "student").iterdir()} == lessons | {"README.md"}
    for path in (made / "student").glob("*.ipynb"):
        notebook = course.nbformat.read(path, as_version=4)
        course.nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
        by_kind = {kind: [cell for cell in code if course.kind_of(cell) == kind] for kind in course.KINDS}
        assert by_kind["answer"] == [], path.stem
        assert all(cell.metadata.jupyter.source_hidden for cell in by_kind["check"])
        shown = by_kind["run"] + by_kind["exercise"]
        assert not any("jupyter" in cell.metadata or "hide-input" in cell.metadata.get("tags", []) for cell in shown)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_answer_stands_in_the_cell_that_asks_for_it(build, course, source):
    cells = [cell for cell in build.read(source).cells if cell.cell_type == "code"]
    assert [course.problem_of(cell) for cell in cells if course.problem_of(cell)] == []
    places = [cell for cell in cells if has_a_place(cell.source)]
    assert [cell.source for cell in places if course.kind_of(cell) not in ("run", "exercise")] == []
    assert [cell.source for cell in places if re.search(r"^\s*assert\b", cell.source, re.MULTILINE)] == []


def has_a_place(source: str) -> bool:
    """Tell whether a statement outside of functions is `x = None` or `x, y = None, None`."""
    given = [node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return any(ast.unparse(value).strip("(,)") in PLACES for value in given)


PLACES = {", ".join(["None"] * number) for number in range(1, 9)}


@pytest.mark.parametrize(
    ("tags", "source", "problem"),
    [
        (["exercise", "DD12"], "a = None", ""),
        (["exercise"], "a = None\nif a:\n    assert a == 4", "an exercise with an assert shows its answer"),
        (["check"], "assert a == 4", ""),
        (["excercise"], "a = None", "the tag 'excercise' is none of run, check, exercise, answer"),
        (["run", "check"], "assert a == 4", "more than one of the tags"),
    ],
)
def test_a_cell_that_would_tell_its_answer_is_an_error_of_the_build(course, tags, source, problem):
    cells = [course.nbformat.v4.new_code_cell(source, metadata={"tags": tags})]
    notebook = course.nbformat.v4.new_notebook(cells=cells)
    if not problem:
        course.for_students(notebook, "a_lesson")
        return
    with pytest.raises(ValueError, match=f"a_lesson, cell 1: .*{problem}"):
        course.for_students(notebook, "a_lesson")


def test_the_teacher_gets_executed_lessons_and_the_solutions(made):
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert (made / "teacher" / path.name).read_bytes() == path.read_bytes()
    solutions = {path.name for path in (made / "teacher" / "solutions").iterdir()}
    assert solutions == {path.name for path in (ROOT / "course" / "solutions").glob("*.py")}


def test_what_follows_a_prediction_is_behind_a_click(course, made):
    for path in (made / "student").glob("*.ipynb"):
        cells = course.nbformat.read(path, as_version=4).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
        told = [after for text, after in pairwise(texts) if re.search(r"Predict\s+first", text)]
        assert [text for text in told if not text.startswith(("<details>", "#", "**Predict"))] == []


def test_folding_keeps_headings_and_questions_in_sight(course):
    assert course.folded("It is 4.\n\n## Next\n\nWhy?").endswith("</details>\n\n## Next\n\nWhy?")
    assert course.folded("It is 4.\n\n**Predict first:** 8?").endswith("</details>\n\n**Predict first:** 8?")
    for plain in ("## Next\n\nIt is 4.", "**Predict first:** 8?"):
        assert course.folded(plain) == plain


def test_a_folder_that_was_not_made_by_it_is_left_alone(course, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["build.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="was not made by this"):
        course.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_student_predicts_writes_a_ring_and_passes(build, course, made):
    """The student's notebook of the ring, filled in as by a student, and executed."""
    notebook = course.nbformat.read(made / "student" / "ring_all_reduce.ipynb", as_version=4)
    source = (ROOT / "course" / "solutions" / "own_ring.py").read_text()
    for cell in notebook.cells:
        cell.source = cell.source.replace('predict("ring.steps", None)', 'predict("ring.steps", 12)')
        if 'lessons.check("ring", my_ring)' in cell.source:
            mine = f'mine = {{"__name__": "__main__"}}\nexec({source!r}, mine)'
            cell.source = f"{mine}\nprint(lessons.check('ring', mine['to_the_right']))\nlessons.report()"
    build.execute(notebook)
    shown = "\n".join(str(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "you expected 12, seen was 6: not so" in shown
    assert "ring: passed, by its result and by what crossed the wire, on 2, 3, 4 ranks" in shown
    assert "0 of 1 right at first, 0 at last" in shown


# Goals, and what comes before -----------------------------------------------------------------------------------------

BEFORE = re.compile(r"\*\*Before this:\*\* (.*?) \*\*Takes\*\* about (\d+) minutes\.")


def paths() -> dict[str, list[str]]:
    """The three paths of notebooks/README.md: their names, with their lessons in order."""
    text = (NOTEBOOKS / "README.md").read_text().partition("## Three paths")[2].partition("\n## ")[0]
    return {
        name: re.findall(r"\]\((\w+)\.ipynb\)", lessons) for name, lessons in re.findall(r"\*\*(.*?)\*\*(.*)", text)
    }


def head(lesson: str) -> tuple[list[str], int]:
    """What the head of a lesson names as its prerequisites, and its minutes."""
    source = (NOTEBOOKS / f"{lesson}.py").read_text().replace("\n# ", " ")
    assert "**Goals.** You will be able to " in source
    before, minutes = BEFORE.search(source).groups()
    return re.findall(r"\]\((\w+)\.ipynb\)", before), int(minutes)


def test_there_are_three_paths_and_none_leads_through_a_lesson_before_what_it_builds_on():
    assert list(paths()) == ["90 minutes", "One day", "One term"]
    for name, lessons in paths().items():
        seen: list[str] = []
        for lesson in lessons:
            needs, _ = head(lesson)
            missing = {each for each in needs if each in lessons and each not in seen}
            assert not missing, f"{name}: {lesson} comes before {missing}"
            seen.append(lesson)
    assert sum(head(each)[1] for each in paths()["90 minutes"]) <= 100
    assert sum(head(each)[1] for each in paths()["One day"]) <= 8 * 60
    with_a_head = {path.stem for path in NOTEBOOKS.glob("*.py") if "**Goals.**" in path.read_text()}
    assert {*paths()["One term"]} == with_a_head


def test_the_map_is_what_the_lessons_say_they_build_on():
    drawn = re.findall(r"^ +(\w+) --> (\w+)$", (NOTEBOOKS / "README.md").read_text(), re.MULTILINE)
    told = [(need, lesson) for lesson in {*paths()["One term"]} for need in head(lesson)[0]]
    assert sorted(drawn) == sorted(told)
