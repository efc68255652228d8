"""Columns of the table of messages tell the same as its messages, of every kind of job that is frozen."""

import zipfile

import frozen_answers
import pytest

from dlearn import Trace, messages
from dlearn.trace.tables.event_table import NONE


@pytest.mark.parametrize("name", ["mpi", "rpc", "workloads", "lesson-museum_of_hangs"])
def test_columns_are_those_of_the_messages(name, tmp_path):
    zipfile.ZipFile(frozen_answers.HERE / f"{name}.zip").extractall(tmp_path)
    missing = observed = 0
    for folder in sorted(path for path in tmp_path.iterdir() if path.is_dir()):
        found = messages(Trace.load(folder))
        called = [[end.start_ns for end in each.operation.ends if end.rank == each.src] for each in found]
        assert found.src.tolist() == [each.src for each in found]
        assert found.missing.tolist() == [each.how == "missing" for each in found]
        for at_ns, starts in zip(found.called_ns.tolist(), called, strict=True):
            assert at_ns in starts or (at_ns == NONE and not starts)
        missing += found.missing.sum()
        observed += len(found) - found.missing.sum()
    assert observed
    assert missing or "hangs" not in name
