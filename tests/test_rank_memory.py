"""What ranks hold while they train, counted on real ranks and beside the textbook; and that the counting is a guest."""

import gc
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooked
from torch.optim import optimizer as hooked_optimizer
from torch.utils.checkpoint import checkpoint

import dlearn
from dlearn import Trace, analysis, draw

P = 4 * (6 * 8 + 8 + 8 * 4 + 4)
BATCH = 5
SAVED = 4 * BATCH * (6 + 8)
"""What autograd keeps: the input, and the output of ReLU, which is the second layer's input."""
WAYS = ("DDP", "views", "ZeRO-1", "FSDP2")


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def train_in_all_ways():
    """In a span each."""
    losses = []
    for way in WAYS:
        with dlearn.span(way):
            losses.append(train(way))
        gc.collect()
    return losses


def train(way):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    made = model()
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (made[0], made[2], made):
            fully_shard(part, mesh=mesh)
    else:
        made = DistributedDataParallel(made, gradient_as_bucket_view=way == "views")
    adam = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam) if way == "ZeRO-1" else torch.optim.Adam
    optimizer = adam(made.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = made(torch.full((BATCH, 6), float(step))).sum()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def trace(recorded):
    """The same is computed where nothing is counted."""
    found = recorded(train_in_all_ways, sources=["memory"])
    assert recorded.results(train_in_all_ways, sources=["memory"]) == recorded.results(train_in_all_ways)
    assert found.problems == ()
    return found


def test_counted_as_the_textbook_says(trace):
    steps = 4 * 4  # Adam counts its steps beside each parameter, in four bytes.
    found = {way: analysis.rank_memory(trace.within(way)) for way in WAYS}

    def most(way, part):
        return [found[way].most(rank, part) for rank in (0, 1)]

    for way in ("DDP", "views", "ZeRO-1"):
        assert most(way, "parameters") == most(way, "gradients") == [P, P]
        assert most(way, "gathered") == [0, 0]
        assert most(way, "activations") == [SAVED, SAVED]
    assert most("DDP", "buckets") == [P, P]
    assert most("views", "buckets") == [0, 0], "the gradients stand in the buckets"
    assert most("DDP", "state") == [2 * P + steps] * 2
    assert sum(most("ZeRO-1", "state")) == 2 * P + steps, "dealt out, each parameter's to one rank"
    assert most("FSDP2", "parameters") == most("FSDP2", "gradients") == [P / 2, P / 2]
    assert most("FSDP2", "state") == [P + steps] * 2
    assert most("FSDP2", "gathered") == [4 * (6 * 8 + 8)] * 2, "one layer at a time, the larger one"
    # Beside it: the whole for each, or the half of two ranks.
    for way, textbook in (("DDP", f"{2 * P} B"), ("ZeRO-1", f"{P} B"), ("FSDP2", f"{P} B")):
        (row,) = [line.split() for line in str(found[way]).splitlines() if line.startswith("rank 1  optimizer state")]
        assert " ".join(row).endswith(textbook)


def test_activations_come_one_by_one_and_go_and_so_they_are_drawn(trace):
    held = analysis.rank_memory(trace.within("DDP")).held[0]
    assert {0, 4 * BATCH * 6, SAVED} <= {each.activations for each in held}
    assert held[-1].activations == 0
    ax = draw.memory(trace.within("DDP").where(rank=0))
    (area,) = [each.get_paths()[0] for each in ax.collections if each.get_gid() == "activations"]
    for now, then in pairwise(held):
        middle_ms = ((now.start_ns + then.start_ns) / 2 - held[0].start_ns) / 1e6
        column = [(middle_ms, y) for y in np.linspace(*ax.get_ylim(), 1000)]
        assert area.contains_points(column).any() == (now.activations > 0)


@contextmanager
def watched(folder):
    """What is done here is counted; afterwards the folder's trace says how it went."""
    before = dict(hooked._global_forward_hooks), dict(hooked._global_forward_pre_hooks)
    with dlearn.record(folder, sources=["memory"]):
        yield
    assert (dict(hooked._global_forward_hooks), dict(hooked._global_forward_pre_hooks)) == before
    assert not hooked_optimizer._global_optimizer_pre_hooks
    trace = Trace.load(folder)
    assert trace.problems == ()
    assert trace.where(kind="memory").events


def gradient(made, loss):
    made.zero_grad()
    loss().backward()
    return made[0].weight.grad.clone()


def test_what_is_freed_is_counted_no_longer_without_a_backward_pass(tmp_path):
    with watched(tmp_path):
        made = model()
        with dlearn.span("held"):
            loss = made(torch.ones(BATCH, 6)).sum()
        del loss
        gc.collect()
        with dlearn.span("freed"), torch.no_grad():
            made(torch.ones(BATCH, 6))
    trace = Trace.load(tmp_path)
    held, freed = (trace.within(name).where(kind="memory").events for name in ("held", "freed"))
    assert (held[-1].activations, freed[-1].activations) == (SAVED, 0)


def test_checkpoints_hooks_of_others_and_torch_func_work_on(tmp_path):
    class Inside(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda y: (y * y).sum())(x)

    made, kept = model(), []
    x = torch.ones(BATCH, 6, requires_grad=True)
    expected = gradient(made, lambda: made(x).sum())

    def keep(tensor):
        kept.append(tensor)
        return tensor.detach()

    with watched(tmp_path):
        for reentrant in (True, False):  # It calls the model again in the backward pass, and takes what that saves.
            call = partial(checkpoint, made, use_reentrant=reentrant)
            assert torch.equal(gradient(made, lambda call=call: call(x).sum()), expected)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            assert torch.equal(gradient(made, lambda: made(x).sum()), expected)
        assert torch.equal(Inside()(torch.arange(3.0)), 2 * torch.arange(3.0))
        assert torch.func.vmap(made)(torch.ones(2, 6)).shape == (2, 4)
    assert kept
