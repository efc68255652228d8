"""The rooms of the house: who may import whom, and who may import what is heavy. Read from the code by `ast`."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import dlearn

HOUSE = Path(dlearn.__file__).parent

# What each room may import of the others. `errors`, `shown` and `version` are everybody's.
EVERYBODYS = {"errors", "notices", "shown", "version"}
TEACHING = {"collectives", "course", "lessons"}  # Only these rooms and the cli import them.
DATA = {"events", "join", "trace"}
MAY_IMPORT = {room: set[str]() for room in (*EVERYBODYS, "events", "network")} | {
    "join": {"events"},
    "trace": {"events", "join"},
    "hooks": {"events"},
    "diagnosis": DATA,
    "analysis": DATA | {"diagnosis"},
    "recorder": {"events", "trace", "hooks", "diagnosis"},
    "sources": {"events", "trace", "hooks"},
    "backends": {"recorder"},
    "collectives": {"join", "recorder", "backends"},
    "live": {"events", "trace", "analysis", "diagnosis", "play"},
    "cluster": {"events", "trace", "hooks", "analysis", "diagnosis", "recorder", "backends", "network", "live"},
    "scripts": DATA | {"hooks", "analysis", "diagnosis", "recorder", "network", "live"},
    "draw": DATA | {"analysis", "diagnosis"},
    "play": DATA | {"analysis", "draw"},
    "export": DATA | {"analysis", "diagnosis", "draw", "play"},
    "course": DATA | {"analysis", "cluster", "recorder", "collectives"},
    "lessons": DATA
    | {"analysis", "diagnosis", "cluster", "collectives", "course", "draw", "network", "play", "recorder"},
    "doctor": {"events", "hooks", "cluster", "network"},
    "__main__": {"cli"},
    "cli": DATA | {"analysis", "draw", "export", "doctor", "scripts", "lessons"},
}
MAY_IMPORT_HEAVY = {
    "torch": {"hooks", "recorder", "sources", "backends", "cluster", "scripts", "doctor"} | TEACHING,
    "matplotlib": {"draw", "lessons"},
    "pandas": {"shown", "events", "join", "analysis"},
    "mpi4py": {"hooks", "backends", "cluster"},
}


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every module but the package's own `__init__`, which loads names lazily."""
    files = [path for path in sorted(HOUSE.rglob("*.py")) if path != HOUSE / "__init__.py"]
    return [(path.relative_to(HOUSE).parts[0].removesuffix(".py"), path) for path in files]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Every name and module that the file imports, if only for types, with the statement."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "optional":
            found += [(ast.literal_eval(node.args[0]), node)]
    return found


@pytest.mark.parametrize(("room", "path"), modules(), ids=[str(path.relative_to(HOUSE)) for _, path in modules()])
def test_imports_stay_in_order(room, path):
    assert room in MAY_IMPORT
    assert room in {*TEACHING, "cli"} or not MAY_IMPORT[room] & TEACHING
    for name, statement in imports(path):
        parts = name.split(".")
        if parts[0] == "dlearn" and len(parts) > 1 and (HOUSE / parts[1]).with_suffix("") != HOUSE / room:
            known = parts[1] in MAY_IMPORT
            assert not known or parts[1] in EVERYBODYS or parts[1] in MAY_IMPORT[room], ast.unparse(statement)
        if parts[0] in MAY_IMPORT_HEAVY:
            assert room in MAY_IMPORT_HEAVY[parts[0]], ast.unparse(statement)


def test_no_import_runs_in_a_circle():
    homes = {".".join(path.relative_to(HOUSE.parent).with_suffix("").parts): path for _, path in modules()}
    homes = {name.removesuffix(".__init__"): path for name, path in homes.items()}
    graph = nx.DiGraph()
    for home, path in homes.items():
        for name, _ in imports(path):
            graph.add_edge(home, name if name in homes else name.rpartition(".")[0])
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_no_class_name_means_two_things():
    homes: dict[str, list[str]] = defaultdict(list)
    for room, path in modules():
        names = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
        for name in names if room != "lessons" else ():
            homes[name].append(str(path.relative_to(HOUSE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_no_file_name_stands_twice_and_a_room_is_seen_at_a_glance():
    names = Counter(path.name for path in HOUSE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, files in names.items() if files > 1] == []
    rooms = Counter(str(path.parent.relative_to(HOUSE)) for path in HOUSE.rglob("*.py"))
    assert {room: files for room, files in rooms.items() if files > 25} == {}
    assert {str(path): n for _, path in modules() if (n := line_count(path)) > 400} == {}, "read in one sitting"


# What tests know of the house: a room that is built anew takes with it the tests that stand in it.

MOST = 15
PUBLIC = {"dlearn", "dlearn.errors", *(f"dlearn.{name}" for name in dlearn.__all__)}


def test_tests_import_public_names_and_few_modules_besides():
    homes: dict[str, set[str]] = defaultdict(set)
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"dlearn.{alias.name}" for alias in node.names] if node.module == "dlearn" else [node.module]
            for name in names:
                if name and name.split(".")[0] == "dlearn" and name not in PUBLIC:
                    homes[name].add(path.name)
    assert len(homes) <= MOST, "\n".join(f"{name}: {', '.join(sorted(homes[name]))}" for name in sorted(homes))


# The budget. A number may only fall: a feature that needs room makes it, and whoever makes room lowers the number.

LINES = {
    "benchmarks": 1_239,
    "course": 2_325,
    "dlearn": 1_252,
    "dlearn/analysis": 6_178,
    "dlearn/backends": 606,
    "dlearn/cluster": 3_210,
    "dlearn/collectives": 591,
    "dlearn/course": 2_649,
    "dlearn/diagnosis": 2_052,
    "dlearn/draw": 5_064,
    "dlearn/events": 4_467,
    "dlearn/export": 635,
    "dlearn/hooks": 4_318,
    "dlearn/join": 5_012,
    "dlearn/lessons": 2_517,
    "dlearn/live": 1_386,
    "dlearn/network": 1_037,
    "dlearn/play": 2_418,
    "dlearn/recorder": 716,
    "dlearn/scripts": 1_089,
    "dlearn/sources": 329,
    "docs": 1_533,
    "notebooks": 10_987,
    "tests": 16_178,
    "tools": 175,
}
SLACK = 0.01  # So far below its budget a folder may be before the budget has to be lowered.
HABITS = {
    "conditionals inside f-strings": 6,
    "docstrings that begin with no verb": 0,
    "functions of more than 10 branches": 6,
    "lines over 100 characters": 1_965,
    "statements of more than one comprehension": 35,
}


def folders() -> dict[str, list[Path]]:
    """The text files of each folder that has a budget; a room of dlearn is one, the files beside the rooms another."""
    home = HOUSE.parent
    found: dict[str, list[Path]] = defaultdict(list)
    for folder in {room.partition("/")[0] for room in LINES}:
        for path in (home / folder).rglob("*"):
            if path.suffix in {".py", ".js", ".css", ".html", ".md"} and ".ipynb_checkpoints" not in path.parts:
                parts = path.relative_to(home).parts
                room = "/".join(parts[:2]) if parts[0] == "dlearn" and len(parts) > 2 else parts[0]
                found[room].append(path)
    return found


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_folder_is_larger_than_its_budget():
    lines = {room: sum(map(line_count, paths)) for room, paths in folders().items()}
    assert {room: n for room, n in lines.items() if n > LINES.get(room, 0)} == {}, "make room before you add"
    assert {room: n for room, n in lines.items() if n < LINES[room] * (1 - SLACK)} == {}, "lower the budget"


def habits() -> Counter[str]:
    """How often dlearn does what its style does not want."""
    counts: Counter[str] = Counter()
    for _, path in modules():
        counts["lines over 100 characters"] += sum(len(line) > 100 for line in path.read_text("utf-8").splitlines())
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                counts["docstrings that begin with no verb"] += bool(NO_VERB.match(ast.get_docstring(node) or ""))
                counts["functions of more than 10 branches"] += number(BRANCHES, node) > 10
            elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
                counts["statements of more than one comprehension"] += number(COMPREHENSIONS, node) > 1
            elif isinstance(node, ast.FormattedValue):
                counts["conditionals inside f-strings"] += number(ast.IfExp, node) > 0
    return counts


def number(kinds: type | tuple[type, ...], within: ast.AST) -> int:
    return sum(isinstance(node, kinds) for node in ast.walk(within))


BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.match_case, ast.IfExp)
NO_VERB = re.compile(r"(A|All|An|As|At|By|Each|Every|For|From|How|If|In|Its?|Of|On|One|That|The|Those|Wh\w*)\s")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def test_habits_only_fade():
    assert dict(habits()) == HABITS, "a number only falls: lower it where the habit has faded"
