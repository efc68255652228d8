# ---
# jupyter:
#   dlearn:
#     ids: [T10, T11, T12, T13]
#     minutes: 0.5
#     needs: []
#     peak_mb: 800
# ---

# %% [markdown]
# # Experts: which token goes to which rank?
#
# **Goals.** You will be able to write the two all-to-alls of a mixture of experts; read a routing matrix from its
# traffic; say what a capacity costs and drops; find out that DDP has made all experts equal.
#
# **Before this:** [collectives](collectives.ipynb), [ddp_step_by_step](ddp_step_by_step.ipynb). **Takes** about 40
# minutes.
#
# A *mixture of experts* replaces an MLP by n MLPs, the experts. A small linear layer, the *router*, chooses one expert
# for each token. So the layer has n times the parameters, and each token still costs the computing of one MLP. In
# *expert parallel*, each rank holds one expert. A token must travel to the rank of its expert, and back. Here a token
# is an image of 64 pixels. Four ranks have 256 tokens each. An expert is an MLP, 64 → 128 → 64.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.parallel import DistributedDataParallel as DDP

from dlearn import Cluster, draw, lessons, messages, operations, span
from dlearn.analysis import traffic
from dlearn.lessons import charts, digits

RANKS, TOKENS, WIDTH, HIDDEN = 4, 256, 64, 128
TOKEN_BYTES = 4 * WIDTH

# %% [markdown]
# The layer sorts its tokens by expert. It tells each rank how many will come. It sends the tokens (*dispatch*) and
# applies the expert. It sends the results back (*combine*), restores the order and multiplies by the router's
# probability: this is how the router gets a gradient. torch's `all_to_all_single_autograd` sends `going[r]` rows to
# each rank r and receives `coming[r]`; gradients travel back the same way.


# %%
class Experts(nn.Module):
    """A router, the same on all ranks, and this rank's own expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, RANKS)
        torch.manual_seed(1 + dist.get_rank())  # each rank has another expert
        self.expert = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, tokens):
        probability, expert_of = self.router(tokens).softmax(1).max(1)
        order = expert_of.argsort(stable=True)
        going = expert_of.bincount(minlength=RANKS)
        coming = torch.empty_like(going)
        with span("counts"):
            dist.all_to_all_single(coming, going)
        going, coming = going.tolist(), coming.tolist()
        with span("dispatch"):
            arrived = all_to_all_single_autograd(tokens[order], coming, going, dist.group.WORLD)
        processed = self.expert(arrived)
        with span("combine"):
            back = all_to_all_single_autograd(processed, going, coming, dist.group.WORLD)
        return tokens + probability[:, None] * torch.empty_like(back).index_copy(0, order, back)


def tokens_of(rank):
    return digits.shard(rank, RANKS)[0][:TOKENS].flatten(1)


# %% [markdown]
# `tokens_of` gives each rank 256 images. **Predict first:** all tokens together have 4 · 256 · 256 B. How many times
# that do the ranks send in one forward and one backward pass? The input needs a gradient. Assume a fair router.

# %%
my_times = lessons.predict("experts.times the tokens", None)


def one_pass():
    tokens = tokens_of(dist.get_rank()).requires_grad_()
    layer = Experts()
    with span("pass"):
        layer(tokens).square().mean().backward()
    return layer.router(tokens).argmax(1).bincount(minlength=RANKS)


cluster = Cluster(RANKS)  # the same ranks for the whole lesson
run = cluster.run(one_pass)
step, everything = run.trace.within("pass"), RANKS * TOKENS * TOKEN_BYTES
for each in operations(step):
    in_all = sum(message.payload_bytes for message in messages(step) if message.operation == each)
    print(f"{each.ends[0].phase:9} {each.op}, {in_all:9,} B in all, {in_all / everything:.2f} times the tokens")
times = traffic(step).total_bytes / everything
my_times and my_times.against(round(times, 2), tolerance=0.02)

# %% [markdown]
# The first all-to-all exchanges the counts, 8 B for each pair of ranks. Four move tokens: dispatch and combine, and
# their gradients. In each, three quarters of all tokens leave their rank, as one expert in four is on it: 4 · 3/4 = 3.
#
# Each row of the next picture is a sender. Look at the columns: is this router fair?

# %%
routing = torch.stack([run.results[rank] for rank in range(RANKS)])  # [rank, expert]
dispatch = step.within("dispatch")
chosen = routing.sum(0)
title = f"The router is not fair: {chosen.max()} of {RANKS * TOKENS:,} tokens choose expert {chosen.argmax()}"
axes = charts.retitle(draw.traffic(dispatch), title)

# %% tags=["T10", "check"]
calls = [(each.op, each.ends[0].phase) for each in operations(step)]
assert calls == [("all_to_all_single", phase) for phase in ["forward"] * 3 + ["backward"] * 2]
sent = traffic(dispatch).payload_bytes
for rank in range(RANKS):
    for expert in range(RANKS):
        assert rank == expert or sent.get((rank, expert), 0) == int(routing[rank, expert]) * TOKEN_BYTES

# %% [markdown]
# It is not: rank 1 receives nearly everything, and the others wait for it. **The traffic of a dispatch is the routing
# matrix**, in bytes: the number of tokens that rank r sends to expert e, times 256 B. Its diagonal is not sent.
#
# ## A router that learns to be fair
#
# Training alone does not help: an expert that gets all tokens learns most, and so gets more. The *Switch Transformer*
# adds a [second loss](https://arxiv.org/abs/2101.03961) (equation 4): n · Σ fₑ · Pₑ, where fₑ is the share of the
# tokens that chose expert e, and Pₑ its mean probability, which has the gradient. It is 1 for a fair router.
#
# The ranks train on digits. The dense part (router and head) is averaged over the ranks, as in DDP. **Predict first:**
# with the second loss, the busiest expert gets fewer tokens. What happens to the bytes of a dispatch?

# %%
my_total = lessons.predict("experts.bytes of a fair router", None, choices=("fewer", "about as many", "more"))


def fair(router, tokens):
    """Return the second loss: 1 if each expert is chosen equally often."""
    probability = router(tokens).softmax(1)
    share = one_hot(probability.argmax(1), RANKS).float().mean(0)
    return RANKS * (share * probability.mean(0)).sum()


def train(weight, steps=40):
    images, labels = digits.shard(dist.get_rank(), RANKS)
    tokens, labels = images[:TOKENS].flatten(1), labels[:TOKENS]
    model = nn.Sequential(Experts(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        with span(f"step {step}"):
            loss = cross_entropy(model(tokens), labels)
            (loss + weight * fair(model[0].router, tokens)).backward()
            for name, each in model.named_parameters():
                if ".expert." not in name:  # an expert's gradient is a sum over all ranks' tokens already
                    dist.all_reduce(each.grad)
                each.grad /= RANKS
        optimizer.step()
    return loss.item(), model[0].router(tokens).argmax(1)


# %%
tokens_at, bytes_of, expert_of = {}, {}, {}
for weight in (0, 0.1):
    of = cluster.run(train, weight)
    expert_of[weight] = [of.results[rank][1] for rank in range(RANKS)]
    tokens_at[weight] = torch.stack([chosen.bincount(minlength=RANKS) for chosen in expert_of[weight]])
    dispatch = of.trace.within("step 39").within("dispatch")
    bytes_of[weight] = traffic(dispatch).total_bytes / everything
    loss, busiest = of.results[0][0], tokens_at[weight].sum(0).max() / TOKENS
    print(f"second loss x {weight}: the busiest expert has {busiest:.2f} times a fair share,", end=" ")
    print(f"{bytes_of[weight]:.2f} of all tokens travel, loss of rank 0 {loss:.2f}")
print("tokens from rank (row) to expert (column), with the second loss:", tokens_at[0.1], sep="\n")
more = bytes_of[0.1] / bytes_of[0]
my_total and my_total.against("fewer" if more < 0.9 else "more" if more > 1.1 else "about as many")
title = f"Second loss: the busiest expert has {busiest:.2f} times its share, bytes hardly differ"
axes = charts.retitle(draw.traffic(dispatch), title)

# %% tags=["T11", "check"]
assert tokens_at[0].sum(0).max() > 3.5 * TOKENS  # without the second loss one expert gets nearly all
assert tokens_at[0.1].sum(0).max() < 2 * TOKENS
assert all(abs(share - (RANKS - 1) / RANKS) < 0.04 for share in bytes_of.values())
assert abs(times - 3) < 0.05

# %% [markdown]
# Without the second loss, one expert ends with nearly all tokens. With it, the busiest has less than twice its share.
# (The loss is not lower for it: one expert is enough for so few images.) The bytes hardly differ. All ranks have the
# same mixture of tokens here, so each expert is on the own rank of one token in n, however many choose it, and (n-1)/n
# of all tokens travel. **Then an unfair router costs time, not bytes**: all wait for the busiest rank.
#
# ## A capacity: fixed shapes, dropped tokens
#
# The counts must be known before the tokens can be sent. On a GPU this makes the host wait. The Switch Transformer
# avoids it with a *capacity*: each rank sends exactly C rows to each expert, where C = c · tokens / n with a *capacity
# factor* c. If more tokens chose an expert, the rest is **dropped**: they skip the layer. If fewer did, the part is
# filled with zeros. **Predict first:** the counts of the nearly fair router are printed above. With c = 1, each rank
# sends 64 rows to each expert. Which share of the 1,024 tokens is dropped?

# %%
my_drops = lessons.predict("experts.share dropped", None)


def with_capacity(experts_of, capacity):
    """Send `capacity` rows to each expert; return how many tokens of this rank are dropped."""
    tokens, expert_of = tokens_of(dist.get_rank()), experts_of[dist.get_rank()]
    rows, dropped = torch.zeros(RANKS, capacity, WIDTH), TOKENS
    for expert in range(RANKS):
        kept = tokens[expert_of == expert][:capacity]
        rows[expert, : len(kept)] = kept
        dropped -= len(kept)
    dist.all_to_all_single(torch.empty_like(rows), rows)
    return dropped


FACTORS = [1, 1.25, 2, 4]
capped = {c: cluster.run(with_capacity, expert_of[0.1], int(c * TOKENS / RANKS)) for c in FACTORS}
lost = {c: sum(of.results.values()) / (RANKS * TOKENS) for c, of in capped.items()}
bytes_at = {c: traffic(of.trace).total_bytes / everything for c, of in capped.items()}
parts = [charts.Part("tokens dropped", [*lost.values()]), charts.Part("bytes sent", [*bytes_at.values()])]
title = f"Capacity 1 drops {lost[1]:.0%} of the tokens, 4 none, for {bytes_at[4] / bytes_at[1]:.0f} times the bytes"
axes = charts.bars([f"c = {c}" for c in FACTORS], parts, title=title, y="times all tokens", text="{:.2f}".format)
my_drops and my_drops.against(round(lost[1], 2), tolerance=0.05)

# %% [markdown]
# The bytes depend on c alone: c · (n-1)/n of all tokens, whatever the router does. Only c = n can never drop a token. A
# dropped token raises no error, and it costs nothing on the wire. Count it, or you will not notice.

# %% tags=["T12", "check"]
for c in FACTORS:
    assert bytes_at[c] == c * (RANKS - 1) / RANKS
    over = (tokens_at[0.1] - int(c * TOKENS / RANKS)).clamp(min=0).sum().item()
    assert lost[c] == over / (RANKS * TOKENS)
assert lost[1] > 0.1
assert lost[4] == 0

# %% [markdown]
# ## Wrong on purpose: DDP around everything
#
# The dense part is the same on all ranks, the experts differ. What if the whole model goes into DDP? There is no error.


# %%
def in_ddp(everything):
    layer, head = Experts(), nn.Linear(WIDTH, 10)
    if everything:
        model = DDP(nn.Sequential(layer, head))
    else:
        layer.router = DDP(layer.router)
        model = nn.Sequential(layer, DDP(head))
    with span("backward"):
        model(tokens_of(dist.get_rank())).square().mean().backward()
    return layer.expert[0].weight[0, 0].item()


reduced, firsts = {}, {}
for name, all_of_it in {"everything": True, "dense part": False}.items():
    of = cluster.run(in_ddp, all_of_it)
    reduced[name] = traffic(of.trace.within("backward").where(op="all_reduce")).bytes_from(rank=0)
    firsts[name] = [round(of.results[rank], 5) for rank in range(RANKS)]
    print(f"{name} in DDP: the experts' first weights {firsts[name]}; rank 0 sends {reduced[name]:,} B of gradients")

# %% [markdown]
# DDP's constructor copies rank 0's parameters to all ranks: the four experts become one, and the averaged gradients
# keep it so. **The traffic shows it:** the all-reduce is as large as router, head *and* expert. An expert's gradient
# must not be reduced: all tokens that chose it were on its rank. It is only divided by n, as in `train`.

# %% tags=["T13", "check"]
DENSE, EXPERT = (WIDTH + 1) * (RANKS + 10), (WIDTH + 1) * HIDDEN + (HIDDEN + 1) * WIDTH  # numbers
assert [len({*firsts[name]}) for name in firsts] == [1, RANKS]
for name, numbers in {"everything": DENSE + EXPERT, "dense part": DENSE}.items():
    assert 0 <= reduced[name] - 2 * (RANKS - 1) / RANKS * 4 * numbers < 64  # a ring of whole numbers

# %% [markdown]
# ## When is it hidden?
#
# The expert cannot begin before its tokens arrive, and the next layer waits for the results. So both all-to-alls are
# waited for, unless the tokens are cut in two halves: one travels while the other is computed. An expert of width d and
# hidden width 4d does 16 d² FLOPs for a token forward (two matrices of 4d² numbers, 2 FLOPs for each). In bf16, the
# token travels there and back in 2 · 2d · (n-1)/n bytes: **4d · n/(n-1) FLOPs for each byte.** Backward, each matrix
# takes two products and as many bytes travel: **8d · n/(n-1)**. The cell predicts from data sheets, without measuring.

# %%
FLOPS, LINKS = 989e12, {"NVLink in a host": 450e9, "one 400 Gbit/s NIC": 50e9}  # H100 SXM, dense bf16; B/s one way
enough = {name: FLOPS / speed * (RANKS - 1) / RANKS / 4 for name, speed in LINKS.items()}
for name, width in enough.items():
    print(f"{name}: predicted to be hidden forward from d = {width:,.0f} on, backward from {width / 2:,.0f}")

# %% tags=["check"]
assert [round(width) for width in enough.values()] == [412, 3709]

# %% [markdown]
# With d = 2,048 it can be hidden inside a host; over a network only backward. So experts stay in a host if possible.
#
# ## Exercises
#
# 1. Write dispatch and combine **without an all-to-all and without sorting**: by `isend` and `recv`, one rank after the
#    other. `tokens` [count, width] are this rank's, and `expert_of[i]` is the rank whose `expert` processes token i.
#    Return the processed tokens in their original order. Before it sends tokens, a rank may say how many will come.
# 2. Most models choose *two* experts for each token. `experts_of` is [count, 2], two different ranks for each token,
#    and `weights` [count, 2]. Return, for each token, the sum of weight times result over both of its experts.


# %% tags=["exercise"]
def my_dispatch(tokens, expert_of, expert):
    return tokens  # replace this: send each token to its expert, and back


lessons.check("expert_dispatch", my_dispatch, student="")  # your name: it chooses the data


# %% tags=["exercise"]
def my_top_two(tokens, experts_of, weights, expert):
    return tokens  # replace this: each token goes to two experts, and back


lessons.check("top_two", my_top_two, student="")
