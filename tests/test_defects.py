"""Each defect of tests/defects.toml can be put where it belongs; whether a test tells is `make test-defects`."""

import re
from collections import Counter
from pathlib import Path

import pytest
from defects import HOME, defects


@pytest.mark.parametrize("defect", defects(), ids=lambda each: each.name)
def test_a_defect_changes_one_place_of_a_file_that_still_compiles(defect):
    path = HOME / defect.file
    changed = defect.applied(path.read_text(encoding="utf-8"))
    if path.suffix == ".py":
        compile(changed, path, "exec")
    file, _, test = defect.told_by.partition("::")
    assert not file or f"def {test.partition('[')[0]}(" in (HOME / file).read_text(encoding="utf-8")


def test_the_defects_are_of_all_rooms_and_each_has_a_name():
    assert [name for name, times in Counter(each.name for each in defects()).items() if times > 1] == []
    rooms = {path.name for path in Path(HOME, "dlearn").iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert rooms - {each.file.split("/")[1] for each in defects()} == set()


def test_each_question_has_a_wrong_answer():
    page = (HOME / "docs/questions.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\| ([A-Z]+\d+) ", page, re.MULTILINE)
    assert sorted(asked) == sorted(each.question for each in defects() if each.question)
