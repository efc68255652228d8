# ---
# jupyter:
#   dlearn:
#     ids: [Q8]
#     minutes: 0.4
#     needs: []
#     peak_mb: 900
# ---

# %% [markdown]
# # Sharding: what do ZeRO and FSDP send, and what do they save?
#
# **Goals.** You will be able to say what ZeRO-1 and FSDP send and store in a step, compared with DDP.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb), [collectives](collectives.ipynb). **Takes** about 35
# minutes.
#
# Under DDP every rank stores all parameters, all gradients and the whole state of the optimizer. With Adam that is four
# times the model, on each rank. *Sharding* cuts some of it into n parts, and each rank keeps one part:
#
# - **ZeRO, stage 1** (`ZeroRedundancyOptimizer`): the optimizer's state.
# - **FSDP** (`fully_shard`): parameters, gradients and state.
#
# **What does that cost in messages, and is it what the textbook says?** The model here is small: three linear layers,
# 26,122 parameters, P = 104,488 bytes. At the end each rank reports how many bytes it stores, from the `numel` of every
# tensor, or of its own part (`to_local`).

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
    state = getattr(optimizer, "optim", optimizer).state  # ZeRO contains an ordinary optimizer for its part
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
# The textbook counts an all-gather and a reduce-scatter as (n-1)/n · P for each rank, and an all-reduce as both, 2
# (n-1)/n · P. So DDP sends 2 (n-1)/n · P. ZeRO-1 sends as much: it reduce-scatters gradients and all-gathers
# parameters. FSDP sends 3 (n-1)/n · P, because it gathers the parameters twice, once forward and once backward.
# **Predict first:** with two ranks on gloo, how many bytes does each rank send in a step of FSDP, as a multiple of P?

# %%
my_guess = lessons.predict("sharding.FSDP, times P", None)
runs = {}
for n in (2, 4):
    with Cluster(n, sources=["memory"]) as cluster:  # the same ranks run all four, and record their memory
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
my_guess and my_guess.against(traffic(steps[2]["FSDP"]).bytes_from(rank=0) / P)

# %% [markdown]
# All four train the same model, and their losses agree. DDP has one all-reduce (its bucket contains the whole model).
# ZeRO-1 has that all-reduce, too. Then the owner of each parameter broadcasts it: six parameters, six broadcasts. FSDP
# gathers three layers forward and three backward, and reduce-scatters three gradients. Now compare the bytes:

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

# %% [markdown]
# In multiples of (n-1) · P, all ranks together send 2, 3, 4 and 3. With four ranks these numbers hold if P includes
# FSDP's padding: it cuts each tensor along its first dimension, and pads the last layer's ten rows to twelve.
#
# FSDP sends 4 instead of 3 because gloo's reduce-scatter sends as much as an all-reduce, twice what is needed (lesson
# [collectives](collectives.ipynb)). On NCCL the textbook's numbers should hold; that was not run here. ZeRO-1 sends 3
# instead of 2 because torch's optimizer adds the broadcasts, but does not replace DDP's all-reduce.

# %% tags=["Q8", "check"]
assert P == 104_488 == 4 * 26_122
for n, ways in runs.items():
    assert len({round(run.results[0]["loss"], 4) for run in ways.values()}) == 1, "the same training"
    assert all(reconcile(step).not_measured or reconcile(step).exact for step in steps[n].values())

kinds = {how: Counter(each.op for each in operations(step)) for how, step in steps[2].items()}
assert kinds["DDP"] == {"all_reduce": 1}
assert kinds["ZeRO-1"] == {"all_reduce": 1, "broadcast": 6}
assert kinds["FSDP"] == {"all_gather_single": 6, "reduce_scatter_single": 3}
assert kinds["FSDP, kept"] == {"all_gather_single": 3, "reduce_scatter_single": 3}

for n, ways in steps.items():
    rows = sum(4 * -(-len(each) // n) * n * each[0].numel() for each in models.MLP().parameters())
    assert rows == {2: P, 4: 105_520}[n]
    size = {"DDP": P, "ZeRO-1": P, "FSDP": rows, "FSDP, kept": rows}
    factor = {how: traffic(step).total_bytes / ((n - 1) * size[how]) for how, step in ways.items()}
    assert factor == {"DDP": 2, "ZeRO-1": 3, "FSDP": 4, "FSDP, kept": 3}
filled = 105_520  # P with twelve rows in the last layer
found = {op: [each for each in messages(steps[4]["FSDP"]) if each.op == op] for op in kinds["FSDP"]}
assert [sum(each.payload_bytes for each in of_op) for of_op in found.values()] == [2 * 3 * filled] * 2
assert len(found["reduce_scatter_single"]) / 3 == len(messages(steps[4]["DDP"]))  # as many as an all-reduce

# %% [markdown]
# The picture shows the broadcasts of ZeRO-1. Which rank sends more, and why?

# %%
axes = draw.sequence(steps[2]["ZeRO-1"].where(op="broadcast"))
zero_1 = analysis.compare(steps[2]["DDP"], steps[2]["ZeRO-1"], names=("DDP", "ZeRO-1"))
zero_1

# %% [markdown]
# ZeRO-1 never cuts a parameter. Rank 0 owns the largest, `fc2.weight`, and rank 1 owns all others.
#
# ## Keep the parameters until the backward pass?
#
# With `reshard_after_forward=True`, the default for layers inside a model, FSDP frees the gathered parameters as soon
# as a layer is done, and gathers them again for the backward pass. What does `False` save? Go through FSDP's step in
# the player. What is gathered, when, and when is it freed?

# %%
told = analysis.compare(steps[2]["FSDP"], steps[2]["FSDP, kept"], names=("FSDP", "kept"))
print(told)
play.player(steps[2]["FSDP"])

# %% tags=["check"]
assert zero_1.came == (("optimizer", "broadcast"),)
assert zero_1.total.added_bytes == P
sent = [traffic(steps[2]["ZeRO-1"]).bytes_from(rank=rank) - P for rank in range(2)]
assert sent == [65_536, 38_952]  # fc2.weight is rank 0's: 128 · 128 · 4 B; all others are rank 1's
assert told.went == (("backward", "all_gather_single"),)
assert told.total.added_bytes == -P
assert told.total.b.payload_bytes == 3 * P

# %% [markdown]
# `False` saves all gathers of the backward pass. In exchange, each rank holds the whole model between the passes.
#
# ## What is saved
#
# You pay in bytes on the wire. What you gain is memory. **Predict first:** with Adam and four ranks, each rank holds 4
# P after a step of DDP. How many times P does a rank hold after a step of FSDP?

# %%
my_memory = lessons.predict("sharding.memory of FSDP, in P", None)
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
if my_memory:
    print(my_memory.against(round(most["FSDP"] / P, 2), tolerance=0.02))

# %% [markdown]
# FSDP cuts every tensor into equal parts (except for the last layer's padding). ZeRO-1 distributes whole parameters,
# and here one of them is 63% of the model. So rank 0 has nearly two thirds of the state, and rank 3 hardly any. With a
# hundred layers of the same size the shares would be nearly even.
#
# The bars show the memory after the step. During the step a rank also holds DDP's buckets, the parameters that FSDP
# gathers for a moment, and the activations that autograd keeps for the backward pass. With two ranks, does FSDP ever
# hold as much as the whole model?

# %%
for how in ("DDP", "FSDP"):
    axes = draw.memory(steps[2][how])
peaks = {how: analysis.rank_memory(steps[2][how]) for how in ways}
gathered = [peaks["FSDP"].most(rank, "gathered") for rank in range(2)]
print({how: found.finding for how, found in peaks.items()})

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

assert gathered == [66_048, 66_048]  # the largest layer alone: 4 · (128 · 128 + 128) B
assert peaks["DDP"].most(0, "buckets") == P
for how, found in peaks.items():
    for rank in range(2):
        assert found.most(rank, "parameters") == runs[2][how].results[rank]["parameters"]
        assert found.most(rank, "gradients") == runs[2][how].results[rank]["gradients"]

# %% [markdown]
# Not here, because it gathers one layer at a time. So a rank holds at most its own half and one gathered layer; the
# largest has 66 kB. (FSDP may gather the next layer early, to hide the wait. Then it holds two layers.)

# %% [markdown]
# ## Answers
#
# Bytes sent by each rank in a step, in (n-1)/n · P; memory with Adam, in P, right after a step:
#
# | | textbook | recorded on gloo | parameters | gradients | state |
# |---|---|---|---|---|---|
# | DDP | 2 | 2 | 1 | 1 | 2 |
# | ZeRO-1 (torch's) | 2 | 3, the mean of the ranks | 1 | 1 | 2/n, in whole parameters |
# | FSDP | 3 | 4 | 1/n | 1/n | 2/n |
# | FSDP, kept | 2 | 3 | 1/n, whole in between | 1/n | 2/n |
#
# ## Exercises
#
# 1. Eight ranks on gloo train a model of P = 1 GB with FSDP; no tensor needs padding. How many bytes do all ranks
#    together send in a step?
# 2. Write ZeRO-1, FSDP and a pair of tensor parallel layers yourself. The docstrings say what each function must do.

# %% tags=["exercise"]
my_answer = None
lessons.answer("sharding.bytes_of_fsdp", my_answer)

# %% tags=["answer"]
seen_of_four = traffic(steps[4]["FSDP"]).total_bytes / ((4 - 1) * filled)  # in (n-1) · P
assert lessons.answer("sharding.bytes_of_fsdp", seen_of_four * (8 - 1) * 10**9).right


# %% tags=["exercise"]
def my_optimizer(parameters, gradient_of, steps, rate, momentum):
    """ZeRO-1: SGD with momentum on the mean of all ranks' gradients, in place. `gradient_of(parameters, step)` is this
    rank's gradient. Keep and return the momentum of this rank's 1/n of the parameters only (their length is a multiple
    of n). No rank sends more than in an all-reduce.
    """
    return  # replace this by your loop


lessons.check("sharded_optimizer", my_optimizer, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_fsdp(shards, x, forward, backward):
    """Make a step of FSDP. `shards` is this rank's 1/n of the weights of 3 layers, each in one row.
    `forward(weights, x)` returns y; `backward(weights, x, y, gradient)` the gradients of x and of the weights.
    Gather the weights of a layer just before each call, and free them after it: hold at most 2 tensors of a layer's
    size. The gradient of the last y is y itself. Return this rank's shards of the weights' gradients, each the mean
    over all ranks.
    """
    return  # replace this by your step


lessons.check("fsdp_by_hand", my_fsdp, student="")
