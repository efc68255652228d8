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
from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dlearn import Cluster, draw, lessons, messages, operations, play, span
from dlearn.analysis import assert_fresh, traffic
from dlearn.lessons import charts

N, TOKENS, WIDTH = 4, 64, 16  # ranks; tokens of the sequence; numbers in a query, key or value
BLOCK = TOKENS // N


def sequence(more=0.0):
    """Return q, k and v of all tokens, [3, TOKENS, WIDTH]; `more` is added to the last token."""
    whole = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    whole[:, -1] += more
    return whole


# %% [markdown]
# ## Ring attention by hand
#
# Each rank passes a block of k and v to the next rank, and uses that block while another one arrives (Liu et al. 2023,
# [Ring Attention](https://arxiv.org/abs/2310.01889)). After n-1 hops each rank has seen all blocks. A softmax divides
# by a sum over *all* scores, but these come in blocks. So the **online softmax** keeps three things for each query: its
# largest score so far, the sum of its weights `exp(score - largest)`, and the sum of weights times values. If a new
# block has a larger score, both sums shrink by `exp(old largest - new largest)`.


# %%
def exchange(pair):
    """Begin to send k and v to the next rank, and to receive others from the previous rank."""
    rank, n, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(pair)
    return came, [dist.isend(pair, (rank + 1) % n), dist.irecv(came, (rank - 1) % n)]


def ring_attention(q, k, v, sees=lambda src: torch.ones(BLOCK, BLOCK).bool(), sleep_s=0.0):
    """Return outputs, the most bytes of k and v held, and scores needed. `sees(src)`: which keys of that rank count."""
    rank, n, pair = dist.get_rank(), dist.get_world_size(), torch.stack([k, v])
    largest, total = torch.full((BLOCK, 1), -torch.inf), torch.zeros(BLOCK, 1)
    output, held, needed = torch.zeros_like(q), 0, 0
    for hop in range(n):
        src = (rank - hop) % n  # whose block is here
        k, v = pair
        came, works = exchange(pair) if hop < n - 1 else (None, [])
        mask = sees(src)
        if mask.any():
            with span(f"block {src}"):
                time.sleep(sleep_s)
                scores = (q @ k.T / WIDTH**0.5).masked_fill(~mask, -torch.inf)
                higher = torch.maximum(largest, scores.amax(1, keepdim=True))
                weights, shrink = (scores - higher).exp(), (largest - higher).exp()
                total = total * shrink + weights.sum(1, keepdim=True)
                output = output * shrink + weights @ v
                largest = higher
        held, needed = max(held, bytes_held(pair, came)), needed + int(mask.sum())
        for work in works:
            work.wait()
        pair = came
    return output / total, held, needed


# %% [markdown]
# The other way is an all-gather of k and v, and then an ordinary softmax. **Predict first:** 64 tokens, 4 ranks, k and
# v with 16 numbers of 4 B each. How many bytes does each rank send in ring attention? Then go through the player: which
# ranks does the block of rank 0 visit?

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


def attend(attention, more=0.0, **how):
    own = [each.clone() for each in sequence(more).chunk(N, dim=1)[dist.get_rank()]]
    return attention(*own, **how)


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
# FLOP/s : B/s of the machine. The two break-even points below are predictions from data sheets, not measured: H100 SXM,
# 989 TFLOP/s dense in bf16; NVLink, 450 GB/s in one direction; a network card of 400 Gbit/s, 50 GB/s.
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
axes = charts.retitle(draw.timeline(slept.trace), "Each call begins before a block is used, and ends after it")

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


def causal(src):  # compares positions in the whole sequence
    position = torch.arange(BLOCK)
    return position + src * BLOCK <= (position + dist.get_rank() * BLOCK)[:, None]


def local(src):  # compares positions inside the blocks
    return torch.ones(BLOCK, BLOCK).tril().bool()


found, runs_of = {}, {}
for name, sees in {"causal": causal, "local": local}.items():
    runs_of[name], other = (cluster.run(attend, ring_attention, more, sees=sees) for more in (0.0, 1.0))
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
# The cure for the imbalance is **zig-zag** (torch: head-tail). Cut the sequence into 2n chunks, and give rank r chunks
# r and 2n - 1 - r: an early one with few scores, a late one with many. Here torch does it. Its `context_parallel` needs
# kernels of GPUs: on CPUs torch 2.13 raises NotImplementedError ("Operator aten._scaled_dot_product_flash_attention_
# for_cpu.default does not have a sharding strategy registered"). But the loop inside runs with that kernel, too:


# %%
def torch_loop(method):
    """Run the loop inside with the kernel for CPUs; return whether it is right, and the scores that it needs."""
    whole, needed = sequence()[:, None, None], []
    mine = _load_balancer._HeadTailLoadBalancer(TOKENS, N, "cpu")._generate_indices()[0].chunk(N)[dist.get_rank()]

    def kernel(q, k, v, is_causal, **options):
        rows, columns = q.shape[2], k.shape[2]
        needed.append(rows * (rows + 1) // 2 if is_causal else rows * columns)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal, **options)

    _attention.set_rotate_method(method)
    _attention._cp_options.enable_load_balance = True
    world, qkv = dist.group.WORLD, whole[..., mine, :]
    with span("torch"):
        output, _ = _attention._templated_ring_attention(world, 2, kernel, *qkv, is_causal=True)
    right = functional.scaled_dot_product_attention(*whole, is_causal=True)[..., mine, :]
    return torch.allclose(output, right, atol=1e-5), sum(needed)


own = {method: cluster.run(torch_loop, method) for method in ("alltoall", "allgather")}
calls = {method: [each.op for each in operations(run.trace.within("torch"))] for method, run in own.items()}
print(calls)
in_order, zig_zag = found["causal"][1], [own["alltoall"].results[rank][1] for rank in range(N)]
parts = [charts.Part("blocks in order", in_order), charts.Part("zig-zag", zig_zag)]
title = f"In order the last rank needs {max(in_order)} scores; in zig-zag each needs {max(zig_zag)}"
axes = charts.bars([f"rank {rank}" for rank in range(N)], parts, title=title, y="scores that the mask leaves", text=str)

# %% [markdown]
# The results are right, and each rank needs 520 scores instead of 136 to 904. With `alltoall` each hop is an all-to-all
# in which a rank sends to the next rank only: our messages. The default, `allgather`, is our other way, with all blocks
# in memory. The bytes are those of the ring by hand in both: zig-zag changes who computes, not what travels.

# %% tags=["T16", "check"]
right = functional.scaled_dot_product_attention(*sequence()[:, None], is_causal=True)[0].chunk(N)
assert all(torch.allclose(result[0], right[rank], atol=1e-5) for rank, result in runs_of["causal"].results.items())
assert in_order == tuple(rank * BLOCK**2 + BLOCK * (BLOCK + 1) // 2 for rank in range(N)) == (136, 392, 648, 904)
assert abs(max(in_order) * N / sum(in_order) - (2 * N - 1) / N) < 0.02
assert found == {"causal": (24_576, in_order, [3]), "local": (24_576, (544,) * N, [0, 1, 2, 3])}
assert zig_zag == [520] * N == [sum(in_order) / N] * N
assert calls == {"alltoall": ["all_to_all_single"] * (N - 1), "allgather": ["all_gather_single_coalesced"]}
for run in own.values():
    assert all(right for right, _ in run.results.values())
    sizes = traffic(run.trace.within("torch")).payload_bytes
    assert {pair: size for pair, size in sizes.items() if size} == sent  # of the ring by hand

# %% [markdown]
# ## Exercises
#
# Write ring attention for any number of ranks, without the cell above, and then zig-zag.


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
