"""For the tests of a course: `pytest -p dlearn.course.pytest_plugin`.

def test_my_ring(cluster):                      # runs on 2, 3 and 4 ranks
    run = cluster.run(drive, my_ring)
    assert_traffic(run.trace, op="send", bytes_per_rank=..., pattern="ring")

def test_the_same_as_the_notebook(graded):
    graded("ring", my_ring)                     # fails with the finding and the hint of `lessons.check`
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlearn.cluster import Cluster
from dlearn.course.catalogue import check


@pytest.fixture(params=(2, 3, 4), ids="n={}".format)
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield 2, 3 and 4 ranks on the glass-box ring, with checksums, in an empty folder.

    Other numbers: `@pytest.mark.parametrize("cluster", [5], indirect=True)`.
    """
    monkeypatch.chdir(tmp_path)
    with Cluster(request.param, backend="dlearn_ring", checksums=True) as ranks:
        yield ranks


@pytest.fixture
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a `lessons.check` that fails the test where a submission does not pass."""
    monkeypatch.chdir(tmp_path)

    def grade(id: str, submission: Any, **options: Any) -> None:
        found = check(id, submission, **options)
        if not found.passed:
            pytest.fail(str(found), pytrace=False)

    return grade
