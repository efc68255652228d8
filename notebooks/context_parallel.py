# ---
# jupyter:
#   dlearn:
#     ids: [T14, T15, T16]
#     minutes: 0.3
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Context parallel: a sequence too long for one rank
#
# **Goals.** You will be able to write ring attention; say when its messages are hidden; balance a causal mask.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb), [ring_all_reduce](ring_all_reduce.ipynb). **Takes** about
# 40 minutes.
#
# In attention each token has a query q, a key k and a value v. A token's output is a mean of all values, weighted by
# the softmax of its *scores* `q @ k.T / sqrt(width)`. **Context parallel** cuts a sequence of S tokens into n blocks,
# one for each rank. A rank computes the outputs of its own block, and needs the keys and values of *all* tokens for it.
# **What do ranks send, when is that hidden behind the computation, and has each rank as much to compute?**

# %%
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dlearn import Cluster, draw, lessons, messages, play, span
from dlearn.analysis import assert_fresh, traffic
from dlearn.draw import canvas, palette
from dlearn.lessons import charts

N, TOKENS, WIDTH = 4, 64, 16  # ranks; tokens of the sequence; numbers in a query, key or value
BLOCK = TOKENS // N
IN_ORDER = torch.arange(TOKENS).chunk(N)  # which tokens a rank has


def sequence(more=0.0):
    """Return q, k and v of all tokens, [3, TOKENS, WIDTH]; `more` is added to the last token."""
    whole = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    whole[:, -1] += more
    return whole


# %% [markdown]
# ## A softmax in two blocks, on one device
#
# A softmax divides by a sum over *all* scores. If they come in blocks, the **online softmax** keeps three things for
# each query: its largest score so far, the sum of its weights `exp(score - largest)`, and the sum of weights times
# values. If a new block has a larger score, both sums shrink by `exp(old largest - new largest)`.
#
# By hand: a query has the scores ln 1 and ln 2 for the values 1 and 4. Then come ln 4 and ln 1 for the values 2 and 3.
# All at once: (1 · 1 + 2 · 4 + 4 · 2 + 1 · 3) / (1 + 2 + 4 + 1) = 20 / 8 = 2.5. What are the three after each block?


# %%
def add_block(largest, total, output, scores, v):
    """Return the largest score, the sum of weights, and the sum of weights times values, with one more block."""
    higher = torch.maximum(largest, scores.amax(1, keepdim=True))
    weights, shrink = (scores - higher).exp(), (largest - higher).exp()
    return higher, total * shrink + weights.sum(1, keepdim=True), output * shrink + weights @ v


def nothing(queries, width):
    return torch.full((queries, 1), -torch.inf), torch.zeros(queries, 1), torch.zeros(queries, width)


state = nothing(1, 1)
for numbers, values in (([1.0, 2.0], [1.0, 4.0]), ([4.0, 1.0], [2.0, 3.0])):
    state = add_block(*state, torch.tensor([numbers]).log(), torch.tensor([values]).T)
    largest, total, output = state[0].exp().item(), state[1].item(), state[2].item()
    print(f"largest: ln {largest:g}, sum of weights: {total:g}, of weights times values: {output:g}")
print("output:", output / total)

# %% [markdown]
# After the first block the weights are 1/2 and 1: the sums are 1.5 and 4.5. The second has a larger score, so both
# shrink by 1/2, and its weights 1 and 1/4 come on top: 0.75 + 1.25 = 2 and 2.25 + 2.75 = 5. Again 5 / 2 = 2.5.
#
# ## The ring
#
# Each rank passes a block of k and v to the next rank, and uses that block while another one arrives (Liu et al. 2023,
# [Ring Attention](https://arxiv.org/abs/2310.01889)). After n-1 hops each rank has seen all blocks.


# %%
def exchange(pair):
    """Begin to send k and v to the next rank, and to receive others from the previous rank."""
    rank, n, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(pair)
    return came, [dist.isend(pair, (rank + 1) % n), dist.irecv(came, (rank - 1) % n)]


def ring_attention(q, k, v, sees=lambda src: torch.ones(BLOCK, BLOCK).bool(), sleep_s=0.0):
    """Return outputs, the most bytes of k and v held, and scores needed. `sees(src)`: which keys of that rank count."""
    rank, n, pair = dist.get_rank(), dist.get_world_size(), torch.stack([k, v])
    state, held, needed = nothing(BLOCK, WIDTH), 0, 0
    for hop in range(n):
        src = (rank - hop) % n  # whose block is here
        k, v = pair
        came, works = exchange(pair) if hop < n - 1 else (None, [])
        mask = sees(src)
        if mask.any():
            with span(f"block {src}"):
                time.sleep(sleep_s)
                scores = (q @ k.T / WIDTH**0.5).masked_fill(~mask, -torch.inf)
                state = add_block(*state, scores, v)
        held, needed = max(held, bytes_held(pair, came)), needed + int(mask.sum())
        for work in works:
            work.wait()
        pair = came
    _, total, output = state
    return output / total, held, needed


# %% [markdown]
# The other way: an all-gather of k and v, then an ordinary softmax. **Predict first:** 64 tokens on 4 ranks, 16 numbers
# of 4 B in k and in v. How many bytes does a rank send in the ring? In the player: where does rank 0's block go?

# %%
my_bytes = lessons.predict("context_parallel.bytes", None)


def bytes_held(*tensors):
    return sum(each.nbytes for each in tensors if each is not None)


def gathered_attention(q, k, v):
    every = torch.empty(2 * N, BLOCK, WIDTH)  # k and v of rank 0, of rank 1, ...
    dist.all_gather_single(every, torch.stack([k, v]))
    weights = torch.softmax(torch.cat([q @ k.T for k in every[::2]], dim=1) / WIDTH**0.5, dim=1)
    output = sum(of_block @ v for of_block, v in zip(weights.chunk(N, dim=1), every[1::2], strict=True))
    return output, bytes_held(every)


def attend(attention, more=0.0, places=IN_ORDER, mask=None, **how):
    """Run one of the two on this rank's tokens; `mask` says of queries and keys which key counts for which query."""
    mine = places[dist.get_rank()]
    if mask is not None:
        how["sees"] = lambda src: mask(mine, places[src])
    return attention(*sequence(more)[:, mine], **how)


cluster = Cluster(N, checksums=True)
runs = {each.__name__: cluster.run(attend, each) for each in (ring_attention, gathered_attention)}
of_one = functional.scaled_dot_product_attention(*sequence()).chunk(N)  # on one device
for name, run in runs.items():
    print(f"{name}: a rank sends {traffic(run.trace).bytes_from(rank=0):,} B and holds {run.results[0][1]:,} B")
my_bytes and print(my_bytes.against(traffic(runs["ring_attention"].trace).bytes_from(rank=0)))
play.player(runs["ring_attention"].trace, title="Each block of k and v visits every rank once")

# %% [markdown]
# In each of n-1 hops a rank sends a block of k and one of v: **(n-1) · 2 · S/n · width · 4 B**, here 3 · 2,048 B. An
# all-gather sends the same bytes between the same ranks. The difference is memory. A rank of the ring holds two blocks
# for any n: the one it uses and the one that arrives. After an all-gather it holds all n. (This lesson is about the
# forward pass. Backward, k and v go round once more, and their gradients with them.)

# %% tags=["T14", "check"]
assert (pair_bytes := 2 * BLOCK * WIDTH * 4) == 2_048
for name, blocks in {"ring_attention": 2, "gathered_attention": N}.items():
    results = runs[name].results.items()
    assert all(torch.allclose(result[0], of_one[rank], atol=1e-5) for rank, result in results)
    assert {result[1] for _, result in results} == {blocks * pair_bytes}
    sent = {pair: size for pair, size in traffic(runs[name].trace).payload_bytes.items() if size}
    assert sent == {(rank, (rank + 1) % N): 3 * pair_bytes for rank in range(N)}
assert_fresh(runs["ring_attention"].trace, op="send")  # no rank gets a block that it had before

# %% [markdown]
# ## When is a hop hidden?
#
# In one hop a rank multiplies its b = S/n queries by k.T, and the weights by v: 2 · b² · width FLOPs each. In bf16, k
# and v of a block are 2 · b · width · 2 B. That makes **b FLOPs for each byte**. A hop is hidden if b is at least
# FLOP/s : B/s of the machine. (Backward there are five such products, as FlashAttention computes the scores again, and
# twice the bytes with the gradients in bf16: 5/4 · b.) The two break-even points below are predictions from data
# sheets: H100 SXM, 989 TFLOP/s dense in bf16; NVLink, 450 GB/s in one direction; a network card, 50 GB/s.
#
# And the send has to *begin before* the computation: `isend` and `irecv`, then compute, then `wait`. In the picture
# each block sleeps for 40 ms (ranks on the same core can sleep at the same time). Which calls lie below which block?

# %%
with FlopCounterMode(display=False) as counted:
    q, k, v = sequence()[:, :BLOCK]
    (q @ k.T) @ v
per_byte = counted.get_total_flops() / (messages(runs["ring_attention"].trace)[0].payload_bytes / 2)  # bf16: half of it
break_even = {link: round(989e12 / rate) for link, rate in {"NVLink": 450e9, "400 Gbit/s": 50e9}.items()}
print(f"{per_byte:.0f} FLOPs for each byte; predicted tokens on a rank from which a hop is hidden: {break_even}")
slept = cluster.run(attend, ring_attention, sleep_s=0.04)
axes = charts.retitle(draw.timeline(slept.trace), "While a block is used, it is sent on and the next one arrives")

# %% [markdown]
# With 16 tokens a rank does 16 FLOPs for each byte. An H100 needs about 2,200 on each rank to hide a hop behind NVLink,
# and nearly 20,000 for the network card. A causal mask halves the FLOPs, so twice as many. Width and number of heads
# cancel out. If g heads of q share one head of k and v, there are g times the FLOPs for each byte.

# %% tags=["T15", "check"]
assert per_byte == BLOCK == 16
assert break_even == {"NVLink": 2_198, "400 Gbit/s": 19_780}
for rank in range(N):
    works = slept.trace.where(rank=rank, kind="span").events
    calls = [each for each in slept.trace.where(rank=rank).events if getattr(each, "op", "") in ("send", "recv")]
    assert (len(works), len(calls)) == (N, 2 * (N - 1))
    for number, call in enumerate(calls):  # a send and a receive in each hop
        assert call.start_ns < works[number // 2].start_ns < works[number // 2].end_ns < call.end_ns

# %% [markdown]
# ## A causal mask: who has how much to do?
#
# In a language model a token sees only itself and earlier tokens. With blocks in order rank 0 needs only its own block,
# and the last rank all. **Predict first:** how many times the scores of the mean of the four ranks does the last need?

# %%
my_share = lessons.predict("context_parallel.last rank, times the mean", None)


def causal(queries, keys):  # positions in the whole sequence
    return keys <= queries[:, None]


def local(queries, keys):  # positions inside the blocks
    return keys % BLOCK <= (queries % BLOCK)[:, None]


found, runs_of = {}, {}
for name, mask in {"causal": causal, "local": local}.items():
    runs_of[name], other = (cluster.run(attend, ring_attention, more, mask=mask) for more in (0.0, 1.0))
    outputs, _, needed = zip(*(runs_of[name].results[rank] for rank in range(N)), strict=True)
    changed = [rank for rank in range(N) if not torch.equal(outputs[rank], other.results[rank][0])]
    found[name] = traffic(runs_of[name].trace).total_bytes, needed, changed
    print(f"{name}: {found[name][0]:,} B, scores {needed}; a change of the last token changes the outputs of {changed}")
my_share and my_share.against(round(max(found["causal"][1]) * N / sum(found["causal"][1]), 2), tolerance=0.02)

# %% [markdown]
# Rank r needs r whole blocks, b² scores each, and half of its own: about (r + 1/2) b². The mean is n/2 · b², and the
# last rank has (n - 1/2) b²: **(2n - 1)/n** times the mean, nearly twice. In the next exchange the others wait for it.
#
# `local` is wrong, without an error: the same bytes, and it even looks balanced. A test of causality shows it. Change
# only the last token: only the last rank's outputs may change, but here all ranks see it.
#
# The cure for the imbalance is **zig-zag**. Cut the sequence into 2n chunks, and give rank r chunks r and 2n - 1 - r:
# an early one with few scores, a late one with many. In the picture a row is a chunk of queries, a column one of keys,
# and a colour is a rank. How many whole squares does each rank compute, besides two halves (pale)?


# %%
def draw_mask(ranks_of, title):
    """Draw two causal masks, a square for each pair of chunks, in the colour of the rank that computes it."""
    ax = canvas.new_axes(height_in=2.7, left_in=0.3)
    for left, (name, ranks) in zip((0, 13), ranks_of.items(), strict=True):
        canvas.write(ax, left, -0.7, name, ha="left")
        for row, rank in enumerate(ranks):
            boxes = [(left + column, left + column + 0.94, row, row + 0.92) for column in range(row + 1)]
            canvas.draw_boxes(ax, boxes, facecolors=palette.SERIES[rank], alpha=[1] * row + [0.4])
            canvas.write(ax, left + row + 1.3, row + 0.5, f"rank {rank}", ha="left")
    ax.set(xlim=(0, 25), ylim=(2 * N, -1.2))
    ax.set_axis_off()
    return canvas.frame(ax, title=title, below_in=0.1)


both = {"blocks in order": [r // 2 for r in range(2 * N)], "zig-zag": [*range(N), *reversed(range(N))]}
above = torch.arange(2.0 * N)  # whole squares of a row: as many as chunks before it
whole = {name: torch.tensor(ranks).bincount(above).int().tolist() for name, ranks in both.items()}
print("whole squares of each rank:", whole)
axes = draw_mask(both, "In order rank 0 has 1 whole square and rank 3 has 13; in zig-zag each rank has 7")

# %% [markdown]
# A whole square has 8 · 8 = 64 scores, a half 36. So in zig-zag each rank needs 7 · 64 + 2 · 36 = 520 scores. The ring
# stays as it is: only the places of a rank's tokens change, and the mask compares them. Do the bars agree?

# %%
chunks = torch.arange(TOKENS).chunk(2 * N)
ZIG_ZAG = [torch.cat([chunks[rank], chunks[2 * N - 1 - rank]]) for rank in range(N)]
paired = cluster.run(attend, ring_attention, places=ZIG_ZAG, mask=causal)
in_order, zig_zag = found["causal"][1], [paired.results[rank][2] for rank in range(N)]
parts = [charts.Part("blocks in order", in_order), charts.Part("zig-zag", zig_zag)]
title = f"In order the last rank needs {max(in_order)} scores; in zig-zag each needs {max(zig_zag)}"
axes = charts.bars([f"rank {rank}" for rank in range(N)], parts, title=title, y="scores that the mask leaves", text=str)

# %% [markdown]
# They do, and the bytes are those without a mask: zig-zag changes who computes, not what travels. (This ring also
# computes scores that the mask leaves out; in the exercise you skip them. torch's `context_parallel` is for GPUs.)

# %% tags=["T16", "check"]
assert abs(output / total - 2.5) < 1e-6
right = functional.scaled_dot_product_attention(*sequence()[:, None], is_causal=True)[0]
for places, run in ((IN_ORDER, runs_of["causal"]), (ZIG_ZAG, paired)):
    assert all(torch.allclose(run.results[rank][0], right[places[rank]], atol=1e-5) for rank in range(N))
assert whole == {"blocks in order": [1, 5, 9, 13], "zig-zag": [7] * N}
assert in_order == tuple(rank * BLOCK**2 + BLOCK * (BLOCK + 1) // 2 for rank in range(N)) == (136, 392, 648, 904)
assert abs(max(in_order) * N / sum(in_order) - (2 * N - 1) / N) < 0.02
assert found == {"causal": (24_576, in_order, [3]), "local": (24_576, (544,) * N, [0, 1, 2, 3])}
assert zig_zag == [520] * N == [sum(in_order) / N] * N
assert {pair: size for pair, size in traffic(paired.trace).payload_bytes.items() if size} == sent  # without a mask

# %% [markdown]
# ## Exercises
#
# Write ring attention for any number of ranks, without the cells above. Then zig-zag, without squares that are masked.


# %% tags=["exercise"]
def my_attention(q, k, v):
    """Return this rank's block of `softmax(Q @ K.T / sqrt(width)) @ V`, without a mask. q, k and v are this rank's
    blocks, [block, width] each. Blocks of k and v go round a ring by sends to one neighbour, in n-1 hops.
    """
    return torch.softmax(q @ k.T / k.shape[1] ** 0.5, dim=1) @ v  # this rank's block only: what is missing?


lessons.check("ring_attention", my_attention, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_zig_zag(take, scores):
    """Causal attention of 2n chunks on n ranks. `take(i)` returns q, k and v of chunk i. Take two on each rank; return
    their outputs, [2 * chunk, width]. Use `scores(q, k)` for `q @ k.T / sqrt(width)`: it counts, and no rank computes
    more than (2n + 1) · chunk² of them. Blocks of k and v go round a ring by sends to one neighbour, in n-1 hops."""
    return  # replace this by your ring


lessons.check("zig_zag", my_zig_zag, student="")
