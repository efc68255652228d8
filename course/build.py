"""Make the notebooks of a course: python course/build.py --out course-out

    student/    every lesson without outputs and without cells that are tagged `answer`; folded are those tagged
                `check`, and what is said of a prediction's result; numbered as in a term
    teacher/    every lesson as it stands in notebooks/, executed, and the solutions with their known wrong answers

`--students lab` puts only the students' notebooks there, and changes no file that is there already.
Nothing runs here. Students get their outputs by running the cells.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
PREDICT = re.compile(r"\*\*(Predict|Think)\s+first")
KINDS = ("run", "check", "exercise", "answer")
"""Tags of cells, in the sources; a cell without one is run."""
CLAIM = re.compile(r"[A-Z]{1,2}\d+")
"""The other tags: the id of a question or of a claim that the cell answers."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
TEACHERS_OWN = ("**For a teacher:**", "The ids in *answers*", "The `.py` beside")
"""Paragraphs of notebooks/README.md that are not for students begin so."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the notebooks of a course.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", metavar="DIR", type=Path, help="a new folder, or one made by this")
    where.add_argument("--students", metavar="DIR", type=Path, help="add what is missing there")
    options = parser.parse_args()
    try:
        students = students_folder()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if options.students:
        add_missing(students, options.students)
        return
    begin_anew(options.out, "student")
    add_missing(students, options.out / "student")
    teacher, python = options.out / "teacher", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "course" / "solutions", teacher / "solutions", ignore=python)
    for path in [*(ROOT / "notebooks").glob("*.ipynb"), ROOT / "notebooks" / "README.md"]:
        shutil.copy(path, teacher)
    print(f"{teacher}: the executed lessons, and the solutions")


def begin_anew(out: Path, holds: str) -> None:
    """Empty the folder. It has to be new, or made by this program, so that it `holds` that."""
    if out.exists() and not (out / holds).is_dir():
        sys.exit(f"error: {out} is there and was not made by this; name another folder")
    shutil.rmtree(out, ignore_errors=True)


def in_order() -> list[str]:
    """Return the names of all lessons, in the order of notebooks/README.md's term."""
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    term = page.partition("**One term**")[2].partition("\n## ")[0]
    table = page.partition("## All lessons")[2]
    found = re.findall(r"\]\((\w+)\.ipynb\)", term) + re.findall(r"\n\| \[(\w+)\]", table)
    return list(dict.fromkeys(found))


def students_folder() -> dict[str, str]:
    """Return the text of each file for students. ValueError where a lesson tells its answer."""
    lessons = enumerate(in_order(), 1)
    names = {f"{name}.ipynb": f"{place:02}-{name}.ipynb" for place, name in lessons}
    made = {}
    for name, numbered in names.items():
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        for cell in for_students(notebook, name.removesuffix(".ipynb")).cells:
            if cell.cell_type == "markdown":
                cell.source = with_links(cell.source, names)
        made[numbered] = nbformat.writes(notebook) + "\n"
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    paragraphs = [each for each in page.split("\n\n") if not each.startswith(TEACHERS_OWN)]
    return made | {"README.md": with_links("\n\n".join(paragraphs).rstrip() + "\n", names)}


def with_links(text: str, names: Mapping[str, str]) -> str:
    """Turn links to lessons into links to their new names, and links to other files into text."""

    def kept(link: re.Match[str]) -> str:
        mark, words, target, heading = link.groups(default="")
        if target in names:
            return f"{mark}[{words}]({names[target]}{heading})"
        return link[0] if "://" in target else words

    return LINK.sub(kept, text)


def add_missing(students: Mapping[str, str], folder: Path) -> None:
    """Write what is not there, under any number, and leave what is."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {path.name.lstrip("0123456789-") for path in folder.iterdir()}
    missing = [name for name in students if name.lstrip("0123456789-") not in there]
    for name in missing:
        (folder / name).write_text(students[name], encoding="utf-8")
    print(f"{folder}: {len(missing)} of {len(students)} files for students were added;", end=" ")
    print("those that were there stay as they are. To begin one anew, rename it.")


def for_students(notebook: NotebookNode, lesson: str) -> NotebookNode:
    """Take out all outputs and answers, and fold what would tell them before they are asked.

    Raises ValueError, with the lesson and the cell, where a tag is unknown or an exercise holds its own answer.
    """
    for number, cell in enumerate(notebook.cells, start=1):
        if problem := problem_of(cell):
            raise ValueError(f"{lesson}, cell {number}: {problem}")
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if kind_of(cell) == "check":
                cell.metadata.jupyter = {"source_hidden": True}
    return fold_answers(notebook)


def fold_answers(notebook: NotebookNode) -> NotebookNode:
    """Take out answers; fold checks, and behind a prediction the section's results and what is said of them."""
    notebook.cells = [cell for cell in notebook.cells if kind_of(cell) != "answer"]
    predicted = section = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            hidden = ["hide-input"] if kind_of(cell) == "check" else []  # JupyterLab has `source_hidden`
            if section and cell.outputs:
                hidden.append("hide-output")
            if hidden:
                cell.metadata.tags = [*cell.metadata.get("tags", []), *hidden]
        else:
            if predicted:
                cell.source = folded(cell.source)
            predicted = bool(PREDICT.search(cell.source))
            section = predicted or (section and not re.search("^#", cell.source, re.MULTILINE))
    return notebook


def kind_of(cell: NotebookNode) -> str:
    """Return the one of KINDS that a cell is tagged with."""
    return next((tag for tag in cell.metadata.get("tags", []) if tag in KINDS), "run")


def problem_of(cell: NotebookNode) -> str:
    """Say what is wrong with a cell's tags, or with an exercise; nothing if all is well."""
    tags = cell.metadata.get("tags", [])
    unknown = [tag for tag in tags if tag not in KINDS and not CLAIM.fullmatch(tag)]
    if unknown:
        return f"the tag {unknown[0]!r} is none of {', '.join(KINDS)}, and no id of a claim"
    if len({*tags} & {*KINDS}) > 1:
        return f"it has more than one of the tags {', '.join(KINDS)}"
    if kind_of(cell) == "exercise" and re.search(r"^\s*assert\b", cell.source, re.MULTILINE):
        return "an exercise with an assert shows its answer: move that to a cell tagged `check`, or to lessons.answer"
    return ""


def folded(source: str) -> str:
    """Fold the first part, up to the next heading or prediction, behind a click (Markdown)."""
    parts = source.split("\n#", 1)
    told, rest = parts[0], "".join("\n\n#" + part for part in parts[1:])
    paragraphs = told.split("\n\n")
    asked = next((place for place, each in enumerate(paragraphs) if PREDICT.search(each)), len(paragraphs))
    if asked == 0 or told.startswith("#"):
        return source
    shown = "".join("\n\n" + each for each in paragraphs[asked:])
    hidden = "\n\n".join(paragraphs[:asked])
    return f"<details><summary>What came out, and why</summary>\n\n{hidden}\n\n</details>{shown}{rest}"


if __name__ == "__main__":
    main()
