"""Make the site of the course: python course/make_site.py --out site-out

    site-out/html/      open index.html; works without a network and without a kernel
    site-out/source/    what Sphinx read: lessons, docs and pages that are generated from the lessons' heads

Answers are folded where a lesson asks for a prediction. A link that leads nowhere is an error.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from build import fold_answers, out_folder

from dlearn.course.catalogue import EXERCISES

ROOT = Path(__file__).parent.parent
WIDE, HIGH = 135, 52
"""Of a lesson in the map, with the room around it."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
BEFORE = re.compile(r"\*\*Before this:\*\*(.*?)\*\*Takes\*\*\s+about\s+(\d+)", re.DOTALL)


def main() -> int:
    out = out_folder("Make the site of the course.", holds="source")
    shutil.rmtree(out, ignore_errors=True)
    write_sources(out / "source")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run([*command, "-c", ROOT / "course" / "site", out / "source", out / "html"])
    if done.returncode == 0:
        print(f"The site is in {out}/html: open index.html")
    return done.returncode


@dataclass(frozen=True)
class Lesson:
    """What a lesson's metadata and its head say."""

    name: str
    title: str
    ids: tuple[str, ...]
    student_minutes: str
    minutes: float
    memory_mb: int
    needs: tuple[str, ...]
    before: tuple[str, ...]
    text: str

    @property
    def link(self) -> str:
        return f"[{self.name}](../notebooks/{self.name}.ipynb)"


def lessons() -> list[Lesson]:
    """Return the lessons in the order of notebooks/README.md."""
    table = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8").partition("## All lessons")[2]
    return [read(name) for name in re.findall(r"^\| \[(\w+)\]", table, re.MULTILINE)]


def read(name: str) -> Lesson:
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    facts, head = notebook.metadata.dlearn, BEFORE.search(text)
    return Lesson(
        name=name,
        title=text.partition("\n")[0].lstrip("# "),
        ids=tuple(facts.ids),
        student_minutes=head[2] if head else "-",
        minutes=facts.minutes,
        memory_mb=facts.peak_mb,
        needs=tuple(facts.needs),
        before=tuple(re.findall(r"\]\((\w+)\.ipynb\)", head[1])) if head else (),
        text=text,
    )


def write_sources(source: Path) -> None:
    every = lessons()
    for folder in ("docs", "notebooks"):
        (source / folder).mkdir(parents=True)
    for lesson in every:
        notebook = nbformat.read(ROOT / "notebooks" / f"{lesson.name}.ipynb", as_version=4)
        nbformat.write(fold_answers(notebook), source / "notebooks" / f"{lesson.name}.ipynb")
    pages = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    pages["questions.md"] = with_lessons(pages["questions.md"], every)
    pages["glossary.md"] = with_first_uses(pages["glossary.md"], every)
    pages["teaching.md"] += f"\n{paths()}\n\n## Time, memory and needs\n\n{costs(every)}\n"
    pages["exercises.md"] = exercises()
    shutil.copytree(ROOT / "docs" / "pictures", source / "docs" / "pictures")
    (source / "docs" / "map.svg").write_text(drawn_map(every), encoding="utf-8")
    (source / "notebooks" / "README.md").write_text(contents(every), encoding="utf-8")
    for name, text in pages.items():
        (source / "docs" / name).write_text(without_ways_out(text, source / "docs", pages), encoding="utf-8")
    (source / "index.md").write_text(index(pages), encoding="utf-8")


# Pages ----------------------------------------------------------------------------------------------------------------


def with_lessons(text: str, every: list[Lesson]) -> str:
    """Add a column of lessons to the table of questions. ValueError if they do not fit."""
    answered = {id: [each.link for each in every if id in each.ids] for each in every for id in each.ids}
    asked = re.findall(r"^\| ([A-Z]+\d+) ", text, re.MULTILINE)
    if {*asked} != {*answered} or len(asked) != len({*asked}):
        raise ValueError(f"docs/questions.md and the lessons differ in: {sorted({*asked} ^ {*answered})}")
    text = text.replace("| in one line |\n|---|---|---|", "| in one line | shown in |\n|---|---|---|---|")
    return re.sub(
        r"^(\| ([A-Z]+\d+) .*)$", lambda row: f"{row[1]} {', '.join(answered[row[2]])} |", text, flags=re.MULTILINE
    )


def with_first_uses(text: str, every: list[Lesson]) -> str:
    """Add a column of the first lesson that uses each term to the glossary."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| term")]
    for row in rows:
        term = row.split(" | ")[0].removeprefix("| ")
        pattern = re.compile(r"(?<!\w)" + re.sub(r"\\?[- ]", "[-\\\\s]+", term), re.IGNORECASE)
        first = next((each.link for each in every if pattern.search(each.text)), "-")
        text = text.replace(row, f"{row} {first} |")
    return text.replace("| term | meaning |\n|---|---|", "| term | meaning | first in |\n|---|---|---|")


def paths() -> str:
    """Return the three paths of notebooks/README.md."""
    text = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    own = text.partition("## Three paths")[2].partition("\n## ")[0]
    return "## Three paths\n" + own.replace("](", "](../notebooks/").rstrip()


def costs(every: list[Lesson]) -> str:
    rows = ["| lesson | a student | runs | memory | needs |", "|---|---|---|---|---|"]
    for each in every:
        needs = ", ".join(each.needs) or "-"
        rows.append(
            f"| {each.link} | {each.student_minutes} min | {each.minutes} min | {each.memory_mb:,} MB | {needs} |"
        )
    return "\n".join(rows)


def exercises() -> str:
    """Return the task of each exercise, as the library says it."""
    told = "\n\n".join(
        f"## {id}\n\n{each.asks}\n\nTried on {', '.join(map(str, each.ranks))} ranks." for id, each in EXERCISES.items()
    )
    return (
        f"# Exercises\n\nEach is graded by `lessons.check(id, f, student=...)`, in a notebook or in pytest.\n\n{told}\n"
    )


def contents(every: list[Lesson]) -> str:
    names = "\n".join(each.name for each in every)
    return (
        "# Lessons\n\nEach asks a question, lets you predict, and runs real ranks. What came out is folded until you"
        " have made up your mind. An arrow leads from a lesson to one that builds on it.\n\n"
        "![What builds on what](../docs/map.svg)\n\n"
        f"{paths()}\n\n```{{toctree}}\n:maxdepth: 1\n:caption: All lessons\n\n{names}\n```\n"
    )


def index(pages: dict[str, str]) -> str:
    first = ["teaching.md", "exercises.md", "questions.md", "glossary.md", "reference.md", "tour.md"]
    rest = [name for name in pages if name not in first]
    listed = "\n".join(f"docs/{name.removesuffix('.md')}" for name in [*first, *rest])
    return (
        "# Who sent what to whom\n\n"
        "dlearn records every message of a real PyTorch distributed job, and shows it. Begin with the"
        " [lessons](notebooks/README.md); the shortest path takes 90 minutes:"
        " [quickstart](notebooks/quickstart.ipynb), [ring_all_reduce](notebooks/ring_all_reduce.ipynb),"
        " [museum_of_hangs](notebooks/museum_of_hangs.ipynb). For a teacher: [the guide](docs/teaching.md).\n\n"
        f"```{{toctree}}\n:hidden:\n\nnotebooks/README\n{listed}\n```\n"
    )


def without_ways_out(text: str, folder: Path, pages: dict[str, str]) -> str:
    """Turn links to files that are not on the site into plain text."""

    def kept(link: re.Match[str]) -> str:
        target = link[3]
        there = target in pages or "://" in target or (folder / target).exists()
        return link[0] if there else link[2]

    return LINK.sub(kept, text)


# The map --------------------------------------------------------------------------------------------------------------


def drawn_map(every: list[Lesson]) -> str:
    """Draw a column for each distance from the first lesson, and lines to what a lesson needs."""
    before = {each.name: each.before for each in every}
    columns: dict[int, list[str]] = {}
    for name in before:
        columns.setdefault(depth(name, before), []).append(name)
    place = {name: (WIDE * column, HIGH * row) for column, names in columns.items() for row, name in enumerate(names)}
    height = HIGH * max(map(len, columns.values())) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE * len(columns)} {height}"'
        ' font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(lines(place, before))}{''.join(boxes(place))}</svg>"
    )


def depth(name: str, before: dict[str, tuple[str, ...]]) -> int:
    return max((depth(need, before) + 1 for need in before[name]), default=0)


def lines(place: dict[str, tuple[int, int]], before: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for name, needs in before.items():
        x, y = place[name]
        for need in needs:
            a, b = place[need]
            curve = f"M{a + 112} {b + 24} C{a + 130} {b + 24} {x - 14} {y + 24} {x + 4} {y + 24}"
            yield f'<path d="{curve}" fill="none" stroke="#9aa5b8"/>'


def boxes(place: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Write names of two words in two lines."""
    for name, (x, y) in place.items():
        words = name.split("_")
        half = (len(words) + 1) // 2
        parts = [part for part in ("_".join(words[:half]), "_".join(words[half:])) if part]
        yield f'<rect x="{x + 4}" y="{y + 4}" width="108" height="40" rx="4" fill="#eef3fb" stroke="#0072B2"/>'
        for number, part in enumerate(parts):
            line = y + 29 + 15 * number - 7 * (len(parts) - 1)
            yield f'<text x="{x + 58}" y="{line}" text-anchor="middle">{part}</text>'


if __name__ == "__main__":
    sys.exit(main())
