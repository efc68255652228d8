"""The stretches of a training step that send nothing, as the recorder sees them."""

from itertools import pairwise

import pytest
import torch
from programs import mlp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import dlearn
from dlearn import Cluster, Trace
from dlearn.analysis.ddp.training_steps import training_steps
from dlearn.trace.event import Collective, Gradient, Stretch

pytestmark = pytest.mark.usefixtures("own_folder")


def phases(trace, rank=0):
    return [event.phase for event in trace.events if isinstance(event, Stretch) and event.rank == rank]


def test_every_stretch_of_a_step_is_seen_and_holds_what_happens_in_it():
    def train() -> None:
        model = DistributedDataParallel(mlp())
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.ones(2, 64))  # no part of a step

    trace = Cluster(2).run(train, timeout=60).trace
    assert trace.problems == ()
    for rank in trace.ranks:
        assert phases(trace, rank) == ["forward", "backward", "optimizer"] * 2
        mine = [event for event in trace.events if event.rank == rank]
        stretches = [event for event in mine if isinstance(event, Stretch)]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(stretches))
        inside = [event for event in mine if isinstance(event, Gradient)]
        calls = [event for event in mine if isinstance(event, Collective)]
        inside += [event for event in calls if event.phase == "backward"]
        for event in inside:
            around = [each for each in stretches if each.start_ns <= event.start_ns <= each.end_ns]
            assert [each.phase for each in around] == [event.phase]
        # What DDP sends before the module's own forward pass belongs to the step, and lies before the stretch.
        first = [min(e.start_ns for e in calls if e.phase == "forward" and e.start_ns > stretches[2].end_ns)]
        assert first[0] < stretches[3].start_ns
        assert [step.start_ns for step in training_steps(trace) if step.rank == rank][1:] == first


def test_accumulation_checkpointing_errors_and_two_optimizers():
    def train() -> str:
        from torch.utils.checkpoint import checkpoint

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(4, 4)

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=True)

        model = DistributedDataParallel(Net())
        first, second = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
        x = torch.ones(1, 4, requires_grad=True)
        with model.no_sync():
            model(x).sum().backward()  # reentrant checkpointing: a backward pass inside a backward pass
        model(x).sum().backward()
        first.step()
        second.step()
        try:
            torch.ones(1).backward()
        except RuntimeError as error:
            return str(error)
        return ""

    run = Cluster(2).run(train, timeout=60)
    assert "does not require grad" in run.results[0]
    assert phases(run.trace) == ["forward", "backward"] * 2 + ["optimizer"] * 2 + ["backward"]
    *_, failed = (event for event in run.trace.events if isinstance(event, Stretch) and event.rank == 0)
    assert failed.error == "RuntimeError"


def test_a_program_without_ddp_is_left_alone_and_one_with_it_gets_everything_back():
    def look() -> list[bool]:
        def state() -> tuple[object, ...]:
            hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
            return torch.autograd._engine_run_backward, *(tuple(each.values()) for each in hooks)

        ddp = DistributedDataParallel._inside_ddp_forward
        before = state()
        with dlearn.record("inner"):
            layer = torch.nn.Linear(4, 4)
            layer(torch.ones(1, 4)).sum().backward()
            torch.optim.SGD(layer.parameters()).step()
            alone = state()
            DistributedDataParallel(layer)(torch.ones(1, 4)).sum().backward()
            followed = state()
        restored = ddp is DistributedDataParallel._inside_ddp_forward
        return [alone == before, followed != before, state() == before, restored]

    assert Cluster(2, record=False).run(look, timeout=60).results[0] == [True] * 4
    assert phases(Trace.load("inner")) == ["forward", "backward"]
