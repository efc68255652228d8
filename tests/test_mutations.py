"""Each question that a lesson answers is answered by a cell that fails when its claim is made false."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, UNTRIED, WITHOUT

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"


def ids_of(lesson: str) -> set[str]:
    found = re.search(r"ids: \[(.*?)\]", (NOTEBOOKS / f"{lesson}.py").read_text())
    return set(found[1].split(", ")) - {""}


def tags_of(lesson: str) -> set[str]:
    heads = re.findall(r"^# %% tags=(\[.*\])", (NOTEBOOKS / f"{lesson}.py").read_text(), re.MULTILINE)
    return {tag for head in heads for tag in json.loads(head)} - {"run", "check", "exercise", "answer"}


def test_every_question_has_a_mutation_or_a_reason():
    lessons = [path.stem for path in NOTEBOOKS.glob("*.py") if path.stem != "build"]
    answered = set().union(*(ids_of(lesson) for lesson in lessons))
    mutated = {each.id for mutations in (MUTATIONS | UNTRIED).values() for each in mutations}
    assert answered == mutated | set(WITHOUT)
    assert not mutated & set(WITHOUT)


@pytest.mark.parametrize("lesson", MUTATIONS | UNTRIED)
def test_a_mutated_lesson_has_its_cells_tagged_and_the_text_that_is_changed(lesson):
    mutations = (MUTATIONS | UNTRIED)[lesson]
    assert {each.id for each in mutations} <= tags_of(lesson) <= ids_of(lesson)
    source = (NOTEBOOKS / f"{lesson}.py").read_text()
    assert [each.id for each in mutations if each.old not in source] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lesson", MUTATIONS)
def test_a_cell_fails_where_its_claim_is_made_false(lesson, tmp_path):
    source = NOTEBOOKS / f"{lesson}.py"
    if "needs: [mpi]" in source.read_text():
        pytest.importorskip("mpi4py", reason="this lesson needs the extra `mpi`")
    done = subprocess.run(
        [sys.executable, HERE / "mutating.py", source],
        input=json.dumps(MUTATIONS[lesson]),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]
    assert [each["id"] for each in answers] == [each.id for each in MUTATIONS[lesson]], done.stderr[-2000:]
    code = [cell for cell in re.split(r"(?m)^(?=# %%)", source.read_text())[1:] if "[markdown]" not in cell[:16]]
    for each in answers:
        assert each["error"] == "AssertionError", each
        assert f'"{each["id"]}"' in code[each["cell"]].splitlines()[0], each
