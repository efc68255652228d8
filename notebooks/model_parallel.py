# ---
# jupyter:
#   dlearn:
#     ids: [DM4, DM5, DM7, DM8]
#     minutes: 0.3
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Model parallel: what crosses the cut?
#
# **Goals.** You will be able to predict the bytes that cross a cut; find the batch size above which DDP sends less.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 30 minutes.
#
# A model may be too large for one machine. Then two machines each have one half, and each training step crosses the
# cut, forward and back. **What crosses the cut? Does the batch size matter? And does this send less than DDP, or
# more?**
#
# Here one convolution is on another worker. It gets B images of 3 channels and 16×16 pixels, and returns 8 channels.

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
    remote_conv = rpc.remote("stage1", Conv)  # created on stage1, and stays there
    for step in range(2):  # the first also registers the reference
        with span(f"step {step}"), dist_autograd.context() as context:
            x = torch.ones(B, 3, 16, 16, requires_grad=needs_grad)
            y = remote_conv.rpc_sync().forward(x)  # x goes there, y comes back
            dist_autograd.backward(context, [loss(y)])


# %% [markdown]
# ## Three tensors
#
# `one_pass` runs on worker `stage0` only; `stage1` answers its calls. **Predict first:** for a batch of 8, how many
# bytes has the output that comes back? (In the player, hide the control messages. What is left?)

# %%
my_output = lessons.predict("model_parallel.bytes of the output", None)
cluster = Cluster(["stage0", "stage1"], rpc=True)
run = cluster.run({"stage0": one_pass}, 8)
told = iteration(run.trace)
for message in told.messages:
    if message.tensors:
        print(f"{run.trace.label(message.src)} -> {run.trace.label(message.dst)}: {message.what}")
tensors = [(each.src, each.dst, each.tensors[0].payload_bytes) for each in told.messages if each.tensors]
if my_output:
    print(my_output.against(tensors[1][2]))
play.player(run.trace, messages=told.messages, title=f"One step in two halves: {len(told.messages)} messages")

# %% [markdown]
# `stage0` sends the input (24,576 bytes), gets the output (65,536 bytes), and sends the gradient of the output, which
# has the output's shape (65,536 bytes). Parameters and their gradients stay on `stage1`.

# %% tags=["check"]
assert tensors == [(0, 1, 24_576), (1, 0, 65_536), (0, 1, 65_536)]

# %% [markdown]
# ## Where it crosses
#
# Where a tensor that needs a gradient leaves a worker, autograd adds a *send* node to its graph. Where it arrives,
# autograd adds a *recv* node with the same number. In the backward pass the recv node sends the gradient, and the send
# node receives it. Here the value stays on `stage1` until `to_here()` fetches it. Look at the edge between the workers.


# %%
def fetched(B):
    remote_conv = rpc.remote("stage1", Conv)
    with dist_autograd.context() as context:
        y = remote_conv.remote().forward(torch.ones(B, 3, 16, 16)).to_here()
        dist_autograd.backward(context, [y.square().mean()])


seen = Cluster(["stage0", "stage1"], rpc=True, graph=True).run({"stage0": fetched}, 8)
axes = draw.autograd(seen.trace)
graph = autograd_graph(seen.trace)
wires = [(a, b) for a, b, kind in graph.edges(data="kind") if kind == "wire"]
names = [tuple(graph.nodes[node]["name"].split("::")[-1] for node in wire) for wire in wires]
print(names)

# %% tags=["DM4", "check"]
assert names == [("RecvRpcBackward", "SendRpcBackward")]
assert [tuple(graph.nodes[node]["worker"] for node in wire) for wire in wires] == [("stage0", "stage1")]

# %% [markdown]
# ## Does the batch size matter?
#
# Under DDP it does not. How do the three sizes change with batches of 1, 8 and 32? In the picture, do the points lie on
# straight lines? (The output and its gradient share one line. A cluster inside `with` keeps its workers.)

# %%
with cluster:
    told = scaling({B: cluster.run({"stage0": one_pass}, B).trace for B in (1, 8, 32)})
print(told)
axes = draw.scaling(told)

# %% [markdown]
# They grow by exactly 4 · C · H · W bytes for each example, where C is the number of channels of the tensor that
# travels. The rest is the packing of the tensors and the runtime's own messages, which is the same for any batch.

# %% tags=["DM5", "check"]
assert [line.slope for line in told.growing] == [4 * 3 * 16 * 16, 4 * 8 * 16 * 16, 4 * 8 * 16 * 16]
assert all(line.exact and line.deviation_bytes <= 4 for line in told.lines)
assert all(0 < line.constant < 1_000 for line in told.growing)

# %% [markdown]
# ## Is the backward traffic as large as the forward traffic?
#
# Not always. Here are two changes of one line each:
#
# 1. the *input* needs a gradient (it is the output of a layer on `stage0`, say);
# 2. the loss is `y.sum()` instead of `y.square().mean()`. The gradient of a sum is 1 for every number.
#
# **Predict first:** with a batch of 8 and the second change, how many bytes of gradient are sent?

# %%
my_gradient = lessons.predict("model_parallel.gradient of a sum", None)


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
my_gradient and my_gradient.against(sent)

# %% [markdown]
# If the input needs no gradient, nothing comes back for it. If it needs one, 3,072 bytes come back for each example, as
# many as were sent. The gradient of a sum has the shape of the output, 8,192 bytes for each example, but it stores a
# single 1: it is an *expanded* tensor. RPC sends only what is stored: **4 bytes**, for any batch. (So an example that
# ends in `.sum()` looks cheaper than real training.)
#
# With `measure="phase"` the kernel's counters are read around the backward pass. Instead of 65,536 bytes, fewer than
# 400 are sent, nearly all of them framing.

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
# Now we train a whole model in two ways. `split.First` is a convolution with 8 output channels. `split.Second` has two
# linear layers with ten outputs. Together they have 35,818 parameters, P = 143,272 bytes.
#
# - *DDP*: both ranks have the whole model, and each sends P bytes in a step: 2 · P together.
# - *Model parallel*: `stage0` has the first half; `stage1` has the second half, and gets the labels for the loss. In
#   each step B · 4 · C · H · W bytes cross the cut, and as many come back: 8,192 bytes for each example, twice.
#
# **Predict first:** DDP's bytes do not depend on B, those of model parallel grow with it. At which B are both equal?

# %%
my_meeting = lessons.predict("model_parallel.break-even", None)
size = split.Size(C=8, H=16, W=16)
predicted = split.break_even(size)
print(f"P = {split.parameter_bytes(size):,} B, the cut: {split.boundary_bytes(size):,} B for each example")
print(f"They meet at B = {predicted:.2f}")

steps = {}
if counted:
    counting = Bytes()  # two lasting ranks, and the kernel's counters around each step
    steps = {B: counting.ask(size._replace(B=B)) for B in (1, 8, 16, 17, 18, 32)}
    counting.close()
for B, step in steps.items():
    less = "DDP" if step.ddp[1] < step.rpc[1] else "model parallel"
    print(f"B = {B:2}: DDP {step.ddp[1]:,} B, model parallel {step.rpc[1]:,} B: {less} sends less")
my_meeting and my_meeting.against(predicted, tolerance=0.03)

# %% [markdown]
# They are equal where 2 · P = 2 · B · 4 · C · H · W, so at B = P / (4 · C · H · W) = 17.49; the measurement finds it
# between 17 and 18. For larger B, DDP sends less. The kernel also counts what the formula leaves out: the labels, 8
# bytes each, and the framing of the twelve messages of a step, about 3 kB in all.

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
    assert step.ddp[1] - step.ddp[0] == 8 * (96 + 48)  # gloo's framing of eight messages
    added = sum(each.predicted_bytes for each in iteration(step.traces[1]).phases)
    assert abs(step.rpc[1] - added) < 20

# %% [markdown]
# (Each of DDP's two ranks has its own batch of B. Its bytes do not change if each takes half of one batch. With n ranks
# instead of 2, both formulas get the factor n - 1, so they are equal at the same B.)
#
# ## Change the sizes
#
# When you release a slider, the two ranks train again in both ways, and the kernel counts. (With the keyboard, tab to a
# slider, then use the arrow keys. Without a running kernel you see only the picture; on a system without counters you
# see nothing.) With images of 8×8 pixels instead of 16×16, at which batch size are both equal?

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
# A linear layer of 4,096 × 4,096 numbers (without bias) is behind the cut, and its input of B × 4,096 numbers crosses
# it. The part before the cut has no parameters. Above which batch size does DDP send less? Write your number instead of
# `None`, and run the cell.

# %% tags=["exercise"]
my_answer = None
lessons.answer("model_parallel.linear_layer", my_answer)

# %% tags=["answer"]
P = 4 * sum(each.numel() for each in nn.Linear(4_096, 4_096, bias=False).parameters())
assert lessons.answer("model_parallel.linear_layer", P / torch.ones(4_096).nbytes).right
