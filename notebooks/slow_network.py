# ---
# jupyter:
#   dlearn:
#     ids: [DD12]
#     minutes: 0.6
#     needs: [network]
#     peak_mb: 600
# ---

# %% [markdown]
# # A slow network: what do bytes cost, and when does it pay to send fewer?
#
# **Goals.** You will be able to predict an all-reduce's time; find the rate below which compression pays.
#
# **Before this:** [compression](compression.ipynb), [trees_and_rings](trees_and_rings.ipynb). **Takes** about 25
# minutes.
#
# On one machine a transfer costs little more than processor time. So a ring and a star take about as long, and
# compressing gradients never pays. Here you choose the network: each rank has its own, and a switch forwards its
# packets with the rate and the latency that you choose. gloo and DDP do not notice. (Linux only, no root; `dlearn
# doctor` says whether this machine permits it, and what to do if not.)
#
# ## What does an all-reduce take?
#
# A message takes latency + bytes / rate. In a ring of n ranks each rank sends 2(n - 1) messages of one n-th of the
# data. **Predict first:** with two ranks, 20 Mbit/s and 1 ms, how long does an all-reduce of 1 MB take? And of 4 bytes?

# %%
import time

import torch
import torch.distributed as dist

from dlearn import Cluster, lessons
from dlearn.lessons import charts

my_guess_ms = lessons.predict("slow_network.ms", None)  # {"1 MB": ..., "4 B": ...}
LATENCY = 0.001


def ring_seconds(size, rate, ranks=2):
    """Seconds of a ring: `size` in bytes, `rate` in bit/s."""
    return 2 * (ranks - 1) * (LATENCY + size / ranks * 8 / rate)


def all_reduce_seconds(sizes, rounds=3):
    """Time a few all-reduces of each size in bytes; return the fastest of each."""
    found = []
    for size in sizes:
        data, taken = torch.ones(size // 4), []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data)
            taken.append(time.perf_counter() - start)
        found.append(min(taken))
    return found


def over(rate):
    return f"{rate / 1e6:g} Mbit/s, 1 ms"


# %%
run = Cluster(2, network=over(20e6)).run(all_reduce_seconds, [1_000_000, 4])
large, small = run.results[0]
print(f"1 MB: {large * 1e3:.0f} ms, the model says {ring_seconds(1_000_000, 20e6) * 1e3:.0f}")
print(f"4 B: {small * 1e3:.1f} ms, the model says {ring_seconds(4, 20e6) * 1e3:.1f}")
print(f"{1_000_000 // 4:,} times fewer bytes, and {large / small:.0f} times as fast")
my_guess_ms and print(my_guess_ms.against({"1 MB": 1e3 * large, "4 B": 1e3 * small}, tolerance=0.25))
run.network

# %% [markdown]
# The small all-reduce is nearly all latency (gloo also exchanges a message before it sends), so far fewer bytes save
# far less time. The table is the switch's own report: *asked* is what you chose, *carried* is what the packets got.
# Next, the curves are the model at three rates, and the dots are measured:

# %%
RATES = (5e6, 20e6, 80e6)
SIZES = [4_000, 16_000, 64_000, 256_000, 1_000_000]
found = {rate: Cluster(2, network=over(rate), record=False).run(all_reduce_seconds, SIZES).results[0] for rate in RATES}
series = {}
for rate in RATES:
    series[f"{rate / 1e6:g} Mbit/s"] = charts.Series(SIZES, [1e3 * each for each in found[rate]], between="")
for rate in RATES:
    points = [1e3 * ring_seconds(size, rate) for size in SIZES]
    series[f"the model at {rate / 1e6:g} Mbit/s"] = charts.Series(SIZES, points, derived=True)
far = {rate: found[rate][-1] / ring_seconds(SIZES[-1], rate) for rate in RATES}
charts.lines(
    series,
    title=f"1 MB takes {min(far.values()):.2f} to {max(far.values()):.2f} times what the model says",
    x="bytes of the all-reduce",
    y="ms",
    log="xy",
    ticks=[(size, f"{size // 1000} kB") for size in SIZES],
)

# %% tags=["check"]
assert all(found[rate][-1] >= ring_seconds(SIZES[-1], rate) for rate in RATES)  # never faster than the model
assert all(found[rate][-1] < 1.5 * ring_seconds(SIZES[-1], rate) for rate in RATES)
assert found[5e6][-1] > 10 * found[80e6][-1]  # 16 times the rate
assert large < 300 * small

# %% [markdown]
# ## When does it pay to send fewer bytes?
#
# The lesson [compression](compression.ipynb) counts what hooks save: instead of 104,488 bytes of gradients, PowerSGD of
# rank 1 sends 3,408, in three all-reduces instead of one. So it costs computing and two more all-reduces. On loopback:

# %%
from statistics import median

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dlearn.lessons import digits, models

START = 2  # PowerSGD leaves the first two steps alone, while DDP still makes its buckets
BYTES = {"plain": 104_488, "fp16": 52_244, "PowerSGD": 3_408}  # of a step; see the lesson compression


def steps(rounds=15):
    """Seconds of each step with each hook, in turn."""
    images, labels = (part[:25] for part in digits.shard(dist.get_rank(), dist.get_world_size()))
    made = {name: DistributedDataParallel(models.MLP()) for name in BYTES}
    made["fp16"].register_comm_hook(None, fp16_compress_hook)
    made["PowerSGD"].register_comm_hook(
        PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=START), powerSGD_hook
    )
    taken = {name: [] for name in BYTES}
    for number in range(START + rounds):
        for name, model in made.items():
            dist.barrier()
            start = time.perf_counter()
            cross_entropy(model(images), labels).backward()
            if number >= START:
                taken[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in taken.items()}


near = Cluster(2, record=False).run(steps).results[0]
print("; ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in near.items()))

# %% [markdown]
# **Predict first:** below which rate does PowerSGD pay? It costs the difference to plain that you see here, plus four
# latencies (two all-reduces of two messages each). It saves bytes / rate. The curves cross where both are equal:

# %%
my_guess_mbit = lessons.predict("slow_network.PowerSGD pays below so many Mbit/s", None)
saved = BYTES["plain"] - BYTES["PowerSGD"]
costs = max(0.0, near["PowerSGD"] - near["plain"]) + 4 * LATENCY
crossing = saved * 8 / costs
print(f"predicted: below {crossing / 1e6:.0f} Mbit/s")
my_guess_mbit and my_guess_mbit.against(crossing / 1e6, tolerance=0.5)

# %%
tried = (5e6, 40e6, 160e6, 640e6)
at = {rate: Cluster(2, record=False, network=over(rate)).run(steps).results[0] for rate in tried}
ratios = {name: [at[rate]["plain"] / at[rate][name] for rate in tried] for name in ("fp16", "PowerSGD")}
pays = [rate for rate, ratio in zip(tried, ratios["PowerSGD"], strict=True) if ratio > 1]
charts.lines(
    {name: charts.Series(tried, each) for name, each in ratios.items()}
    | {"both take as long": charts.Series(tried, [1] * len(tried), derived=True)},
    title=f"PowerSGD is {ratios['PowerSGD'][0]:.1f} times as fast over {tried[0] / 1e6:g} Mbit/s,"
    f" and {ratios['PowerSGD'][-1]:.1f} times over {tried[-1] / 1e6:g}",
    x="rate of the network",
    y="a plain step, times one with the hook",
    log="x",
    ticks=[(rate, f"{rate / 1e6:g} Mbit/s") for rate in tried],
    mark=(min(max(crossing, tried[0]), tried[-1]), "predicted"),
)

# %% tags=["check"]
assert at[5e6]["plain"] > 1.3 * at[5e6]["fp16"] > 1.3 * at[5e6]["PowerSGD"]  # half of the bytes, then a thirtieth
assert ratios["PowerSGD"][-1] < 1  # where 100 kB take 1 ms, four latencies take 4
assert pays
assert max(pays) < tried[-1]

# %% [markdown]
# ## And a script of yours?
#
# `dlearn run --network "100 Mbit/s, 2 ms" --nproc-per-node=4 train.py` puts torchrun's ranks on such a network, and the
# trace records it. [ddp_paper](ddp_paper.ipynb) tests the claims DD9 and DD17 over such a network, too: several groups
# in turn, the best bucket size.
#
# ## Exercises
#
# 1. Choose a latency of 20 ms. Which becomes slower, fp16 or PowerSGD, and why? Where do the curves cross now?
# 2. `Network.star(["1 Gbit/s, 100 us", "1 Gbit/s, 100 us", "10 Mbit/s, 5 ms"])` gives one of three ranks a bad link.
#    How long does the ring take, and which rank waits for which (`draw.timeline`)?
# 3. Which bucket size is best at a latency of 20 ms? Predict it from the number of buckets, and try it.
