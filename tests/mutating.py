"""Run the cells that a tagged cell needs, with a mutation, in this process: python mutating.py LESSON.py < mutations

Of each mutation one line of JSON: the type of the error that ended it, its text, and the number of the cell.
"""

from __future__ import annotations

import ast
import json
import sys

import jupytext
from IPython.core.interactiveshell import InteractiveShell

CHANGING = {"append", "update", "add", "extend", "insert", "pop", "setdefault", "clear"}


def main() -> None:
    notebook = jupytext.read(sys.argv[1], fmt="py:percent")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shell = InteractiveShell.instance()
    shell.run_cell("import matplotlib; matplotlib.use('agg')", store_history=False)
    for id, old, new in json.load(sys.stdin):
        sources = [cell.source for cell in cells]
        place = next((number for number, source in enumerate(sources) if old in source), None)
        answer = {"id": id, "place": place, "error": "", "told": "", "cell": None}
        if place is not None:
            sources[place] = sources[place].replace(old, new, 1)
            tagged = [number for number, cell in enumerate(cells) if id in cell.metadata.get("tags", [])]
            answer |= run(shell, sources, tagged)
        print(json.dumps(answer), file=sys.__stdout__, flush=True)


def run(shell: InteractiveShell, sources: list[str], tagged: list[int]) -> dict[str, object]:
    """Each tagged cell in turn, with what it needs, until one fails."""
    for target in tagged:
        shell.reset(new_session=True, aggressive=False)
        sys.modules["__main__"].__spec__ = None  # the fork server asks for it
        for number in needed(sources, target):
            result = shell.run_cell(sources[number], store_history=False)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                return {"error": type(error).__name__, "told": str(error)[:500], "cell": number}
    return {}


def needed(sources: list[str], target: int) -> list[int]:
    """The cells that make the names which the target uses, in their order, and the target."""
    names, chosen = reads(sources[target]), [target]
    for number in range(target - 1, -1, -1):
        made, changed = writes(sources[number])
        if names & (made | changed):
            names = (names - made) | reads(sources[number])
            chosen.append(number)
    return sorted(chosen)


def reads(source: str) -> set[str]:
    nodes = ast.walk(ast.parse(source))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def writes(source: str) -> tuple[set[str], set[str]]:
    """Names that the cell makes, outside of its functions, and names of objects that it changes."""
    made: set[str] = set()
    changed: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
            continue
        if isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            changed.add(node.value.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            changed.add(node.target.id)
        elif isinstance(node, ast.Attribute) and node.attr in CHANGING and isinstance(node.value, ast.Name):
            changed.add(node.value.id)
        waiting += ast.iter_child_nodes(node)
    return made - changed, changed


if __name__ == "__main__":
    main()
