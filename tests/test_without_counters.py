"""As on a Mac: without the kernel's counters and namespaces, and without mpi4py, lessons run, or say what they need."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

SOURCES = [path for path in sorted(Path(__file__).parent.parent.glob("notebooks/*.py")) if path.stem != "build"]
NEEDS = {path: re.search(r"needs: \[(.*?)\]", path.read_text("utf-8"))[1] for path in SOURCES}
COUNTING = [
    path
    for path, needs in NEEDS.items()
    if path.stem != "ddp_paper"  # It takes minutes, and its claims are tried elsewhere.
    and (needs or re.search("reconcile|measured_bytes|measure=|knobs", path.read_text("utf-8")))
]

SITE = '''
"""Read by every Python that starts, so by the ranks, too."""

import sys
from importlib.machinery import PathFinder
from types import SimpleNamespace

AS_ON_A_MAC = ("dlearn.hooks.network.sockets", "dlearn.network.namespace")


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "mpi4py":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if name in AS_ON_A_MAC:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), on_a_mac(module))
        return spec


def on_a_mac(module):
    module.sys = SimpleNamespace(platform="darwin")
    if hasattr(module, "unshare"):
        def refuse():
            raise module.NotPermitted("only Linux has network namespaces")

        module.unshare = refuse


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
'''

COUNTS_NOTHING = """
import torch.distributed as dist
from dlearn import Cluster
from dlearn.analysis import reconcile

assert reconcile(Cluster(2).run(dist.barrier).trace).not_measured.startswith("darwin")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", COUNTING, ids=lambda source: source.stem)
def test_a_lesson_runs_or_says_in_one_sentence_what_it_needs(build, source, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.getenv("PYTHONPATH")])]))
    notebook = build.read(source)
    notebook.cells.append(build.nbformat.v4.new_code_cell(COUNTS_NOTHING))
    if not NEEDS[source]:
        build.execute(notebook)  # raises with the cell and its error, if one fails
        return
    with pytest.raises(build.CellExecutionError) as failed:
        build.execute(notebook)
    assert failed.value.ename == "SetupError"
    assert re.search("network of their own|needs mpi4py", failed.value.evalue)
    assert "\n" not in failed.value.evalue
