# ---
# jupyter:
#   dlearn:
#     ids: [Q8, Q15]
#     minutes: 0.4
#     needs: []
#     peak_mb: 900
# ---

# %% [markdown]
# # Sharding: what do ZeRO and FSDP send, and what do they save?
#
# **Goals.** You will be able to say what ZeRO-1 and FSDP send and hold in a step, against DDP.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb), [collectives](collectives.ipynb). **Takes** about 35
# minutes.
#
# Under DDP every rank holds everything: all parameters, all gradients, all of the optimizer's state. With Adam
# that is four times the model, on each rank. *Sharding* cuts some of it into n parts, and each rank keeps one:
#
# - **ZeRO, stage 1** (`ZeroRedundancyOptimizer`): the optimizer's state.
# - **FSDP** (`fully_shard`): parameters, gradients and state.
#
# **What does that cost in messages, and is it what the textbook says?**

# %%
from collections import Counter
from math import isclose

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, analysis, draw, lessons, messages, operations, play, span
from dlearn.analysis import reconcile, traffic
from dlearn.lessons import charts, digits, models


def sharded(model, how):
    if how in ("DDP", "ZeRO-1"):
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.children(), model):  # each layer is gathered by itself
        fully_shard(layer, mesh=mesh, reshard_after_forward=how == "FSDP")
    return model


# %% [markdown]
# The model is small: three linear layers, 26,122 parameters, P = 104,488 bytes. The training is the same for all.
# At the end each rank says how many bytes of what it holds: `numel` of every tensor, or of its own part (`to_local`).


# %%
def held(tensors):
    own = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(4 * each.numel() for each in own)


def train(how):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = sharded(models.MLP(), how)
    if how == "ZeRO-1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        batch = slice(25 * step, 25 * (step + 1))
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    parameters = list(model.parameters())
    state = getattr(optimizer, "optim", optimizer).state  # ZeRO holds an ordinary optimizer of its part
    moments = [each for of_one in state.values() for name, each in of_one.items() if name != "step"]
    return {
        "loss": loss.item(),
        "parameters": held(parameters),
        "gradients": held(each.grad for each in parameters),
        "optimizer state": held(moments),
    }


P = 4 * sum(each.numel() for each in models.MLP().parameters())
WAYS = ["DDP", "ZeRO-1", "FSDP", "FSDP, kept"]  # kept: reshard_after_forward=False

# %% [markdown]
# **Predict first:** two ranks. How many bytes does each of them send in a step, as a multiple of P? The textbook counts
# an all-gather and a reduce-scatter as (n-1)/n · P for each rank, and an all-reduce as both, 2 (n-1)/n · P. So DDP
# sends 2 (n-1)/n · P; ZeRO-1 as much (it reduce-scatters gradients and all-gathers parameters); FSDP gathers the
# parameters twice, once forward and once backward: 3 (n-1)/n · P.

# %%
my_guess = lessons.predict("sharding.times P", None)  # {"DDP": ..., "ZeRO-1": ..., "FSDP": ..., "FSDP, kept": ...}
runs = {}
for n in (2, 4):
    with Cluster(n, sources=["memory"]) as cluster:  # the ranks stay for all four, and count what they hold
        runs[n] = {how: cluster.run(train, how) for how in WAYS}
steps = {n: {how: run.trace.within("step 3") for how, run in ways.items()} for n, ways in runs.items()}

for how, step in steps[2].items():
    calls = Counter((each.ends[0].phase, each.op) for each in operations(step))
    sent = [traffic(step).bytes_from(rank=rank) for rank in range(2)]
    wire = reconcile(step).whole
    print(f"{how}: sent by each rank: {sent[0]:,} and {sent[1]:,} B")
    print(f"    on the wire, both together: {wire.measured_bytes or wire.predicted_bytes:,} B with framing")
    for (phase, op), count in calls.items():
        print(f"    {phase:9} {count} x {op}")
my_guess and my_guess.against({how: traffic(step).bytes_from(rank=0) / P for how, step in steps[2].items()})

# %% [markdown]
# All four train the same model: their losses agree. DDP has one all-reduce (its bucket holds the whole model). ZeRO-1
# has that all-reduce too, and then the owner of each parameter broadcasts it: six parameters, six broadcasts. FSDP
# gathers three layers forward, three backward, and reduce-scatters three gradients. That is what the textbook says. But
# count the bytes:

# %%
TEXTBOOK = {"DDP": 2, "ZeRO-1": 2, "FSDP": 3, "FSDP, kept": 2}  # times (n-1)/n · P, for each rank
seen = {how: traffic(step).total_bytes / P for how, step in steps[2].items()}  # n = 2: times (n-1)/n · P
more = {how: round(seen[how] / TEXTBOOK[how], 2) for how in WAYS}
axes = charts.bars(
    WAYS,
    [
        charts.Part("in the textbook", [TEXTBOOK[how] for how in WAYS]),
        charts.Part("recorded, on gloo", [seen[how] for how in WAYS]),
    ],
    title=f"On gloo FSDP sends {more['FSDP']:.2f} times what the textbook says, as a reduce-scatter costs a whole"
    f" all-reduce; ZeRO-1 {more['ZeRO-1']:.2f} times",
    y="sent by a rank in a step, in (n-1)/n · P",
    text=lambda value: f"{value:g}",
    notes=[f"P = {P:,} B: the parameters, as bytes. ZeRO-1 is torch's ZeroRedundancyOptimizer: the mean of the ranks."],
)

# %% tags=["Q8", "check"]
for n, ways in runs.items():
    assert len({round(run.results[0]["loss"], 4) for run in ways.values()}) == 1, "the same training"
    assert all(reconcile(step).not_measured or reconcile(step).exact for step in steps[n].values())

kinds = {how: Counter(each.op for each in operations(step)) for how, step in steps[2].items()}
assert kinds["DDP"] == {"all_reduce": 1}
assert kinds["ZeRO-1"] == {"all_reduce": 1, "broadcast": 6}
assert kinds["FSDP"] == {"all_gather_single": 6, "reduce_scatter_single": 3}
assert kinds["FSDP, kept"] == {"all_gather_single": 3, "reduce_scatter_single": 3}

# %% [markdown]
# For all ranks together, in multiples of (n-1) · P: 2, 3, 4 and 3. With four ranks, too, if P is what FSDP really
# handles: it cuts each tensor along its first dimension, and the last layer has ten rows, which four ranks share as
# twelve. (DDP's ring cuts anywhere, and needs no such filling.)

# %% tags=["Q8"]
for n, ways in steps.items():
    rows = sum(4 * -(-len(each) // n) * n * each[0].numel() for each in models.MLP().parameters())
    size = {"DDP": P, "ZeRO-1": P, "FSDP": rows, "FSDP, kept": rows}
    factor = {how: traffic(step).total_bytes / ((n - 1) * size[how]) for how, step in ways.items()}
    print(f"n = {n}: {factor}   (FSDP handles {rows:,} B instead of {P:,})")
    assert factor == {"DDP": 2, "ZeRO-1": 3, "FSDP": 4, "FSDP, kept": 3}
    assert rows == {2: P, 4: 105_520}[n]

# %% [markdown]
# ## Where does the fourth part come from?
#
# From the reduce-scatter. Take the messages of FSDP's step apart. **Predict first:** one all-gather hands round (n-1) ·
# P bytes in all; how many does the reduce-scatter?

# %%
four = steps[4]["FSDP"]
filled = 105_520  # P with twelve rows in the last layer
for op in ("all_gather_single", "reduce_scatter_single"):
    found = [each for each in messages(four) if each.op == op]
    calls = len({id(each.operation) for each in found})
    size = sum(each.payload_bytes for each in found)
    to = {(each.dst - each.src) % 4 for each in found}
    way = {1: "to the right", 3: "to the left"}[to.pop()]
    print(f"{op}: {calls} calls, {len(found)} messages {way}, {size:,} B = {size / filled:g} P")

# %% [markdown]
# Six all-gathers send 6 P, which is 3 P for each time the whole model is gathered: (n-1) · P, no byte too many. Three
# reduce-scatters also send 6 P, for *one* time: twice (n-1) · P. Gloo sums everything everywhere with its ring to the
# left, an all-reduce, and throws away what the rank does not keep. It is visible in the number of messages, too: 48
# for a reduce-scatter, as many as for an all-reduce of four ranks, and 24 for an all-gather.
#
# The kernel, which knows nothing of algorithms, has counted the same bytes: the residue was 0 above. On NCCL a
# reduce-scatter is one, and the textbook's numbers should hold; that was not run here.

# %% tags=["check"]
gathered = [each for each in messages(four) if each.op == "all_gather_single"]
scattered = [each for each in messages(four) if each.op == "reduce_scatter_single"]
assert sum(each.payload_bytes for each in gathered) == 2 * 3 * filled
assert sum(each.payload_bytes for each in scattered) == 2 * 3 * filled
assert len(scattered) / 3 == 48 == len(messages(steps[4]["DDP"]))
assert len(gathered) / 6 == 24

# %% [markdown]
# And ZeRO-1? torch's optimizer does not replace DDP's all-reduce. The gradients are summed everywhere, then each
# parameter is broadcast by its owner: 2 + 1. In the picture are those broadcasts. Which rank sends more, and why?

# %%
axes = draw.sequence(steps[2]["ZeRO-1"].where(op="broadcast"))

# %%
told = analysis.compare(steps[2]["DDP"], steps[2]["ZeRO-1"], names=("DDP", "ZeRO-1"))
told

# %% tags=["check"]
assert told.came == (("optimizer", "broadcast"),)
assert told.total.added_bytes == P
sent = [traffic(steps[2]["ZeRO-1"]).bytes_from(rank=rank) - P for rank in range(2)]
assert sent == [65_536, 38_952]  # fc2.weight is rank 0's: 128 · 128 · 4 B; all others are rank 1's

# %% [markdown]
# A parameter is never cut: rank 0 got the largest, `fc2.weight`, rank 1 all others.
#
# And FSDP? Go through its step: what is gathered, when, and what becomes of it before the gradients are scattered?

# %%
play.player(steps[2]["FSDP"])

# %% [markdown]
# ## Keep the parameters until the backward pass?
#
# `reshard_after_forward=True`, the default for layers inside a model, frees what was gathered as soon as a layer is
# done, and gathers it again for the backward pass. **Predict first:** what does `False` save?

# %%
told = analysis.compare(steps[2]["FSDP"], steps[2]["FSDP, kept"], names=("FSDP", "kept"))
told

# %% tags=["check"]
assert told.went == (("backward", "all_gather_single"),)
assert told.total.added_bytes == -P
assert told.total.b.payload_bytes == 3 * P

# %% [markdown]
# All gathers of the backward pass. In exchange, each rank holds the whole model from the forward pass to the backward.
#
# ## What is saved
#
# You pay in bytes on the wire. What you gain is memory. **Predict first:** Adam, four ranks. How many bytes does a rank
# hold after a step, in multiples of P?

# %%
PARTS = ["parameters", "gradients", "optimizer state"]
ways = ["DDP", "ZeRO-1", "FSDP"]
columns = [(how, rank) for how in ways for rank in range(4)]
memory = {(how, rank): runs[4][how].results[rank] for how, rank in columns}
most = {how: max(sum(memory[how, rank][part] for part in PARTS) for rank in range(4)) for how in ways}
axes = charts.bars(
    [f"{how} rank {rank}" for how, rank in columns],
    [charts.Part(part, [memory[each][part] / P for each in columns]) for part in PARTS],
    stacked=True,
    title=f"Of {most['DDP'] / P:.2f} P a rank keeps {most['FSDP'] / P:.2f} P with FSDP; with ZeRO-1 the fullest rank"
    f" still {most['ZeRO-1'] / P:.2f} P",
    y="held after a step, in P",
    text=lambda value: f"{value:.2f}",
    notes=["Bytes by numel. Not in it: buckets of DDP, and what FSDP gathers for a moment."],
)

# %% [markdown]
# FSDP cuts every tensor into equal parts (but for the last layer's filling). ZeRO-1 hands out whole parameters, and
# here one of them is 63% of the model: rank 0 has nearly two thirds of the state, rank 3 hardly any. With a hundred
# layers of one size it would be even.

# %% tags=["check"]
for rank in range(4):
    assert [memory["DDP", rank][part] for part in PARTS] == [P, P, 2 * P]
    assert memory["ZeRO-1", rank]["parameters"] == memory["ZeRO-1", rank]["gradients"] == P
    assert memory["FSDP", rank]["optimizer state"] == 2 * memory["FSDP", rank]["parameters"]
    assert memory["FSDP", rank]["gradients"] == memory["FSDP", rank]["parameters"]
    assert isclose(memory["FSDP", rank]["parameters"], P / 4, rel_tol=0.04)

assert sum(memory["ZeRO-1", rank]["optimizer state"] for rank in range(4)) == 2 * P
assert sum(memory["FSDP", rank]["parameters"] for rank in range(4)) == P
assert round(memory["ZeRO-1", 0]["optimizer state"] / (2 * P), 2) == 0.63

# %% [markdown]
# That was after the step. And during it? Two ranks, the same two steps again, with all that was not in the bars: DDP's
# buckets, what FSDP gathers for a moment, and the activations that autograd keeps for the backward pass. **Predict
# first:** does FSDP ever hold as much as the whole model?

# %%
axes = draw.memory(steps[2]["DDP"])

# %%
axes = draw.memory(steps[2]["FSDP"])

# %%
peaks = {how: analysis.rank_memory(steps[2][how]) for how in ways}
gathered = [peaks["FSDP"].most(rank, "gathered") for rank in range(2)]
print({how: found.finding for how, found in peaks.items()})

# %% tags=["check"]
assert gathered == [66_048, 66_048]  # the largest layer alone: 4 · (128 · 128 + 128) B
assert peaks["DDP"].most(0, "buckets") == P
for how, found in peaks.items():
    for rank in range(2):
        assert found.most(rank, "parameters") == runs[2][how].results[rank]["parameters"]
        assert found.most(rank, "gradients") == runs[2][how].results[rank]["gradients"]

# %% [markdown]
# Not here: it gathers one layer at a time. So a rank holds its own half and the largest layer, 66 kB. (FSDP may gather
# the next layer early, to hide the wait; then it holds two.)
#
# DDP's option `gradient_as_bucket_view=True` saves memory, too, and no byte on the wire: see
# [ddp_hooks](ddp_hooks.ipynb).
#
# ## Or cut the layers: tensor parallel
#
# Another cut keeps the images whole and cuts the *matrices*: of two linear layers the first by columns, so that each
# rank computes half of the hidden units, and the second by rows, so that each has a share of every output. **Predict
# first:** which collectives does such a pair of layers need in a step, forward and backward, and what decides their
# size: the weights, or the batch?


# %%
class Copied(torch.autograd.Function):
    """Each rank goes on with the same input: backward, its gradients are summed."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """The shares of all ranks are summed: backward, each has the same gradient."""

    @staticmethod
    def forward(context, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


# %%
BATCH, WIDTH, HIDDEN = 16, 64, 256


def cut(x):
    torch.manual_seed(0)
    first, second = torch.randn(HIDDEN, WIDTH).double(), torch.randn(WIDTH, HIDDEN).double()
    rank, n = dist.get_rank(), dist.get_world_size()
    columns, rows = first.chunk(n)[rank], second.chunk(n, dim=1)[rank]
    x = x.clone().requires_grad_()
    with span("step"):
        y = Summed.apply(torch.relu(Copied.apply(x) @ columns.T) @ rows.T)
        y.square().sum().backward()
    whole = x.detach().clone().requires_grad_()
    expected = torch.relu(whole @ first.T) @ second.T
    expected.square().sum().backward()
    return torch.allclose(y, expected) and torch.allclose(x.grad, whole.grad)


cut_runs = {size: Cluster(2).run(cut, torch.ones(size, WIDTH).double()) for size in (BATCH, 2 * BATCH)}
for size, run in cut_runs.items():
    told = [f"{each.op} of {each.ends[0].inputs[0].payload_bytes:,} B" for each in operations(run.trace.within("step"))]
    print(f"{size} images: {', then '.join(told)}")

# %% [markdown]
# One all-reduce forward, one backward, each as large as the *activations* at the cut: batch times width. Weights and
# their gradients never travel. That is why tensor parallel stays within a machine: it sends in every layer, and nothing
# can go on before it has come.

# %% tags=["Q15", "check"]
for size, run in cut_runs.items():
    calls = operations(run.trace.within("step"))
    assert [each.op for each in calls] == ["all_reduce", "all_reduce"]
    assert all(each.ends[0].inputs[0].payload_bytes == size * WIDTH * 8 for each in calls)
    assert [each.ends[0].phase for each in calls] == ["none", "backward"]
    assert run.results == {0: True, 1: True}  # as on one device, forward and backward

# %% [markdown]
# ## Answers
#
# For each rank, in (n-1)/n · P a step; memory with Adam, in P, right after a step:
#
# | | textbook | recorded on gloo | parameters | gradients | state |
# |---|---|---|---|---|---|
# | DDP | 2 | 2 | 1 | 1 | 2 |
# | ZeRO-1 (torch's) | 2 | 3, the mean: by whose parameters they are | 1 | 1 | 2/n, in whole parameters |
# | FSDP | 3 | 4 | 1/n | 1/n | 2/n |
# | FSDP, kept | 2 | 3 | 1/n, whole in between | 1/n | 2/n |
#
# ## Exercise
#
# Eight ranks on gloo, FSDP, a model of P = 1 GB whose tensors 8 divides. How many bytes do all ranks together send in a
# step? Work it out, write your number instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("sharding.bytes_of_fsdp", my_answer)

# %% tags=["answer"]
seen_of_four = traffic(steps[4]["FSDP"]).total_bytes / ((4 - 1) * filled)  # in (n-1) · P
assert lessons.answer("sharding.bytes_of_fsdp", seen_of_four * (8 - 1) * 10**9).right
