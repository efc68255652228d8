"""What students are handed: no outputs, and no answer in sight before it is asked for."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture(scope="module")
def made(course, tmp_path_factory):
    out = tmp_path_factory.mktemp("course") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["build.py", "--out", str(out)])
        course.main()
    return out


def test_students_get_every_lesson_without_outputs_and_solutions_and_the_teacher_all_of_it(course, made):
    assert all((made / "teacher" / path.name).read_bytes() == path.read_bytes() for path in LESSONS)
    assert (made / "teacher" / "solutions" / "own_ring.py").exists()
    names = [re.sub(r"^\d\d-", "", path.name) for path in sorted((made / "student").iterdir())]
    assert names == [*(f"{name}.ipynb" for name in course.in_order()), "README.md"]
    assert sorted(names[:-1]) == [path.name for path in LESSONS]
    page = (made / "student" / "README.md").read_text()
    assert not re.search(r"`make |For a teacher|\.py\b", page)
    for path in (made / "student").glob("*.ipynb"):
        notebook = course.nbformat.read(path, as_version=4)
        course.nbformat.validate(notebook)
        texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        for _, _, file, _ in course.LINK.findall("\n".join([page, *texts])):
            assert "://" in file or (made / "student" / file).exists(), (path.name, file)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
        for cell in code:
            kind = course.kind_of(cell)
            assert kind != "answer", path.stem
            assert ("jupyter" in cell.metadata and cell.metadata.jupyter.source_hidden) == (kind == "check")
            asks = re.search(r"^\w+ = None$", cell.source, re.MULTILINE)
            assert not asks or not re.search(r"^\s*assert\b", cell.source, re.MULTILINE), "its answer is in sight"
        told = [after for text, after in pairwise(texts) if re.search(r"Predict\s+first", text)]
        shown = [text for text in told if not text.startswith(("<details>", "#", "**Predict"))]
        assert shown == [], "what follows a prediction is behind a click"


def test_what_is_missing_is_added_and_what_a_student_has_written_stays(course, tmp_path, capsys):
    """Under another number, too: when a lesson is put in between, the next ones are no new lessons."""
    (tmp_path / "09-a.ipynb").write_text("mine")
    course.add_missing({"01-a.ipynb": "", "02-b.ipynb": "new", "README.md": ""}, tmp_path)
    assert f"{tmp_path}: 2 of 3 files for students were added" in capsys.readouterr().out
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"09-a.ipynb": "mine", "02-b.ipynb": "new", "README.md": ""}


@pytest.mark.parametrize(
    ("tags", "source", "problem"),
    [
        (["exercise", "DD12"], "a = None", ""),
        (["exercise"], "a = None\nif a:\n    assert a == 4", "an exercise with an assert shows its answer"),
        (["excercise"], "a = None", "the tag 'excercise' is none of run, check, exercise, answer"),
        (["run", "check"], "assert a == 4", "more than one of the tags"),
    ],
)
def test_a_cell_that_would_tell_its_answer_is_an_error_of_the_build(course, tags, source, problem):
    new = course.nbformat.v4
    notebook = new.new_notebook(cells=[new.new_code_cell(source, metadata={"tags": tags})])
    if not problem:
        course.for_students(notebook, "a_lesson")
        return
    with pytest.raises(ValueError, match=f"a_lesson, cell 1: .*{problem}"):
        course.for_students(notebook, "a_lesson")


def test_a_folder_that_was_not_made_by_it_is_left_alone(course, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["build.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="was not made by this"):
        course.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def head(lesson: str) -> tuple[list[str], int]:
    """What the head of a lesson names as its prerequisites, and its minutes."""
    source = (NOTEBOOKS / f"{lesson}.py").read_text().replace("\n# ", " ")
    assert "**Goals.** You will be able to " in source
    before, minutes = re.search(r"\*\*Before this:\*\* (.*?) \*\*Takes\*\* about (\d+) minutes\.", source).groups()
    return re.findall(r"\]\((\w+)\.ipynb\)", before), int(minutes)


def test_no_path_leads_through_a_lesson_before_what_it_builds_on_and_the_map_says_the_same():
    page = (NOTEBOOKS / "README.md").read_text()
    text = page.partition("## Three paths")[2].partition("\n## ")[0]
    _, *parts = re.split(r"^\*\*(.*?)\*\*", text, flags=re.MULTILINE)
    paths = {name: re.findall(r"\]\((\w+)\.ipynb\)", told) for name, told in zip(parts[::2], parts[1::2], strict=True)}
    assert list(paths) == ["Two hours", "One day", "One term", "Parameter servers and RPC"]
    paths["Parameter servers and RPC"] = every = [*paths["One term"], *paths["Parameter servers and RPC"]]
    for name, lessons in paths.items():
        for place, lesson in enumerate(lessons):
            missing = {*head(lesson)[0]} & {*lessons[place:]}
            assert not missing, f"{name}: {lesson} comes before {missing}"
    assert sum(head(each)[1] for each in paths["Two hours"]) <= 120
    assert sum(head(each)[1] for each in paths["One day"]) <= 8 * 60
    arrows = re.findall(r"^ +(\w+) --> ([\w &]+)$", page, re.MULTILINE)
    drawn = [(need, lesson) for need, lessons in arrows for lesson in lessons.split(" & ")]
    assert sorted(drawn) == sorted((need, lesson) for lesson in {*every} for need in head(lesson)[0])
