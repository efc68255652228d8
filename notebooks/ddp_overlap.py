# ---
# jupyter:
#   dlearn:
#     ids: [DD2, DD4]
#     minutes: 0.5
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # DDP: sending while computing
#
# **Goals.** You will be able to say which part of a step's communication is hidden behind the backward pass, and why
# the order of the layers and the size of the buckets decide how much.
#
# **Before this:** [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 25 minutes.
#
# A step of DDP computes gradients and averages them. **Does it do both at once, and how do you see that?**
#
# ## When is a gradient ready?
#
# The backward pass begins at the loss and ends at the first layer. So the last layer's gradient is ready before the
# first layer's, and could already travel. How much earlier is it ready? To measure that, we train a deep model: eight
# linear layers, 0.5 M parameters. DDP calls a communication hook with each full bucket. (`allreduce_hook` does DDP's
# default.)
#
# In the picture, look at where the curve begins and ends, and whether it is a step or a slope. Each thin line is one
# backward pass on one rank; the thick line is the median.

# %%
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, draw, lessons, span
from dlearn.analysis import bucket_times, compare, overlap


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)])

    def forward(self, x):
        return self.layers(x)


def train_deep(hook):
    model = DistributedDataParallel(Deep(), bucket_cap_mb=0.5)
    model.register_comm_hook(dist.group.WORLD, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(256, 256)
    for step in range(12):
        with span(f"step {step}"):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()


deep = Cluster(2).run(train_deep, allreduce_hook)

# %%
curves = {}
for bucket in bucket_times(deep.trace).items:
    if bucket.backward >= 2:  # with the final buckets
        own = curves.setdefault((bucket.rank, bucket.backward), [])
        own += [((at - bucket.begins_ns) / 1e6, name) for name, at in bucket.ready]
elements = {name: parameter.numel() / 1000 for name, parameter in Deep().named_parameters()}
shares = [[100 * ms / curve[-1][0] for ms, _ in curve] for curve in curves.values()]
counted = torch.tensor([elements[name] for _, name in next(iter(curves.values()))]).cumsum(0)
_, axes = plt.subplots(figsize=(9, 3.2), dpi=110, layout="constrained")
for share in shares:
    axes.plot(share, counted, color="#9aa5b8", linewidth=0.7, drawstyle="steps-post")
middle = [median(each) for each in zip(*shares, strict=True)]
axes.plot(middle, counted, color="#222222", linewidth=2.2, drawstyle="steps-post")
axes.set_title("Gradients become ready all along the backward pass", loc="left", fontsize=12, fontweight="bold")
axes.set_xlabel("% of the time from the start of the pass to its last gradient")
axes.set_ylabel("thousand gradients ready")
axes.set_xlim(0, 101)
axes.set_ylim(0, None)
axes.spines[["top", "right"]].set_visible(False)
lasts = sorted(curve[-1][0] for curve in curves.values())
print(f"last gradient after {median(lasts):.1f} ms ({lasts[0]:.1f} to {lasts[-1]:.1f} ms, {len(lasts)} passes)")

# %% [markdown]
# It is a slope: the layers get their gradients one after the other. A gradient that is sent as soon as it is ready
# travels while the remaining ones are computed. The times differ from pass to pass, but the order is always from the
# last layer to the first.

# %% tags=["DD2", "check"]
(order,) = {tuple(name for _, name in curve) for curve in curves.values()}
assert [name.split(".")[1] for name in order[::2]] == list("76543210")
assert len(curves) == 2 * 10
assert all(curve == sorted(dict(curve).items()) for curve in curves.values())  # one after the other

# %% [markdown]
# ## Overlap, with and without
#
# Below is one of those steps, with four buckets. It is the fastest of ten, so it was disturbed least. Look at the ticks
# (gradients) above the first all-reduce of each rank. Do more gradients become ready while it is under way?


# %%
def quickest(trace):
    """Return the shortest step; the first two are left out, because they have other buckets."""
    steps = [trace.within(f"step {step}") for step in range(2, 12)]
    return min(steps, key=lambda step: step.events[-1].start_ns - step.events[0].start_ns)


axes = draw.timeline(quickest(deep.trace))

# %% [markdown]
# Now the communication hook does the same, but does not return before its all-reduce has ended. What happens meanwhile?


# %%
def waits(state, bucket):
    """A communication hook that does not return before its all-reduce is over."""
    data = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(data)
    done = torch.futures.Future()
    done.set_result(data)
    return done


held = Cluster(2).run(train_deep, waits)
axes = draw.timeline(quickest(held.trace))

# %% [markdown]
# Both hooks send the same bytes in the same calls. **Predict first:** with the hook that waits, how many of the 16
# gradients become ready while an all-reduce is under way?

# %%
my_gradients = lessons.predict("overlap.ready while it waits", None)


def meanwhile(trace):
    """Count rank 0's gradients that became ready while one of its all-reduces was under way."""
    step = quickest(trace)
    calls = step.where(op="all_reduce", rank=0).events
    ready = [event.start_ns for event in step.where(kind="gradient", rank=0).events]
    assert len(calls) == 4
    assert calls[0].start_ns < ready[-1]
    return sum(any(call.start_ns < at < call.end_ns for call in calls) for at in ready)


print("as DDP does it:", meanwhile(deep.trace), "gradients became ready while something was under way")
print("with waiting:  ", meanwhile(held.trace))
print(compare(deep.trace, held.trace, names=("DDP", "waits")).sentence)
if my_gradients is not None:
    print(my_gradients.against(meanwhile(held.trace)))

# %% tags=["DD4", "check"]
assert meanwhile(held.trace) == 0
assert compare(deep.trace, held.trace).total.added_bytes == 0

# %% [markdown]
# With the hook that waits, the backward pass stops while a bucket travels, so no communication is hidden. How much time
# does overlap save? The two hooks take turns, three rounds each. (These are times of two processes on a busy machine;
# look at the spread before you believe a difference. The DDP paper found 26.8% for ResNet50 with gloo, on GPUs, where
# computing and sending do not share the cores.)

# %%
shares, steps_ms = {"DDP": [], "waits": []}, {"DDP": [], "waits": []}
with Cluster(2) as cluster:
    for _ in range(3):
        for name, hook in (("DDP", allreduce_hook), ("waits", waits)):
            trace = cluster.run(train_deep, hook).trace
            found = overlap(trace).steps[2:]
            shares[name] += [share.hidden for step in found for share in step.shares if share.hidden is not None]
            spans = trace.where(kind="span", rank=0).events
            steps_ms[name] += [(each.end_ns - each.start_ns) / 1e6 for each in spans[2:]]
for name in shares:
    low, middle, high = min(shares[name]), median(shares[name]), max(shares[name])
    print(f"{name:6} hidden: {middle:4.0%} ({low:.0%} to {high:.0%}) of the communication time", end="; ")
    ordered = sorted(steps_ms[name])
    print(f"a step: {median(ordered):.1f} ms ({ordered[0]:.1f} to {ordered[-1]:.1f}, {len(ordered)} steps)")
axes = draw.breakdown(deep.trace)

# %% [markdown]
# ## How early?
#
# `bucket_cap_mb=0` gives each of the 16 parameters its own bucket. **Predict first:** how many of the 16 all-reduces
# start before the last gradient is ready? And with `bucket_cap_mb=4`, where one bucket contains all gradients? Write
# your numbers instead of `None`.

# %%
one_each = lessons.predict("overlap.one bucket each", None)
one_for_all = lessons.predict("overlap.one bucket for all", None)


def early(bucket_cap_mb):
    """Count rank 0's all-reduces in the third step, and those that start before its last gradient is ready."""

    def two_and_one():
        model = DistributedDataParallel(Deep(), bucket_cap_mb=bucket_cap_mb)
        for step in range(3):
            with span(f"step {step}"):
                model(torch.ones(64, 256)).square().mean().backward()

    step = Cluster(2).run(two_and_one).trace.within("step 2")
    last = max(event.start_ns for event in step.where(kind="gradient", rank=0).events)
    begun = [call.start_ns for call in step.where(op="all_reduce", rank=0).events]
    return len(begun), sum(at < last for at in begun)


small, large = early(0), early(4)
print(f"started before the last gradient is ready: {small[1]} of {small[0]} all-reduces, and {large[1]} of {large[0]}")
if one_each is not None:
    print(one_each.against(small[1]))
if one_for_all is not None:
    print(one_for_all.against(large[1]))

# %% [markdown]
# All but the last. A bucket is sent when its own last gradient is ready, and only the last bucket has to wait for the
# last gradient of all. So only the *last* bucket, that of the first layers, cannot be hidden. With a single bucket,
# nothing is hidden. (More buckets mean more calls; [trees_and_rings](trees_and_rings.ipynb) shows what a call costs.)

# %% tags=["DD4", "check"]
assert (small, large) == ((16, 15), (1, 0))
assert max(shares["waits"]) == 0 < median(shares["DDP"])  # the last rank computes on
