"""pyproject.toml, environment.yml and constraints.txt agree; `make` installs what its target needs."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_NAMES = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    """What is asked for by name; what an extra or a group takes over from another one stands there."""
    requirements = [Requirement(line) for line in lines if isinstance(line, str)]
    return {canonicalize_name(r.name): r.specifier for r in requirements if r.name != PROJECT["name"]}


CORE = ranges(PROJECT["dependencies"])
LISTS = [PYPROJECT["build-system"]["requires"], *EXTRAS.values(), *PYPROJECT["dependency-groups"].values()]
DIRECT = CORE | ranges([line for lines in LISTS for line in lines])


def pins() -> dict[str, str]:
    """Name to version; a line that is not `name==version` fails here."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def conda() -> tuple[dict[str, SpecifierSet], list[str]]:
    """What conda installs, and what its pip installs. conda writes `=1.2` where pip writes `==1.2`."""
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = [line for section in lines if isinstance(section, dict) for line in section["pip"]]
    plain = [line for line in lines if isinstance(line, str)]
    return ranges([line if ">=" in line else line.replace("=", "==") for line in plain]), pip


def test_environment_yml_asks_for_what_pyproject_asks_for():
    wanted = CORE | ranges([line for extra in ("notebook", "lab", "mpi") for line in EXTRAS[extra]])
    wanted = {CONDA_NAMES.get(name, name): specifier for name, specifier in wanted.items()}
    offered, _ = conda()
    assert offered.keys() - {"python", "pip"} == wanted.keys()
    del wanted["pytorch-cpu"]  # the one exact pin, see the next test
    assert {name: offered[name] for name in wanted} == wanted


def test_environment_yml_pins_torch_as_constraints_do():
    assert conda()[0]["pytorch-cpu"] == SpecifierSet(f"=={pins()['torch']}")


def test_environment_yml_has_a_python_that_pyproject_allows():
    (python,) = conda()[0]["python"]
    assert python.version in SpecifierSet(PROJECT["requires-python"])


def test_pip_inside_conda_installs_only_the_project(tmp_path):
    """conda and mamba hand the lines to pip as a file of requirements, in the folder of environment.yml."""
    (tmp_path / "lines.txt").write_text("\n".join(conda()[1]))
    ask = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation"]
    ask += ["--dry-run", "--report", tmp_path / "report.json", "-r", tmp_path / "lines.txt"]
    subprocess.run(ask, cwd=ROOT, check=True)
    wanted = json.loads((tmp_path / "report.json").read_text())["install"]
    assert [each["metadata"]["name"] for each in wanted] == [PROJECT["name"]]


@pytest.mark.parametrize("name", DIRECT)
def test_every_direct_dependency_is_pinned_within_its_range(name):
    assert pins()[name] in DIRECT[name]


@pytest.mark.parametrize("name", CORE)
def test_what_is_installed_satisfies_pyproject(name):
    assert importlib.metadata.version(name) in CORE[name]


# `make`, which says what it would run (-n) in a folder where nothing is installed -------------------------------------


@pytest.fixture
def clone(tmp_path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/install_torch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def would_run(target: str, folder: Path) -> str:
    # The `make` that runs these tests leaves its own flags in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.check_output(["make", "-n", target], cwd=folder, env=environment, text=True)


def asked_of_pip(commands: str) -> list[str]:
    """All that comes behind the options that every call of pip has."""
    return [" ".join(found.split()) for found in re.findall("-m pip install .*--no-build-isolation (.*)", commands)]


DEMO = "--no-compile -e ."
TEST = '-e ".[notebook,mpi]" --group test'


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("demo", [DEMO]),
        ("paper", [DEMO]),
        ("lab", [DEMO, '-e ".[lab,mpi]"']),
        ("test", [DEMO, TEST]),
        ("test-all", [DEMO, TEST, '-e ".[lab,mpi]" --group test-all']),
        ("check", [DEMO, "--group check"]),
        ("notebooks", [DEMO, '-e ".[notebook,mpi]" --group notebooks']),
        ("site", [DEMO, "--group site"]),
        ("bench", [DEMO, "--group bench"]),
    ],
)
def test_each_target_installs_what_it_needs_and_no_more(target, asked, clone):
    assert asked_of_pip(would_run(target, clone)) == asked


def test_what_is_set_up_is_not_set_up_again(clone):
    (clone / ".venv").mkdir()
    (clone / ".venv/.demo").write_text("43")
    assert asked_of_pip(would_run("demo", clone)) == []
    assert asked_of_pip(would_run("check", clone)) == ["--group check"]


def test_a_set_up_that_was_cut_off_starts_afresh(clone):
    (clone / ".venv").mkdir()
    for name in (".demo", ".check"):
        (clone / ".venv" / name).write_text("43")
    (clone / ".venv/.unfinished").write_text("1795345200")
    commands = would_run("check", clone)
    assert "starting afresh" in commands
    assert asked_of_pip(commands) == [DEMO, "--group check"]
