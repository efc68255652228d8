"""Make the notebooks of a course: python course/build.py --out course-out

    student/    every lesson without outputs; checks are folded, and so is what is said of a prediction's result
    teacher/    every lesson as it stands in notebooks/, executed, and the solutions with their known wrong answers

Nothing runs here. Students get their outputs by running the cells.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
PREDICT = "**Predict first"
FOLDED = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
"""As JupyterLab and Jupyter Book know it."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the notebooks of a course, for students and for a teacher.")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder, or one made by this")
    out = parser.parse_args().out
    if out.exists() and not (out / "student").is_dir():
        print(f"error: {out} is there and was not made by this; name another folder", file=sys.stderr)
        return 1
    for kind in ("student", "teacher"):
        shutil.rmtree(out / kind, ignore_errors=True)
        (out / kind).mkdir(parents=True)
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in lessons:
        nbformat.write(for_students(nbformat.read(path, as_version=4)), out / "student" / path.name)
        shutil.copy(path, out / "teacher" / path.name)
    for kind in ("student", "teacher"):
        shutil.copy(ROOT / "notebooks" / "README.md", out / kind)
    shutil.copytree(
        ROOT / "course" / "solutions", out / "teacher" / "solutions", ignore=shutil.ignore_patterns("__pycache__")
    )
    print(f"{len(lessons)} lessons are in {out}/student and {out}/teacher; the solutions with the teacher's only")
    return 0


def for_students(notebook: NotebookNode) -> NotebookNode:
    """Take out all outputs, and fold what would tell the answer before it is asked."""
    predicted = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            if is_check(cell.source):
                cell.metadata.update(FOLDED)
        elif predicted:
            cell.source = folded(cell.source)
        if cell.cell_type == "markdown":
            predicted = PREDICT in cell.source
    return notebook


def is_check(source: str) -> bool:
    """Whether a cell is there to hold the lesson to its word: it has an assert, and no place for an answer."""
    return "assert " in source and " = None" not in source and "None, None" not in source


def folded(source: str) -> str:
    """Markdown with its first part, up to the next heading or prediction, behind a click."""
    parts = source.split("\n#", 1)
    told, rest = parts[0], "".join("\n\n#" + part for part in parts[1:])
    paragraphs = told.split("\n\n")
    asked = next((place for place, each in enumerate(paragraphs) if PREDICT in each), len(paragraphs))
    if asked == 0 or told.startswith("#"):
        return source
    shown = "".join("\n\n" + each for each in paragraphs[asked:])
    hidden = "\n\n".join(paragraphs[:asked])
    return f"<details><summary>What came out, and why</summary>\n\n{hidden}\n\n</details>{shown}{rest}"


if __name__ == "__main__":
    sys.exit(main())
