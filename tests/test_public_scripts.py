"""Programs that this project did not write, run from the wheels that ship them: nothing of them is copied or changed.

accelerate's are whole scripts. torch's are programs made for its own tests, with processes that they spawn themselves;
`scripts/torch_rpc.py` and `scripts/torch_collectives.py` only name them. They take seconds to minutes, most of it for
imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dlearn.analysis.telling.words import overview
from dlearn.join.joining import operations
from dlearn.trace.trace import Trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 250
CROWDED = {"DistOptimizerTest.test_dist_optim_none_grads"}
"""It drops references while others are taken in: on a busy machine a few kinds cannot be told, and are "unknown". The
bound is that of tests/test_rpc_oracle.py for such programs."""
SCRIPTS = Path(__file__).parent / "scripts"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # torch's programs write an XML report, with a package of its own, wherever CI is set. Their master asks trainers
    # over RPC as soon as it has its own process group, which a trainer may not have yet: torch's switch has it wait.
    own = {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1", "TEMP_DIR": str(folder / "temporary"), "CI": ""}
    own["TORCH_DIST_INIT_BARRIER"] = "1"
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **own},
    )


def complete(done: subprocess.CompletedProcess[str], folder: Path, ranks: int) -> Trace:
    """The trace, of which nothing is missing."""
    assert done.returncode == 0, done.stderr
    assert "could not record" not in done.stderr
    assert "not recorded" not in done.stderr
    trace = Trace.load(folder)
    assert trace.problems == ()
    assert trace.ranks == tuple(range(ranks))
    assert all(process.closed for process in trace.processes)
    count = len(operations(trace))
    assert count > 0
    assert f"{count:,} of {count:,} operations explained" in overview(trace)
    return trace


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("accelerate.test_utils.scripts.test_sync", id="accelerate test_sync"),
        pytest.param("accelerate.test_utils.scripts.test_script", id="accelerate test_script"),
    ],
)
def test_a_script_for_torchrun_runs_unmodified(tmp_path, module):
    pytest.importorskip("accelerate")
    options = ("--standalone", "--nproc-per-node=2")
    plain = run(tmp_path, "torch.distributed.run", *options, "-m", module)
    done = run(tmp_path, "dlearn.cli", "run", *options, "--trace", "t", "-m", module)
    trace = complete(done, tmp_path / "t", 2)
    assert plain.returncode == 0, plain.stderr
    # Two ranks write into one pipe, and a line's text and its end may come apart, with dlearn and without.
    assert Counter(done.stdout) == Counter(plain.stdout)
    assert all(len(match.ends) == 2 for match in trace.matches)
    assert "all confirmed by the kernel's counters" in overview(trace)


@pytest.mark.parametrize(
    ("program", "workers", "collectives"),
    [
        pytest.param("ParameterServerTest", 4, False, id="torch rpc parameter_server_test"),
        pytest.param("ReinforcementLearningRpcTest", 4, False, id="torch rpc reinforcement_learning_rpc_test"),
        pytest.param("DistOptimizerTest.test_dist_optim_none_grads", 4, False, id="torch rpc dist_optimizer_test"),
        pytest.param("RemoteModuleTest.test_train_eval", 2, False, id="torch rpc remote_module_test"),
        pytest.param("DdpComparisonTest.test_ddp_comparison", 4, True, id="torch ddp_comparison"),
        pytest.param("DdpUnderDistAutogradTest.test_backward_ddp_outside", 6, True, id="torch ddp_under_dist_autograd"),
    ],
)
def test_a_program_of_torch_that_spawns_its_workers_runs_unmodified(tmp_path, program, workers, collectives):
    """Its output tells times, so that only the verdict of torch's own assertions can be compared.

    Every request of the agents is there, and its kind, which is inferred where the request is torch's own.
    """
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    done = run(tmp_path, "dlearn.cli", "run", "--trace", "t", str(SCRIPTS / "torch_rpc.py"), f"TensorPipe{program}")
    trace = complete(done, tmp_path / "t", workers)
    assert "\nRan 1 test in" in done.stderr
    assert "\nOK\n" in done.stderr
    assert trace.rpc.complete, trace.rpc.problems
    assert sum(each.request is not None for each in trace.rpc.exchanges) == trace.rpc.logged > 0
    if program in CROWDED:
        assert trace.rpc.explained >= 0.97 * trace.rpc.logged
    else:
        assert trace.rpc.explained == trace.rpc.logged
    assert bool(trace.where(kind="collective").events) == collectives


def test_torchs_program_of_sends_and_receives_runs_unmodified(tmp_path):
    """Three spawned ranks; each sends to each other one in turn, more and more: (rank + 1)^2 floats."""
    pytest.importorskip("expecttest", reason="torch's own tests need it")
    for name in ("barrier", "test_dir", "init_dir"):
        (tmp_path / "temporary" / name).mkdir(parents=True)
    script = str(SCRIPTS / "torch_collectives.py")
    done = run(tmp_path, "dlearn.cli", "run", "--trace", "t", script, "Spawned.test_send_recv")
    trace = complete(done, tmp_path / "t", 3)
    assert "\nOK\n" in done.stderr
    sent = {(match.sender, match.receiver) for match in trace.matches if match.sender is not None}
    assert sent == {(a, b) for a in range(3) for b in range(3) if a != b}
