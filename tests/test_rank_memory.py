"""What ranks hold while they train, counted on real ranks and beside the textbook; drawn from traces by hand."""

import gc
from functools import partial

import matplotlib.pyplot as plt
import pytest
import torch
from text_boxes import faults
from torch import nn
from torch.nn.modules import module as hooked
from torch.optim import optimizer as hooked_optimizer
from torch.utils.checkpoint import checkpoint
from traces import Job

from dlearn import Cluster, analysis, draw
from dlearn.analysis.volume.rank_memory import textbook
from dlearn.sources import memory
from dlearn.trace.memory_held import MemoryHeld
from dlearn.trace.source import describe

SIZES = (6, 8, 4)
P = 4 * (6 * 8 + 8 + 8 * 4 + 4)
BATCH = 5
SAVED = 4 * BATCH * (6 + 8)
"""What autograd keeps: the input, and the output of ReLU, which is the second layer's input."""


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def train(how):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    made = model()
    if how == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (made[0], made[2], made):
            fully_shard(part, mesh=mesh)
    else:
        made = DistributedDataParallel(made, gradient_as_bucket_view=how == "views")
    adam = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam) if how == "ZeRO-1" else torch.optim.Adam
    optimizer = adam(made.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = made(torch.full((BATCH, 6), float(step))).sum()
        loss.backward()
        optimizer.step()
    return loss.item()


WAYS = ("DDP", "views", "ZeRO-1", "FSDP2")


@pytest.fixture(scope="module")
def runs():
    with Cluster(2, sources=["memory"]) as cluster:
        watched = {how: cluster.run(train, how) for how in WAYS}
    with Cluster(2) as cluster:
        alone = {how: cluster.run(train, how) for how in WAYS}
    assert {how: run.results for how, run in watched.items()} == {how: run.results for how, run in alone.items()}
    return {how: run.trace for how, run in watched.items()}


def most(trace, part):
    found = analysis.rank_memory(trace)
    return [found.most(rank, part) for rank in found.held]


def test_counted_as_the_textbook_says(runs):
    steps = 4 * 4  # Adam counts its steps beside each parameter, in four bytes.
    for how in ("DDP", "views", "ZeRO-1"):
        assert most(runs[how], "parameters") == [P, P]
        assert most(runs[how], "gradients") == [P, P]
        assert most(runs[how], "gathered") == [0, 0]
        assert most(runs[how], "activations") == [SAVED, SAVED]
    assert most(runs["DDP"], "buckets") == [P, P]
    assert most(runs["views"], "buckets") == [0, 0], "the gradients stand in the buckets"
    assert most(runs["DDP"], "state") == [2 * P + steps] * 2
    assert sum(most(runs["ZeRO-1"], "state")) == 2 * P + steps, "dealt out, each parameter's to one rank"
    assert most(runs["FSDP2"], "parameters") == [P / 2, P / 2]
    assert most(runs["FSDP2"], "gradients") == [P / 2, P / 2]
    assert most(runs["FSDP2"], "state") == [P + steps] * 2
    assert most(runs["FSDP2"], "gathered") == [4 * (6 * 8 + 8)] * 2, "one layer at a time, the larger one"
    assert not any(trace.problems for trace in runs.values())


def test_what_the_textbook_says(runs):
    whole = {"parameters": P, "gradients": P, "state": 2 * P}
    said = {how: textbook(runs[how].of(MemoryHeld)[-1]) for how in WAYS}
    assert said["DDP"] == said["views"] == whole
    assert said["ZeRO-1"] == whole | {"state": P}
    assert said["FSDP2"] == {"parameters": P / 2, "gradients": P / 2, "state": P}


def test_activations_come_one_by_one_and_go(runs):
    held = [each.activations for each in runs["DDP"].where(rank=0).of(MemoryHeld)]
    assert {0, 4 * BATCH * 6, SAVED} <= set(held)
    assert held[-1] == 0


class Heard:
    """What an Emit is told."""

    def __init__(self):
        self.events, self.failures = [], []

    def event(self, kind, /, **facts):
        self.events.append(facts)
        return len(self.events)

    def failed(self, where, error):
        self.failures.append(error)


def test_everything_is_given_back():
    before = dict(hooked._global_forward_hooks), dict(hooked._global_forward_pre_hooks)
    heard = Heard()
    undo = memory.install(heard)
    made = model()
    loss = made(torch.ones(2, 6)).sum()
    undo()
    counted = len(heard.events)
    assert (dict(hooked._global_forward_hooks), dict(hooked._global_forward_pre_hooks)) == before
    assert not hooked_optimizer._global_optimizer_pre_hooks
    made(torch.ones(2, 6))
    assert len(heard.events) == counted > 0
    assert not heard.failures
    loss.backward()
    assert made[0].weight.grad is not None


@pytest.fixture
def heard():
    listening = Heard()
    undo = memory.install(listening)
    yield listening
    undo()
    assert not listening.failures


def test_a_model_that_raises_leaves_nothing_behind(heard):
    with pytest.raises(RuntimeError, match="shapes"):
        model()(torch.ones(2, 7))
    counted = len(heard.events)
    torch.ones(3, requires_grad=True).exp().sum().backward()
    assert len(heard.events) == counted, "no hook is left on autograd"


def test_a_call_cut_off_by_the_user_is_left_at_the_end():
    class Stops(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    heard = Heard()
    undo = memory.install(heard)
    with pytest.raises(KeyboardInterrupt):
        Stops()(torch.ones(2))
    undo()
    counted = len(heard.events)
    torch.ones(3, requires_grad=True).exp().sum().backward()
    assert len(heard.events) == counted


def test_what_is_freed_is_counted_no_longer_without_a_backward_pass(heard):
    made = model()
    loss = made(torch.ones(BATCH, 6)).sum()
    assert heard.events[-1]["activations"] == SAVED
    del loss
    gc.collect()
    with torch.no_grad():
        made(torch.ones(BATCH, 6))
    assert heard.events[-1]["activations"] == 0


def gradient(made, loss):
    made.zero_grad()
    loss().backward()
    return made[0].weight.grad.clone()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_works_on(heard, whole, reentrant):
    """It calls the model again in the backward pass, and takes what that saves."""
    made = model()
    x = torch.ones(BATCH, 6, requires_grad=True)
    outer = made if whole else nn.Sequential(made)
    call = partial(checkpoint, outer if whole else made, use_reentrant=reentrant)
    assert torch.equal(gradient(made, lambda: call(x).sum()), gradient(made, lambda: made(x).sum()))


def test_hooks_of_others_keep_what_they_save(heard):
    kept = []

    def keep(tensor):
        kept.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        model()(torch.ones(BATCH, 6)).sum().backward()
    assert kept


@pytest.mark.slow  # It imports the compiler.
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # Of any hook on all modules.
def test_a_compiled_model_computes_the_same(heard):
    made = model()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = torch.ones(BATCH, 6)
    assert torch.equal(gradient(made, lambda: compiled(x).sum()), gradient(made, lambda: made(x).sum()))


def test_torch_func_works_inside_and_outside_of_a_model(heard):
    class Inside(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda y: (y * y).sum())(x)

    x = torch.arange(3.0)
    assert torch.equal(Inside()(x), 2 * x)
    made = model()
    assert torch.func.vmap(made)(torch.ones(2, 6)).shape == (2, 4)


# By hand --------------------------------------------------------------------------------------------------------------


def job_of(folder, ranks):
    job = Job(folder, ranks=ranks)
    for lines in job.files:
        lines.append(describe(memory.SOURCE))
    return job


def held(job, rank, at, **sizes):
    usual = {"parameters": 100, "gathered": 0, "gradients": 0, "buckets": 0, "state": 200, "activations": 0}
    facts = {"model": 100, "optimizers": "Adam", "way": "DDP", "ranks": 64}
    job.event(MemoryHeld, rank, start_ns=at, **usual | facts | sizes)


def many(folder, ranks, steps):
    job = job_of(folder, ranks)
    for rank in range(ranks):
        for step in range(steps):
            for at, saved in enumerate((0, 40, 80, 10)):
                held(job, rank, 1000 * (10 * step + at), activations=saved + (50 if rank == 7 else 0))
    return job.load()


@pytest.mark.parametrize(("ranks", "steps"), [(3, 1), (16, 80), (64, 5)])
def test_ranks_that_hold_the_same_share_a_lane(tmp_path, ranks, steps):
    trace = many(tmp_path, ranks, steps)
    with draw.small():
        ax = draw.memory(trace)
    assert faults(ax.figure) == []
    assert ax.get_position().width > 0.8, "names take no room of the areas"
    areas = [each.get_window_extent() for each in ax.collections if each.get_gid() not in (None, "lanes")]
    named = [each.get_window_extent() for each in ax.texts if each.get_text() == "textbook"]
    assert named
    assert not [name for name in named if any(name.overlaps(area) for area in areas)]
    ax = draw.memory(trace)
    labels = [each.get_text() for each in ax.get_yticklabels()]
    assert labels == (["ranks 0, 1, 2"] if ranks == 3 else ["rank 7", f"ranks 0, 1, 2, 3 and {ranks - 5} more"])
    assert "holds at most" in ax.get_title(loc="left")
    plt.close("all")


def test_heights_are_the_sums_of_what_is_held(tmp_path):
    job = job_of(tmp_path, 1)
    held(job, 0, 0)
    held(job, 0, 1_000_000, gradients=100, activations=50)
    ax = draw.memory(job.load())
    areas = {each.get_gid(): each.get_paths()[0].get_extents() for each in ax.collections if each.get_gid()}
    tall = {part: areas[part].height for part in ("parameters", "state", "gradients", "activations")}
    assert tall["state"] == pytest.approx(2 * tall["parameters"])
    assert areas["activations"].y0 == pytest.approx(areas["parameters"].y1 - 4.5 * tall["parameters"])
    plt.close("all")


def test_a_trace_without_any_says_how_to_record_it(tmp_path):
    trace = Job(tmp_path, ranks=1).load()
    assert 'sources=["memory"]' in draw.memory(trace).texts[0].get_text()
    assert 'sources=["memory"]' in str(analysis.rank_memory(trace))
    plt.close("all")
