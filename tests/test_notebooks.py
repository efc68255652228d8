"""Each notebook is what its source says, was executed, and runs."""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import re
from functools import cache
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image, ImageChops, ImageStat

from dlearn.network.namespace import refusal

HOME = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(path for path in HOME.glob("*.py") if path.name != "build.py")

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@cache
def saved(source):
    import nbformat  # Here: with the names of the web that it knows, it takes 2.5 s.

    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@each_notebook
def test_the_notebook_is_made_from_its_source(build, source):
    notebook = saved(source)
    fresh = build.read(source)
    assert [(cell.cell_type, cell.id, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.id, cell.source) for cell in fresh.cells
    ], "run `make notebooks`"
    assert notebook.metadata.dlearn == fresh.metadata.dlearn


@each_notebook
def test_metadata_names_the_questions_and_the_cost(source):
    facts = saved(source).metadata.dlearn
    assert set(facts) == {"ids", "minutes", "needs", "peak_mb"}
    assert all(re.fullmatch(r"[A-Z]{1,2}\d+", name) for name in facts.ids)
    assert min(facts.minutes, facts.peak_mb) > 0
    order = (HOME / "README.md").read_text()
    assert all(word in order for word in (source.stem, *facts.ids)), "notebooks/README.md lists each lesson"


@each_notebook
def test_every_code_cell_was_executed_in_order_without_error(build, source):
    notebook = saved(source)
    build.nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    kinds = [output.output_type for output in outputs(notebook)]
    assert "error" not in kinds
    assert shown_pictures(notebook) > 0, "a lesson has a picture"


@each_notebook
def test_the_notebook_is_small_and_says_nothing_about_the_machine_that_made_it(build, source):
    text = source.with_suffix(".ipynb").read_text()
    assert len(text.encode()) < build.MOST_BYTES
    images = re.compile(r'"image/png": "[^"]*"|data:image/[^"]*')
    paths = re.findall(r"(?<![\w.])/(?:home|root|tmp|usr|work|Users|opt|var)/[^\s\"]*", images.sub("", text))
    assert paths == []
    assert not any(build.is_empty(output) for output in outputs(saved(source)))


def code_cells(build, source):
    """Kind and text of each code cell."""
    for cell in build.read(source).cells:
        if cell.cell_type == "code":
            kinds = {"check", "exercise", "answer"} & {*cell.metadata.get("tags", [])}
            yield "".join(kinds) or "run", cell.source


@each_notebook
def test_cells_are_short_and_plain(build, source):
    assert all(cell.source.count("\n") < 40 for cell in build.read(source).cells), "a cell fits on a screen"
    for _, text in code_cells(build, source):
        assert not re.search(r"^[%!]|sys\.path", text, re.MULTILINE)
        if re.search(r"\.(residue_bytes|measured_bytes)\b|(wire|answer|reconcile\(.*\))\.exact", text):
            assert re.search("not_measured|None|measured_bytes or ", text), "not every kernel has counters"


@each_notebook
def test_each_cell_keeps_to_its_kind(build, source):
    cells = [*code_cells(build, source)]
    for (kind, text), following in zip(cells, [*cells[1:], ("", "")], strict=True):
        *_, last = body = ast.parse(text).body
        if kind == "run":
            assert not all(isinstance(each, ast.Assert) for each in body), "a cell of asserts is a check"
        if kind == "check":
            assert "assert " in text
            assert "Cluster(" not in text, "an experiment is shown"
        if kind == "exercise":
            assert re.match(r"lessons\.(check|answer)\(", ast.unparse(last)), "it ends with what it is compared with"
            assert "lessons.check(" in text or following[0] == "answer"
        if kind == "answer":
            assert re.search(r"assert .*lessons\.answer\(.*\)\.right", text), "the expected value is proved"


@each_notebook
def test_no_assert_holds_by_typing_alone_and_every_guess_is_read(build, source):
    """Names in capitals are constants that the lesson types; one letter may be a size that was counted."""
    lesson = ast.parse("\n".join(text for _, text in code_cells(build, source)))
    for each in ast.walk(lesson):
        if isinstance(each, ast.Assert) and not any(isinstance(part, ast.Attribute) for part in ast.walk(each.test)):
            free = names(each.test, ast.Load) - names(each.test, ast.Store) - {*dir(builtins)}
            assert not all(re.fullmatch(r"[A-Z_]{2,}|my_\w+", name) for name in free), ast.unparse(each)
    unread = names(lesson, ast.Store) - names(lesson, ast.Load)
    assert {name for name in unread if name.startswith("my_")} == set()


def names(tree, use):
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, use)}


def shown_pictures(notebook):
    """How many outputs are figures: as PNG, or as a drawing's SVG."""
    shown = [output.get("data", {}) for output in outputs(notebook)]
    return sum("image/png" in data or "dlearn-drawing" in data.get("text/html", "") for data in shown)


def test_a_drawing_stands_in_a_notebook_once_with_a_png_where_svg_is_taken_out(build):
    image = png(Figure(figsize=(1, 1), facecolor="white").savefig)
    ours = build.NotebookNode({"image/png": image, "text/html": SVG_OUTPUT})
    build.one_picture(ours)
    assert set(ours) == {"text/html"}
    assert ours["text/html"].startswith('<style>s</style><picture><source type="image/svg+xml" srcset="data:image/svg')
    assert f'<img class="dlearn-drawing" alt="a" src="data:image/png;base64,{image}"></picture>' in ours["text/html"]
    written = json.dumps(dict(ours))
    assert json.loads(build.smaller_only(written)) == {"text/html": SVG_OUTPUT}, "where it must be small"
    large = build.smaller_only(written.replace("AA==", "A" * 99_999))
    assert f"base64,{image}" in large
    assert "svg" not in large, "of the two the smaller one"
    for html in ("<p>a table</p>", '<img src="data:image/svg+xml;base64,AA">'):
        own = build.NotebookNode({"image/png": image, "text/html": html})
        build.one_picture(own)
        assert own == {"image/png": image, "text/html": html}, "a figure of the reader's own"


SVG_OUTPUT = '<style>s</style><img class="dlearn-drawing" alt="a" src="data:image/svg+xml;base64,AA==">'


def test_a_picture_keeps_its_size_and_looks_with_fewer_colors(build):
    figure = Figure(figsize=(4, 2), facecolor="white")
    axes = figure.subplots()
    axes.bar(range(4), range(4), color=["#0072B2", "#E69F00", "#009E73", "#CC79A7"])
    axes.set_title("Four bars")
    text = png(figure.savefig)
    smaller = build.fewer_colors(text)
    before, after = (Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB") for each in (text, smaller))
    assert len(smaller) < 0.7 * len(text)
    assert before.size == after.size
    assert max(ImageStat.Stat(ImageChops.difference(before, after)).mean) < 1  # of 255
    transparent = png(Image.new("RGBA", (20, 20), (0, 114, 178, 128)).save)
    assert build.fewer_colors(transparent) == transparent


def png(save):
    file = io.BytesIO()
    save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "source",
    [pytest.param(each, marks=[pytest.mark.alone] * ("needs: [network]" in each.read_text())) for each in SOURCES],
    ids=lambda source: source.stem,
)
@pytest.mark.slow
@pytest.mark.timeout(1800)  # The longest runs for three minutes, on a machine that does nothing else.
def test_the_notebook_runs_and_every_text_of_its_pictures_can_be_read(build, source, tmp_path, monkeypatch):
    notebook = build.read(source)
    if source.stem in CHECKED:
        notebook.cells.append(build.nbformat.v4.new_code_cell(CHECKED[source.stem]))
    held = [cell.source for cell in notebook.cells if "turn.bars" in cell.source]
    for text in ["turn.sliders['B'].value = 32", *held] if held else []:
        notebook.cells.append(build.nbformat.v4.new_code_cell(text))  # a slider is moved, and the checks run again
    if "mpi" in notebook.metadata.dlearn["needs"]:
        pytest.importorskip("mpi4py", reason="this lesson needs the extra `mpi`")
    if "network" in notebook.metadata.dlearn["needs"] and refusal():
        pytest.skip(refusal())
    start, seen = tmp_path / "start.py", tmp_path / "pictures"
    start.write_text(WATCH.format(tests=str(Path(__file__).parent), seen=str(seen)))
    monkeypatch.setenv("PYTHONSTARTUP", str(start))
    monkeypatch.setenv("MPLBACKEND", "agg")  # as it may stand where somebody builds them: the figures come all the same
    build.execute(notebook)  # raises with the cell and its error, if one fails
    pictures = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [f"cell {each['cell']}: {fault}" for each in pictures for fault in each["faults"]] == []
    assert len(pictures) >= shown_pictures(notebook) > 0, "each was looked at"
    assert min(each["texts"] for each in pictures) > 0


WATCH = """
import sys
sys.path.append({tests!r})
import text_boxes
text_boxes.watch_kernel({seen!r})
del sys, text_boxes
"""
"""What the kernel runs before the first cell."""

CHECKED = {
    "ddp_paper": "from paper_findings import check_finding\nfor each in findings:\n    check_finding(each)",
    "museum_of_hangs": "from museum_visits import check_visit\nfor each in visits:\n    check_visit(each)",
}
"""What is run behind the last cell: claims and exhibits take minutes, so no other test runs all of them."""
