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
# **Goals.** You will be able to price an all-reduce in the alpha-beta model; say when a tree beats a ring; tell algbw
# from busbw.
#
# **Before this:** [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about 45 minutes.
#
# An all-reduce gives every rank the sum of all ranks' data. There are many ways to do that, with one and the
# same result: in a ring, in a tree, all through one rank. **Which one should a library take, and from what
# size on?** And when you read "this all-reduce does 10 GB/s": **is that algbw or busbw**, and what is
# the difference?
#
# We begin with the price of one message.

# %%
import os
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from dlearn import Cluster, draw, lessons, messages, operations, span
from dlearn.analysis import Bandwidth, bandwidths, reconcile, traffic
from dlearn.collectives import halving_doubling, ring, star, tree
from dlearn.lessons.cost_chart import costs
from dlearn.lessons.trees_and_rings import (
    Model,
    cost,
    cost_seen,
    crossover,
    fit,
    fit_all_reduce,
    measurements,
    predictions,
)

# %% [markdown]
# ## What does one message cost?
#
# Two ranks play ping-pong: one sends, the other receives, then the other way round. The ball grows from 4
# bytes to 4 MiB, which is about a million times as many (2 to the power 20).
#
# **Predict first:** how many times longer does the largest ball take? Write your guess instead of `None`.

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
my_factor and my_factor.against(factor, tolerance=0.5)

# %% [markdown]
# Look at the first rows: they differ by less than the sizes do. A message has a fixed price, its **latency**,
# however small it is. Only when it is large do its bytes count, at so many in a second: the **bandwidth**. In
# one line:
#
#     time = latency + bytes / bandwidth
#
# Papers call this the **alpha-beta model**, or Hockney's: alpha is the latency, beta the time of a byte.
#
# `fit` finds the two constants of this machine. Their product is the size at which both parts cost the same.

# %%
model = fit(balls)
print(model)
print(f"both parts cost the same at {model.latency_s * model.bandwidth:,.0f} B")

# %% tags=["check"]
quickest = {size: min(seconds for each, seconds in balls if each == size) for size in BALLS}
assert quickest[64] < 4 * quickest[4]  # 16 times the bytes: latency is all
assert 4 * quickest[4] < quickest[BALLS[-1]] < 2**20 / 100 * quickest[4]  # bytes count, and by far not a million times

# %% [markdown]
# ## A tree, by hand
#
# Now an all-reduce of four ranks. The (*binomial*) tree works in levels. *Inward*, half of the ranks that still have
# something send it to the other half, which adds. Then rank 0 has the sum, and the same way *outward*
# every rank gets it.


# %%
def tree_all_reduce(data):
    rank, n = dist.get_rank(), dist.get_world_size()
    reaches = [2**level for level in range((n - 1).bit_length())]  # 1, 2 for four ranks
    theirs = torch.empty_like(data)
    for reach in reversed(reaches):  # inward
        if rank < reach and rank + reach < n:
            dist.recv(theirs, src=rank + reach)
            data += theirs
        elif reach <= rank < 2 * reach:
            dist.send(data, dst=rank - reach)
    for reach in reaches:  # outward
        if rank < reach and rank + reach < n:
            dist.send(data, dst=rank + reach)
        elif reach <= rank < 2 * reach:
            dist.recv(data, src=rank - reach)


def sum_by_hand():
    data = torch.full((8,), float(dist.get_rank()))
    tree_all_reduce(data)
    return data.tolist()


by_hand = Cluster(4).run(sum_by_hand)
print(by_hand.results[3])

# %% tags=["check"]
assert all(found == [6.0] * 8 for found in by_hand.results.values())  # 0 + 1 + 2 + 3

# %% [markdown]
# `dlearn.collectives` has this tree and three other algorithms, and says of each message in which step it was
# sent:
#
# - `ring`: each rank passes a quarter of the data to the neighbour and adds; then the finished quarters go
#   round
# - `halving_doubling`: partners exchange halves, then quarters; then backwards (recursive halving and doubling, or
#   Rabenseifner's algorithm)
# - `star`: each rank sends all to rank 0, and rank 0 sends each the sum
#
# A **step** is what can happen at the same time: its messages wait for those of the step before, and for
# nothing else. **Predict first:** how many steps does each of them take with four ranks?

# %%
my_steps = {"ring": None, "halving_doubling": None, "tree": None, "star": None}

ALGORITHMS = {"ring": ring, "halving_doubling": halving_doubling, "tree": tree, "star": star}


def one_of_each(numbers):
    for name, algorithm in ALGORITHMS.items():
        dist.barrier()  # all ranks start together
        with span(name):
            algorithm.all_reduce(torch.ones(numbers))


def plan(name):
    """What was sent in each step: (from, to, bytes)."""
    steps = {}
    for message in messages(tiny.trace.within(name)):
        steps.setdefault(message.step, set()).add((message.src, message.dst, message.payload_bytes))
    return [steps[number] for number in sorted(steps)]


tiny = Cluster(4).run(one_of_each, 8)  # 8 numbers: 32 bytes
for name in ("tree", "ring"):
    print(name)
    for number, step in enumerate(plan(name), start=1):
        print(f"    step {number}:", ", ".join(f"{src} to {dst}: {size} B" for src, dst, size in sorted(step)))

# %% [markdown]
# The tree takes four steps. Each message has all 32 bytes, and in no step does every rank send. The ring
# takes six steps; in each of them every rank sends one quarter, 8 bytes, and receives another.
#
# Here is the tree in time. In the picture, follow the chain from rank 3 to rank 1, to rank 0, and back the
# same way. Can one of these arrows begin before the one before it has come?

# %%
axes = draw.timeline(tiny.trace.within("tree"))

# %% [markdown]
# It cannot: rank 1 must have what it adds before it can pass it on. That is why steps count: they follow one
# another, whatever the machine.
#
# Now the ring. Count the arrows that leave the lane of rank 2: in the tree it was one.

# %%
axes = draw.timeline(tiny.trace.within("ring"))

# %% [markdown]
# Six, one in each step, and the same from every other rank. (How far apart the arrows are is up to the
# machine. Each rank goes on as soon as it has what it needs, so one may be a step ahead of another.)

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

hand_made = sorted((each.src, each.dst, each.payload_bytes) for each in messages(by_hand.trace))
assert hand_made == sorted(message for step in plan("tree") for message in step)  # ours was the same tree

# %% [markdown]
# ## Steps and bytes
#
# What counts is the longest chain of messages that must wait for each other: its number of **steps**, and the
# **bytes** that pass on it. `cost` gives both in theory, `cost_seen` counts them in the recorded messages.
# `S` is the size of the data. Look for the row with the fewest steps, and for the one with the fewest bytes.

# %%
SIZE = 9_600
counted = Cluster(4).run(one_of_each, SIZE // 4)
seen = {name: cost_seen(operations(counted.trace.within(name))[0]) for name in ALGORITHMS}
in_all = {name: len(messages(counted.trace.within(name))) for name in ALGORITHMS}

print(f"{'4 ranks':18} {'your guess':>10} {'steps':>6} {'theory':>7} {'bytes':>8} {'theory':>8}  messages in all")
for name, (steps, size) in seen.items():
    theory = cost(name, 4, SIZE)
    guess = "" if my_steps[name] is None else my_steps[name]
    print(f"{name:18} {guess:>10} {steps:6} {theory.steps:7} {size:8,} {theory.bytes:8,.0f}  {in_all[name]:15}")

# %% [markdown]
# Theory and record agree to the byte. This does not depend on the machine: the ring takes 6 steps and 1.5 S,
# the tree 4 steps and 4 S, the star 6 steps and 6 S. Halving-doubling has the steps of the tree *and* the
# bytes of the ring. No all-reduce can do with fewer than 2 (n-1)/n · S, if no switch adds for it: ring and
# halving-doubling are **bandwidth-optimal**.
#
# So why is halving-doubling not always taken? What follows is textbook knowledge, and not measured here. Its
# partners are 1, 2, 4, ... ranks apart: in one of the steps all data cross the middle of the network at once, where
# links are shared, while a ring only uses links between neighbours. It wants a power of two. And a ring cuts large data
# into pieces that follow each other without a pause.
#
# So few steps are good for small data, where latency is all; few bytes are good for large data.

# %% tags=["check"]
assert seen == {name: cost(name, 4, SIZE) for name in ALGORITHMS}
assert seen["ring"] == (6, 1.5 * SIZE)
assert seen["halving_doubling"] == (4, 1.5 * SIZE)
assert seen["tree"] == (4, 4 * SIZE)
assert seen["star"] == (6, 6 * SIZE)
assert in_all == {"ring": 24, "halving_doubling": 16, "tree": 6, "star": 6}

# %% [markdown]
# ## Who should win, and who does?
#
# With the two constants of the ping-pong, theory gives a time for each algorithm: `steps · latency + bytes /
# bandwidth`. A `*` marks the fastest. **Predict first:** up to which size, in bytes, does the tree beat the
# ring on this machine?

# %%
my_crossing = lessons.predict("trees_and_rings.tree below", None)

SIZES = [32, 4_096, 65_536, 2**20, 2**24]
print(f"the tree beats the ring below {crossover(model, 4):,.0f} B")
my_crossing and print(my_crossing.against(crossover(model, 4), tolerance=0.5))
predictions(model, 4, SIZES)

# %% [markdown]
# Now the four of them really run, one after the other, each several times.


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

# %% [markdown]
# In the picture, lines are theory, dots are what was measured. First follow the lines: to the left they are
# flat (latency), to the right they rise (bytes), and the ring's and the tree's cross at the white circle.
# Then the dots: do they lie on their lines? Is their order, from the lowest to the highest, that of the
# lines?

# %%
axes = costs(model, 4, measured=measured)

# %% [markdown]
# Do not be surprised if they are far off. The theory makes two promises that this machine may not keep:
#
# - *All messages of a step travel at the same time.* That takes a core for each rank. Where ranks share cores
#   they take turns, and the messages **in all** count, not the steps of the chain: 24 in the ring, but 6 in
#   the tree.
# - *A message costs what it cost in the ping-pong.* There two ranks did nothing but wait for it. Among four,
#   a rank must first be woken up, and its neighbours are just as busy.
#
# The cell below shows what a small all-reduce took on this machine, beside the steps and the messages in all.
# Which of the two columns explains the times better? And how much larger is the latency if it is fitted to
# the all-reduces themselves?

# %%
print(f"this machine has {os.cpu_count()} cores for 4 ranks\n")
print(f"{'32 bytes':18} {'steps':>5}  {'messages in all':>15}  {'median time':>12}")
for name, found in measured.items():
    seconds = median(time for size, time in found if size == 32)
    print(f"{name:18} {seen[name].steps:5}  {in_all[name]:15}  {seconds * 1e6:9,.0f} µs")

print("\nfrom the ping-pong:     ", model)
print("from the all-reduces:   ", fit_all_reduce(measured, 4))

# %% [markdown]
# So steps and bytes are facts about an algorithm; times are facts about a machine. A library that wants to
# choose well must know the constants of *your* machine. What the theory says for every machine is the form of
# the answer: with four and more ranks there is one size at which ring and tree cross, and it grows with
# latency · bandwidth. (Three ranks are too few: there the tree saves no step.)

# %% tags=["check"]
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
# Both are defined by NVIDIA's nccl-tests
# ([PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)), and people mix them
# up.
#
# - **algbw** = size / time. How long will my all-reduce take? Divide its size by this.
# - **busbw** = algbw · 2 (n-1)/n, for an all-reduce on n ranks. How well are the wires used? Compare this
#   with what a wire can do.
#
# Imagine a perfect machine: each wire carries 1 GB/s, a message has no latency. 1 GB is summed in a ring.
# **Predict first:** with more and more ranks, what happens to algbw, and what to busbw?

# %%
GB = 10**9
perfect = Model(latency_s=0.0, bandwidth=1.0 * GB)


def on_perfect_wires(algorithm, ranks):
    seconds = perfect.time_s(cost(algorithm, ranks, GB))
    return Bandwidth(op="all_reduce", ranks=ranks, size_bytes=GB, duration_ns=round(seconds * 1e9))


for algorithm, ranks in [("ring", 2), ("ring", 4), ("ring", 8), ("ring", 64), ("tree", 4)]:
    it = on_perfect_wires(algorithm, ranks)
    print(f"{algorithm} of {ranks}: algbw {it.algorithm_bandwidth / GB:.3f}, busbw {it.bus_bandwidth / GB:.3f} GB/s")

# %% [markdown]
# The algbw of the ring falls from 1 GB/s to about one half, although nothing got worse: with more ranks there
# is more to do. Its busbw stays at 1 GB/s, the speed of a wire: for any number of ranks it can be compared.
#
# But it is no speed that was measured on a wire. The factor 2 (n-1)/n is what ranks must send *at least*
# (as long as no network switch adds for them). The tree sends more: on the same wires its busbw is 0.375 GB/s.

# %% tags=["check"]
for ranks in (2, 4, 8, 64):
    assert abs(on_perfect_wires("ring", ranks).bus_bandwidth / GB - 1) < 1e-6
    assert abs(on_perfect_wires("ring", ranks).algorithm_bandwidth / GB - ranks / (2 * (ranks - 1))) < 1e-6
assert on_perfect_wires("ring", 2).algorithm_bandwidth == GB
assert abs(on_perfect_wires("ring", 64).algorithm_bandwidth / GB - 0.508) < 0.001
assert abs(on_perfect_wires("tree", 4).bus_bandwidth / GB - 0.375) < 1e-6

# %% [markdown]
# And here? `bandwidths` takes both from any trace: for 2 ranks they are equal, for 4 busbw is 1.5 times algbw.


# %%
def sums(numbers, times):
    data = torch.zeros(numbers)
    for _ in range(times):
        dist.all_reduce(data)


traces = {ranks: Cluster(ranks).run(sums, 2**20, 9).trace for ranks in (2, 4)}
for trace in traces.values():
    print(bandwidths(trace))

# %% tags=["check"]
for ranks, trace in traces.items():
    [found] = bandwidths(trace).items
    assert (found.ranks, found.size_bytes, found.count) == (ranks, 4 * 2**20, 9)
    sent_of_size = traffic(trace).bytes_from(rank=0) / (found.count * found.size_bytes)
    assert abs(found.bus_bandwidth / found.algorithm_bandwidth - sent_of_size) < 1e-9  # what a rank's wire transports

# %% [markdown]
# ## What does gloo choose?
#
# Gloo's own all-reduce is one call; its messages are not seen. But the kernel counts the bytes of each
# socket. So: predict the bytes from each rank to each other rank as a ring sends them, then compare with what
# was counted. If gloo took a tree for small data, there would be bytes left over (*residue*). **Predict
# first:** at which of these sizes?


# %%
def sum_once(size):
    dist.all_reduce(torch.zeros(size // 4))


pairs_seen, table = [], [f"{'size':>12} {'predicted':>12} {'measured':>12} {'residue':>8}"]
with Cluster(4) as cluster:
    for size in (8, 4_096, 2**20, 25 * 2**20):
        run = cluster.run(sum_once, size)
        answer = reconcile(run.trace)
        whole = answer.whole
        counts = [size, whole.predicted_bytes, whole.measured_bytes or 0, whole.residue_bytes or 0]
        table.append("{:10,} B {:12,} {:12,} {:8,}".format(*counts) + answer.not_measured)

        pairs_seen.append((answer, {(each.src, each.dst) for each in messages(run.trace)}))
print("\n".join(table))

# %% tags=["check"]
for answer, pairs in pairs_seen:
    assert pairs == {(1, 0), (2, 1), (3, 2), (0, 3)}
    assert answer.exact or answer.not_measured  # the counters exist on Linux only

# %% [markdown]
# At none: from 8 bytes to 25 MiB, not one byte is left over. Gloo, as torch uses it, is a ring at every size
# here, whatever a tree could save.
#
# ## What does NCCL choose?
#
# *This section is from the documentation and from what its authors say. It was not run here.*
#
# NCCL decides anew for each call. It has a model of every algorithm with every protocol, estimates the time
# that each would take for this size, and takes the lowest ([issue
# 457](https://github.com/NVIDIA/nccl/issues/457)). In its tuning table, too, each has a latency and a
# bandwidth ([nccl-tests, issue 89](https://github.com/NVIDIA/nccl-tests/issues/89)): the idea of this lesson,
# with constants for your GPUs and links. So there is no one size at which it switches: that depends on the
# number of nodes, the GPUs in a node and the bandwidths inside and between nodes ([issue
# 754](https://github.com/NVIDIA/nccl/issues/754)).
#
# Its tree is not ours: each GPU but the root sends 2 S in all, about as many bytes as in a ring, which sends
# 2 (n-1)/n S (issue 457 again). Ours has 4 S on its chain, because it sends everything at once and not piece
# by piece.

# %% [markdown]
# | to do what | variable |
# |---|---|
# | let NCCL choose (the default) | set none of these |
# | allow only some algorithms, or forbid some with `^` | `NCCL_ALGO=Ring`, `NCCL_ALGO=^Tree` |
# | the same for one operation (since 2.24) | `NCCL_ALGO="allreduce:^tree"` |
# | the same for protocols: `LL`, `LL128`, `Simple` | `NCCL_PROTO`, but users are discouraged (see below) |
# | see what was chosen | `NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING` |
# | the old knob: trees below this size | `NCCL_TREE_THRESHOLD`: since 2.4, **removed in 2.5** |
#
# The algorithms, with the version that brought them: Ring and Tree (as choices 2.5), CollnetChain and
# CollnetDirect (2.14; the network adds), NVLS (2.17) and NVLSTree (2.18) (the NVLink switch adds), PAT
# (2.23). Not each of them does each operation. The protocols are better left alone: LL128, forced where it is
# not supported, can corrupt data.
#
# Sources: [environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html),
# [logging](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html) and [issue
# 1444](https://github.com/NVIDIA/nccl/issues/1444).

# %% [markdown]
# ## Exercise
#
# Eight ranks, a latency of 20 µs, a bandwidth of 1 GB/s. Up to which size, in bytes, does the tree beat the
# ring? Write down steps and bytes of both for a size S, set the two times equal, and solve for S. Then write
# your number instead of `None`.

# %% tags=["exercise"]
my_answer = None
lessons.answer("trees_and_rings.tree_below", my_answer)

# %% tags=["answer"]
assert lessons.answer("trees_and_rings.tree_below", crossover(Model(latency_s=20e-6, bandwidth=1e9), 8)).right
