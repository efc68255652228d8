# ---
# jupyter:
#   dlearn:
#     ids: [T17, T18, T19, T20]
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 800
# ---

# %% [markdown]
# # A plan for many ranks: what will it send, and will that be hidden?
#
# **Goals.** You will be able to predict every byte of a training step that is data, tensor and pipeline parallel at
# once; choose which dimension crosses a slow link; say when a plan's communication is hidden behind computing.
#
# **Before this:** [fsdp2](fsdp2.ipynb), [tensor_parallel](tensor_parallel.ipynb), [experts](experts.ipynb),
# [pipeline](pipeline.ipynb). **Takes** about 40 minutes.
#
# Large models are trained with several kinds of parallelism at once. The ranks form a *mesh*: a rank has one place in
# each *dimension*. A **plan** says how many ranks each dimension has. Here are eight ranks in a mesh of 2 × 2 × 2:
#
# - **pp**, pipeline: each of 2 stages has half of the layers. Activations go forward, their gradients go back.
# - **dp**, data: each of 2 replicas has half of the batch. Gradients of the weights are all-reduced.
# - **tp**, tensor: each of 2 ranks has half of every layer. Activations are all-reduced, forward and backward.
#
# A layer is two matrices, width × hidden and hidden × width, with a ReLU between them.

# %%
import inspect

from dlearn import Cluster, draw, lessons, messages, operations
from dlearn.analysis import Machine, ModelShape, plan, plan_times
from dlearn.course import parallel_step
from dlearn.lessons import charts
from dlearn.network import Network

SIZES = {"layers": 4, "width": 32, "hidden": 128, "sequence": 4, "number_bytes": 4}
SHAPE = ModelShape(batch=16, **SIZES)
for part in (parallel_step.train, parallel_step.forward, parallel_step.backward):
    print(inspect.getsource(part))

# %% [markdown]
# That is the step which each rank runs, with the gradients of `reduced` at its end: an all-reduce of each matrix. You
# have written its parts in the lessons before; now they run together.
#
# ## By hand
#
# A ring all-reduce of S bytes over n ranks sends 2 (n-1)/n · S from each rank, 2 (n-1) S in all. The rest is to ask,
# for each dimension: **how large is S, how often is it sent, and in how many groups?**


# %%
def by_hand(shape, dp, tp, pp):
    """Return what all ranks together send in a step, in bytes, by dimension."""
    matrices = 2 * shape.width * shape.hidden * shape.number_bytes  # of a layer
    stage = shape.layers // pp * matrices // tp  # of one rank
    tokens = shape.batch // dp * shape.sequence  # of one replica, in all its micro-batches
    activations = tokens * shape.width * shape.number_bytes
    return {
        "pp": 2 * (pp - 1) * activations * (dp * tp),  # forward and back; each tp rank sends a whole copy
        "dp": 2 * (dp - 1) * stage * (pp * tp),  # pp · tp groups
        "tp": 2 * (tp - 1) * activations * (2 * shape.layers // pp) * (pp * dp),  # a layer: once forward, once back
    }


# %% [markdown]
# **Predict first:** the batch is doubled. The bytes of which dimensions double?

# %%
my_doubled = lessons.predict("plan.doubled batch", None, choices=("dp", "tp", "pp", "tp and pp", "all"))


def sent(run):
    """Return what all ranks together have sent, in bytes, by dimension of the mesh."""
    step, total = run.trace.within("step"), {}
    for name in sorted({each.group.dimension for each in operations(step)}):
        total[name] = sum(each.payload_bytes for each in messages(step.where(dimension=name)))
    return total


MESH = {"dp": 2, "tp": 2, "pp": 2}
ring = Cluster(8, backend="dlearn_ring")
runs = {
    "batch 16": ring.run(parallel_step.train, SHAPE, **MESH, micro_batches=2),
    "four micro-batches": ring.run(parallel_step.train, SHAPE, **MESH, micro_batches=4),
    "batch 32": ring.run(parallel_step.train, ModelShape(batch=32, **SIZES), **MESH, micro_batches=2),
}
for name, run in runs.items():
    print(f"{name}: {sent(run)}")
print("by hand:", by_hand(SHAPE, **MESH))
first, doubled = sent(runs["batch 16"]), sent(runs["batch 32"])
grown = " and ".join(name for name in ("tp", "pp", "dp") if doubled[name] == 2 * first[name])
my_doubled and my_doubled.against(grown)

# %% [markdown]
# The recorded bytes are those by hand, all of them. Activations grow with the batch, so tp and pp double. Gradients are
# summed over the batch before they are sent, so dp depends on the model only. Four micro-batches send twice as many
# messages of half the size.
#
# With which ranks does rank 0 share a group, and in which dimension?

# %%
axes = draw.groups(runs["batch 16"].trace.within("step"))
charts.retitle(axes, "Rank 0 shares tp with rank 1, dp with rank 2, pp with rank 4")

# %% tags=["T17", "T18", "check"]
assert first == by_hand(SHAPE, **MESH)
assert doubled == by_hand(ModelShape(batch=32, **SIZES), **MESH)
assert doubled == {"dp": first["dp"], "tp": 2 * first["tp"], "pp": 2 * first["pp"]}
assert sent(runs["four micro-batches"]) == first
for name in ("tp", "pp"):
    two, four = (len(messages(runs[each].trace.where(dimension=name))) for each in ("batch 16", "four micro-batches"))
    assert four == 2 * two
groups = {each.group.dimension: each.group.members for each in operations(runs["batch 16"].trace) if 0 in each.ranks}
assert groups == {"tp": (0, 1), "dp": (0, 2), "pp": (0, 4)}

# %% [markdown]
# ## The library's plan
#
# `analysis.plan` does the same for sharded weights (FSDP), sequence parallel and experts (**ep**), on a ring and on
# gloo. Each row has its formula and its source. `compare` puts a recorded step beside it. The *residue* is what was
# recorded less what was planned.

# %%
whole = plan(SHAPE, **MESH, micro_batches=2)
print(whole)
whole.compare(runs["batch 16"].trace.within("step"))

# %% [markdown]
# Now the same eight ranks are divided in other ways. Which plan sends the fewest bytes? Where does gloo send more than
# the ring?

# %%
EXPERTS = ModelShape(batch=16, experts=4, **SIZES)
PLANS = {
    "dp 8": (SHAPE, {"dp": 8}),
    "dp 8, sharded": (SHAPE, {"dp": 8, "sharded": True}),
    "tp 8": (SHAPE, {"tp": 8}),
    "tp 8, sequence": (SHAPE, {"tp": 8, "sequence_parallel": True}),
    "pp 2, dp 4": (SHAPE, {"pp": 2, "dp": 4, "micro_batches": 2}),
    "pp 2, tp 4": (SHAPE, {"pp": 2, "tp": 4, "micro_batches": 2}),
    "ep 4, tp 2": (EXPERTS, {"ep": 4, "tp": 2}),
}
compared = {}
for backend in ("dlearn_ring", "gloo"):
    with Cluster(8, backend=backend) as ranks:
        for name, (shape, ways) in PLANS.items():
            step = ranks.run(parallel_step.train, shape, **ways).trace.within("step")
            compared[name, backend] = plan(shape, **ways, backend=backend).compare(step)
totals = {each: sum(found.recorded.values()) / 1000 for each, found in compared.items()}
fewest = min(PLANS, key=lambda name: totals[name, "dlearn_ring"])
charts.bars(
    list(PLANS),
    [charts.Part(each, [totals[name, each] for name in PLANS]) for each in ("dlearn_ring", "gloo")],
    title=f"{fewest} sends the fewest bytes; gloo sends more where a plan has a reduce-scatter",
    y="sent by all ranks in a step, in kB",
    text="{:,.0f}".format,
)

# %% [markdown]
# All fourteen are exact. dp sends twice what tp does: by the formulas, both send as much when a batch has as many
# tokens as a layer has hidden units, and here it has half as many, 64. A boundary between stages transports the
# activations once each way, however many layers a stage has. gloo's reduce-scatter costs a whole all-reduce (lesson
# [fsdp2](fsdp2.ipynb)).

# %% tags=["T17", "check"]
assert all(each.exact for each in compared.values())
more = {name for name in PLANS if totals[name, "gloo"] != totals[name, "dlearn_ring"]}
assert more == {"dp 8, sharded", "tp 8, sequence"}
assert fewest == "pp 2, tp 4"
assert totals["dp 8", "gloo"] == 2 * totals["tp 8", "gloo"]
assert SHAPE.tokens == 64 == SHAPE.hidden / 2

# %% [markdown]
# ## When is it hidden?
#
# Bytes are half of a plan. A rank computes 2 FLOPs for each weight and token forward, and 4 backward. Messages that can
# travel meanwhile cost no time as long as a rank has enough FLOPs for each byte that it sends: as many as its machine
# computes while it sends one. `plan_times` compares both, row by row. Gradients can hide behind the backward pass and
# gathered weights behind the layer before. Sums of activations cannot: the next layer needs them. A pipeline adds its
# *bubble*, (p-1)/(m+p-1) of the time of its passes with p stages and m micro-batches.
#
# The next cell is a **prediction**: it measures nothing. Its machine is the H100 SXM by NVIDIA's data sheet (989
# TFLOP/s in bf16; 450 GB/s each way between the 8 GPUs of a host) with a network card of 50 GB/s for each GPU. Kernels
# reach less in practice, so put in what you measure. The model has 17 billion weights, and a batch 2 million tokens.

# %%
LARGE = ModelShape(layers=32, width=8_192, hidden=32_768, batch=512, sequence=4_096, number_bytes=2)
INSIDE, BETWEEN = 450e9, 50e9
CHOICES = {
    "64: dp 64": {"dp": 64, "sharded": True},
    "64: tp 64": {"tp": 64},
    "64: dp 8, tp 8": {"dp": 8, "tp": 8, "sharded": True},
    "512: dp 512": {"dp": 512, "sharded": True},
    "1,024: dp 128, tp 8": {"dp": 128, "tp": 8, "sharded": True},
    "1,024: pp 4, dp 32, tp 8": {"pp": 4, "dp": 32, "tp": 8, "micro_batches": 16},
}
times = {}
for name, ways in CHOICES.items():
    tp_rate = INSIDE if ways.get("tp", 1) <= 8 else BETWEEN
    h100 = Machine(flops_per_s=989e12, bytes_per_s={"tp": tp_rate, "dp": BETWEEN, "pp": BETWEEN})
    times[name] = plan_times(plan(LARGE, **ways), h100)
    print(f"{name}: {times[name].finding}")
parts = {"computes": "compute_s", "waits for messages": "exposed_s", "bubble": "bubble_s"}
bars = []
for label, part in parts.items():
    bars.append(charts.Part(label, [100 * getattr(each, part) / each.step_s for each in times.values()]))
charts.bars(
    [f"{name}: {each.computing:.0%}" for name, each in times.items()],
    bars,
    stacked=True,
    title="Predicted: dp is hidden on 64 ranks and not on 512; tp in each host helps 1,024",
    y="of a step, in %",
)
print(times["1,024: dp 128, tp 8"])

# %% [markdown]
# With 64 ranks, each has 32,768 tokens, and computes as many FLOPs forward for each byte that it gathers (lesson
# [fsdp2](fsdp2.ipynb)). This machine needs 19,780 to hide them. With 512 ranks each has 4,096, and mostly waits. More
# than 512 replicas are not possible: there are 512 sequences. tp makes each rank's share of the weights smaller, so dp
# sends less; the price is its own sums, which nothing hides, so they stay inside a host. A pipeline sends little, and
# pays with its bubble: 16% of the time of its passes, 14% of the step. (Its weights are not sharded here.)

# %% tags=["T19", "check"]
computing = {name: round(100 * each.computing) for name, each in times.items()}
assert [*computing.values()] == [98, 4, 76, 21, 65, 58]
assert round(989e12 / BETWEEN) == 19_780
assert (LARGE.tokens // 64, LARGE.tokens // 512) == (32_768, 4_096)
assert round(100 * times["1,024: pp 4, dp 32, tp 8"].bubble) == 16
assert round(100 * times["1,024: pp 4, dp 32, tp 8"].bubble_s / times["1,024: pp 4, dp 32, tp 8"].step_s) == 14
assert (round(LARGE.layers * LARGE.pair_numbers / 1e9), round(LARGE.tokens / 1e6)) == (17, 2)

# %% [markdown]
# ## Which dimension crosses the slow link?
#
# Now measure one such choice. Ranks 0 and 1 are one host, 2 and 3 another. All messages between the hosts share one
# link of 20 Mbit/s. (This needs namespaces: Linux only, no root; `dlearn doctor` says whether this machine permits
# them.) tp is the innermost dimension, its ranks are neighbours: of "dp 2, tp 2" only dp crosses the link. The model
# has 2.1 MB of weights, and its 256 tokens have activations of 131 kB.
#
# **Predict first:** which plan sends the fewest bytes over the link?

# %%
LINKED = ModelShape(layers=4, width=128, hidden=512, batch=256, number_bytes=4)
FOUR = {"dp 4": {"dp": 4}, "tp 4": {"tp": 4}, "dp 2, tp 2": {"dp": 2, "tp": 2}, "pp 2, tp 2": {"pp": 2, "tp": 2}}
my_fewest = lessons.predict("plan.fewest between hosts", None, choices=tuple(FOUR))
HOSTS = Network.racks([2, 2], inside="500 Mbit/s, 50 us", between="20 Mbit/s, 1 ms")


def crossed(cluster):
    """Return the payload that the switch has forwarded between the hosts so far, in bytes."""
    pairs = cluster.network.carried().pairs
    return sum(pair.payload for pair in pairs if pair.source // 2 != pair.target // 2)


link, seconds = {}, {}
for name, ways in FOUR.items():
    with Cluster(4, network=HOSTS) as hosts:
        hosts.run(abs, 1)  # starts the ranks
        before = crossed(hosts)
        run = hosts.run(parallel_step.train, LINKED, **ways)
        link[name] = crossed(hosts) - before
    seconds[name] = max((each.end_ns - each.start_ns) / 1e9 for each in run.trace.where(kind="span").events)
    print(f"{name}: {link[name]:,} B over the link, {seconds[name]:.2f} s")
my_fewest and my_fewest.against(min(link, key=link.get))
charts.bars(
    list(FOUR),
    [charts.Part("over the link", [link[name] / 1e6 for name in FOUR])],
    title=f"{min(link, key=link.get)} sends the fewest bytes between the hosts, {max(link, key=link.get)} the most",
    y="between the hosts, both ways, in MB",
    text="{:.2f}".format,
    notes=["Counted by the switch."],
)

# %% [markdown]
# Of a ring of all four ranks, two of four arrows cross the link: half of the bytes of dp 4 and of tp 4. Of the mixed
# plans the outer dimension crosses, all of it, and tp stays inside. Each direction of the link transports half of the
# bytes, at 20 Mbit/s: no step can take less. tp 4 sends half of what dp 4 does because there are half as many tokens as
# hidden units. With four times the tokens it would send twice what dp 4 does. (The model of the prediction has 2
# million tokens a batch.)

# %% tags=["T20", "check"]
planned = {name: plan(LINKED, **ways, backend="gloo").bytes_by_dimension for name, ways in FOUR.items()}
over = {"dp 4": planned["dp 4"]["dp"] / 2, "tp 4": planned["tp 4"]["tp"] / 2}
over |= {"dp 2, tp 2": planned["dp 2, tp 2"]["dp"], "pp 2, tp 2": planned["pp 2, tp 2"]["pp"]}
assert over == {"dp 4": 6_291_456, "tp 4": 3_145_728, "dp 2, tp 2": 4_194_304, "pp 2, tp 2": 524_288}
more_tokens = plan(ModelShape(layers=4, width=128, hidden=512, batch=4 * 256, number_bytes=4), tp=4)
assert more_tokens.bytes_by_dimension["tp"] == 2 * planned["dp 4"]["dp"]
for name, size in over.items():
    assert size <= link[name] < size + 60_000  # with messages to the store, which make the groups
    assert seconds[name] > size / 2 * 8 / 20e6

# %% [markdown]
# ## Exercises
#
# 1. A plan for one rank, with the ends of a pipeline. The grader runs the step and compares every rank's bytes.


# %% tags=["exercise"]
def my_plan(shape, dp, tp, pp, rank):
    """Return the bytes that this rank sends in a step. The mesh has pp · dp · tp ranks; tp's are neighbours."""
    return {"dp": 0, "tp": 0, "pp": 0}  # replace this by your plan


lessons.check("plan_bytes", my_plan, student="")  # your name: it chooses the data

# %% [markdown]
# 2. An all-reduce can have two levels, too: the ranks of each host reduce, the hosts exchange their sums, and the ranks
# of each host share the result. `my_all_reduce(tensor, local)` replaces the tensor of each rank by the sum of all
# ranks' tensors. Ranks 0 and 1 are on one host, 2 and 3 on another (`local` is 2). Between the hosts it sends no more
# than the tensor's size, each way.


# %% tags=["exercise"]
def my_all_reduce(tensor, local):
    return  # replace this by your two levels


lessons.check("hierarchical", my_all_reduce, student="")
