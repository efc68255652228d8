"""pyproject.toml, environment.yml and constraints.txt agree; `make` installs what its target needs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from install_torch import CPU_INDEX, explain_choice, extra_pip_arguments, pinned_version
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
PINNED = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, version in (line.split("==") for line in PINNED)}
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def test_every_direct_dependency_is_pinned_within_its_range_and_installed():
    assert [name for name, wanted in DIRECT.items() if PINS[name] not in wanted] == []
    assert [name for name, wanted in CORE.items() if importlib.metadata.version(name) not in wanted] == []


def test_conda_asks_for_what_pyproject_asks_for_with_the_torch_of_the_constraints():
    plain = [line for line in CONDA if isinstance(line, str)]
    offered = ranges([line if ">=" in line else line.replace("=", "==") for line in plain])  # conda writes `=1.2`
    assert offered.pop("pytorch-cpu") == SpecifierSet(f"=={PINS['torch']}")
    (python,) = offered.pop("python")
    assert python.version in SpecifierSet(PROJECT["requires-python"])
    wanted = CORE | ranges([line for extra in ("notebook", "lab", "mpi") for line in EXTRAS[extra]])
    wanted = {CONDA_NAMES.get(name, name): specifier for name, specifier in wanted.items() if name != "torch"}
    assert {name: specifier for name, specifier in offered.items() if name != "pip"} == wanted


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder where nothing is installed; `make -n` says there what it would run."""
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/install_torch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def asked_of_pip(target: str, folder: Path) -> list[str]:
    """All that comes behind the options that every call of pip has."""
    # The `make` that runs these tests leaves its own flags in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    commands = subprocess.check_output(["make", "-n", target], cwd=folder, env=environment, text=True)
    return [" ".join(found.split()) for found in re.findall("-m pip install .*--no-build-isolation (.*)", commands)]


DEMO = "--no-compile -e ."
TEST = '-e ".[notebook,mpi]" --group test'


def test_a_target_sets_up_what_it_needs_once_and_afresh_what_was_cut_off(clone):
    assert asked_of_pip("demo", clone) == [DEMO]
    assert asked_of_pip("test-all", clone) == [DEMO, TEST, '-e ".[lab,mpi]" --group test-all']
    (clone / ".venv").mkdir()
    (clone / ".venv/.demo").write_text("43")
    assert asked_of_pip("demo", clone) == []
    assert asked_of_pip("check", clone) == ["--group check"]
    (clone / ".venv/.check").write_text("43")
    (clone / ".venv/.unfinished").write_text("1795345200")
    assert asked_of_pip("check", clone) == [DEMO, "--group check"]


@pytest.mark.parametrize(
    ("brought", "has_driver", "arguments", "said"),
    [
        (["nvidia-cublas", "triton"], False, ["--index-url", CPU_INDEX], "there is no NVIDIA driver here"),
        (["nvidia-cublas", "triton"], True, [], "there is an NVIDIA driver here"),
        (["sympy", "not-nvidia"], False, [], "it brings no CUDA packages"),
    ],
)
def test_the_cpu_index_is_for_cuda_without_a_driver(brought, has_driver, arguments, said):
    # What `pip install --dry-run --report` writes, as far as we read it.
    report = {"install": [{"metadata": {"name": name}} for name in ["torch", *brought]]}
    assert extra_pip_arguments(report, has_driver=has_driver) == arguments
    assert said in explain_choice(report, has_driver=has_driver)
    assert pinned_version("torch", "# torch==1.0\npytorch==2.0\ntorch==2.13.0\n") == "2.13.0"
