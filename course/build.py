"""Make the notebooks of a course: python course/build.py --out course-out

    student/    every lesson without outputs and without cells that are tagged `answer`; folded are those tagged
                `check`, and what is said of a prediction's result
    teacher/    every lesson as it stands in notebooks/, executed, and the solutions with their known wrong answers

Nothing runs here. Students get their outputs by running the cells.
"""

import argparse
import re
import runpy
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
PREDICT = re.compile(r"\*\*Predict\s+first")
KINDS = ("run", "check", "exercise", "answer")
"""Tags of cells, in the sources; a cell without one is run."""
CLAIM = re.compile(r"[A-Z]{1,2}\d+")
"""The other tags: the id of a question or of a claim that the cell answers."""
HIDE_INPUT = "hide-input"  # for Jupyter Book; JupyterLab has `source_hidden`


def main() -> None:
    out = out_folder("Make the notebooks of a course, for students and for a teacher.", holds="student")
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    read = runpy.run_path(str(ROOT / "notebooks" / "build.py"))["read"]
    try:
        students = {path: for_students(read(path.with_suffix(".py")), path.stem) for path in lessons}
    except ValueError as error:
        sys.exit(f"error: {error}")
    for kind in ("student", "teacher"):
        shutil.rmtree(out / kind, ignore_errors=True)
        (out / kind).mkdir(parents=True)
    for path, notebook in students.items():
        nbformat.write(notebook, out / "student" / path.name)
        shutil.copy(path, out / "teacher" / path.name)
    for kind in ("student", "teacher"):
        shutil.copy(ROOT / "notebooks" / "README.md", out / kind)
    shutil.copytree(
        ROOT / "course" / "solutions", out / "teacher" / "solutions", ignore=shutil.ignore_patterns("__pycache__")
    )
    print(f"{len(lessons)} lessons are in {out}/student and {out}/teacher; the solutions with the teacher's only")


def out_folder(description: str, *, holds: str) -> Path:
    """Return the folder of the command line: new, or made by this program, so it `holds` that."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder, or one made by this")
    out: Path = parser.parse_args().out
    if out.exists() and not (out / holds).is_dir():
        sys.exit(f"error: {out} is there and was not made by this; name another folder")
    return out


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
    """Take out answers; fold checks, and behind a prediction the results and what is said of them."""
    notebook.cells = [cell for cell in notebook.cells if kind_of(cell) != "answer"]
    predicted = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            hidden = [HIDE_INPUT] if kind_of(cell) == "check" else []
            if predicted and cell.outputs:
                hidden.append("hide-output")
            if hidden:
                cell.metadata.tags = [*cell.metadata.get("tags", []), *hidden]
        else:
            if predicted:
                cell.source = folded(cell.source)
            predicted = bool(PREDICT.search(cell.source))
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
