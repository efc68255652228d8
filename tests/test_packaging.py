"""What is built for others: a wheel that works alone, the site, what people look for in a project; and what is
installed: pyproject.toml, environment.yml and constraints.txt agree, `make` installs what its target needs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from urllib.parse import unquote

import for_the_index
import pytest
import yaml
from install_torch import CPU_INDEX, choose_build, pinned_version
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import dlearn

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
HOME = "https://forge.example/owner/project"
TAG = f"v{dlearn.__version__}"


def test_there_is_one_version_and_a_citation_with_what_its_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == dlearn.__version__ == citation["version"]
    assert dlearn.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert (citation["cff-version"], citation["license"]) == ("1.2.0", PROJECT["license"])
    assert all(citation[name] for name in ("message", "title", "authors"))
    assert all(yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml"))


PAGES = [*ROOT.glob("[A-Z]*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    text = page.read_text()
    assert "@@" not in text, "left half-written"
    for _, _, target in for_the_index.LINK.findall(text):
        file, _, heading = target.partition("#")
        led_to = page.parent / file if file else page
        assert led_to.exists(), target
        assert not heading or heading in headings(led_to.read_text()), target


def headings(page: str) -> set[str]:
    """As links name them."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in page.splitlines()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a wheel is built of, made fit for the index."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "dlearn", folder / "dlearn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for_the_index.main(folder, HOME, TAG)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout) -> Path:
    code = "from flit_core.buildapi import build_wheel; print(build_wheel('dist'))"
    (checkout / "dist").mkdir()
    return checkout / "dist" / subprocess.check_output([sys.executable, "-c", code], cwd=checkout, text=True).strip()


def test_the_wheel_holds_the_package_and_its_licence_and_metadata_that_the_index_takes(checkout, wheel):
    held = zipfile.ZipFile(wheel).namelist()
    names = {name for name in held if ".dist-info/" not in name}
    package = {str(path.relative_to(checkout)) for path in (checkout / "dlearn").rglob("*") if path.is_file()}
    assert names == package >= {"dlearn/py.typed", "dlearn/play/player.js", "dlearn/lessons/data/digits.csv.gz"}
    facts = {"LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    assert {Path(name).name for name in set(held) - names} == facts
    folder = f"dlearn_trace-{dlearn.__version__}.dist-info"
    metadata = Metadata.from_email(zipfile.Path(wheel, f"{folder}/METADATA").read_bytes())
    assert metadata.name == "dlearn-trace"  # `dlearn` on the index is another project's
    assert metadata.project_urls == {"Homepage": HOME, "Changelog": f"{HOME}/blob/{TAG}/CHANGELOG.md"}
    assert for_the_index.LINK.findall(metadata.description) == []
    core = [each.name for each in metadata.requires_dist if each.marker is None]
    assert core == [Requirement(line).name for line in PROJECT["dependencies"]]


def with_what_they_need(requirements: list[str], found: set[str]) -> set[str]:
    """The distributions that pip installs for these requirements, without any extra."""
    for requirement in map(Requirement, requirements):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            with_what_they_need(importlib.metadata.requires(requirement.name) or [], found)
    return found


@pytest.fixture
def python(wheel, tmp_path_factory) -> Path:
    """The Python of a new environment with the wheel and what it asks for, linked from here: no Jupyter, no pandas."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in with_what_they_need(PROJECT["dependencies"], set()):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(distribution.locate_file(top))
    install = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-index"]
    subprocess.run([*install, "--no-deps", wheel], check=True)
    return folder / "bin/python"


REST = """
print(dlearn.__file__)
for name in ("IPython", "pandas", "ipywidgets", "mpi4py"):
    assert importlib.util.find_spec(name) is None
"""


@pytest.mark.slow
def test_the_first_example_runs_with_the_wheel_and_core_dependencies_in_an_empty_folder(python, tmp_path):
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    (tmp_path / "first.py").write_text(f"import importlib.util, dlearn\n{first}\n{REST}")
    done = subprocess.run([python, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith(str(python.parents[1]))
    trace = next(tmp_path.glob(".dlearn/runs/*/trace"))
    command = python.with_name("dlearn")
    assert subprocess.check_output([command, "explain", trace], text=True).startswith("3 ranks (gloo)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_and_every_link_of_it_leads_somewhere(tmp_path):
    pytest.importorskip("myst_nb", reason="this needs the dependency group `site`")
    out = tmp_path / "out"
    subprocess.run([sys.executable, ROOT / "course" / "make_site.py", "--out", out], check=True)
    pages = {page: page.read_text() for page in (out / "html").rglob("*.html")}
    assert len(pages) > 45
    read = {page.name: text for page, text in pages.items()}
    assert len(re.findall("<tr", read["questions.html"])) == 86 + 1
    assert len(re.findall("<tr", read["glossary.html"])) == 15 + 1
    assert read["api.html"].count('class="highlight-python') > 15
    assert read["quickstart.html"].count('class="dlearn-player') == 3, "two players and a strip"
    for page, text in pages.items():
        assert "tag_answer" not in text, "an answer is in sight"
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:', text), page
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="https?:', text), page
        for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            file, _, heading = unquote(target).partition("#")
            led_to = (page.parent / file).resolve() if file else page
            assert led_to.exists(), (page.name, target)
            if heading and led_to in pages:
                assert f'id="{heading}"' in pages[led_to], (page.name, target)


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
    chosen, reason = choose_build(report, has_driver=has_driver)
    assert chosen == arguments
    assert said in reason
    assert pinned_version("torch", "# torch==1.0\npytorch==2.0\ntorch==2.13.0\n") == "2.13.0"
