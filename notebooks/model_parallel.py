# ---
# jupyter:
#   dlearn:
#     ids: [DM4, DM5, DM7, DM8]
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Model parallel: what crosses the cut?
#
# **Goals.** You will be able to predict the bytes that cross a cut; find the batch from which on DDP sends less.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 30 minutes.
#
# A model may be too large for one machine. Then one half of it lives here and the other half there, and each
# training step goes over the cut: forward, and back again. **What exactly travels there? Does the batch size
# matter? And does that send less than DDP, or more?**
#
# We begin with a single convolution on another worker. It gets B images of 3 channels and 16×16 pixels, and
# makes 8 channels of them.

# %%
from functools import partial

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from dlearn import Cluster, draw, lessons, play, span
from dlearn.analysis import autograd_graph, iteration, scaling
from dlearn.lessons import split
from dlearn.lessons.knobs import Bytes, knobs


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, kernel_size=3, padding=1)

    def forward(self, x):
        return torch.relu(self.conv(x))


def one_pass(B, loss=lambda y: y.square().mean(), needs_grad=False):
    remote_conv = rpc.remote("stage1", Conv)  # made there, and stays there
    for step in range(2):  # in the first, the reference to it is made known
        with span(f"step {step}"), dist_autograd.context() as context:
            x = torch.ones(B, 3, 16, 16, requires_grad=needs_grad)
            y = remote_conv.rpc_sync().forward(x)  # x goes there, y comes back
            dist_autograd.backward(context, [loss(y)])


# %% [markdown]
# ## Three tensors
#
# `one_pass` runs on worker `stage0` only; `stage1` serves. **Predict first:** for a batch of 8, which tensors
# cross the cut in one step, in which direction, and how many bytes has each?

# %%
cluster = Cluster(["stage0", "stage1"], rpc=True)
run = cluster.run({"stage0": one_pass}, 8)
told = iteration(run.trace)
for message in told.messages:
    if message.tensors:
        print(f"{run.trace.label(message.src)} -> {run.trace.label(message.dst)}: {message.what}")

# %% [markdown]
# The input goes there (24,576 bytes), the output comes back (65,536 bytes), and the gradient of the output goes
# there again: 65,536 bytes, shaped as the output. No parameter and no gradient of a parameter crosses: the
# parameters live on `stage1`, and their gradients stay with them.

# %% tags=["check"]
crossing = [
    (message.src, message.dst, message.tensors[0].payload_bytes) for message in told.messages if message.tensors
]
assert crossing == [(0, 1, 24_576), (1, 0, 65_536), (0, 1, 65_536)]

# %% [markdown]
# All of the step, message by message. Below the picture stand the contexts of distributed autograd: from which message
# on has `stage1` gradients in one, and when does it forget them? Then hide the control messages: what is left?

# %%
play.player(run.trace, messages=told.messages, title=f"One step in two halves: {len(told.messages)} messages")

# %% [markdown]
# ## Where it crosses
#
# How does the backward pass know the way? Where a tensor that needs a gradient leaves a worker, autograd puts a
# *send* node into its graph, and where it arrives a *recv* node, with the same number on both. Backward, the recv
# node sends the gradient, and the send node gets it. Below, the value stays on `stage1` until `to_here()` fetches
# it. Look at the one edge that goes from one worker to the other.


# %%
def fetched(B):
    remote_conv = rpc.remote("stage1", Conv)
    with dist_autograd.context() as context:
        y = remote_conv.remote().forward(torch.ones(B, 3, 16, 16)).to_here()
        dist_autograd.backward(context, [y.square().mean()])


seen = Cluster(["stage0", "stage1"], rpc=True, graph=True).run({"stage0": fetched}, 8)
axes = draw.autograd(seen.trace)

# %%
graph = autograd_graph(seen.trace)
wires = [(a, b) for a, b, kind in graph.edges(data="kind") if kind == "wire"]
names = [tuple(graph.nodes[node]["name"].split("::")[-1] for node in wire) for wire in wires]
print(names)

# %% tags=["DM4", "check"]
assert names == [("RecvRpcBackward", "SendRpcBackward")]

# %% [markdown]
# ## Does the batch size matter?
#
# Under DDP it did not. **Predict first:** with batches of 1, 8 and 32, how do those three sizes change? What is the
# slope of each, in bytes for each example?
#
# (A cluster inside `with` keeps its workers: the second run and the third need not start any.)

# %%
with cluster:
    told = scaling({B: cluster.run({"stage0": one_pass}, B).trace for B in (1, 8, 32)})
told

# %% [markdown]
# To the byte: 4 · C · H · W for each example, with the C of what travels. What is left is the packing around the
# tensors and the runtime's own messages, and that is the same for any batch. In the picture, look at how the points
# lie: the output and its gradient are one line.

# %%
axes = draw.scaling(told)

# %% tags=["DM5", "check"]
assert [line.slope for line in told.growing] == [4 * 3 * 16 * 16, 4 * 8 * 16 * 16, 4 * 8 * 16 * 16]
assert all(line.exact and line.deviation_bytes <= 4 for line in told.lines)

# %% [markdown]
# ## Is what comes back as large as what went there?
#
# Not always. Two changes of one line each:
#
# 1. the *input* needs a gradient (it is the output of a layer here, say);
# 2. the loss is `y.sum()` instead of `y.square().mean()`.
#
# **Predict first:** what do they change in the backward pass? (The gradient of a sum is 1 for every number.)


# %%
def tensors_back(B, **change):
    run = cluster.run({"stage0": partial(one_pass, **change)}, B)
    back = [message for message in iteration(run.trace).messages if message.op == "BACKWARD_AUTOGRAD_REQ"]
    return [(message.src, message.tensors[0].logical_bytes, message.tensors[0].payload_bytes) for message in back]


with cluster:
    for name, change in {
        "as above": {},
        "the input needs a gradient": {"needs_grad": True},
        "loss = y.sum()": {"loss": torch.sum},
    }.items():
        print(name)
        for B in (1, 8):
            for src, logical, sent in tensors_back(B, **change):
                print(f"  B = {B}: from stage{src}, a gradient of {logical:,} B, of which {sent:,} B are sent")

# %% [markdown]
# An input without a gradient: nothing comes back for it. With one: 3,072 bytes for each example, as many as went
# there.
#
# And the gradient of a sum? It has the shape of the output, 8,192 bytes for each example, but it is one 1 that
# pretends to be many: an *expanded* tensor. RPC sends what is stored: **4 bytes**, for any batch. (A real loss gives
# a real gradient. Remember this when an example that ends in `.sum()` looks cheap.)
#
# Is that so on the wire, too? With `measure="phase"` the kernel's counters are read around the backward pass. Look at
# what is left of 65,536 bytes: under 400, nearly all of it framing.

# %%
measured = {}
with Cluster(["stage0", "stage1"], rpc=True, measure="phase") as counting:
    for name, loss in {"mean of squares": lambda y: y.square().mean(), "sum": torch.sum}.items():
        phases = iteration(counting.run({"stage0": one_pass}, 8, loss).trace).phases
        (measured[name],) = (each.measured_bytes for each in phases if (each.phase, each.src) == ("backward", 0))
counted = None not in measured.values()
print(measured if counted else "not measured: this system tells no process about the bytes in its sockets")

# %% tags=["DM7", "check"]
if counted:
    assert measured["mean of squares"] > 65_536
    assert 4 < measured["sum"] < 400
with cluster:
    assert tensors_back(8) == [(0, 65_536, 65_536)]
    assert tensors_back(1, loss=torch.sum) == [(0, 8_192, 4)]
    assert tensors_back(1, needs_grad=True)[1] == (1, 3_072, 3_072)
    assert tensors_back(8, needs_grad=True) == [(0, 65_536, 65_536), (1, 24_576, 24_576)]
    assert tensors_back(8, loss=torch.sum) == [(0, 65_536, 4)]

# %% [markdown]
# ## DDP or model parallel: which sends less?
#
# Now a whole model in two ways. `split.First` is a convolution that makes 8 channels, `split.Second` two linear
# layers that make ten numbers of them: 35,818 parameters, P = 143,272 bytes.
#
# - *DDP*: both ranks have all of it, and each sends P bytes in a step: 2 · P together.
# - *Model parallel*: `stage0` has the first half, `stage1` the second, and the labels to make the loss. In each step
#   B · 4 · C · H · W bytes go there, and as many come back: 8,192 bytes for each example, twice.
#
# One does not depend on B, the other grows with it. They meet where 2 · P = 2 · B · 4 · C · H · W, so at
# B = P / (4 · C · H · W). **Predict first:** which B is that, and for which batches should you cut the model?

# %%
size = split.Size(C=8, H=16, W=16)
predicted = split.break_even(size)
print(f"P = {split.parameter_bytes(size):,} B, the cut: {split.boundary_bytes(size):,} B for each example")
print(f"They meet at B = {predicted:.2f}")

steps = {}
if counted:
    counting = Bytes()  # two ranks that stay, and the kernel's counters around each step
    steps = {B: counting.ask(size._replace(B=B)) for B in (1, 8, 16, 17, 18, 32)}
    counting.close()
for B, step in steps.items():
    less = "DDP" if step.ddp[1] < step.rpc[1] else "model parallel"
    print(f"B = {B:2}: DDP {step.ddp[1]:,} B, model parallel {step.rpc[1]:,} B: {less} sends less")

# %% [markdown]
# Predicted at 17.49, found between 17 and 18. From here on DDP sends less, however large the batch. A larger image
# moves the crossing down, for the convolution's parameters do not grow with it, but the cut does; a larger linear
# layer moves it up.
#
# Two things are left out of the formula and counted by the kernel. The labels go over the cut too, 8 bytes each. And
# each of the twelve messages of a step has its framing: about 3 kB in all, more than the framing of DDP's one
# all-reduce.

# %% tags=["DM8", "check"]
assert split.parameter_bytes(size) == 143_272 == 4 * 35_818
assert split.boundary_bytes(size) == 8_192
assert round(predicted, 2) == 17.49
if counted:
    assert steps[17].rpc[1] < steps[17].ddp[1]
    assert steps[18].rpc[1] > steps[18].ddp[1]
    assert len({step.ddp[1] for step in steps.values()}) == 1
    assert steps[1].ddp[0] == 2 * 143_272
    assert len(iteration(steps[1].traces[1]).messages) == 12
for B, step in steps.items():
    assert step.rpc[0] == 2 * B * 8_192
    assert 2_900 < step.rpc[1] - step.rpc[0] - 8 * B < 3_300
    assert step.ddp[1] - step.ddp[0] < 1_500

# %% [markdown]
# (For a fair comparison, mind what a step is: DDP's two ranks have a batch each. The bytes do not change if each takes
# half of one batch. And with n ranks instead of 2, both formulas get the factor n - 1: the crossing stays.)
#
# ## Turn the knobs
#
# Each slider, when you let it go, makes the two ranks train again, both ways, and the kernel counts. (With the
# keyboard: tab to a slider, then the arrow keys. Without a Jupyter kernel you see the picture only, and where the
# system does not count, nothing.) **Predict first:** with
# images of 8×8 pixels instead of 16×16, where is the crossing?

# %%
turn = knobs(B=16) if counted else None
turn

# %% tags=["check"]
if turn:
    now, bars = turn.answer.size, turn.bars  # where the sliders stand
    assert bars.predicted == (2 * split.parameter_bytes(now), 2 * now.B * 4 * now.C * now.H * now.W)
    assert all(seen > planned for seen, planned in zip(bars.measured, bars.predicted, strict=True))
assert round(split.break_even(split.Size(H=8, W=8)), 1) == 70.0

# %% [markdown]
# ## Exercise
#
# A linear layer of 4,096 × 4,096 numbers (without bias) stands behind the cut, and its input of B × 4,096 numbers
# crosses it. The part before the cut has no parameters. From which batch on does DDP send less? Work it out, write your
# number instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("model_parallel.linear_layer", my_answer)

# %% tags=["answer"]
P = 4 * sum(each.numel() for each in nn.Linear(4_096, 4_096, bias=False).parameters())
assert lessons.answer("model_parallel.linear_layer", P / torch.ones(4_096).nbytes).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
