"""Programs that this project did not write, run from the wheels that ship them, unchanged: a script of accelerate's
(Apache-2.0), and a part of torch's own tests (BSD-3), which `scripts/torch_rpc.py` names."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dlearn import Trace, explain, operations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).parent / "scripts"
SEEDED = """
import numpy.random
from functools import partial
numpy.random.default_rng = partial(lambda make, seed=None: make(seed or 0), numpy.random.default_rng)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # torch's programs write an XML report, with a package of its own, wherever CI is set. Their master asks trainers
    # over RPC as soon as it has its own process group, which a trainer may not have yet: torch's switch has it wait.
    # accelerate's data have no seed, and with some of them its own comparison of gradients is too strict.
    (folder / "sitecustomize.py").write_text(SEEDED)
    paths = os.pathsep.join([str(folder), *filter(None, [os.getenv("PYTHONPATH")])])
    own = {
        "PYTHONPATH": paths,
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "TEMP_DIR": str(folder / "temporary"),
        "CI": "",
    }
    facts = os.environ | own | {"TORCH_DIST_INIT_BARRIER": "1"}
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, env=facts)


def complete(done: subprocess.CompletedProcess[str], folder: Path, ranks: int) -> Trace:
    """The trace, of which nothing is missing."""
    assert done.returncode == 0, done.stderr
    assert "not record" not in done.stderr
    trace = Trace.load(folder)
    assert trace.problems == ()
    assert trace.ranks == tuple(range(ranks))
    count = len(operations(trace))
    assert count > 0
    assert f"{count:,} of {count:,} operations explained" in explain(trace).sentences[0]
    return trace


def test_a_script_for_torchrun_runs_unmodified(tmp_path):
    pytest.importorskip("accelerate")
    options = ("--standalone", "--nproc-per-node=2")
    script = ("-m", "accelerate.test_utils.scripts.test_sync")
    plain = run(tmp_path, "torch.distributed.run", *options, *script)
    done = run(tmp_path, "dlearn.cli", "run", *options, "--trace", "t", *script)
    trace = complete(done, tmp_path / "t", 2)
    # Without dlearn, torch's group dies at its own end in one run of six, after the last line that is compared.
    assert plain.returncode == 0 or "exitcode: -6" in plain.stderr, plain.stderr
    # Two ranks write into one pipe, and a line's text and its end may come apart, with dlearn and without.
    assert Counter(done.stdout) == Counter(plain.stdout)
    assert "all confirmed by the kernel's counters" in explain(trace).sentences[0]


def test_a_program_of_torch_that_spawns_its_workers_runs_unmodified(tmp_path):
    """A trainer by DDP and RPC, six workers. Its output tells times, so that only the verdict of torch's own assertions
    can be compared.

    Every request of the agents is there, and its kind, which is inferred where the request is torch's own.
    """
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    program = "TensorPipeDdpUnderDistAutogradTest.test_backward_ddp_outside"
    done = run(tmp_path, "dlearn.cli", "run", "--trace", "t", str(SCRIPTS / "torch_rpc.py"), program)
    trace = complete(done, tmp_path / "t", 6)
    assert "\nOK\n" in done.stderr
    assert trace.rpc.complete, trace.rpc.problems
    assert trace.rpc.explained == trace.rpc.logged > 0
    assert trace.where(kind="collective").events
