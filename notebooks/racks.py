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
# **Goals.** You will be able to count the bytes that an all-reduce sends between two racks; say why an all-reduce on
# two levels sends fewer; choose the mesh of HSDP.
#
# **Before this:** [slow_network](slow_network.ipynb), [fsdp2](fsdp2.ipynb). **Takes** about 25 minutes.
#
# In real clusters, links inside a rack or a host are fast, and links between racks are slow. Here are two racks of two
# ranks each. All messages between the racks share one link of 20 Mbit/s. (The lesson needs namespaces: Linux only, no
# root; `dlearn doctor` says whether this machine permits them.)
#
# ## A flat ring
#
# gloo's ring does not depend on the racks: 0 → 3 → 2 → 1 → 0. Two of its four arrows cross the slow link, 0 → 3 and 2 →
# 1. **Predict first:** all four ranks all-reduce 1 MB (S). Each rank sends 2 · 3/4 S to its neighbour. How many bytes
# does the switch count between the racks, in both directions together?

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
    """Bytes that the switch has forwarded from rack to rack while the job ran, and the job's results."""

    def payload():
        return sum(pair.payload for pair in cluster.network.carried().pairs if rack(pair.source) != rack(pair.target))

    before = payload()
    answers = list(cluster.run(job, *args, timeout=60).results.values())
    return payload() - before, answers


cluster = Cluster(4, network=RACKS)
with cluster:
    cluster.run(flat, 4)  # makes the connections
    ring_bytes, ring = crossing(cluster, flat, SIZE)
ring_s = max(taken for taken, _ in ring)
print(f"{ring_bytes:,} B between the racks, in {ring_s * 1e3:.0f} ms; the sum is {ring[0][1]}")
my_guess and my_guess.against(ring_bytes, tolerance=0.03)

# %% [markdown]
# Two arrows of 3/2 S make 3 S. Each direction of the link transports 1.5 S in 1.5 MB · 8 / 20 Mbit/s = 600 ms.

# %% tags=["check"]
at_least = 1.5 * SIZE * 8 / RATE
assert at_least == 0.6
assert 3 * SIZE <= ring_bytes < 3.03 * SIZE  # with a few messages to the store
assert ring_s > at_least
assert all(total == [10.0, 10.0] for _, total in ring)

# %% [markdown]
# ## Two levels
#
# An all-reduce on two levels sends less over the link: the ranks of each rack reduce, the racks exchange their sums,
# and the ranks of each rack share the result. Write one, with sends or with collectives of groups.
# `my_all_reduce(tensor, local)` replaces the tensor of each rank by the sum of all ranks' tensors. Ranks 0 and 1 are on
# one machine, 2 and 3 on another (`local` is 2). Between the machines it sends no more than the tensor's size, each
# way.


# %% tags=["exercise"]
def my_all_reduce(tensor, local):
    return  # replace this by your two levels


lessons.check("hierarchical", my_all_reduce, student="")  # your name: it chooses the data

# %% [markdown]
# ## What it is used for: HSDP
#
# FSDP over all ranks shards parameters over both racks, so it also gathers them over the slow link. HSDP has two
# levels: FSDP inside each rack, and an all-reduce of the gradients' shards between the racks. The DeviceMesh has shape
# (4,) for FSDP, and (2, 2) for HSDP. **Predict first:** which sends the fewest bytes between racks?

# %%
my_fewest = lessons.predict("racks.fewest bytes", None, choices=("DDP", "FSDP", "HSDP"))

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
    crossed[way] = (many - few) / 3  # of a step, without what is sent once
    print(f"{way}: {crossed[way] / answers[way][0][0]:.2f} times the parameters' bytes from rack to rack, each step")
times = {way: crossed[way] / answers[way][0][0] for way in crossed}
if my_fewest:
    print(my_fewest.against(min(times, key=times.get)))
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
# DDP's ring sends 3 S. FSDP gathers the parameters in a ring (1.5 S). Its reduce-scatter, which on gloo is an
# all-reduce (lesson [collectives](collectives.ipynb)), sends 3 S more. (It gathers once: the whole model is one unit
# here, and is kept from the forward to the backward pass. In [fsdp2](fsdp2.ipynb) each layer is a unit, and is
# gathered twice.) HSDP sends 2 S between the racks, the gradients once in each direction, and gathers inside a rack.
# All three end with the same model, except for rounding.

# %% tags=["check"]
for way, wanted in (("DDP", 3), ("FSDP", 4.5), ("HSDP", 2)):
    assert wanted <= times[way] < 1.03 * wanted, way
for way in ("FSDP", "HSDP"):
    pairs = zip(answers[way][0][1], answers["DDP"][0][1], strict=True)
    assert all(abs(one - other) < 1e-3 for one, other in pairs), way

# %% [markdown]
# ## Exercises
#
# 1. How many arrows of the ring would cross if one rack had ranks 0 and 2, and the other 1 and 3? Why do launchers
#    number ranks host by host?
# 2. With four racks of one rank each, do two levels save anything?
