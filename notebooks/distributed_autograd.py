# ---
# jupyter:
#   dlearn:
#     ids: [DM4, DM6, PS2, Q10]
#     minutes: 0.2
#     needs: []
#     peak_mb: 700
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Distributed autograd: where does the backward pass cross?
#
# **Goals.** You will be able to count the messages that carry gradients; say where the backward pass crosses, and
# when it hangs.
#
# **Before this:** [model_parallel](model_parallel.ipynb). **Takes** about 30 minutes.
#
# A network is spread over three workers, w0, w1 and w2. w0 calls the stages on the others by RPC, and afterwards one
# line, `dist_autograd.backward`, finds the gradients of all parameters, wherever they are. **How many messages carry
# gradients from one worker to another, and why just these?** If you use the same remote value twice: is that one
# gradient message, or two?

# %%
from collections import Counter

import networkx as nx
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

from dlearn import Cluster, draw, lessons, messages, play, span
from dlearn.analysis import autograd_graph, hangs

WORKERS = ["w0", "w1", "w2"]

# %% [markdown]
# w1 and w2 have a stage each, which w0 knows by a remote reference; `w1.rpc_sync().forward(x)` calls it there and
# waits for the result, `w1.remote().forward(x)` leaves the result there until `to_here()` fetches it. w0 itself has
# `head`, a linear layer, and `x`, five rows of eight numbers.
#
# A *case* is one way to compute a loss from these. Each goes backward in a context of its own.


# %%
class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.lin(x))


def drive(cases):
    w1, w2 = rpc.remote("w1", Stage, (8, 8)), rpc.remote("w2", Stage, (8, 4))
    torch.manual_seed(2)
    head, x = nn.Linear(8, 8), torch.randn(5, 8)
    for case in cases:
        with span(case.__name__), dist_autograd.context() as context:
            loss = case(w1, w2, head, x)
            dist_autograd.backward(context, [loss])


recorded = {}


def watch(*cases):
    """Run these on w0, and keep what was recorded of each: its messages, and with graph=True its autograd graph."""
    run = Cluster(WORKERS, rpc=True, graph=True).run({"w0": drive}, cases, timeout=60)
    recorded.update({case.__name__: run.trace.within(case.__name__) for case in cases})


# %% [markdown]
# **Predict first**, for all eight cases of this lesson: how many messages carry a gradient? Write your guesses instead
# of `None`. The code of each case follows further down; they are in this order:
#
# 1. w0 calls w1 with an `x` that needs no gradient;
# 2. the same, and `x` needs one;
# 3. a result of w1 is fetched once, and used twice;
# 4. a result of w1 is fetched twice;
# 5. w0 calls w1 with the output of `head`, and w1 calls w2;
# 6. w0 calls w1 with it, fetches the result, and calls w2 with that;
# 7. w0 only tells w2 where the result of w1 is, and w2 fetches it from there;
# 8. the output of `head` is sent to w1 and to w2.

# %%
my_guess = {"needs_no_gradient": None, "needs_gradient": None, "used_twice": None, "fetched_twice": None}
my_guess |= {"nested": None, "piped": None, "handed_on": None, "sent_to_both": None}

# %% [markdown]
# ## One call
#
# A worker's autograd knows only the operations of that worker. So when a tensor that needs a gradient leaves for
# another worker, the forward pass adds a **send** function to the graph where it leaves, and a **recv** function where
# it comes in, and both keep the same number. Backward, the recv sends the gradient, and the send takes it in.
#
# In the picture, time goes to the right and a band is a worker. Follow the gradient from the loss. Where does it end?


# %%
def needs_no_gradient(w1, w2, head, x):
    return w1.rpc_sync().forward(x).sum()


def needs_gradient(w1, w2, head, x):
    return w1.rpc_sync().forward(x.clone().requires_grad_()).sum()


watch(needs_no_gradient, needs_gradient)
axes = draw.autograd(recorded["needs_no_gradient"])

# %% [markdown]
# It ends at the parameters of w1. The forward pass has sent *two* tensors, `x` and the result, but `x` needs no
# gradient, so there is no send on w0 and no way back: the graph has **two pieces**, one on each worker.
#
# Now `x` needs a gradient. Where does the third piece stand?

# %%
axes = draw.autograd(recorded["needs_gradient"])

# %% [markdown]
# On w0 again, at the right: w0 has two pieces now, which only meet through w1. Each arrow between bands is a message,
# with its bytes and the shape of the gradient: a gradient has the shape of what was sent forward. The first one is
# only 4 bytes: every number in the gradient of a sum is the same 1, and torch sends that once. The way back to `x` has
# 5 · 8 different numbers of 4 bytes.


# %%
def crossings(name):
    """From whom to whom, and how many bytes, for every gradient that goes to another worker; in no order."""
    graph = autograd_graph(recorded[name])
    worker = graph.nodes(data="worker")
    return [(worker[a], worker[b], edge["bytes"]) for a, b, edge in graph.edges(data=True) if edge["kind"] == "wire"]


def pieces(name):
    graph = autograd_graph(recorded[name])
    graph.remove_edges_from([(a, b) for a, b, kind in graph.edges(data="kind") if kind == "wire"])
    return nx.number_weakly_connected_components(graph)


def tensors_forward(name):
    return sum(len(message.tensors) for message in messages(recorded[name]) if message.op.startswith("FORWARD"))


# %% tags=["PS2", "check"]
assert crossings("needs_no_gradient") == [("w0", "w1", 4)]
assert sorted(crossings("needs_gradient")) == [("w0", "w1", 4), ("w1", "w0", 5 * 8 * 4)]
assert (pieces("needs_no_gradient"), pieces("needs_gradient")) == (2, 3)
assert tensors_forward("needs_no_gradient") == tensors_forward("needs_gradient") == 2

# %% [markdown]
# ## The same value twice
#
# w0 uses a result of w1 in two places. In the first case it fetches it once and uses what came; in the second it
# fetches it for each use. Both give the same loss. **Look back at your guesses**, then look for the place where the
# two ways meet: before the wire, or behind it?


# %%
def used_twice(w1, w2, head, x):
    out = w1.remote().forward(x).to_here()
    return (out * 2).sum() + (out * 3).sum()


def fetched_twice(w1, w2, head, x):
    out = w1.remote().forward(x)
    return (out.to_here() * 2).sum() + (out.to_here() * 3).sum()


watch(used_twice, fetched_twice)
axes = draw.autograd(recorded["used_twice"])

# %%
axes = draw.autograd(recorded["fetched_twice"])

# %% [markdown]
# Fetched once, there is one recv. Both ways lead into it, it waits for both gradients, adds them, and sends **one**
# message. Fetched twice, there are two recvs, each with a send of its own on w1: **two** messages of the same size. The
# gradients meet on w1, before `Tanh`, which runs once all the same.
#
# Each `to_here()` is a crossing. So keep what you have fetched.
#
# Here is the second one as it ran. Choose *graph*, and press Forward: nodes fill as they run. Which of the two
# crossings comes first, and what does `Tanh` wait for?

# %%
in_context = [m for m in messages(recorded["fetched_twice"]) if m.operation.exchange.context is not None]
play.player(recorded["fetched_twice"], messages=in_context, title="Fetched twice: two gradients cross")

# %% tags=["DM6", "check"]
assert crossings("used_twice") == [("w0", "w1", 160)]
assert crossings("fetched_twice") == [("w0", "w1", 160)] * 2
graph = autograd_graph(recorded["fetched_twice"])
assert [graph.in_degree(node) for node, name in graph.nodes(data="name") if name == "TanhBackward0"] == [2]
graph = autograd_graph(recorded["used_twice"])
assert [graph.in_degree(node) for node, name in graph.nodes(data="name") if name.endswith("RecvRpcBackward")] == [2]

# %% [markdown]
# ## Three workers
#
# The next three compute the same: `head` on w0, then the stage of w1, then that of w2. They differ in who calls whom.
# In `nested`, w1 is called, and calls w2 itself. In `piped`, w0 fetches each result and sends it on. In `handed_on`, w2
# gets a reference, and fetches the result from w1.


# %%
def run(stage, x):
    return stage.local_value()(x)


def run_both(first, second, x):
    return rpc.rpc_sync(second.owner(), run, (second, first.local_value()(x)))


def run_fetched(stage, x):
    return stage.local_value()(x.to_here())


def nested(w1, w2, head, x):
    return rpc.rpc_sync("w1", run_both, (w1, w2, head(x))).sum()


def piped(w1, w2, head, x):
    hidden = w1.remote().forward(head(x)).to_here()
    return w2.remote().forward(hidden).to_here().sum()


def handed_on(w1, w2, head, x):
    hidden = w1.remote().forward(head(x))
    return rpc.remote("w2", run_fetched, (w2, hidden)).to_here().sum()


watch(nested, piped, handed_on)

# %% [markdown]
# In the picture of `nested`, the result came back from w2 to w0 through w1. Does its gradient take that way, too,
# although w1 has done nothing with it?

# %%
axes = draw.autograd(recorded["nested"])

# %% [markdown]
# It does: on w1 a send stands beside a recv, with no operation between them. The reply of w2 was a tensor that came in
# and went out again, and that is what the graph remembers. (The 4 bytes are the sum's gradient again; a send hands on
# what came as it came.)
#
# When w2 fetches from w1 by itself, one crossing is left out. Which worker is not in the middle any more?

# %%
axes = draw.autograd(recorded["handed_on"])

# %% [markdown]
# w0 is not: the large gradient goes from w2 to w1 directly. Compare the three, from whom to whom.

# %%
for name in ("nested", "piped", "handed_on"):
    ways = ", ".join(f"{src} to {dst} {size} B" for src, dst, size in sorted(crossings(name)))
    print(f"{name:10} {len(crossings(name))} crossings: {ways}")

# %% tags=["check"]
ways = {name: Counter((src, dst) for src, dst, _ in crossings(name)) for name in ("nested", "piped", "handed_on")}
assert ways["nested"] == Counter([("w0", "w1"), ("w1", "w2"), ("w2", "w1"), ("w1", "w0")])
assert ways["piped"] == Counter([("w0", "w2"), ("w2", "w0"), ("w0", "w1"), ("w1", "w0")])
assert ways["handed_on"] == Counter([("w0", "w2"), ("w2", "w1"), ("w1", "w0")])
assert sorted(size for *_, size in crossings("nested")) == [4, 4, 160, 160]


# %% [markdown]
# ## All eight
#
# The last case sends one tensor to two workers. Then the table: nodes on each worker, pieces, crossings in the graph,
# and `BACKWARD_AUTOGRAD_REQ`, the messages with gradients which torch's RPC agents themselves report in their logs.
# The last two are counted in different ways: do they agree?


# %%
def sent_to_both(w1, w2, head, x):
    hidden = head(x)
    return rpc.rpc_sync("w1", run, (w1, hidden)).sum() + rpc.rpc_sync("w2", run, (w2, hidden)).sum()


def nodes(name):
    found = Counter(worker for _, worker in autograd_graph(recorded[name]).nodes(data="worker"))
    return [found[worker] for worker in WORKERS]


def backward_messages(name):
    return [message for message in messages(recorded[name]) if message.op == "BACKWARD_AUTOGRAD_REQ"]


watch(sent_to_both)
print(f"{'case':18}{'w0':>4}{'w1':>4}{'w2':>4}{'pieces':>8}{'crossings':>11}{'messages':>10}{'your guess':>12}")
for name, guess in my_guess.items():
    counts = "".join(f"{count:4}" for count in nodes(name))
    told = f"{pieces(name):8}{len(crossings(name)):11}{len(backward_messages(name)):10}{guess!s:>12}"
    print(f"{name:18}{counts}{told}")

# %% tags=["DM4", "check"]
EXPECTED = {  # nodes on w0, w1 and w2; pieces; crossings
    "needs_no_gradient": ([2, 6, 0], 2, 1),
    "needs_gradient": ([4, 7, 0], 3, 2),
    "used_twice": ([6, 6, 0], 2, 1),
    "fetched_twice": ([7, 7, 0], 2, 2),
    "nested": ([7, 9, 7], 5, 4),
    "piped": ([9, 7, 7], 5, 4),
    "handed_on": ([7, 7, 7], 4, 3),
    "sent_to_both": ([11, 7, 7], 4, 4),
}
assert {name: (nodes(name), pieces(name), len(crossings(name))) for name in recorded if name in EXPECTED} == EXPECTED
for name in EXPECTED:
    graph = autograd_graph(recorded[name])
    assert graph.graph["problems"] == ()
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.number_weakly_connected_components(graph) == 1
    sent = [(WORKERS[message.src], WORKERS[message.dst], message.tensors) for message in backward_messages(name)]
    in_logs = Counter((src, dst, sum(tensor.payload_bytes for tensor in tensors)) for src, dst, tensors in sent)
    assert in_logs == Counter(crossings(name))
    wires = [(a, b) for a, b, kind in graph.edges(data="kind") if kind == "wire"]
    assert all(graph.nodes[a]["name"].endswith("RecvRpcBackward") for a, _ in wires)
    assert all(graph.nodes[b]["name"].endswith("SendRpcBackward") for _, b in wires)

# %% [markdown]
# They agree in every case, from whom to whom and in bytes. So the rule is short: **every message that brought a tensor
# which needs a gradient is answered by one message with its gradient**, no matter how often the tensor is used where it
# came, as long as it is used. Of a message from which *nothing* reaches the loss no gradient comes, and torch waits for
# it for ever.
#
# ## Exercise
#
# A ninth case. `detach()` gives the same numbers without their history. How many messages carry a gradient here? Write
# your number instead of `None`, and run the cell.


# %% tags=["exercise"]
def ninth(w1, w2, head, x):
    hidden = w1.rpc_sync().forward(head(x))
    looked_at = w2.rpc_sync().forward(hidden.detach())
    return looked_at.sum() + hidden.sum() + (hidden * hidden).sum()


watch(ninth)
my_number = None
lessons.answer("distributed_autograd.ninth", my_number)

# %% tags=["answer"]
assert lessons.answer("distributed_autograd.ninth", len(crossings("ninth"))).right

# %% [markdown]
# Then draw it, `draw.autograd(recorded["ninth"])`, and take the `detach()` away. What is added to the picture?
#
# ## Fetched and not used
#
# The exception, run with a limit: two fetches of one value, of which only one reaches the loss. **Predict first:** who
# waits, and for what?


# %%
def one_unused(w1, w2, head, x):
    hidden = w1.remote().forward(head(x))
    used, _ = hidden.to_here(), hidden.to_here()
    return used.sum()


stuck = Cluster(WORKERS, rpc=True, graph=True).run({"w0": drive}, [one_unused], timeout=6, check=False)
print(stuck.error)

# %% [markdown]
# w1 sent two values and counts on two gradients. One has come and stands in the sentence: w1 "has it and has not
# begun", for it waits for the other, which w0 will never send: that value is in no loss. Fetch once, or use what you
# fetch.

# %% tags=["check"]
(wait,) = hangs(stuck.trace)
assert wait.operation.op == "BACKWARD_AUTOGRAD_REQ"
assert [stuck.trace.label(end.rank) for end in wait.operation.ends] == ["w0", "w1"]

# %% [markdown]
# ## A parameter that is sent itself
#
# One more trap, and this one is silent. w0 sends three tensors that need a gradient: a plain one, an `nn.Parameter`,
# and that parameter times 1. **Predict first:** for which of them does `get_gradients` hold a gradient on w0?


# %%
def twice(x):
    return 2 * x


def is_leaf(x):
    return x.is_leaf


def send_each():
    plain, own = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))
    found = {}
    for name, leaf, given in (("plain", plain, plain), ("Parameter", own, own), ("Parameter · 1", own, own * 1)):
        with dist_autograd.context() as context:
            result = rpc.rpc_sync("w1", twice, (given,))
            dist_autograd.backward(context, [result.sum()])
            has_one = leaf in dist_autograd.get_gradients(context)
            found[name] = result.requires_grad, rpc.rpc_sync("w1", is_leaf, (given,)), has_one
    return found


found = Cluster(WORKERS, rpc=True).run({"w0": send_each}).results["w0"]
for name, (needed, leaf, has_one) in found.items():
    print(f"{name:14} the result needs a gradient: {needed}; arrives as a leaf: {leaf}; w0 has a gradient: {has_one}")

# %% [markdown]
# Not for the parameter. It arrives on w1 as a leaf, cut off from the one that was sent; no error is raised, and the
# optimizer on w0 has nothing to apply. Times 1 it is a result like any other, and its gradient comes home.

# %% tags=["Q10", "check"]
assert found == {
    "plain": (True, False, True),
    "Parameter": (True, True, False),
    "Parameter · 1": (True, False, True),
}

# %% [markdown]
# *Text and figures: CC BY 4.0. Code: MIT.*
