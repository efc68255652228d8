"""Each notebook is what its source says, was executed, and runs: once, and with it what else asks for a run of it.

The ring runs as a student's who has filled it in, on a machine without the kernel's counters and namespaces, as a Mac.
"""

import ast
import json
import os
import re
import tomllib
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from defects import defects

HOME = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(path for path in HOME.glob("*.py") if path.name != "build.py")
SOURCES.sort(key=lambda path: -float(re.search("minutes: (.*)", path.read_text())[1]))  # What takes longest begins.

MEASURE = {"slow_network", "stragglers", "incast", "local_sgd"}
"""They judge seconds."""

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


@cache
def saved(source):
    import nbformat  # Here: with the names of the web that it knows, it takes 2.5 s.

    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def shown_pictures(notebook):
    """How many outputs are figures: as PNG, or as a drawing's SVG."""
    shown = [output.get("data", {}) for output in outputs(notebook)]
    return sum("image/png" in data or "dlearn-drawing" in data.get("text/html", "") for data in shown)


@each_notebook
def test_the_notebook_is_made_from_its_source_and_says_what_it_costs(build, source):
    notebook, fresh = saved(source), build.read(source)
    assert [(cell.cell_type, cell.id, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.id, cell.source) for cell in fresh.cells
    ], "run `make notebooks`"
    facts = notebook.metadata.dlearn
    assert facts == fresh.metadata.dlearn
    tags = {tag for cell in fresh.cells for tag in cell.metadata.get("tags", [])}
    assert tags <= {"run", "check", "exercise", "answer", *facts.ids}
    assert set(facts) == {"ids", "minutes", "needs", "peak_mb"}
    assert min(facts.minutes, facts.peak_mb) > 0
    order = (HOME / "README.md").read_text()
    assert all(word in order for word in (source.stem, *facts.ids)), "notebooks/README.md lists each lesson"


@each_notebook
def test_it_was_executed_in_order_is_small_and_says_nothing_about_the_machine_that_made_it(build, source):
    notebook, text = saved(source), source.with_suffix(".ipynb").read_text()
    build.nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any(output.output_type == "error" or build.is_empty(output) for output in outputs(notebook))
    assert shown_pictures(notebook) > 0, "a lesson has a picture"
    assert len(text.encode()) < build.MOST_BYTES
    images = re.compile(r'"image/png": "[^"]*"|data:image/[^"]*')
    paths = re.findall(r"(?<![\w.])/(?:home|root|tmp|usr|work|Users|opt|var)/[^\s\"]*", images.sub("", text))
    assert paths == []


def code_cells(build, source):
    """Kind and text of each code cell."""
    for cell in build.read(source).cells:
        if cell.cell_type == "code":
            kinds = {"check", "exercise", "answer"} & {*cell.metadata.get("tags", [])}
            yield "".join(kinds) or "run", cell.source


@each_notebook
def test_cells_are_short_and_plain_and_keep_to_their_kind(build, source):
    assert all(cell.source.count("\n") < 40 for cell in build.read(source).cells), "a cell fits on a screen"
    cells = [*code_cells(build, source)]
    for (kind, text), following in zip(cells, [*cells[1:], ("", "")], strict=True):
        assert not re.search(r"^[%!]|sys\.path", text, re.MULTILINE)
        if re.search(r"\.(residue_bytes|measured_bytes)\b|(wire|answer|reconcile\(.*\))\.exact", text):
            assert re.search("not_measured|None|measured_bytes or ", text), "not every kernel has counters"
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
def test_a_lesson_is_short_and_what_it_lets_predict_is_kept_and_answered_by_the_next_cell(build, source):
    cells = build.read(source).cells
    assert len(cells) <= 30 or source.stem == "ddp_paper", "that one is a reference, in no path"
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    names = re.findall(r"^(\w+) = lessons\.predict\(", code, re.MULTILINE)
    assert len(names) == code.count("lessons.predict(") <= 3
    assert all(f"{name}.against(" in code for name in names)
    in_sight = [text for kind, text in code_cells(build, source) if kind == "run"]
    assert not re.search(r"\.against\((\"[^\"]*\"|\d+)\)", "\n".join(in_sight)), "a check is folded"
    asked = [after.source for cell, after in pairwise(cells) if "Predict first" in " ".join(cell.source.split())]
    assert all("lessons.predict(" in after for after in asked)
    assert bool(asked) == bool(names)


def test_each_graded_exercise_stands_in_one_lesson_with_a_cell_to_fill_in(build):
    tasks = tomllib.loads((files("dlearn.course") / "tasks.toml").read_text(encoding="utf-8"))
    given = []
    for source in SOURCES:
        text = "\n".join(text for kind, text in code_cells(build, source) if kind == "exercise")
        given += re.findall(r'lessons\.check\("(\w+)", .*student=', text)
    assert sorted(given) == sorted({*tasks} - {"findings", "holds"})


@contextmanager
def kernel(build, folder, after):
    """A kernel that notes its pictures, and the file in which they stand."""
    start, seen = folder / "start.py", folder / "pictures"
    start.write_text(WATCH.format(tests=str(Path(__file__).parent), seen=str(seen)))
    (folder / "sitecustomize.py").write_text(SITE.format(after=after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONSTARTUP", str(start))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.getenv("PYTHONPATH")])]))
        patch.setenv("MPLBACKEND", "agg")  # as it may stand where somebody builds them: the figures come all the same
        with build.kernel(folder) as manager:
            yield manager, seen


@pytest.fixture(scope="module")
def shared(build, tmp_path_factory):
    """One kernel for all notebooks but those with a patched library, which loads torch once and forgets all names."""
    with kernel(build, tmp_path_factory.mktemp("kernel"), {}) as running:
        yield running


@pytest.mark.parametrize(
    "source",
    [pytest.param(each, marks=[pytest.mark.alone] * (each.stem in MEASURE)) for each in SOURCES],
    ids=lambda source: source.stem,
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_every_text_of_its_pictures_can_be_read(build, course, source, tmp_path, request):
    notebook, name = build.read(source), source.stem
    if "mpi" in notebook.metadata.dlearn["needs"]:
        pytest.importorskip("mpi4py", reason="this lesson needs the extra `mpi`")
    if "network" in notebook.metadata.dlearn["needs"]:
        request.getfixturevalue("permitted")
    if name == "ring_all_reduce":
        fill_in(course, notebook)
    if name == "ddp_paper":
        take_fewer(notebook)
    held = [cell.source for cell in notebook.cells if "turn.bars" in cell.source]
    moved = ["turn.sliders['B'].value = 32", *held] if held else []  # a slider is moved, and the checks run again
    for text in [*moved, *filter(None, [BEHIND.get(name)])]:
        notebook.cells.append(build.nbformat.v4.new_code_cell(text))
    begin_anew(build, notebook, tmp_path)
    own = kernel(build, tmp_path, AFTER[name]) if name in AFTER else nullcontext(request.getfixturevalue("shared"))
    with own as (manager, seen):
        seen.write_text("")
        build.run_in(manager, notebook)  # raises with the cell and its error, if one fails
    pictures = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [f"cell {each['cell']}: {fault}" for each in pictures for fault in each["faults"]] == []
    assert len(pictures) >= shown_pictures(notebook) > 0, "each was looked at"
    assert min(each["texts"] for each in pictures) > 0
    text = "\n".join(map(str, outputs(notebook)))
    assert [each for each in SHOWN.get(name, ()) if each not in text] == []


@pytest.mark.parametrize(
    "claim", [each for each in defects() if each.question.startswith("T")], ids=lambda claim: claim.question
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_claim_that_is_made_false_fails_in_the_cell_that_proves_it(build, shared, claim, tmp_path, request):
    """Those of today's parallelism; of the others, and in a copy of the whole, `make test-defects`."""
    path = HOME.parent / claim.file
    changed = tmp_path / path.name
    changed.write_text(claim.applied(path.read_text()))
    notebook = build.read(changed)
    if "network" in notebook.metadata.dlearn["needs"]:
        request.getfixturevalue("permitted")
    begin_anew(build, notebook, tmp_path)
    with pytest.raises(build.CellExecutionError) as caught:
        build.run_in(shared[0], notebook)
    assert claim.told_in("\n".join(caught.value.__notes__)), caught.value


def begin_anew(build, notebook, folder):
    """Let the notebook forget, in a folder of its own, what others have left in its kernel."""
    anew = f"import os\nos.chdir({str(folder)!r})\nget_ipython().reset(new_session=True)"
    notebook.cells.insert(0, build.nbformat.v4.new_code_cell(anew))


def fill_in(course, notebook):
    """The student's notebook, with a guess, and a ring that is right."""
    source = (HOME.parent / "course" / "solutions" / "own_ring.py").read_text()
    course.for_students(notebook, "ring_all_reduce")
    for cell in notebook.cells:
        cell.source = cell.source.replace('predict("ring.steps", None)', 'predict("ring.steps", 12)')
        if 'lessons.check("ring", my_ring, ' in cell.source:
            mine = f'mine = {{"__name__": "__main__"}}\nexec({source!r}, mine)'
            cell.source = f"{mine}\nprint(lessons.check('ring', mine['to_the_right']))\nlessons.report()"


def take_fewer(notebook):
    """The lesson with few samples, each number found where it stood."""
    for many, few in FEWER.items():
        (cell,) = [cell for cell in notebook.cells if many in cell.source]
        cell.source = cell.source.replace(many, few)


BEHIND = {
    "museum_of_hangs": "from test_museum import check_visit\nfor each in visits:\n    check_visit(each)",
    "ring_all_reduce": """
assert reconcile(Cluster(2).run(dist.barrier).trace).not_measured.startswith("darwin")
try:
    Cluster(2, network="1 Gbit/s").run(abs, -1)
except Exception as error:
    print(f"{type(error).__name__} {error}")
""",
}
"""What is run behind the last cell."""

SHOWN = {
    "ring_all_reduce": [
        "you predicted 12; the result was 6",
        "ring: passed, by its result and by what crossed the wire, on 2, 3, 4 ranks",
        "of 1 prediction, 0 right the first time, 0 the last time",
        "SetupError ranks cannot have a network of their own on this machine: only Linux",
    ]
}

WATCH = """
import sys
sys.path.append({tests!r})
import text_boxes
text_boxes.watch_kernel({seen!r})
del sys, text_boxes
"""
"""What the kernel runs before the first cell."""

SITE = """
import sys
from importlib.machinery import PathFinder

AFTER = {after!r}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        code = AFTER.get(name) or AFTER.get(name.split(".")[0])
        if code and spec and spec.loader:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), exec(code, vars(module)))
        return spec


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""Read by every Python that starts, so by the ranks, too: what is run after a module, or after each of a package."""

AFTER = {
    # As on a Mac.
    "ring_all_reduce": {
        "dlearn": """
if "sys" in globals():
    class Mac:
        platform = "darwin"
        __getattr__ = staticmethod(lambda name: getattr(__import__("sys"), name))
        __setattr__ = lambda self, name, value: setattr(__import__("sys"), name, value)
    sys = Mac()
if "unshare" in globals():
    def unshare():
        raise NotPermitted("only Linux has network namespaces")
"""
    },
}

FEWER = {
    "FEWEST, ROUNDS, CONFIDENCE = 10, 12": "FEWEST, ROUNDS, CONFIDENCE = 3, 3",
    "for power in range(8, 21)": "for power in range(11, 21)",
    "EVERY, SEEDS = (1, 2, 4, 8), (0, 1, 2)": "EVERY, SEEDS = (1, 2, 4, 8), (0,)",
    "0.02, 800": "0.02, 400",
    "0.06, 240": "0.06, 120",
    "(64, 192, 512), 8, (1, 2, 4, 8), 32, 1000": "(64, 96, 128), 8, (1, 2, 4, 8), 3, 20",
}
"""Medians of few samples in ddp_paper: what is sent is the same, and no verdict about times or losses is asserted."""
