"""Which folders of runs are deleted, and which never: no other's, and none that a notebook uses, wherever it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlearn.cluster.run import Run, keep_folder, new_folder
from dlearn.errors import SetupError

pytestmark = pytest.mark.usefixtures("own_folder")
RUNS = Path(".dlearn", "runs")


def one_of_another_process() -> Path:
    """A run of a process that has ended without giving it up."""
    code = "from dlearn.cluster.run import new_folder; print(new_folder())"
    return Path(subprocess.check_output([sys.executable, "-c", code], text=True).strip())


def make_many() -> list[Path]:
    """More runs than are kept, of which no `Run` is in hand any more."""
    made = [new_folder() for _ in range(22)]
    for number, folder in enumerate(made):
        (folder / "in-use").unlink()
        os.utime(folder, (number, number))
    return [*made, new_folder()]


def test_the_newest_twenty_runs_are_kept_and_nothing_but_runs_is_deleted():
    best, named, elsewhere = RUNS / "my-best-run", RUNS / "20250101-000000-aaaaaa", Path("elsewhere")
    file, link = RUNS / "20250101-000000-bbbbbb", RUNS / "20250101-000000-cccccc"
    for folder in (best / "trace", named, elsewhere / "trace"):
        folder.mkdir(parents=True)
    file.touch()
    link.symlink_to(elsewhere.absolute())
    others = [best / "trace", named, file, link, elsewhere / "trace"]
    for path in others:
        os.utime(path, (0, 0))
    made = make_many()
    assert all(path.exists() for path in others)
    assert sorted(made[3:]) == sorted(path for path in made if path.exists())


@pytest.mark.parametrize("link", [RUNS.parent, RUNS])
def test_a_link_in_the_place_of_the_folder_is_refused_before_anything_is_deleted(link):
    theirs = [Path("theirs", *below, f"20250101-000000-{n:06x}") for n in range(25) for below in ((), ("runs",))]
    for path in theirs:
        (path / "trace").mkdir(parents=True)
    if link == RUNS:
        RUNS.parent.mkdir()
    link.symlink_to(Path("theirs").absolute())
    with pytest.raises(SetupError, match=rf"cannot be kept in \S+{link}: it is a symbolic link\. Remove it"):
        new_folder()
    assert sorted(theirs) == sorted(Path("theirs").glob("**/2025*"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("path", [RUNS.parent, RUNS])
def test_a_folder_of_another_user_is_refused_before_anything_is_deleted(path):
    made = [new_folder() for _ in range(20)]
    for each in made:
        (each / "in-use").unlink()
    os.chown(path, 65534, 65534)
    with pytest.raises(SetupError, match=rf"cannot be kept in \S+{path}: it is another user's"):
        new_folder()
    assert sorted(made) == sorted(RUNS.absolute().iterdir())


def test_a_run_is_kept_while_its_run_is_in_hand_and_its_process_lives():
    run = Run(new_folder(), True)
    keep_folder(run)
    folder, of_one_that_ended, of_another_pid = run.folder, one_of_another_process(), one_of_another_process()
    numbering, ended = (of_another_pid / "in-use").read_text().split("\n")
    (of_another_pid / "in-use").write_text(f"{numbering}\n{os.getpid()} {ended.partition(' ')[2]}")
    make_many()
    assert [each.exists() for each in (folder, of_one_that_ended, of_another_pid)] == [True, False, False]
    del run
    make_many()
    assert not folder.exists()
