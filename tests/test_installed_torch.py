"""Which torch can be recorded, and what only some versions have."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import workloads
from torch._C import _distributed_c10d

from dlearn import Cluster
from dlearn.errors import SetupError
from dlearn.hooks import private
from dlearn.hooks.c10d import c10d_ops, collectives
from dlearn.hooks.c10d.groups import Groups
from dlearn.trace.event import Collective, PointToPoint


def test_a_torch_without_a_name_that_is_needed_is_told_in_one_sentence(monkeypatch):
    monkeypatch.delattr(_distributed_c10d, "_dump_fr_trace_json")
    with pytest.raises(SetupError) as told:
        private.ask_for_names()
    lacks = (
        f"dlearn cannot record with torch {torch.__version__}: it has no torch._C._distributed_c10d._dump_fr_trace_json"
    )
    assert str(told.value).startswith(f"{lacks}. Install torch 2.8 to 2.15")


def test_every_private_name_that_hooks_import_is_asked_for():
    hooks = [ast.parse(file.read_text()) for file in Path(private.__file__).parent.rglob("*.py")]
    imports = [node for tree in hooks for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {
        (node.module, name.name)
        for node in imports
        for name in node.names
        if node.module.split(".")[0] == "torch" and (name.name.startswith("_") or "._" in node.module)
    }
    asked = {(module, name.split(".")[0]) for module, names in private.NAMES.items() for name in names.split()}
    modules = {tuple(module.rsplit(".", 1)) for module in private.NAMES}
    assert len(found) > 15
    assert found - asked - modules == set()


@pytest.mark.slow
def test_the_ranks_of_a_cluster_say_so_too(tmp_path):
    """The fork server lives through it, and the rank's own error says why."""
    # Python imports it in every process; it is for the fork server.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('forkserver' in each for each in sys.orig_argv):\n"
        "    from torch._C import _distributed_c10d\n"
        "    del _distributed_c10d._dump_fr_trace_json\n"
    )
    script = "from dlearn import Cluster\nprint(Cluster(2).run(print, check=False).error.what)\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "script.py").write_text(script)
    said = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert "all 2 ranks failed: SetupError: dlearn cannot record with torch" in said.stdout
    assert "Traceback" not in said.stdout + said.stderr


# The second witness ---------------------------------------------------------------------------------------------------

has_hooks = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has no hooks of process groups"
)
WATCHED = ["collectives", "lists_to_all", "point_to_point", "ddp", "ddp_fp16_hook", "fsdp2", "dtensor_and_functional"]

Call = tuple[str, list[tuple[int, ...]], int | None]
"""Its name, the shapes of its tensors, and its root or peer."""


def watched_by_torch(jobs: list[Callable[[], object]]) -> list[Call]:
    """The calls on the default group as torch's own hook of that group sees them."""
    warnings.simplefilter("ignore")
    names = {op.schema.strip("_"): op.name for op in (*c10d_ops.COLLECTIVES, *c10d_ops.POINT_TO_POINT)}
    seen: list[Call] = []

    def before(call: object) -> None:
        shapes = [tuple(tensor.shape) for tensor in (*call.input_tensors, *call.output_tensors)]
        seen.append((names[call.name.name.lower()], shapes, call.root if call.root >= 0 else None))

    world = dist.group.WORLD
    world.register_pre_hook(1, before)
    for job in jobs:
        job()
    world.unregister_pre_hook(1)
    return seen


@has_hooks
def test_torchs_own_hooks_see_the_same_calls(own_folder):
    run = Cluster(2).run(watched_by_torch, [job for job in workloads.truth if job.__name__ in WATCHED], timeout=100)
    for rank in (0, 1):
        events = run.trace.where(rank=rank).events
        recorded = [as_call(event) for event in events if isinstance(event, Collective | PointToPoint)]
        seen = run.results[rank]
        assert len(seen) > 60
        assert [call[:2] for call in recorded] == [call[:2] for call in seen]
        # A hook comes before the call: who will send what is received from any source, only the recording knows.
        both = zip(recorded, seen, strict=True)
        assert [(ours, theirs) for (_, _, ours), (_, _, theirs) in both if theirs not in (ours, None)] == []


def as_call(event: Collective | PointToPoint) -> Call:
    if isinstance(event, PointToPoint):
        return event.op, [tensor.shape for tensor in event.tensors], event.peer
    return event.op, [tensor.shape for tensor in (*event.inputs, *event.outputs)], event.root


# New operations -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="this torch has no gather_single")
def test_a_gather_into_one_tensor_is_recorded(tmp_path, monkeypatch):
    """Gloo refuses it, and that is recorded, too."""
    monkeypatch.chdir(tmp_path)

    def gathered() -> str:
        try:
            dist.gather_single(torch.ones(4), torch.zeros(8) if dist.get_rank() == 0 else None, dst=0)
        except RuntimeError as refused:
            return str(refused)
        return ""

    run = Cluster(2).run(gathered)
    assert "does not support gather_single" in run.results[0]
    (call,) = run.trace.where(rank=0, op="gather_single").events
    assert (call.root, call.error) == (0, "RuntimeError")
    assert [tensor.payload_bytes for tensor in (*call.inputs, *call.outputs)] == [16, 32]


class NewNccl(dist.ProcessGroup):
    """What "nccl" is in torch 2.15, as far as it can be had without a GPU: its name."""

    backend_name = "nccl2"

    def getGroupName(self) -> str:
        return "gpus"

    def getGroupDesc(self) -> str:
        return ""


def test_the_new_nccl_completes_its_futures_when_it_queues_a_kernel_too():
    group = Groups(collectives._Probe()).of(NewNccl(0, 1))
    assert (group.end_by_callback, group.on_gpu) == (False, True)
