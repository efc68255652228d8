# ---
# jupyter:
#   dlearn:
#     ids: [MP2]
#     minutes: 0.2
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Collectives: what does each one send, and to which rank?
#
# **Goals.** You will be able to say for nine collectives how many bytes each rank sends; recognise the algorithm in the
# traffic matrix.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 40 minutes.
#
# A *collective* is a call that all ranks make together: broadcast, reduce, all-reduce and so on. The program says
# **what** each rank has afterwards, but not **how** the bytes get there: from rank 0 to all ranks, round a ring, or
# along a tree. The backend decides that; here it is gloo. **How many bytes does each rank send, and to which ranks?**

# %%
from math import ceil, isclose, log2

import torch
import torch.distributed as dist

from dlearn import Cluster, draw, lessons, messages, span
from dlearn.analysis import reconcile, traffic

S = 1_200_000  # bytes: 300,000 numbers, which 2, 3 and 4 ranks can share evenly


def one_of_each(size):
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(size // 4)  # S bytes
    part = torch.ones(size // 4 // n)  # S/n bytes
    parts = list(torch.ones(size // 4).chunk(n)) if rank == 0 else None
    with span("broadcast"):  # each rank gets the S bytes of rank 0
        dist.broadcast(whole, src=0)
    with span("reduce"):  # rank 0 gets the sum of all ranks' S bytes
        dist.reduce(whole, dst=0)
    with span("all_reduce"):  # each rank gets the sum
        dist.all_reduce(whole)
    with span("reduce_scatter"):  # each rank gets 1/n of the sum
        dist.reduce_scatter_single(part, whole)
    with span("all_gather"):  # each rank gets the parts of all
        dist.all_gather_single(whole, part)
    with span("gather"):  # rank 0 gets the parts of all
        dist.gather(part, parts, dst=0)
    with span("scatter"):  # each rank gets its part from rank 0
        dist.scatter(part, parts, src=0)
    with span("all_to_all"):  # each rank gets a part from each rank
        dist.all_to_all_single(torch.empty_like(whole), whole)
    with span("barrier"):  # no data: no rank goes on before all have arrived
        dist.barrier()


COLLECTIVES = ["broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather"]
COLLECTIVES += ["gather", "scatter", "all_to_all", "barrier"]

# %% [markdown]
# `S` is always the size of the **whole** data. Where a rank has only a part (all-gather, gather, scatter), the part has
# S/n bytes. (`reduce_scatter_single` and `all_gather_single` are the newer names of `reduce_scatter_tensor` and
# `all_gather_into_tensor`.)
#
# **Predict first:** in a broadcast from rank 0 to three others, how many times S does rank 0 send?

# %%
my_broadcast = lessons.predict("collectives.broadcast", None)
runs = {n: Cluster(n).run(one_of_each, S) for n in (2, 3, 4)}


def sent(name, n):
    """Bytes that each rank sent."""
    table = traffic(runs[n].trace.within(name))
    return [table.bytes_from(rank=rank) for rank in range(n)]


def pairs(name, n):
    """How many messages each rank sent to each other."""
    return traffic(runs[n].trace.within(name)).message_count


print(f"{'':15} n   sent by each rank, in S       messages  from > to")
for name in COLLECTIVES:
    for n in runs:
        multiples = "  ".join(f"{size / S:5.3f}" for size in sent(name, n))
        count = sum(pairs(name, n).values())
        peers = " ".join(f"{src}>{dst}" for src, dst in sorted(pairs(name, n)))
        print(f"{name if n == 2 else '':15} {n}   {multiples:28}  {count:8}  {peers}")
my_broadcast and my_broadcast.against(sent("broadcast", 4)[0] / S)

# %% [markdown]
# Look at the rows of four ranks. In an all-reduce each rank sends 1.5 S. In a broadcast, rank 0 sends S twice, rank 1
# once, and the others nothing. In a reduce, rank 0 receives the sum, but it also *sends*. The following formulas give
# every number of the table.


# %%
def formula(name, n):
    """Bytes that each rank sends, as a multiple of S. Rank 0 is the root."""
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


# %% [markdown]
# ## Is that true?
#
# Gloo does not report which messages it sends. `dlearn` knows gloo's algorithms, and *derives* the messages from them.
# The kernel is an independent witness: it counts the bytes of every socket. `reconcile` compares the two. Each of
# gloo's messages has 96 bytes of framing, and the receiver sends 48 bytes back to say that it is ready. Look at the
# last column: the *residue* is what the kernel counted beyond the prediction.

# %%
answers = {n: reconcile(runs[n].trace) for n in runs}
answers[4]

# %% tags=["MP2", "check"]
for n in runs:
    for name in COLLECTIVES:
        expected = [S * multiple for multiple in formula(name, n)]
        assert all(isclose(one, two) for one, two in zip(sent(name, n), expected, strict=True)), (name, n)
    assert max(sent("broadcast", n)) == sent("broadcast", n)[0] == ceil(log2(n)) * S
    assert sum(pairs("broadcast", n).values()) == n - 1

for n, result in answers.items():
    if not result.not_measured:
        assert result.exact, n
        assert all(part.residue_bytes == 0 for part in result.parts)
    print(n, "ranks:", result.sentence)

# %% [markdown]
# The residue is 0, also for each collective alone. (Only Linux has these counters. On other systems the last two
# columns are empty, and the table above is only a prediction.)
#
# ## Which algorithm do the bytes reveal?
#
# Now use only the kernel's numbers, for the broadcast. In a *star*, rank 0 would send S and the framing, 1,200,096
# bytes, to rank 3. In a ring, rank 2 would receive from rank 1. **Predict first:** is it a star, a ring or a tree? In
# the picture, look at the last two arrows. Must one of them wait for the other?

# %%
my_shape = lessons.predict("collectives.shape of the broadcast", None, choices=("star", "ring", "tree"))


def on_the_wire(name, n=4):
    """Bytes that the kernel counted from each rank to each other; predicted ones where it counts nothing."""
    whole = reconcile(runs[n].trace.within(name)).whole
    counted = {(pair.src, pair.dst): pair.measured_bytes for pair in whole.pairs}
    predicted = {(pair.src, pair.dst): pair.predicted_bytes for pair in whole.pairs}
    return predicted if answers[n].not_measured else counted


for name in ("broadcast", "all_gather"):
    print(name)
    for (src, dst), size in sorted(on_the_wire(name).items()):
        print(f"    {src} > {dst} {size:12,} B")
axes = draw.sequence(runs[4].trace.within("broadcast"))

# %% [markdown]
# Rank 0 sends nothing to rank 3, so it is not a star. (The 48 bytes from 1 to 0 are a receiver saying that it is
# ready.) It is a **binomial tree**: first rank 0 sends to 1; then 0 sends to 2 and 1 to 3. That takes two rounds for
# four ranks, and one more whenever n doubles. The last two messages have different senders and receivers, so they can
# travel at the same time.
#
# In the all-gather, every rank sends to r+1 only: a **ring to the right**. In the other direction there are only
# replies of 48 bytes. (The all-reduce is a ring to the left: lesson [ring_all_reduce](ring_all_reduce.ipynb).) Are the
# dark cells below or above the diagonal?

# %%
axes = draw.traffic(runs[4].trace.within("all_gather"))

# %% tags=["check"]
left = {(rank, (rank - 1) % 4) for rank in range(4)}
right = {(rank, (rank + 1) % 4) for rank in range(4)}
steps = {(m.src, m.dst): m.step for m in messages(runs[4].trace.within("broadcast"))}
assert steps == {(0, 1): 0, (0, 2): 1, (1, 3): 1}
assert set(pairs("all_reduce", 4)) == left
assert set(pairs("all_gather", 4)) == right
assert all(pairs("reduce_scatter", n) == pairs("all_reduce", n) for n in runs)
assert set(pairs("gather", 4)) == {(rank, 0) for rank in (1, 2, 3)}
assert set(pairs("scatter", 4)) == {(0, rank) for rank in (1, 2, 3)}
assert set(pairs("all_to_all", 4)) == {(src, dst) for src in range(4) for dst in range(4) if src != dst}
wire = on_the_wire("broadcast")
assert (0, 3) not in wire or wire[0, 3] == 0
assert (wire[0, 1], wire[1, 0]) == (S + 96, 48)
for src, dst in left:
    assert on_the_wire("all_gather")[src, dst] == 6 * 48
    assert on_the_wire("all_gather")[dst, src] == 0.75 * S + 6 * 96
my_shape and my_shape.against("tree")

# %% [markdown]
# Gather, scatter and all-to-all are **direct**: each byte goes straight to the rank that needs it.
#
# ## Four surprises
#
# **One: gloo's reduce-scatter is an all-reduce.** Compare the two rows in the first table: the bytes and the pairs are
# the same. But each rank needs only one n-th of the sum, and (n-1)/n S is enough for that, half as much. What this
# costs sharded training is measured in [fsdp2](fsdp2.ipynb).
#
# **Two: gloo's reduce wastes bytes when the data are large.** So far, a reduce on 2 ranks took 1.5 S in all: each rank
# sends one half, then rank 1 sends its finished half to rank 0. Now the data grow.


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
# Between 4 and 7 MiB the factor jumps to 2, and the kernel counts the same. Gloo cuts the data into two pieces for each
# rank. A piece has at most 1 MiB, so above 2 MiB per rank there are more pieces. But gloo still ends its ring two
# pieces before the round is complete. The extra pieces keep travelling, although no rank needs them. The sum is right
# all the same; only the byte count shows the waste.
#
# **Three: in an all-to-all, one part is never sent.** Each rank has a part for every rank, itself included. Its own
# part stays, so it sends (n-1)/n S, not S.
#
# **Four: a barrier sends empty messages.** Only the framing is on the wire. In round k, rank r tells rank r + 2^k that
# it has arrived. After ⌈log2 n⌉ rounds every rank knows that all have arrived.

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
assert wasted == {1 * MiB: 1.5, 4 * MiB: 1.5, 7 * MiB: 2.0, 16 * MiB: 2.25}

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
# **Other backends** use other messages. NCCL, which was not run here, has a [reduce-scatter of its
# own](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html), so gloo's factor of 2 does not
# hold there. Nor does it on dlearn's readable ring, on which [fsdp2](fsdp2.ipynb) runs.
#
# ## Exercises
#
# Five ranks make a broadcast from rank 0. How many times S does rank 0 send? Write your number instead of `None`. (The
# lesson [experts](experts.ipynb) lets you write a layer with an uneven all-to-all.)

# %% tags=["exercise"]
my_answer = None
lessons.answer("collectives.root_of_five", my_answer)


# %% tags=["answer"]
def from_rank_0(size):
    dist.broadcast(torch.zeros(size // 4), src=0)


five = traffic(Cluster(5).run(from_rank_0, S).trace)
assert lessons.answer("collectives.root_of_five", five.bytes_from(rank=0) / S).right
