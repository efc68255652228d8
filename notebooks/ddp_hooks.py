# ---
# jupyter:
#   dlearn:
#     ids: [DD11, DD15, DD16, DD18, DM3, Q3, Q7]
#     minutes: 0.4
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # DDP: its hooks, and its options
#
# **Goals.** You will be able to say which hook fires when in a backward pass, and where DDP registers its own; say what
# buffers and each option of DDP cost in bytes and in memory.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 40 minutes.
#
# With DDP, `loss.backward()` and `optimizer.step()` do not change. **How then does DDP send the gradients? And how do
# its options change the traffic?**
#
# ## Which lines send?
#
# The trace contains each call of a collective, and the line of *your* program in which it happened. **Predict first:**
# which of these lines of `train` sends nothing?


# %%
import inspect
import warnings
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, lessons, operations, span
from dlearn.analysis import compare, traffic
from dlearn.lessons import digits, models

my_line = lessons.predict("ddp_hooks.sends nothing", None, choices=("DDP()", "model()", "backward()", "step()"))


def train(batch_size):
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())  # my share
    torch.manual_seed(0)
    model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()


run = Cluster(2).run(train, 16)
source, first_line = inspect.getsourcelines(train)
behind = []
for call in run.trace.where(kind="collective", rank=0).events:
    line = source[int(call.site.split(":")[1]) - first_line].strip().split("(")[0]
    behind.append((line, call.phase))
    print(f"{line:36} {call.phase:9} {call.op:11} {call.inputs[0].payload_bytes:9,} B  {call.role}")

# %% [markdown]
# Three lines send: the constructor, the call of the model, and `backward()`. The optimizer sends nothing, because all
# ranks have the same gradients by then, and take the same step. (DDP's module calls yours, so it can run code before
# each forward pass. And it has registered a hook on each parameter, which autograd calls.)

# %% tags=["DD15", "check"]
phases = {phase: {line for line, its in behind if its == phase} for _, phase in behind}
assert phases == {
    "setup": {"model = DistributedDataParallel"},
    "forward": {"loss = cross_entropy"},
    "backward": {"loss.backward"},
}
my_line and my_line.against("step()")

# %% [markdown]
# ## What is a computation graph?
#
# During the forward pass, autograd records a *node* for each result, which can compute the gradients of the inputs from
# the gradient of the result. The nodes point to each other, from the loss down to the parameters. Each path ends in an
# `AccumulateGrad`, which adds to a `.grad`. DDP's hooks are there, so DDP knows when a gradient is ready.


# %%
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 10, bias=False)

    def forward(self, x):
        self.h = self.one(x).relu()  # kept, so that we can register hooks on it
        return self.two(self.h)


def tree(node, names, depth=0):
    whose = names.get(id(getattr(node, "variable", None)), "")
    lines = ["  " * depth + f"{node.name().split('::')[-1]} {whose}".rstrip()]
    return lines + [line for below, _ in node.next_functions if below for line in tree(below, names, depth + 1)]


model = Two()
loss = model(torch.randn(8, 64)).square().mean()
lines = tree(loss.grad_fn, {id(parameter): name for name, parameter in model.named_parameters()})
print(*lines, sep="\n")
assert [line.split()[-1] for line in lines if "AccumulateGrad" in line] == ["one.weight", "two.weight"]

# %% [markdown]
# ## What is a hook, and when does it fire?
#
# A hook is a function of yours that torch calls at a certain point. The cells below register one hook of each kind on
# that model and make one step under DDP, with a bucket for each parameter. **Predict first:** does a parameter's hook
# (`Tensor.register_hook`) fire before or after its gradient is in `.grad`?

# %%
my_order = lessons.predict("ddp_hooks.tensor hook", None, choices=("before", "after"))
seen = []


def note(kind, what):
    """Return a hook of any kind, which records that it was called, and changes nothing."""

    def hook(*_):
        seen.append((kind, what))

    return hook


def on_modules(model):
    for name in ("one", "two"):
        module = getattr(model, name)
        module.register_forward_pre_hook(note("module: before forward", name))
        module.register_forward_hook(note("module: after forward", name))
    model.two.register_full_backward_pre_hook(note("module: before backward", "two"))
    model.two.register_full_backward_hook(note("module: after backward", "two"))


def on_parameters(model):
    for name, parameter in model.named_parameters():
        parameter.register_hook(note("tensor", name))
        parameter.register_post_accumulate_grad_hook(note("after accumulation", name))
        accumulate = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        accumulate.register_hook(note("node: after", f"Acc. {name}"))
        yield accumulate  # autograd keeps it only while something refers to it
    both = tuple(model.parameters())
    torch.autograd.graph.register_multi_grad_hook(both, note("several: the first", "of both"), mode="any")
    torch.autograd.graph.register_multi_grad_hook(both, note("several: all", "both"), mode="all")


# %%
def on_h(h):
    h.register_hook(note("tensor", "h"))
    h.grad_fn.register_prehook(note("node: before", "ReLU"))
    h.grad_fn.register_hook(note("node: after", "ReLU"))


def on_buckets(state, bucket):
    note("DDP: a bucket is full", f"bucket {bucket.index()}")()
    return allreduce_hook(state, bucket)


def with_hooks():
    model = Two()
    on_modules(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0)
    ddp.register_comm_hook(dist.group.WORLD, on_buckets)
    held = list(on_parameters(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(note("optimizer: before step", "SGD"))
    optimizer.register_step_post_hook(note("optimizer: after step", "SGD"))
    for _ in range(2):  # the second step has the final buckets
        seen.clear()
        loss = ddp(torch.randn(8, 64)).square().mean()
        on_h(model.h)
        loss.backward()
        optimizer.step()
    assert len(held) == 2
    return list(seen)


hooked = Cluster(2).run(with_hooks)
fired = hooked.results[0]

# %% [markdown]
# In the picture, each column is one call of a hook, in the order of time, and each row is a kind of hook. Look for
# `two.weight`. What is called before its bucket, and what after? (Acc. is its `AccumulateGrad`.)
#
# | row | registered with |
# |---|---|
# | module: before, after forward | `Module.register_forward_pre_hook`, `register_forward_hook` |
# | module: before, after backward | `Module.register_full_backward_pre_hook`, `register_full_backward_hook` |
# | tensor; after accumulation | `Tensor.register_hook`; `Tensor.register_post_accumulate_grad_hook` |
# | several: the first; all | `torch.autograd.graph.register_multi_grad_hook`, mode "any"; "all" |
# | node: before, after | `Node.register_prehook`, `register_hook` (the node of a tensor is its `grad_fn`) |
# | DDP: a bucket is full | `DistributedDataParallel.register_comm_hook` |
# | optimizer: before, after step | `Optimizer.register_step_pre_hook`, `register_step_post_hook` |


# %%
def draw_hooks(fired):
    kinds = list(dict.fromkeys(kind for kind, _ in fired))
    _, axes = plt.subplots(figsize=(9, 4.6), dpi=110, layout="constrained")
    for place, (kind, what) in enumerate(fired, 1):
        row = kinds.index(kind)
        color = "#0072B2" if kind.startswith("DDP") else "#222222"
        axes.plot(place, row, "o", color=color, markersize=6)
        axes.annotate(what, (place, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    backward = [place for place, (kind, _) in enumerate(fired, 1) if not kind.startswith(("optimizer", "module: b"))]
    axes.axvspan(4.5, max(backward) + 0.5, color="#f0f0f0", zorder=0)
    axes.text(4.6, -0.75, "backward()", fontsize=9, va="center")
    axes.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axes.set_ylim(len(kinds) - 0.5, -1.2)
    axes.set_xlim(0.3, len(fired) + 3)
    axes.set_xticks(range(1, len(fired) + 1, 2))
    axes.set_xlabel("order of the calls on rank 0", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Bucket 0 goes before the backward pass gets to h", loc="left", fontsize=12, fontweight="bold")


draw_hooks(fired)

# %% [markdown]
# For `two.weight`, from left to right:
#
# 1. the *tensor* hook: the gradient has been computed, and could still be changed; it is not yet in `.grad`;
# 2. *after accumulation*: now it is in `.grad`. (dlearn registers hooks of this kind on parameters, for the ticks in
#    all pictures. It also uses the optimizer's hooks, but no communication hook.)
# 3. DDP's own hook, in C++ on the same `AccumulateGrad`: it finds that bucket 0 is full, and calls the *communication
#    hook*, which sends the bucket;
# 4. the node's other hooks; then autograd continues with `h` and the first layer.
#
# Your program calls none of these hooks. In this sense DDP is non-intrusive.

# %% tags=["DD18", "check"]
order = {each: place for place, each in enumerate(fired)}
assert fired == hooked.results[1]
assert len(order) == len(fired)
for weight, bucket in (("two.weight", "bucket 0"), ("one.weight", "bucket 1")):
    kinds = [
        order["tensor", weight],
        order["after accumulation", weight],
        order["DDP: a bucket is full", bucket],
        order["node: after", f"Acc. {weight}"],
    ]
    assert kinds == sorted(kinds)
assert order["DDP: a bucket is full", "bucket 0"] < order["tensor", "h"] < order["node: before", "ReLU"]
assert order["node: before", "ReLU"] < order["node: after", "ReLU"] < order["tensor", "one.weight"]
assert order["several: the first", "of both"] < order["tensor", "h"] < order["several: all", "both"]
assert order["several: all", "both"] < order["after accumulation", "one.weight"]
weight = nn.Parameter(torch.ones(1))
there = []
weight.register_hook(lambda _: there.append(weight.grad is not None))
weight.register_post_accumulate_grad_hook(lambda _: there.append(weight.grad is not None))
weight.sum().backward()
assert there == [False, True]
my_order and my_order.against("before")

# %% [markdown]
# ## Buffers
#
# A `BatchNorm` layer has parameters, and also *buffers*: the running mean and variance, and a counter. Buffers have no
# gradient. **Predict first:** how many bytes of buffers does rank 0 send in a step, with 12 channels and two ranks?

# %%
my_buffers = lessons.predict("ddp_hooks.bytes of buffers", None)


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12 * 8 * 8, 10)

    def forward(self, images):
        return self.fc(self.norm(self.conv(images)).relu().flatten(1))


def train_norm(make=WithNorm, **options):
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 calls broadcast_buffers deprecated
    images, labels = digits.shard(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(make(), **options)
    for step in range(3):
        model.zero_grad()
        with span(f"step {step}"):
            cross_entropy(model(images[:16]), labels[:16]).backward()
    return model.module.norm.running_mean


norm = Cluster(2).run(train_norm)
for operation in operations(norm.trace.within("step 2")):
    (given,) = operation.ends[0].inputs
    told = f"{operation.op} in {operation.ends[0].phase}, {given.dtype}{list(given.shape)}, {given.payload_bytes:,} B"
    print(f"{told}: {operation.what}")
print("running mean of channel 0:", [round(each[0].item(), 6) for each in norm.results.values()])
my_buffers and my_buffers.against(traffic(norm.trace.within("step 2").where(op="broadcast")).bytes_from(rank=0))

# %% [markdown]
# In each forward pass rank 0 sends its buffers to all other ranks: 96 B of means and variances, and 8 B for the counter
# (a separate message, because its type differs). They are not averaged. Then the forward pass updates them from the
# rank's own batch, so after a step they differ again. Only rank 0's buffers are ever sent, so save the model on rank 0.

# %% tags=["DD16", "DM3", "check"]
shown = [each for each in operations(norm.trace.within("step 2")) if each.op == "broadcast"]
assert [each.ends[0].inputs[0].payload_bytes for each in shown] == [4 * (12 + 12), 8]
assert traffic(norm.trace.within("step 2").where(op="broadcast")).payload_bytes == {(0, 1): 96 + 8}
assert not torch.equal(norm.results[0], norm.results[1])

# %% [markdown]
# ## The options, one by one
#
# Each line below changes one option of DDP. `find_unused_parameters=True` is for models in which a forward pass does
# not use all parameters; for this line the model gets a layer of 6 parameters that is never used. Which option changes
# the bytes of a step, which only the number of calls, and which neither?


# %%
class WithSpare(WithNorm):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


KNOBS = {
    "all as they are": {},
    "forward_sync_buffers=False": {"forward_sync_buffers": False},
    "broadcast_buffers=False": {"broadcast_buffers": False},
    "bucket_cap_mb=0": {"bucket_cap_mb": 0},
    "gradient_as_bucket_view=True": {"gradient_as_bucket_view": True},
    "find_unused_parameters=True": {"find_unused_parameters": True, "make": WithSpare},
}
costs = {}
print(f"{'rank 0 sends, in bytes':32} constructor  step 0  step 1  step 2  calls in step 2")
with Cluster(2) as cluster:
    runs = {knob: cluster.run(partial(train_norm, **options)) for knob, options in KNOBS.items()}
for knob, ran in runs.items():
    per_step = [traffic(ran.trace.within(f"step {step}")).bytes_from(rank=0) for step in range(3)]
    calls = len(operations(ran.trace.within("step 2")))
    costs[knob] = (traffic(ran.trace).bytes_from(rank=0) - sum(per_step), *per_step, calls)
    print(f"{knob:32} {costs[knob][0]:11,} {per_step[0]:7,} {per_step[1]:7,} {per_step[2]:7,} {calls:16}")

# %% [markdown]
# - `forward_sync_buffers=False`: no step sends the 104 bytes of buffers, but the constructor still sends them once.
#   With the older option `broadcast_buffers=False` the constructor does not send them either.
# - `bucket_cap_mb=0`: the same bytes, but 5 all-reduces instead of 1. (In step 1 rank 0 sends the sizes of 5 buckets
#   instead of 1: 16 bytes more.)
# - `gradient_as_bucket_view=True` changes no byte. See below.
# - `find_unused_parameters=True`: one more call sends a map of the used parameters, 4 bytes for each of 7. The
#   gradients of the unused layer travel, too (24 bytes), although no rank computed them. The buckets are never rebuilt,
#   so step 1 sends no more than others. DDP also walks over the graph in each forward pass, which no message shows.

# %% tags=["DD16", "Q3", "check"]
P, buffers = 4 * (108 + 24 + 7_690), 4 * 24 + 8
tables = 4 * (5 + 1) + 4  # what step 1 sends for the new buckets
shapes = 8 + 8 * 2 * (4 + 1 + 1 + 2 + 1)
assert costs == {
    "all as they are": (shapes + P + buffers, P + buffers, P + buffers + tables, P + buffers, 3),
    "forward_sync_buffers=False": (shapes + P + buffers, P, P + tables, P, 1),
    "broadcast_buffers=False": (shapes + P, P, P + tables, P, 1),
    "bucket_cap_mb=0": (shapes + P + buffers, P + buffers, P + buffers + tables + 16, P + buffers, 2 + 5),
    "gradient_as_bucket_view=True": (shapes + P + buffers, P + buffers, P + buffers + tables, P + buffers, 3),
    "find_unused_parameters=True": (shapes + 8 * 2 * 3 + P + 24 + buffers, *[P + 24 + 28 + buffers] * 3, 4),
}

# %% [markdown]
# ## A layer that a step drops
#
# Without `find_unused_parameters`, a rank that leaves out a layer makes another one wait
# ([museum_of_hangs](museum_of_hangs.ipynb)); if all ranks leave it out, DDP raises an error in the next step. With it:
# are the bytes of a dropped layer saved, and which ranks have its gradient, if only one of two has dropped it?


# %% tags=["DD11"]
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))  # 16,640 B each

    def forward(self, x, dropped):
        for number, layer in enumerate(self.layers):
            x = x if number == dropped else x + layer(x).relu()
        return x


def drop(of_each_rank, steps=1, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Tower(), bucket_cap_mb=0, **options)
    for _ in range(steps):
        model(torch.ones(4, 64), of_each_rank[dist.get_rank()]).sum().backward()
    return {name: each.grad for name, each in model.module.named_parameters() if each.grad is not None}


both = Cluster(2).run(partial(drop, (1, 1), find_unused_parameters=True))
two = Cluster(2).run(partial(drop, (1, 2), find_unused_parameters=True))
skip = Cluster(2).run(partial(drop, (1, 1), find_unused_parameters=True, skip_all_reduce_unused_params=True))
for name, ran in {"both drop layer 1": both, "they drop 1 and 2": two, "both drop 1, and skip it": skip}.items():
    size = sum(call.given_bytes for call in operations(ran.trace.where(op="all_reduce")))
    print(f"{name:24} {size:,} B in all-reduces, then {len(ran.results[0])} of 6 parameters have a gradient")
without = Cluster(2).run(partial(drop, (1, 1), steps=2), check=False)
print(without.error.what.split(". ")[0])

# %% tags=["DD11", "check"]
tower, unused_map = 3 * 16_640, 4 * 6
size_of = [sum(call.given_bytes for call in operations(ran.trace.where(op="all_reduce"))) for ran in (both, two, skip)]
assert size_of == [tower + unused_map, tower + unused_map, tower + unused_map - 16_640]
assert both.results[0].keys() == both.results[1].keys() == skip.results[0].keys()
assert [name for name in two.results[0] if name not in both.results[0]] == ["layers.1.weight", "layers.1.bias"]
assert all(torch.equal(gradient, two.results[1][name]) for name, gradient in two.results[0].items())
sent = [call.bucket.parameters for call in operations(two.trace) if call.bucket is not None]
assert sent == [(name,) for name in reversed(two.results[0])]
assert "Expected to have finished reduction in the prior iteration" in without.error.what

# %% [markdown]
# A dropped layer saves nothing: its gradients travel as zeros, and a rank that has dropped it gets the mean, too. Only
# what no rank has used has no gradient. DDP first builds its buckets in the reverse of `model.parameters()`. With
# `skip_all_reduce_unused_params=True` it does not send a bucket that no rank has used.
#
# ## What is gradient_as_bucket_view?
#
# By default a gradient is computed into `.grad`, copied into its bucket, and copied back. With
# `gradient_as_bucket_view=True`, `.grad` *is* a part of the bucket. A communication hook receives the buckets, so we
# can look in which storage each bucket and each `.grad` is. With 16.8 MB of gradients, how many bytes do both take
# together, with and without the option?


# %% tags=["Q7"]
def places(view):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=64, gradient_as_bucket_view=view)
    sizes = {}

    def look(state, bucket):
        storage = bucket.buffer().untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(dist.group.WORLD, look)
    for _ in range(3):
        sizes.clear()
        ddp(torch.ones(1, 1024)).mean().backward()
    for parameter in model.parameters():
        storage = parameter.grad.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


copied, viewed = Cluster(2).run(places, False), Cluster(2).run(places, True)
print(f"copied: {copied.results[0]:,} B of gradients and buckets; as views: {viewed.results[0]:,} B")
print(compare(copied.trace, viewed.trace, names=("copied", "as views")).sentence)
assert copied.results == {0: 2 * 16_777_216, 1: 2 * 16_777_216}
assert viewed.results == {0: 16_777_216, 1: 16_777_216}
assert compare(copied.trace, viewed.trace).total.added_bytes == 0
assert compare(copied.trace, viewed.trace).total.added_messages == 0

# %% [markdown]
# Gradients take half the memory, but as many bytes on the wire. (With Adam, parameters, gradients and two moments take
# 4 times the memory of the parameters, instead of 5.)
#
# ## Exercise
#
# With a `BatchNorm` of 24 channels on two ranks, how many bytes of buffers does rank 0 send in a forward pass? And with
# `gradient_as_bucket_view=True`? Write your two numbers instead of `None`.

# %% tags=["exercise"]
my_answer = {"plain": None, "as views": None}
lessons.answer("ddp_hooks.buffers_of_24_channels", my_answer)


# %% tags=["answer"]
def buffers_sent(**options):
    def three_steps():
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24)), **options)
        for step in range(3):
            with span(f"step {step}"):
                model(torch.randn(4, 8)).square().mean().backward()

    last = Cluster(2).run(three_steps).trace.within("step 2")
    return traffic(last.where(op="broadcast")).bytes_from(rank=0)


sent = {"plain": buffers_sent(), "as views": buffers_sent(gradient_as_bucket_view=True)}
assert lessons.answer("ddp_hooks.buffers_of_24_channels", sent).right
