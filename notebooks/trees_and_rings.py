# ---
# jupyter:
#   dlearn:
#     ids: [Q1, Q2]
#     minutes: 0.2
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Trees and rings: which all-reduce is the fastest?
#
# **Goals.** You will be able to compute the time of an all-reduce in the alpha-beta model; say when a tree beats a
# ring; tell algbw from busbw.
#
# **Before this:** [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about 45 minutes.
#
# An all-reduce gives every rank the sum of all ranks' data. A ring, a tree and a single rank in the middle all give the
# same result. **Which should a library use for which size?** And when you read "this all-reduce does 10 GB/s": **is
# that algbw or busbw**, and what is the difference?

# %%
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from dlearn import Cluster, draw, lessons, messages, operations, span
from dlearn.analysis import Bandwidth, bandwidths, traffic
from dlearn.collectives import halving_doubling, ring, star, tree
from dlearn.lessons.cost_chart import costs
from dlearn.lessons.trees_and_rings import (
    Model,
    cost,
    cost_seen,
    crossover,
    fit,
    measurements,
    predictions,
)

# %% [markdown]
# ## What does one message cost?
#
# Two ranks play ping-pong: one sends, the other receives and sends back. The message (the "ball") grows from 4 bytes to
# 4 MiB, about a million times as much (2 to the power 20).
#
# **Predict first:** how many times as long does the largest ball take? Write your guess instead of `None`.

# %%
my_factor = lessons.predict("trees_and_rings.factor", None)


def ping_pong(sizes, times):
    for size in sizes:
        ball = torch.zeros(size // 4)
        for turn in range(times):
            if dist.get_rank() == turn % 2:
                dist.send(ball, dst=1 - turn % 2)
            else:
                dist.recv(ball, src=turn % 2)


BALLS = [4 * 4**power for power in range(11)]
run = Cluster(2).run(ping_pong, BALLS, 60)
balls = measurements(run.trace)  # (bytes, seconds) of each message

medians = {size: median(seconds for each, seconds in balls if each == size) for size in BALLS}
for size, seconds in medians.items():
    print(f"{size:>9,} B {seconds * 1e6:10,.0f} µs")
factor = medians[BALLS[-1]] / medians[4]
print(f"{BALLS[-1] // 4:,} times the bytes took {factor:,.1f} times as long")
model = fit(balls)
print(model)
print(f"both parts cost the same at {model.latency_s * model.bandwidth:,.0f} B")
my_factor and my_factor.against(factor, tolerance=0.5)

# %% [markdown]
# Look at the first rows: the times differ much less than the sizes. Every message has a fixed cost, its **latency**,
# however small it is. A large message also takes time for its bytes, at so many per second: the **bandwidth**. In one
# line:
#
#     time = latency + bytes / bandwidth
#
# Papers call this the **alpha-beta model**, or Hockney's: alpha is the latency, beta the time per byte. `fit` finds
# latency and bandwidth of this machine. A message whose size is latency · bandwidth spends the same time on both parts.

# %% tags=["check"]
quickest = {size: min(seconds for each, seconds in balls if each == size) for size in BALLS}
assert quickest[64] < 4 * quickest[4]  # 16 times the bytes: latency is all
assert 4 * quickest[4] < quickest[BALLS[-1]] < 2**20 / 100 * quickest[4]  # bytes count, but not a million times

# %% [markdown]
# ## Four algorithms
#
# `dlearn.collectives` has four all-reduces, and records for each message in which step it was sent:
#
# - `tree`: in each step, half of the ranks that still take part send their data to the other half, which adds them (a
#   *binomial* tree). Then rank 0 has the sum, and sends it back along the same path.
# - `ring`: each rank passes a quarter of the data to its neighbour, which adds; then the finished quarters go round.
# - `halving_doubling`: partners exchange halves, then quarters; then the same in reverse (recursive halving and
#   doubling, or Rabenseifner's algorithm).
# - `star`: each rank sends all its data to rank 0, and rank 0 sends the sum to each rank.
#
# The messages of one **step** can travel at the same time: they wait only for messages of earlier steps. **Predict
# first:** with four ranks, how many steps does the tree take?
#
# In the pictures, follow the tree's chain from rank 3 to rank 1, to rank 0, and back. Can one of these arrows begin
# before the previous one has arrived? In the ring, count the arrows that leave the lane of rank 2.

# %%
my_steps = lessons.predict("trees_and_rings.steps of a tree", None)
ALGORITHMS = {"ring": ring, "halving_doubling": halving_doubling, "tree": tree, "star": star}


def one_of_each(numbers):
    for name, algorithm in ALGORITHMS.items():
        dist.barrier()  # all ranks start together
        with span(name):
            algorithm.all_reduce(torch.ones(numbers))


def plan(name):
    """Return the messages of each step: (from, to, bytes)."""
    steps = {}
    for message in messages(tiny.trace.within(name)):
        steps.setdefault(message.step, set()).add((message.src, message.dst, message.payload_bytes))
    return [steps[number] for number in sorted(steps)]


tiny = Cluster(4).run(one_of_each, 8)  # 8 numbers: 32 bytes
for name in ("tree", "ring"):
    print(name)
    for number, step in enumerate(plan(name), start=1):
        print(f"    step {number}:", ", ".join(f"{src} to {dst}: {size} B" for src, dst, size in sorted(step)))
    axes = draw.timeline(tiny.trace.within(name))
my_steps and my_steps.against(len(plan("tree")))

# %% [markdown]
# The tree takes four steps. Each message has all 32 bytes, and in no step do all ranks send. Rank 1 must receive and
# add before it can send, so the steps follow one another on any machine. The ring takes six steps; in each, every rank
# sends one quarter, 8 bytes, and receives another. (The distances between arrows depend on the machine. Each rank
# continues as soon as it has what it needs, so one rank may be a step ahead of another.)

# %% tags=["check"]
assert plan("tree") == [
    {(2, 0, 32), (3, 1, 32)},
    {(1, 0, 32)},
    {(0, 1, 32)},
    {(0, 2, 32), (1, 3, 32)},
]
assert plan("ring") == 6 * [{(rank, (rank - 1) % 4, 8) for rank in range(4)}]

sent = {(each.src, each.dst): each for each in messages(tiny.trace.within("tree"))}
chain = [sent[3, 1], sent[1, 0], sent[0, 1], sent[1, 3]]
assert all(before.received_ns <= after.sent_ns for before, after in pairwise(chain))

# %% [markdown]
# ## Steps and bytes
#
# The time depends on the longest chain of messages that wait for each other: on its number of **steps**, and on its
# **bytes**. `cost` gives both in theory, and `cost_seen` counts them in the recorded messages. Look for the row with
# the fewest steps, and for the one with the fewest bytes.

# %%
SIZE = 9_600
counted = Cluster(4).run(one_of_each, SIZE // 4)
seen = {name: cost_seen(operations(counted.trace.within(name))[0]) for name in ALGORITHMS}
in_all = {name: len(messages(counted.trace.within(name))) for name in ALGORITHMS}

print(f"{'4 ranks':18} {'steps':>6} {'theory':>7} {'bytes':>8} {'theory':>8}  messages in all")
for name, (steps, size) in seen.items():
    theory = cost(name, 4, SIZE)
    print(f"{name:18} {steps:6} {theory.steps:7} {size:8,} {theory.bytes:8,.0f}  {in_all[name]:15}")

# %% [markdown]
# Theory and trace agree to the byte, on any machine. With data of size S the ring takes 6 steps and 1.5 S, the tree 4
# steps and 4 S, the star 6 steps and 6 S. Halving-doubling has the steps of the tree *and* the bytes of the ring. No
# all-reduce can send less than 2 (n-1)/n · S (unless a switch adds): ring and halving-doubling are
# **bandwidth-optimal**. Few steps are good for small data, where latency dominates, and few bytes for large data.
#
# Why is halving-doubling not always used? (This is textbook knowledge, and not measured here.) Its partners are 1, 2,
# 4, ... ranks apart, so in one step all data cross the middle of the network, where links are shared. A ring uses only
# links between neighbours. Halving-doubling needs a power of two ranks. And a ring can cut large data into pieces that
# follow each other without a pause.

# %% tags=["check"]
assert seen == {name: cost(name, 4, SIZE) for name in ALGORITHMS}
assert seen["ring"] == (6, 1.5 * SIZE)
assert seen["halving_doubling"] == (4, 1.5 * SIZE)
assert seen["tree"] == (4, 4 * SIZE)
assert seen["star"] == (6, 6 * SIZE)
assert in_all == {"ring": 24, "halving_doubling": 16, "tree": 6, "star": 6}

# %% [markdown]
# ## Which should be fastest, and which is?
#
# With latency and bandwidth from the ping-pong, theory gives a time for each algorithm: `steps · latency + bytes /
# bandwidth`. A `*` marks the fastest. **Predict first:** up to which size, in bytes, is the tree faster than the ring?

# %%
my_crossing = lessons.predict("trees_and_rings.tree below", None)

SIZES = [32, 4_096, 65_536, 2**20, 2**24]
print(f"the tree beats the ring below {crossover(model, 4):,.0f} B")
my_crossing and print(my_crossing.against(crossover(model, 4), tolerance=0.5))
predictions(model, 4, SIZES)

# %% [markdown]
# Now the four algorithms run in turn, each several times. In the picture, lines are theory, and dots are measured. On
# the left the lines are flat (latency), on the right they rise (bytes). The lines of ring and tree cross where the
# dotted line stands. Do the dots lie on the lines of their colour?


# %%
def race(sizes, times):
    for size in sizes:
        data = torch.zeros(size // 4)
        for _ in range(times):
            for name, algorithm in ALGORITHMS.items():
                dist.barrier()  # all ranks start together
                with span(name):
                    algorithm.all_reduce(data)


run = Cluster(4).run(race, SIZES, 7)
measured = {name: measurements(run.trace.within(name), op="all_reduce") for name in ALGORITHMS}
axes = costs(model, 4, measured=measured)

# %% [markdown]
# They may be far off. The theory assumes that all messages of a step travel at the same time, which needs a core for
# each rank. If ranks share cores they take turns, and the total number of messages counts: 24 in the ring, but 6 in the
# tree. Besides, a waiting rank must first be woken up. Steps and bytes are properties of an algorithm; times are
# properties of a machine. (Over a network of known rate and latency the theory holds: see
# [slow_network](slow_network.ipynb).)
#
# One result holds for every machine: with four or more ranks there is one size at which ring and tree cross, and it
# grows with latency · bandwidth. (With three ranks the tree saves no step.)

# %% tags=["Q1", "check"]
for ranks in (4, 5, 8, 64):
    size = crossover(model, ranks)
    small, large = (predictions(model, ranks, [size * part]).times for part in (0.9, 1.1))
    assert small["tree"] < small["ring"]
    assert large["tree"] > large["ring"]
    slower = Model(latency_s=2 * model.latency_s, bandwidth=model.bandwidth)
    assert abs(crossover(slower, ranks) - 2 * size) < 1  # twice the latency, twice the size
assert crossover(model, 3) is None
assert cost("tree", 3, 1).steps == cost("ring", 3, 1).steps

# %% [markdown]
# ## algbw or busbw?
#
# NVIDIA's nccl-tests ([PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)) define
# both:
#
# - **algbw** = size / time. How long will my all-reduce take? Divide its size by this.
# - **busbw** = algbw · 2 (n-1)/n, for an all-reduce on n ranks. How well are the links used? Compare it with a link's
#   speed.
#
# Imagine a perfect machine, with links of 1 GB/s and no latency. A ring sums 1 GB. With more and more ranks, what
# happens to algbw, and what to busbw?

# %%
GB = 10**9
perfect = Model(latency_s=0.0, bandwidth=1.0 * GB)


def on_perfect_wires(algorithm, ranks):
    seconds = perfect.time_s(cost(algorithm, ranks, GB))
    return Bandwidth(op="all_reduce", ranks=ranks, size_bytes=GB, duration_ns=round(seconds * 1e9))


for algorithm, ranks in [("ring", 2), ("ring", 4), ("ring", 8), ("ring", 64), ("tree", 4)]:
    it = on_perfect_wires(algorithm, ranks)
    print(f"{algorithm} of {ranks}: algbw {it.algorithm_bandwidth / GB:.3f}, busbw {it.bus_bandwidth / GB:.3f} GB/s")


def sums(numbers, times):
    data = torch.zeros(numbers)
    for _ in range(times):
        dist.all_reduce(data)


traces = {ranks: Cluster(ranks).run(sums, 2**20, 9).trace for ranks in (2, 4)}  # and here, by `bandwidths`
for trace in traces.values():
    print(bandwidths(trace))

# %% [markdown]
# The algbw of the ring falls from 1 GB/s to about one half, although no link became slower: with more ranks there is
# more to send. Its busbw stays at 1 GB/s, the speed of a link, for any number of ranks. But busbw is not measured on a
# link: the factor 2 (n-1)/n is what ranks must send *at least* (unless a switch adds). The tree sends more, so on the
# same links its busbw is 0.375 GB/s.

# %% tags=["Q2", "check"]
for ranks in (2, 4, 8, 64):
    assert abs(on_perfect_wires("ring", ranks).bus_bandwidth / GB - 1) < 1e-6
    assert abs(on_perfect_wires("ring", ranks).algorithm_bandwidth / GB - ranks / (2 * (ranks - 1))) < 1e-6
assert on_perfect_wires("ring", 2).algorithm_bandwidth == GB
assert abs(on_perfect_wires("ring", 64).algorithm_bandwidth / GB - 0.508) < 0.001
assert abs(on_perfect_wires("tree", 4).bus_bandwidth / GB - 0.375) < 1e-6
for ranks, trace in traces.items():
    [found] = bandwidths(trace).items
    assert (found.ranks, found.size_bytes, found.count) == (ranks, 4 * 2**20, 9)
    sent_of_size = traffic(trace).bytes_from(rank=0) / (found.count * found.size_bytes)
    assert abs(found.bus_bandwidth / found.algorithm_bandwidth - sent_of_size) < 1e-9  # what a rank's link transports

# %% [markdown]
# ## What does gloo choose?
#
# The lesson [ring_all_reduce](ring_all_reduce.ipynb) compares the kernel's counters with the prediction for a ring,
# from 8 bytes to 25 MiB. They agree to the byte. So gloo, as torch uses it, is a ring at every size, even where a tree
# would be faster.
#
# ## What does NCCL choose?
#
# *This section is based on the documentation and on statements of the authors. It was not run here.*
#
# NCCL decides for each call. It has a model of every algorithm with every protocol, estimates the time of each for this
# size, and takes the fastest ([issue 457](https://github.com/NVIDIA/nccl/issues/457)); in its tuning table each has a
# latency and a bandwidth ([nccl-tests, issue 89](https://github.com/NVIDIA/nccl-tests/issues/89)). So it has no fixed
# size at which it switches: that depends on the number of nodes, the GPUs in a node and the bandwidths ([issue
# 754](https://github.com/NVIDIA/nccl/issues/754)). In NCCL's tree each GPU except the root sends 2 S in all, about as
# many bytes as in a ring. The tree above has 4 S on its chain, because it does not cut the data into pieces.
#
# | to do what | variable |
# |---|---|
# | let NCCL choose (the default) | set none of these |
# | allow only some algorithms, or forbid some with `^` | `NCCL_ALGO=Ring`, `NCCL_ALGO=^Tree` |
# | the same for one operation (since 2.24) | `NCCL_ALGO="allreduce:^tree"` |
# | the same for protocols: `LL`, `LL128`, `Simple` | `NCCL_PROTO`, but users are discouraged (see below) |
# | see what was chosen | `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING` |
# | the old option: trees below this size | `NCCL_TREE_THRESHOLD`: since 2.4, **removed in 2.5** |
#
# Sources: [environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
# [logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html) and [issue
# 1444](https://github.com/NVIDIA/nccl/issues/1444) (which says why a forced protocol can corrupt data).
#
# ## Exercises
#
# 1. With eight ranks, a latency of 20 µs and a bandwidth of 1 GB/s, up to which size, in bytes, is the tree faster than
#    the ring? Write down the steps and bytes of both for a size S, set the two times equal, and solve for S.
# 2. Write the outward half of a tree, by sends. The docstring says what the function must do.

# %% tags=["exercise"]
my_answer = None
lessons.answer("trees_and_rings.tree_below", my_answer)

# %% tags=["answer"]
assert lessons.answer("trees_and_rings.tree_below", crossover(Model(latency_s=20e-6, bandwidth=1e9), 8)).right


# %% tags=["exercise"]
def my_broadcast(tensor, root):
    """Copy the root's tensor to all ranks by sends. Each rank gets it once; after ceil(log2 n) rounds all have it."""
    return  # replace this by your tree


lessons.check("tree_broadcast", my_broadcast, student="")  # your name: it chooses the data
