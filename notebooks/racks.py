# ---
# jupyter:
#   dlearn:
#     ids: []
#     minutes: 0.5
#     needs: [network]
#     peak_mb: 700
# ---

# %% [markdown]
# # Two racks: what crosses the slow link between them?
#
# **Goals.** You will be able to count the bytes that an all-reduce sends between two racks; say why a hierarchy of two
# levels sends fewer; choose the mesh of HSDP.
#
# **Before this:** [slow_network](slow_network.ipynb), [sharding](sharding.ipynb). **Takes** about 25 minutes.
#
# Real clusters are not flat: inside a rack, or a host, ranks talk fast, and between racks slowly. Here are two racks of
# two ranks each. All that goes from one rack to the other shares one link of 20 Mbit/s. (It needs namespaces: Linux
# only, no root; `dlearn doctor` says whether this machine permits them.)
#
# ## A flat ring
#
# gloo's ring knows nothing of racks: 0 → 3 → 2 → 1 → 0. Two of its four arrows cross, 0 → 3 and 2 → 1. **Predict
# first:** all four ranks all-reduce 1 MB (S). Each rank sends 2 · 3/4 S to the next. How many bytes go from rack to
# rack, both directions together? And how long does it take, at least?

# %%
import time

import torch
import torch.distributed as dist

from dlearn import Cluster, lessons
from dlearn.lessons import charts
from dlearn.network import Network

my_guess = lessons.predict("racks.bytes from rack to rack", None)
RATE = 20e6  # of the link between the racks, in bit/s
RACKS = Network.racks([2, 2], inside="500 Mbit/s, 50 us", between="20 Mbit/s, 1 ms")
SIZE = 1_000_000  # bytes


# %% [markdown]
# The switch counts what it carries between each pair of ranks:


# %%
def rack(rank):
    return rank // 2


def flat(size):
    """Seconds of an all-reduce over all ranks at once, and the sum."""
    data = torch.full((size // 4,), dist.get_rank() + 1.0)
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(data)
    return time.perf_counter() - begin, data[[0, -1]].tolist()


def crossing(cluster, job, *args):
    """What the switch has carried from rack to rack while the job ran, in bytes; and the job's own answers."""

    def payload():
        return sum(pair.payload for pair in cluster.network.carried().pairs if rack(pair.source) != rack(pair.target))

    before = payload()
    answers = list(cluster.run(job, *args, timeout=60).results.values())
    return payload() - before, answers


cluster = Cluster(4, network=RACKS)
with cluster:
    cluster.run(flat, 4)  # the connections are made
    ring_bytes, ring = crossing(cluster, flat, SIZE)
ring_s = max(taken for taken, _ in ring)
print(f"{ring_bytes:,} B between the racks, in {ring_s * 1e3:.0f} ms; the sum is {ring[0][1]}")
my_guess and my_guess.against(ring_bytes, tolerance=0.03)

# %% [markdown]
# 2 arrows of 3/2 S each: 3 S. Each direction of the link carries 1.5 S, which takes 1.5 MB · 8 / 20 Mbit/s = 600 ms.

# %% tags=["check"]
at_least = 1.5 * SIZE * 8 / RATE
assert 3 * SIZE <= ring_bytes < 3.03 * SIZE  # the job's few words with the store are in it
assert ring_s > at_least
assert all(total == [10.0, 10.0] for _, total in ring)

# %% [markdown]
# ## Two levels
#
# Inside each rack the ranks add up, so that each holds half of the rack's sum (reduce-scatter). Then each of them
# all-reduces its half with the rank of the same place in the other rack. Last, the ranks of a rack exchange their
# halves (all-gather). **Predict first:** how many bytes cross now?


# %%
def hierarchical(size):
    """The same sum on two levels; seconds, and the sum."""
    rank = dist.get_rank()
    inside, across = ([dist.new_group(each) for each in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    inside, across = inside[rank // 2], across[rank % 2]
    data = torch.full((size // 4,), rank + 1.0)
    half = torch.empty(size // 8)
    for warm in (True, False):
        dist.barrier()
        begin = time.perf_counter()
        if warm:  # the new groups make their connections
            for group in (inside, across):
                dist.all_reduce(torch.ones(1), group=group)
            continue
        dist.reduce_scatter(half, list(data.chunk(2)), group=inside)
        dist.all_reduce(half, group=across)
        dist.all_gather(list(data.chunk(2)), half, group=inside)
    return time.perf_counter() - begin, data[[0, -1]].tolist()


with cluster:
    cluster.run(hierarchical, 8)
    levels_bytes, levels = crossing(cluster, hierarchical, SIZE)
levels_s = max(taken for taken, _ in levels)
print(f"{levels_bytes:,} B between the racks, in {levels_s * 1e3:.0f} ms; the sum is {levels[0][1]}")

# %% tags=["check"]
assert 2 * SIZE <= levels_bytes < 2.03 * SIZE
assert levels_s < ring_s
assert all(total == [10.0, 10.0] for _, total in levels)

# %% [markdown]
# ## What it is used for: HSDP
#
# FSDP over all ranks shards parameters over both racks: it gathers them over the slow link, too. HSDP is FSDP inside
# each rack, and an all-reduce of the gradients' shards between the racks: the same two levels. In a DeviceMesh that is
# the shape: (4,) for FSDP, (2, 2) for HSDP. **Predict first:** which of the three sends the fewest bytes from rack to
# rack in a step, and by how much?

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn.lessons import digits, models


def trained(way, steps):
    """One number of each parameter after so many steps; and their bytes."""
    rank = dist.get_rank()
    images, labels = (part[:25] for part in digits.shard(rank, dist.get_world_size()))
    torch.manual_seed(0)
    model = models.MLP(width=256)
    size = 4 * sum(each.numel() for each in model.parameters())
    if way == "DDP":
        model = DistributedDataParallel(model)
    else:
        shape, names = ((4,), ("shard",)) if way == "FSDP" else ((2, 2), ("rack", "shard"))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return size, [float(each.detach().double().sum()) for each in whole]


# %%
crossed, answers = {}, {}
for way in ("DDP", "FSDP", "HSDP"):
    with Cluster(4, network=RACKS) as cluster:
        few, _ = crossing(cluster, trained, way, 1) if cluster.run(flat, 4) else None
        many, answers[way] = crossing(cluster, trained, way, 4)
    crossed[way] = (many - few) / 3  # of a step, without what comes once
    print(f"{way}: {crossed[way] / answers[way][0][0]:.2f} times the parameters' bytes from rack to rack, each step")
times = {way: crossed[way] / answers[way][0][0] for way in crossed}
charts.bars(
    list(times),
    [charts.Part("from rack to rack", list(times.values()))],
    title=f"HSDP sends {times['HSDP']:.1f} times the model from rack to rack in a step, DDP {times['DDP']:.1f} times,"
    f" FSDP {times['FSDP']:.1f} times",
    y="from rack to rack, in bytes of the model",
    text=lambda value: f"{value:.2f}",
    notes=["Counted by the switch, both directions. Gloo's reduce-scatter sends as much as an all-reduce."],
)

# %% [markdown]
# DDP's ring sends 3 S, as before. FSDP gathers the parameters round the same ring (1.5 S), and its reduce-scatter,
# which on gloo is a whole all-reduce ([sharding](sharding.ipynb) takes it apart), sends 3 S more. (It gathers once:
# here the whole model is one unit, which is kept from the forward to the backward pass. In `sharding` each layer is a
# unit, and is gathered twice.) HSDP sends between the racks what the two levels sent, 2 S, and gathers inside.
#
# All three have trained the same model, but for rounding:

# %% tags=["check"]
for way, wanted in (("DDP", 3), ("FSDP", 4.5), ("HSDP", 2)):
    assert wanted <= times[way] < 1.03 * wanted, way
for way in ("FSDP", "HSDP"):
    pairs = zip(answers[way][0][1], answers["DDP"][0][1], strict=True)
    assert all(abs(one - other) < 1e-3 for one, other in pairs), way

# %% [markdown]
# ## Exercises
#
# 1. Two racks of three ranks: how many bytes cross in the flat ring, and on two levels? Predict, then count.
# 2. How many arrows of the ring would cross if the ranks of the racks were 0, 2 and 1, 3? Why do launchers number ranks
#    host by host?
# 3. Four racks of one rank each: is there anything to gain from two levels?
