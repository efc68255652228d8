# ---
# jupyter:
#   dlearn:
#     ids: [MP2, Q8]
#     minutes: 0.2
#     needs: []
#     peak_mb: 800
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Collectives: what does each one send, and to whom?
#
# **Goals.** You will be able to name nine collectives with the bytes that each rank sends; read the algorithm off the
# traffic matrix.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 40 minutes.
#
# A *collective* is a call that all ranks make together: broadcast, reduce, all-reduce and so on. The program
# says **what** everybody has afterwards. It does not say **how** the bytes get there. Does rank 0 send to all,
# does a message go round in a ring, or through a tree? That is up to the backend, here gloo.
#
# So we run nine collectives and look at the wire.

# %%
from collections import Counter
from math import ceil, isclose, log2

import torch
import torch.distributed as dist

from dlearn import Cluster, draw, lessons, messages, operations, play, span
from dlearn.analysis import reconcile, traffic
from dlearn.collectives import ring

S = 1_200_000  # bytes: 300,000 numbers, which 2, 3 and 4 ranks can share evenly


def one_of_each(size):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(size // 4)  # S bytes
    part = torch.ones(size // 4 // n)  # S/n bytes
    parts = list(torch.ones(size // 4).chunk(n)) if rank == 0 else None
    with span("broadcast"):  # everybody gets the S bytes of rank 0
        dist.broadcast(whole, src=0)
    with span("reduce"):  # rank 0 gets the sum of everybody's S bytes
        dist.reduce(whole, dst=0)
    with span("all_reduce"):  # everybody gets the sum
        dist.all_reduce(whole)
    with span("reduce_scatter"):  # each rank gets 1/n of the sum
        dist.reduce_scatter_single(part, whole)
    with span("all_gather"):  # everybody gets the parts of all
        dist.all_gather_single(whole, part)
    with span("gather"):  # rank 0 gets the parts of all
        dist.gather(part, parts, dst=0)
    with span("scatter"):  # each rank gets its part from rank 0
        dist.scatter(part, parts, src=0)
    with span("all_to_all"):  # from everybody to everybody a part of its own
        dist.all_to_all_single(torch.empty_like(whole), whole)
    with span("barrier"):  # no data: no rank goes on before all are here
        dist.barrier()


COLLECTIVES = ["broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES += ["gather", "scatter", "all_to_all", "barrier"]

# %% [markdown]
# `S` is always the size of the **whole**. Where a rank holds only a part (all-gather, gather, scatter), the
# part has S/n bytes. (`reduce_scatter_single` and `all_gather_single` are the newer names of
# `reduce_scatter_tensor` and `all_gather_into_tensor`.)
#
# **Predict first:** four ranks. How many bytes does one rank send in each collective, as a multiple of S?
# Take the rank that sends most. And which rank is that?

# %%
my_guess = {"broadcast": None, "reduce": None, "all_reduce": None, "reduce_scatter": None}
my_guess |= {"all_gather": None, "gather": None, "scatter": None, "all_to_all": None, "barrier": None}

runs = {n: Cluster(n).run(one_of_each, S) for n in (2, 3, 4)}


def sent(name, n):
    """What each rank sent, in bytes."""
    table = traffic(runs[n].trace.within(name))
    return [table.bytes_from(rank=rank) for rank in range(n)]


def pairs(name, n):
    """Who sent to whom, and how many messages."""
    return traffic(runs[n].trace.within(name)).message_count


print(f"{'':15} n   sent by each rank, in S       your guess  messages  from > to")
for name in COLLECTIVES:
    for n in runs:
        multiples = "  ".join(f"{size / S:5.3f}" for size in sent(name, n))
        guess = my_guess[name] if n == 4 and my_guess[name] is not None else ""
        count = sum(pairs(name, n).values())
        peers = " ".join(f"{src}>{dst}" for src, dst in sorted(pairs(name, n)))
        print(f"{name if n == 2 else '':15} {n}   {multiples:28} {guess:>10}  {count:8}  {peers}")

# %% [markdown]
# Read a row of four ranks. In an all-reduce everybody sends 1.5 S. In a broadcast, rank 0 sends twice, rank 1
# once, the others nothing. In a reduce rank 0, which wants the sum, also *sends*. Here are the formulas that
# give every number of the table.


# %%
def formula(name, n):
    """What each rank sends, as a multiple of S. Rank 0 is the root."""
    share = (n - 1) / n
    others = range(1, n)
    match name:
        case "broadcast":  # a tree that doubles: each rank that has the data sends it on
            rounds = ceil(log2(n))
            return [sum(2**r > rank and rank + 2**r < n for r in range(rounds)) for rank in range(n)]
        case "reduce":  # a ring, then the finished parts go to the root
            return [share, *(1 for _ in others)]
        case "all_reduce" | "reduce_scatter":
            return [2 * share] * n
        case "all_gather" | "all_to_all":
            return [share] * n
        case "gather":
            return [0, *(1 / n for _ in others)]
        case "scatter":
            return [share, *(0 for _ in others)]
        case "barrier":
            return [0] * n


# %% tags=["MP2", "check"]
for n in runs:
    for name in COLLECTIVES:
        expected = [S * multiple for multiple in formula(name, n)]
        assert all(isclose(one, two) for one, two in zip(sent(name, n), expected, strict=True)), (name, n)
    assert max(sent("broadcast", n)) == sent("broadcast", n)[0] == ceil(log2(n)) * S

# %% [markdown]
# ## Is that true?
#
# Gloo does not tell which messages it sends. `dlearn` knows its algorithms, and *derives* the messages from
# them. So we need a witness that knows nothing of gloo: the kernel. It counts the bytes of every socket.
#
# `reconcile` puts both side by side. Each message of gloo has 96 bytes of framing, and the receiver sends 48
# bytes back to say that it is ready. Look at the last column: the *residue* is what was counted and not
# explained.

# %%
answers = {n: reconcile(runs[n].trace) for n in runs}
answers[4]

# %% [markdown]
# Not one byte is left over; and this holds for each collective alone, too. (The counters exist on Linux only.
# On another system the two last columns are empty, and the table above is a prediction.)

# %% tags=["check"]
for n, result in answers.items():
    if not result.not_measured:
        assert result.exact, n
        assert all(part.residue_bytes == 0 for part in result.parts)
    print(n, "ranks:", result.sentence)

# %% [markdown]
# ## Which algorithm does the wire reveal?
#
# Take the kernel's numbers alone, of the broadcast. **Predict first:** if rank 0 sent to everybody (a *star*),
# how many bytes would go from rank 0 to rank 3?

# %%
my_guess_0_to_3 = None


def on_the_wire(name, n=4):
    """Bytes that the kernel counted from each rank to each other; predicted ones where it counts nothing."""
    whole = reconcile(runs[n].trace.within(name)).whole
    counted = {(pair.src, pair.dst): pair.measured_bytes for pair in whole.pairs}
    predicted = {(pair.src, pair.dst): pair.predicted_bytes for pair in whole.pairs}
    return predicted if answers[n].not_measured else counted


for name in ("broadcast", "all_reduce", "all_gather"):
    print(name)
    for (src, dst), size in sorted(on_the_wire(name).items()):
        print(f"    {src} > {dst} {size:12,} B")
print("you guessed from 0 to 3 in a star:", my_guess_0_to_3)

# %% [markdown]
# A star would show S and the framing, 1,200,096 bytes. In the broadcast there is nothing between 0 and 3. The
# 48 bytes from 1 to 0 are the answer of a receiver. So it is no star, and no ring either, where rank 2 would
# hear from rank 1. It is a **binomial tree**: first rank 0 sends to 1; then 0 to 2 and 1 to 3. That makes two rounds
# for four ranks, and one more whenever n doubles. In the picture, look at the two last arrows: must one of
# them wait for the other?

# %%
axes = draw.sequence(runs[4].trace.within("broadcast"))

# %% [markdown]
# No: they have different senders and different receivers, so both may travel at the same time.
#
# In the all-reduce every rank sends to rank r-1 only: a **ring to the left**. The number of messages is on the
# wire, too: what goes to the right is nothing but 12 answers of 48 bytes. In the all-gather, every rank sends
# to r+1: a **ring to the right**, with half the bytes. Look for the dark cells: below the diagonal, or above?

# %%
axes = draw.traffic(runs[4].trace.within("all_reduce"))

# %%
axes = draw.traffic(runs[4].trace.within("all_gather"))

# %% [markdown]
# Why a ring? Go through the all-reduce step by step and look below the picture: a rank's share of a piece goes round,
# and each rank adds its own to it. After how many of the messages does some rank have a complete sum?

# %%
play.player(runs[4].trace.within("all_reduce"))

# %% tags=["check"]
left = {(rank, (rank - 1) % 4) for rank in range(4)}
right = {(rank, (rank + 1) % 4) for rank in range(4)}
steps = {(m.src, m.dst): m.step for m in messages(runs[4].trace.within("broadcast"))}
assert steps == {(0, 1): 0, (0, 2): 1, (1, 3): 1}
assert set(pairs("all_reduce", 4)) == left
assert set(pairs("all_gather", 4)) == right
assert set(pairs("gather", 4)) == {(rank, 0) for rank in (1, 2, 3)}
assert set(pairs("scatter", 4)) == {(0, rank) for rank in (1, 2, 3)}
assert set(pairs("all_to_all", 4)) == {(src, dst) for src in range(4) for dst in range(4) if src != dst}
wire = on_the_wire("broadcast")
assert (0, 3) not in wire or wire[0, 3] == 0
assert (wire[0, 1], wire[1, 0]) == (S + 96, 48)
for src, dst in left:
    assert on_the_wire("all_reduce")[src, dst] == 1.5 * S + 12 * 96
    assert on_the_wire("all_reduce")[dst, src] == 12 * 48
    assert on_the_wire("all_gather")[dst, src] == 0.75 * S + 6 * 96

# %% [markdown]
# Gather, scatter and all-to-all are **direct**: each byte goes straight to where it is wanted. (Bytes and
# counts do not show the order in time. That the left ring adds in the order we think is shown to the last bit
# in the lesson on send and receive.)
#
# ## Four surprises
#
# **One: gloo's reduce-scatter is an all-reduce.** Compare the two rows in the first table: the same bytes, the
# same pairs. Each rank wants one n-th of the sum, and (n-1)/n S is enough for that. Our own ring proves it: it
# stops when the parts are finished.


# %%
def half_a_ring(size):
    n = dist.get_world_size()
    part = torch.empty(size // 4 // n)
    ring.reduce_scatter(part, torch.ones(size // 4))
    return part.unique().tolist()


run = Cluster(4).run(half_a_ring, S)
enough = traffic(run.trace).bytes_from(rank=0)
gloos = sent("reduce_scatter", 4)[0]
print(f"our ring sends {enough / S} S, gloo {gloos / S} S: {gloos / enough} times as much")

# %% tags=["Q8", "check"]
assert all(found == [4.0] for found in run.results.values())
assert enough == 0.75 * S
assert gloos == 2 * enough == sent("all_reduce", 4)[0]
for n in runs:
    assert pairs("reduce_scatter", n) == pairs("all_reduce", n)

# %% [markdown]
# This matters for **sharded training**. DDP sends the gradients once through an all-reduce. ZeRO-2 reduce-scatters
# the gradients and all-gathers the new parameters. FSDP (ZeRO-3) gathers the parameters twice, before forward
# and again before backward, and reduce-scatters the gradients. With a true reduce-scatter, ZeRO-2 costs the same
# bytes as DDP, and FSDP 1.5 times as many. **Predict first:** how many times as many on gloo?

# %%
my_zero2_guess, my_fsdp_guess = None, None

ddp, gather = sent("all_reduce", 4)[0], sent("all_gather", 4)[0]
theory = {"ZeRO-2": (gather + enough) / ddp, "FSDP": (2 * gather + enough) / ddp}
on_gloo = {"ZeRO-2": (gather + gloos) / ddp, "FSDP": (2 * gather + gloos) / ddp}
for name, guess in (("ZeRO-2", my_zero2_guess), ("FSDP", my_fsdp_guess)):
    print(f"{name}: in theory {theory[name]}, on gloo {on_gloo[name]} times DDP; you guessed {guess}")

# %% tags=["Q8", "check"]
assert theory == {"ZeRO-2": 1.0, "FSDP": 1.5}
assert on_gloo == {"ZeRO-2": 1.5, "FSDP": 2.0}

# %% [markdown]
# That was added up from single calls. Here are DDP and FSDP themselves: four layers, three steps, and the bytes
# of the third. (In the second, DDP sends a few bytes more, to set up its buckets anew.)


# %%
def train(kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4)))
    if kind == "DDP":
        model = DDP(layers)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        model = fully_shard(layers, mesh=mesh, reshard_after_forward=True)
    for step in range(3):
        with span(f"step {step}"):
            model(torch.ones(8, 256)).sum().backward()


PARAMETERS = 4 * 256 * 256 * 4  # bytes
one_step = {kind: Cluster(4).run(train, kind).trace.within("step 2") for kind in ("DDP", "FSDP")}
third = {kind: traffic(trace).bytes_from(rank=0) for kind, trace in one_step.items()}
for kind, size in third.items():
    calls = dict(Counter(call.op for call in operations(one_step[kind])))
    print(f"{kind:5} each rank sends {size / PARAMETERS} times the parameters, by {calls}")

# %% tags=["check"]
assert third == {"DDP": 1.5 * PARAMETERS, "FSDP": 3 * PARAMETERS}
assert all(reconcile(trace).exact or answers[4].not_measured for trace in one_step.values())

# %% [markdown]
# Twice as many, in the real thing. On a backend with a true reduce-scatter it would be 1.5 times. What FSDP
# saves is memory, not traffic.
#
# **Two: gloo's reduce wastes bytes when the data are large.** Up to here a reduce on 2 ranks took 1.5 S in
# all: each rank sends half, then rank 1 sends its finished half to rank 0. We let the data grow.


# %%
def sum_on_rank_0(size):
    data = torch.ones(size // 4)
    dist.reduce(data, dst=0)
    return data.unique().tolist() if dist.get_rank() == 0 else None


MiB = 2**20
wasted = {}
print(f"{'S':>6}  {'sent in all':>12} {'in S':>6} {'on the wire: predicted':>23} {'measured':>12}")
with Cluster(2) as cluster:
    for size in (1 * MiB, 4 * MiB, 7 * MiB, 16 * MiB):
        run = cluster.run(sum_on_rank_0, size)
        result = reconcile(run.trace)
        whole = result.whole
        wasted[size] = whole.payload_bytes / size
        measured = "not measured" if result.not_measured else f"{whole.measured_bytes:,}"
        row = f"{size // MiB:2} MiB  {whole.payload_bytes:12,} {wasted[size]:6.3f}"
        print(f"{row} {whole.predicted_bytes:23,} {measured:>12}")
        assert run.results[0] == [2.0]  # the sum is right
        assert result.exact or result.not_measured

# %% [markdown]
# From 4 to 7 MiB the factor jumps to 2, and the kernel counts the same. Gloo passes the data on in pieces, two
# for each rank, but of at most 1 MiB; so above 2 MiB per rank there are more. Yet it ends its ring two pieces
# before the round is full, as if there were still two. The extra pieces keep travelling, although no rank
# needs them. The sum is right all the same: only counting shows them.

# %% tags=["check"]
assert wasted[1 * MiB] == wasted[4 * MiB] == 1.5
assert wasted[7 * MiB] == 2.0
assert wasted[16 * MiB] == 2.25

# %% [markdown]
# **Three: in an all-to-all, one part is never sent.** Each rank has a part for each rank, itself included. Its
# own part stays: (n-1)/n S, not S.
#
# **Four: a barrier sends messages with nothing in them.** All there is on the wire is the framing. In round k
# each rank tells rank r + 2^k that it is here: after about log2(n) rounds all know of all.

# %%
barrier = messages(runs[4].trace.within("barrier"))
for number in sorted({message.step for message in barrier}):
    in_round = sorted((message.src, message.dst) for message in barrier if message.step == number)
    print(f"round {number}:", "  ".join(f"{src} > {dst}" for src, dst in in_round))

framing = sum(on_the_wire("barrier").values())
print(f"barrier of 4 ranks: {len(barrier)} messages of 0 B, {framing:,} B on the wire")

# %% tags=["check"]
for n in runs:
    assert all(src != dst for src, dst in pairs("all_to_all", n))
    assert set(sent("all_to_all", n)) == {S - S // n}
    found = messages(runs[n].trace.within("barrier"))
    assert {message.payload_bytes for message in found} == {0}
    assert len(found) == n * ceil(log2(n))
    assert {message.dst for message in found if message.src == 0} == {2**k % n for k in range(ceil(log2(n)))}
assert (len(barrier), framing) == (8, 8 * (96 + 48))

# %% [markdown]
# ## Answers
#
# Gloo, n ranks, S bytes in all, rank 0 is the root. Each formula was checked above for n = 2, 3 and 4.
#
# | collective | each rank sends | to whom | algorithm |
# |---|---|---|---|
# | broadcast | root ⌈log2 n⌉ S; all together (n-1) S | r + 1, r + 2, r + 4 ... | tree |
# | reduce | root (n-1)/n S, others S; more above 2 MiB per rank | r-1, then the root | ring, then gather |
# | all_reduce | 2 (n-1)/n S | r-1 | ring to the left |
# | reduce_scatter | 2 (n-1)/n S, twice what is needed | r-1 | that all-reduce |
# | all_gather | (n-1)/n S | r+1 | ring to the right |
# | gather | root 0, others S/n | root | direct |
# | scatter | root (n-1)/n S, others 0 | each other rank | direct |
# | all_to_all | (n-1)/n S | each other rank | direct |
# | barrier | ⌈log2 n⌉ messages of 0 B | r + 1, r + 2, r + 4 ... | rounds |
#
# **Other backends** answer the same calls with other messages. NCCL, which was not run here, has a
# [reduce-scatter of its own](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html), so
# do not carry gloo's factor of 2 over to it. For each call it chooses an algorithm; the lesson on trees and
# rings says how. And between GPUs its bytes go past the sockets that the kernel counts: there this lesson would
# lose its witness.
#
# ## Exercise
#
# Five ranks, broadcast from rank 0. How many times S does rank 0 send? Write your number instead of `None`.

# %% tags=["exercise"]
my_answer = None
lessons.answer("collectives.root_of_five", my_answer)


# %% tags=["answer"]
def from_rank_0(size):
    dist.broadcast(torch.zeros(size // 4), src=0)


five = traffic(Cluster(5).run(from_rank_0, S).trace)
assert lessons.answer("collectives.root_of_five", five.bytes_from(rank=0) / S).right

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
