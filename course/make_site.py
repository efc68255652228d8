"""Make the site of the course: python course/make_site.py --out site-out

    site-out/html/      open index.html; works without a network and without a kernel
    site-out/source/    what Sphinx read: lessons, docs and pages that are generated from the lessons' heads

Answers are folded where a lesson asks for a prediction. A link that leads nowhere is an error.
"""

import argparse
import operator
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from inspect import getdoc, isfunction, signature
from pathlib import Path
from types import ModuleType

import nbformat
from build import LINK, ROOT, begin_anew, fold_answers, in_order, with_links
from nbformat import NotebookNode

import dlearn
from dlearn.course.catalogue import EXERCISES

BEFORE = re.compile(r"\*\*Before this:\*\*(.*?)\*\*Takes\*\*\s+about\s+(\d+)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the site of the course.")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder, or one made by this")
    out: Path = parser.parse_args().out
    begin_anew(out, "source")
    write_sources(out / "source")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run([*command, "-c", ROOT / "course" / "site", out / "source", out / "html"])
    if done.returncode == 0:
        print(f"The site is in {out}/html: open index.html")
    return done.returncode


@dataclass(frozen=True)
class Lesson:
    """A lesson's metadata (`ids`, `minutes`, `peak_mb`, `needs`), and what its head says."""

    name: str
    facts: NotebookNode
    title: str
    student_minutes: str
    before: tuple[str, ...]

    @property
    def link(self) -> str:
        return f"[{self.name}](../notebooks/{self.name}.ipynb)"


def read(name: str) -> Lesson:
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    before, minutes = found.groups() if (found := BEFORE.search(text)) else ("", "-")
    needs = tuple(re.findall(r"\]\((\w+)\.ipynb\)", before))
    title = notebook.cells[0].source.splitlines()[0].lstrip("# ").replace("`", "")
    return Lesson(name, notebook.metadata.dlearn, title, minutes, needs)


def write_sources(source: Path) -> None:
    every = [read(name) for name in in_order()]
    for folder in ("docs", "notebooks"):
        (source / folder).mkdir(parents=True)
    for lesson in every:
        notebook = nbformat.read(ROOT / "notebooks" / f"{lesson.name}.ipynb", as_version=4)
        nbformat.write(fold_answers(notebook), source / "notebooks" / f"{lesson.name}.ipynb")
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    pages["questions.md"] = with_lessons(pages["questions.md"], every)
    pages["for-a-class.md"] += f"\n## Time, memory and needs\n\n{costs(every)}\n"
    pages["exercises.md"] = exercises()
    pages["api.md"] = api()
    shutil.copytree(ROOT / "docs" / "pictures", source / "docs" / "pictures")
    (source / "notebooks" / "README.md").write_text(contents(every), encoding="utf-8")
    for name, text in pages.items():
        (source / "docs" / name).write_text(without_ways_out(text, source / "docs", pages), encoding="utf-8")
    (source / "index.md").write_text(index(pages), encoding="utf-8")


# Pages ----------------------------------------------------------------------------------------------------------------


def with_lessons(text: str, every: list[Lesson]) -> str:
    """Add a column of lessons to the table of questions. ValueError if they do not fit."""
    answered: dict[str, list[str]] = {}
    for each in every:
        for id in each.facts.ids:
            answered.setdefault(id, []).append(each.link)
    asked = re.findall(r"^\| ([A-Z]+\d+) ", text, re.MULTILINE)
    if {*asked} != {*answered} or len(asked) != len({*asked}):
        raise ValueError(f"docs/questions.md and the lessons differ in: {sorted({*asked} ^ {*answered})}")
    text = text.replace("| in one line |\n|---|---|---|", "| in one line | shown in |\n|---|---|---|---|")
    return re.sub(
        r"^(\| ([A-Z]+\d+) .*)$", lambda row: f"{row[1]} {', '.join(answered[row[2]])} |", text, flags=re.MULTILINE
    )


def costs(every: list[Lesson]) -> str:
    rows = ["| lesson | builds on | a student | runs | memory | needs |", "|---" * 6 + "|"]
    for each in every:
        before, needs = ", ".join(each.before) or "-", ", ".join(each.facts.needs) or "-"
        runs = f"{each.facts.minutes} min | {each.facts.peak_mb:,} MB"
        rows.append(f"| {each.link} | {before} | {each.student_minutes} min | {runs} | {needs} |")
    return "\n".join(rows)


def exercises() -> str:
    """Return the task of each exercise, as the library says it."""
    text = "# Exercises\n\nEach is graded by `lessons.check(id, f, student=...)`,"
    text += " in a notebook or in pytest.\n"
    for id, each in EXERCISES.items():
        text += f"\n## {id}\n\n{each.asks}\n\nTried on {', '.join(map(str, each.ranks))} ranks.\n"
    return text


def api() -> str:
    """Return each public name, as the library says it, with the first example of README or tour."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/tour.md")]
    examples = re.findall(r"^```python\n.*?^```$", "\n".join(pages), re.MULTILINE | re.DOTALL)
    text = "# API\n\nThe examples are those of the README and the [tour](tour.md); `tests/test_readme.py` runs them.\n"
    for name in dlearn.__all__:
        public = getattr(dlearn, name)
        inside = public.__all__ if isinstance(public, ModuleType) else ()
        for full in [name, *(f"{name}.{each}" for each in inside)]:
            thing = operator.attrgetter(full)(dlearn)
            told = f"{full}{signature(thing)}\n\n" if isfunction(thing) else ""
            shown = next((each for each in examples if re.search(rf"\b{full}\(", each)), "")
            text += f"\n##{'#' * full.count('.')} {full}\n\n```text\n{told}{getdoc(thing)}\n```\n\n{shown}\n"
    return text


def contents(every: list[Lesson]) -> str:
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    paths = page.partition("## Three paths\n")[2].partition("\n## ")[0]
    names = "\n".join(f"{each.title} ({each.student_minutes} min) <{each.name}>" for each in every)
    return (
        "# Lessons\n\nEach asks a question, lets you predict, and runs real ranks. Predict, then unfold the output and"
        " what came out. What each builds on: [for a class](../docs/for-a-class.md).\n\n"
        f"## Three paths\n{paths}\n```{{toctree}}\n:maxdepth: 1\n:caption: All lessons\n\n"
        f"{names}\n```\n"
    )


def index(pages: dict[str, str]) -> str:
    first = ("for-a-class", "exercises", "questions", "glossary", "reference", "api", "tour")
    names = dict.fromkeys([*first, *(name.removesuffix(".md") for name in pages)])
    listed = "\n".join(f"docs/{name}" for name in names)
    return (
        "# Who sent what to whom\n\n"
        "dlearn records every message of a real PyTorch distributed job, and shows it. Read the"
        " [lessons](notebooks/README.md) here, run them by `make lab`. A path of two hours:"
        " [quickstart](notebooks/quickstart.ipynb), [ring_all_reduce](notebooks/ring_all_reduce.ipynb),"
        " [museum_of_hangs](notebooks/museum_of_hangs.ipynb). New words: [glossary](docs/glossary.md). For a teacher:"
        " [for a class](docs/for-a-class.md).\n\n"
        f"```{{toctree}}\n:hidden:\n\nnotebooks/README\n{listed}\n```\n"
    )


def without_ways_out(text: str, folder: Path, pages: dict[str, str]) -> str:
    """Turn links to files that are not on the site into plain text."""
    found = [target for _, _, target, _ in LINK.findall(text)]
    there = [target for target in found if target in pages or (folder / target).exists()]
    return with_links(text, dict(zip(there, there, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
