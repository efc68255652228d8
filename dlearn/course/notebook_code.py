"""Take what is graded out of a notebook, with what it uses, without running the rest.

Run are the imports, and the statements at the top of a cell that define it, or a name that it
uses, directly or through others: functions, classes, assignments, each where it stands. Not run
are calls, pictures, magics and `lessons.check`. A cell that is no Python is left out, and said.
"""

import ast
import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

MAGIC = re.compile(r"^(\s*)(?:\w+\s*=\s*)?[%!].*$", re.MULTILINE)


@dataclass(frozen=True)
class HandedIn:
    """A file, parsed: its statements with their cell's number, and what could not be parsed."""

    file: Path
    statements: tuple[tuple[int, ast.stmt], ...]
    left_out: str = ""

    def checked(self, exercise: str) -> tuple[str, str]:
        """Return what its last `check(exercise, ..., student=...)` is given, and as whose.

        Without a student it is the first `check`, before any tries; without one, the id itself.
        """
        calls = []
        for node in chain.from_iterable(ast.walk(each) for _, each in self.statements):
            match node:
                case ast.Call(args=[ast.Constant(value), answer], keywords=[*keywords]):
                    student = [ast.unparse(k.value) for k in keywords if k.arg == "student"]
                    if value == exercise and ast.unparse(node.func).endswith("check"):
                        calls.append((ast.unparse(answer), "".join(student)))
        return ([each for each in calls if each[1]] or calls[:1] or [(exercise, "")])[-1]

    def run_definitions(self, *wanted: str) -> dict[str, Any]:
        """Return the names that the definitions of these expressions make; raise what they do."""
        names: dict[str, Any] = {"__name__": "<submission>"}
        used = {each.id for text in wanted if text for each in _names_in(ast.parse(text))}
        for place in _needed([each for _, each in self.statements], used):
            cell, statement = self.statements[place]
            code = compile(ast.Module([statement], []), f"{self.file.name}, cell {cell}", "exec")
            exec(code, names)
        return names


def parsed(file: Path) -> HandedIn:
    """Parse a .py, or the cells of a notebook. Raises SyntaxError of the former."""
    if file.suffix == ".py":
        statements = ast.parse(file.read_bytes(), file.name).body
        return HandedIn(file, tuple((0, each) for each in statements))
    left_out: list[str] = []
    numbered = [(n, each) for n, cell in _cells(file, left_out) for each in cell]
    return HandedIn(file, tuple(numbered), "\n".join(left_out))


def _cells(file: Path, left_out: list[str]) -> list[tuple[int, list[ast.stmt]]]:
    """Return the number and the statements of each cell of code; note those that are no Python."""
    found = []
    for number, cell in enumerate(json.loads(file.read_text(encoding="utf-8"))["cells"], 1):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.startswith("%%"):
            continue
        try:
            found.append((number, _parsed(source)))
        except SyntaxError as error:
            left_out.append(f"cell {number} is left out: line {error.lineno}: {error.msg}")
    return found


def _parsed(source: str) -> list[ast.stmt]:
    """Parse a cell, if need be without the lines that are magics. Raises SyntaxError."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return ast.parse(MAGIC.sub(r"\1pass", source)).body


def _needed(statements: list[ast.stmt], wanted: set[str]) -> list[int]:
    """Return the places of imports, and of what binds a name that is wanted, or used by those."""
    kept = set[int]()
    while True:
        more = {
            place
            for place, each in enumerate(statements)
            if isinstance(each, ast.Import | ast.ImportFrom) or _bound(each) & wanted
        }
        if more == kept:
            return sorted(kept)
        kept = more
        for place in kept:
            wanted |= {each.id for each in _names_in(statements[place])}


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Expr):
        return set()
    return {each.id for each in _names_in(statement) if isinstance(each.ctx, ast.Store)}


def _names_in(tree: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
