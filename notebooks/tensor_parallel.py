# ---
# jupyter:
#   dlearn:
#     ids: [Q15, T1, T2, T3, T4]
#     minutes: 0.5
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Tensor parallel: layers cut in n parts, and the sum that you can forget
#
# **Goals.** You will be able to cut a pair of layers by columns and rows; find a forgotten all-reduce in a trace; say
# what sequence parallel changes, and why tensor parallel stays inside one host.
#
# **Before this:** [collectives](collectives.ipynb), [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 40
# minutes.
#
# DDP cuts the batch. *Tensor parallel* cuts the matrices: each of n ranks computes **all tokens** with **1/n of each
# layer**. (A *token* is a row of x: here an image, in a language model about a word.) Megatron-LM (Shoeybi et al. 2019)
# cuts layers in pairs. `up`, from W to H numbers, is cut by **columns**: each rank computes H/n hidden units. ReLU
# needs no unit of another rank. (torch stores weights transposed: the columns are its rows.) `down`, back to W numbers,
# is cut by **rows**: each rank has one *summand* of each output, and an all-reduce adds them where the pair ends. **Why
# is there something to do where it begins?** All ranks use the input, so its gradient is a sum, too.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.flop_counter import FlopCounterMode

from dlearn import Cluster, analysis, draw, lessons, messages, operations, play, span
from dlearn.analysis import traffic
from dlearn.lessons import charts, digits

N, T, W, H = 4, 48, 64, 256  # ranks, tokens, width, hidden units


class Copied(torch.autograd.Function):  # Where a pair begins. Megatron-LM's paper calls it f.
    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Added(torch.autograd.Function):  # Where a pair ends (g): the reverse.
    @staticmethod
    def forward(context, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context, gradient):  # The gradient of a sum is that of each summand.
        return gradient


# %%
def identity(x):
    return x


class Block(nn.Module):
    def __init__(self, hidden=H):
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.up, self.down = nn.Linear(W, hidden, bias=False), nn.Linear(hidden, W, bias=False)
        self.begin = self.end = identity  # on one device

    def forward(self, x):
        return x + self.end(self.down(torch.relu(self.up(self.begin(self.norm(x))))))


def by_hand(block, begin=Copied.apply):
    rank, n = dist.get_rank(), dist.get_world_size()
    block.begin, block.end = begin, Added.apply
    block.up.weight = nn.Parameter(block.up.weight.chunk(n)[rank].detach().clone())
    block.down.weight = nn.Parameter(block.down.weight.chunk(n, dim=1)[rank].detach().clone())


def step(cut, tokens=T, hidden=H, parts=1):
    """Return whether all is as on one device. The tokens are cut into `parts`, or every rank has all."""
    torch.manual_seed(0)
    block, x = Block(hidden), torch.randn(tokens, W, requires_grad=True)
    expected = block(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    cut(block)
    own = dist.get_rank() % parts
    mine = x.chunk(parts)[own].detach().clone().requires_grad_()
    with span("step"):
        y = block(mine)
        y.square().sum().backward()
    pairs = (y, expected.chunk(parts)[own]), (mine.grad, gradient.chunk(parts)[own])
    return all(torch.allclose(mine, right, atol=1e-4) for mine, right in pairs)


# %% [markdown]
# `dlearn_ring` is a ring in Python whose messages are all recorded. **Predict first:** what doubles the bytes, twice as
# many hidden units or twice as many tokens? Then look at the picture: a bar is a call. How many does each rank make?

# %%
my_size = lessons.predict("tensor_parallel.what doubles the bytes", None, choices=("hidden units", "tokens"))
ring, gloo = Cluster(N, backend="dlearn_ring"), Cluster(N)
runs = {size: ring.run(step, by_hand, *size) for size in ((T, H), (T, 2 * H), (2 * T, H))}
steps = {size: run.trace.within("step") for size, run in runs.items()}
sent = {size: traffic(step).bytes_from(rank=0) for size, step in steps.items()}
for (tokens, hidden), size in sent.items():
    print(f"{tokens} tokens, {hidden} hidden units: {size:,} B from each rank")
my_size and my_size.against("tokens" if sent[2 * T, H] > sent[T, 2 * H] else "hidden units")
axes = charts.retitle(draw.timeline(steps[T, H]), "Each rank makes two calls: an all-reduce forward, one backward")

# %% tags=["T1", "Q15", "check"]
for (tokens, hidden), run in runs.items():
    calls = operations(steps[tokens, hidden])
    assert run.results == dict.fromkeys(range(N), True), "output and gradient are those of one device"
    assert [(each.ends[0].phase, each.op) for each in calls] == [("forward", "all_reduce"), ("backward", "all_reduce")]
    assert sent[tokens, hidden] == 2 * 2 * (N - 1) / N * tokens * W * 4

# %% [markdown]
# Both all-reduces have T · W numbers. In a ring a rank sends **2 · 2 (n-1)/n · T · W · 4** bytes for both. Weights and
# their gradients never travel. So the bytes grow with the batch and not with H; in DDP it is the other way round.
#
# ## Forget the all-reduce of the backward pass
#
# Without `Copied` the output is still right. Four ranks train two such blocks. Before them is a layer of which every
# rank has a copy, `embed`. **Predict first:** what happens without the all-reduce of the backward pass?

# %%
choices = ("an error", "a hang", "the loss stays high", "the loss falls")
my_mistake = lessons.predict("tensor_parallel.forgotten backward", None, choices=choices)


def train(cut):
    """Return the losses, and the weights of `embed` after each step."""
    images, labels = digits.shard(0, 1)  # all ranks have the same images
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, W), Block(), Block(), nn.Linear(W, 10))
    for block in model[2:4]:
        cut(block)
    optimizer, losses, embed = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for x, label in list(zip(images.split(T), labels.split(T), strict=True))[:20]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        embed.append(model[1].weight.detach().clone())
    return losses, torch.stack(embed)


one = train(identity)
right, wrong = ring.run(train, by_hand), ring.run(train, lambda block: by_hand(block, begin=identity))
for name, (losses, _) in {"one device": one, "right": right.results[0], "forgotten": wrong.results[0]}.items():
    print(f"{name:10} loss {losses[0]:.4f}, after 20 steps {losses[-1]:.4f}")
my_mistake and my_mistake.against("the loss falls" if wrong.results[0][0][-1] < 1.5 else "the loss stays high")

# %% [markdown]
# The loss falls, here even faster than on one device. No error tells you that this is another model. How far apart are
# the ranks' copies of `embed`, which should be equal? And what does the traffic say?

# %%
mine, next_one = wrong.results[0][1], wrong.results[1][1]
pairs = {"right, from one device": (right.results[0][1], one[1]), "forgotten, from one device": (mine, one[1])}
pairs["forgotten, rank 1 from rank 0"] = (next_one, mine)
drift = {name: ((a - b).norm(dim=(1, 2)) / b.norm(dim=(1, 2))).tolist() for name, (a, b) in pairs.items()}
series = {name: charts.Series(range(1, 21), values) for name, values in drift.items()}
title = f"Without the all-reduce, the copies are {drift['forgotten, rank 1 from rank 0'][-1]:.0%} apart after 20 steps"
axes = charts.lines(series, title=title, x="step", y="relative distance", ticks=[(1, "1"), (10, "10"), (20, "20")])
missing = analysis.compare(right.trace, wrong.trace, names=("right", "forgotten"))
missing

# %% tags=["T2", "check"]
assert wrong.results[0][0][-1] < one[0][-1] < 0.7 * one[0][0]
assert max(drift["right, from one device"]) < 1e-5
assert min(drift["forgotten, from one device"][-1], drift["forgotten, rank 1 from rank 0"][-1]) > 0.05
assert (missing.went, missing.came) == ((("backward", "all_reduce"),), ())
assert missing.total.b.payload_bytes * 2 == missing.total.a.payload_bytes

# %% [markdown]
# The kind *backward all_reduce* is gone. **Each pair has one forward and one backward**, unless its input needs no
# gradient. Without it each rank has only its own summand of the gradient: everything before the pair goes its own way.
#
# ## torch's own, and sequence parallel
#
# `parallelize_module` cuts the block by a plan. Each weight becomes a *DTensor*, which knows this rank's part of it.
# Before a pair, every rank computes and keeps the norm of all tokens, n times the same. With *sequence parallel*
# (Korthikanti et al. 2022) each rank has 1/n of the tokens there. An all-gather brings them together where the pair
# begins. A reduce-scatter sums the outputs where it ends. Backward, each is the other. **Predict first:** how many
# times the bytes of tensor parallel does this send on the ring?

# %%
my_ratio = lessons.predict("tensor_parallel.bytes of sequence parallel", None)


def torchs(block, plan=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(block, mesh, plan or {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence(block):
    pair = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
    torchs(block, {"norm": SequenceParallel(sequence_dim=0), **pair})


ways = {"tensor parallel": (torchs, T, H), "sequence parallel": (sequence, T, H, N)}
on_ring, on_gloo = ([cluster.run(step, *way) for way in ways.values()] for cluster in (ring, gloo))
tensor, cut = (run.trace.within("step") for run in on_ring)
same = analysis.compare(steps[T, H], tensor, names=("by hand", "torch's own"))
other = analysis.compare(tensor, cut, names=tuple(ways))
print(same.sentence, other, sep="\n\n")
my_ratio and my_ratio.against(other.total.b.payload_bytes / other.total.a.payload_bytes)
gather = cut.where(op="all_gather_single_coalesced", phase="forward")
play.player(gather, title=f"After {len(messages(gather)) // N} rounds each rank has all tokens")

# %% [markdown]
# torch's tensor parallel sends the same as by hand. Sequence parallel sends **as many bytes**: an all-reduce *is* a
# reduce-scatter and an all-gather. (On gloo 1.5 times as many: its reduce-scatter costs a whole all-reduce.) The player
# shows the first all-gather: after which round does a rank have all tokens? What is gained is memory. The next picture
# shows what autograd keeps for the backward pass: how much less?


# %%
def forward(cut, parts=1):
    """Return the FLOPs of a forward pass, and the bytes of the tensors that autograd keeps of it."""
    block, sizes = Block(), {}
    cut(block)

    def note(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = getattr(local, "elem", local).untyped_storage()  # "elem": of a collective that may still go on
        if len(local) in (T, T // N):  # no weight
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as flops, saved_tensors_hooks(note, lambda tensor: tensor):
        block(torch.zeros(T // parts, W, requires_grad=True))
    return flops.get_total_flops(), sum(sizes.values())


cuts = {"by hand": (by_hand,), "tensor parallel": (torchs,), "sequence parallel": (sequence, N)}
passes = {name: ring.run(forward, *how) for name, how in cuts.items()}
kept = {name: run.results[0][1] for name, run in passes.items()}
less = kept["tensor parallel"] - kept["sequence parallel"]
title = f"Sequence parallel keeps {less:,} B less: {N - 1}/{N} of the norm's tensors"
axes = charts.bars([*kept], [charts.Part("kept", [*kept.values()])], title=title, y="bytes", text="{:,.0f} B".format)

# %% tags=["T3", "Q15", "check"]
assert all(run.results == dict.fromkeys(range(N), True) for run in (*on_ring, *on_gloo))
assert all(each.a == each.b for each in (*same.by_kind.values(), *same.by_pair.values()))
halves = ["all_gather_single_coalesced", "reduce_scatter_single_coalesced"]
assert sorted(other.came) == sorted((phase, op) for phase in ("forward", "backward") for op in halves)
assert other.total.added_bytes == 0
gloo_bytes = [traffic(run.trace.within("step")).total_bytes for run in on_gloo]
assert gloo_bytes[1] == 1.5 * gloo_bytes[0]
rest = T * W + T * H / N  # the input of the pair, and the hidden units
assert kept["by hand"] == kept["tensor parallel"] == 4 * (T * (W + 2) + rest) == 37_248
assert kept["sequence parallel"] == 4 * (T * (W + 2) / N + rest) == 27_744

# %% [markdown]
# The norm keeps its input, a mean and a deviation of each token: with sequence parallel 1/n of it. (torch keeps the
# gathered input of the pair whole. The paper keeps 1/n, and gathers it again in the backward pass.) A rank's gradients
# of the norm's *weights* are now of its own tokens only. torch sums them in the optimizer's step: not in this table.
#
# ## How long does it take?
#
# Forward, a rank computes 4 · T · W · H/n FLOPs and sends 2 (n-1)/n · T · W numbers of b bytes: **2 H / ((n-1) · b)
# FLOPs per byte**, for any batch. The cell measures that. Then it *predicts* from NVIDIA's data sheet of the H100 SXM:
# 989 TFLOP/s (bf16, dense), 450 GB/s in each direction over NVLink. A network of 400 Gbit/s has 50 GB/s.

# %%
per_byte = passes["by hand"].results[0][0] / traffic(passes["by hand"].trace).bytes_from(rank=0)
predicted = 2 * 16_384 / ((8 - 1) * 2)  # H of a model with W = 4,096; 8 ranks; numbers of 2 bytes
slower = {link: round(989e12 / rate / predicted, 2) for link, rate in {"NVLink": 450e9, "network": 50e9}.items()}
print(f"measured: {per_byte:.1f} FLOPs per byte sent; predicted for a large model on 8 ranks: {predicted:,.0f}")
print("predicted: sending takes so many times as long as computing:", slower)

# %% tags=["T4", "check"]
assert per_byte == 2 * H / ((N - 1) * 4)
assert slower == {"NVLink": 0.94, "network": 8.45}

# %% [markdown]
# Nothing hides it: the next layer needs the sum. Forward, sending takes 0.94 times (NVLink) or 8.45 times (network) as
# long as computing. Backward a rank computes twice as much for as many bytes. Megatron-LM sends while it computes the
# gradient of `up`'s weights: 2 · T · W · H/n FLOPs, **H / ((n-1) · b) for each byte**. So it stays inside one host.
#
# ## Exercises
#
# Write a pair with a bias, and sequence parallel by hand. The docstrings say what each function must do.


# %% tags=["exercise"]
def my_layers(x, columns, rows, bias):
    """Return `relu(x @ first.T) @ second.T + bias`, differentiable, with the outputs and gradients of one device. Each
    rank has the whole x and bias, 1/n of the rows of `first` (`columns`: its own hidden units) and the columns of
    `second` (`rows`) that go with them.
    """
    return torch.relu(x @ columns.T) @ rows.T + bias  # only this rank's share: what is missing, forward and backward?


lessons.check("column_row", my_layers, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_sequence(x, norm, columns, rows):
    """Return this rank's tokens of `relu(norm(X) @ first.T) @ second.T`, differentiable. X are all tokens; x is this
    rank's 1/n. Give `norm` only x. Send by an all-gather and a reduce-scatter forward, and by as many backward.
    """
    return torch.relu(norm(x) @ columns.T) @ rows.T  # replace this by your layers


lessons.check("sequence_parallel", my_sequence, student="")
