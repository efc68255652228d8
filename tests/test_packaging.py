"""What is built for others: a wheel and an sdist that work alone, and the files that people look for in a project."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import for_the_index
import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from readme import README, blocks

import dlearn

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = "https://forge.example/owner/project"
TAG = f"v{dlearn.__version__}"


def test_there_is_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == dlearn.__version__ == citation["version"]
    assert dlearn.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_says_what_its_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert all(citation[name] for name in ("message", "title", "authors"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_what_github_reads_is_yaml(path):
    assert yaml.safe_load(path.read_text())


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    text = (ROOT / page).read_text()
    targets = [target for _, _, target in for_the_index.LINK.findall(text)]
    for target in targets:
        file, _, heading = target.partition("#")
        led_to = (ROOT / page).parent / file if file else ROOT / page
        assert led_to.exists(), target
        assert not heading or heading in headings(led_to.read_text()), target


def headings(page: str) -> set[str]:
    """As links name them."""
    return {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in page.splitlines()}


def test_the_index_gets_absolute_links():
    text = for_the_index.with_absolute_links(
        "![a\nring](docs/ring.gif), [how](docs/how.md), [where it\nran](#where) and [PyPI](https://pypi.org)", HOME, TAG
    )
    assert text == (
        f"![a\nring]({HOME}/raw/{TAG}/docs/ring.gif), [how]({HOME}/blob/{TAG}/docs/how.md),"
        f" [where it\nran]({HOME}#where) and [PyPI](https://pypi.org)"
    )


def test_a_tag_that_is_not_this_version_is_refused(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    with pytest.raises(SystemExit, match="the tag v9 does not name the version"):
        for_the_index.main(tmp_path, HOME, "v9")
    assert (tmp_path / "README.md").read_text() == README


# Built, and installed where nothing else is ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What git holds and will hold, made fit for the index."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for_the_index.main(folder, HOME, TAG)
    return folder


def built(folder: Path, kind: str) -> Path:
    code = f"from flit_core.buildapi import build_{kind}; print(build_{kind}('dist'))"
    (folder / "dist").mkdir(exist_ok=True)
    return folder / "dist" / subprocess.check_output([sys.executable, "-c", code], cwd=folder, text=True).strip()


@pytest.fixture(scope="module")
def wheel(checkout) -> Path:
    return built(checkout, "wheel")


def test_the_wheel_holds_the_package_and_its_licence_and_nothing_else(checkout, wheel):
    held = zipfile.ZipFile(wheel).namelist()
    names = {name for name in held if ".dist-info/" not in name}
    package = {str(path.relative_to(checkout)) for path in (checkout / "dlearn").rglob("*") if path.is_file()}
    assert names == package >= {"dlearn/py.typed", "dlearn/play/player.js", "dlearn/lessons/data/digits.csv.gz"}
    facts = {"LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    assert {Path(name).name for name in set(held) - names} == facts


def test_the_index_would_take_the_metadata(wheel):
    folder = f"dlearn_trace-{dlearn.__version__}.dist-info"
    metadata = Metadata.from_email(zipfile.Path(wheel, f"{folder}/METADATA").read_bytes())
    assert metadata.name == "dlearn-trace"  # `dlearn` on the index is another project's
    assert metadata.project_urls == {"Homepage": HOME, "Changelog": f"{HOME}/blob/{TAG}/CHANGELOG.md"}
    assert metadata.description_content_type == "text/markdown"
    assert for_the_index.LINK.findall(metadata.description) == []
    core = [each.name for each in metadata.requires_dist if each.marker is None]
    assert core == [Requirement(line).name for line in PROJECT["dependencies"]]


def test_the_sdist_builds_the_same_wheel(checkout, wheel, tmp_path):
    with tarfile.open(built(checkout, "sdist")) as archive:
        # Python before 3.11.4 knows no filters, and one from 3.12 on asks for one.
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.iterdir()
    again = built(unpacked, "wheel")
    one, other = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert one.namelist() == other.namelist()
    assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []


def with_what_they_need(requirements: list[str], found: set[str]) -> set[str]:
    """The distributions that pip installs for these requirements, without any extra."""
    for requirement in map(Requirement, requirements):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            with_what_they_need(importlib.metadata.requires(requirement.name) or [], found)
    return found


@pytest.fixture(scope="module")
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
print(explain(run.trace))
for name in ("dlearn", "IPython", "pandas", "ipywidgets", "mpi4py"):
    print(name, importlib.util.find_spec(name) and importlib.util.find_spec(name).origin)
try:
    dlearn.messages(run.trace).to_frame()
except dlearn.DlearnError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_first_example_runs_with_the_wheel_and_core_dependencies_in_an_empty_folder(python, tmp_path):
    first = next(block for block in blocks(README) if block.language == "python")
    (tmp_path / "first.py").write_text(f"import importlib.util, dlearn\n{first.text}\n{REST}")
    done = subprocess.run([python, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    told, installed = done.stdout.split("\ndlearn ")
    assert "all_reduce" in told
    assert installed.splitlines()[0].startswith(str(python.parents[1]))
    assert installed.splitlines()[1:] == [
        "IPython None",
        "pandas None",
        "ipywidgets None",
        "mpi4py None",
        "to_frame needs pandas, which is not installed: pip install pandas",
    ]
    trace = next(tmp_path.glob(".dlearn/runs/*/trace"))
    command = python.with_name("dlearn")
    assert subprocess.check_output([command, "explain", trace], text=True).startswith("3 ranks (gloo)")
