"""pyproject.toml, environment.yml and constraints.txt ask for the same things."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONDA_NAMES = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base", "nbconvert": "nbconvert-core"}


def ranges(lines: list[str]) -> dict[str, SpecifierSet]:
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in requirements}


CORE = ranges(PROJECT["dependencies"])
DIRECT = CORE | ranges([line for lines in EXTRAS.values() for line in lines])


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
    wanted = CORE | ranges([line for extra in ("lab", "mpi", "dev") for line in EXTRAS[extra]])
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


def test_pip_inside_conda_installs_only_the_project():
    assert conda()[1] == ["-e . --no-deps"]


@pytest.mark.parametrize("name", DIRECT)
def test_every_direct_dependency_is_pinned_within_its_range(name):
    assert pins()[name] in DIRECT[name]


@pytest.mark.parametrize("name", CORE)
def test_what_is_installed_satisfies_pyproject(name):
    assert importlib.metadata.version(name) in CORE[name]
