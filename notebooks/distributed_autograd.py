# ---
# jupyter:
#   dlearn:
#     ids: [DM4, DM6, PS2, Q10]
#     minutes: 0.2
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # Distributed autograd: where does the backward pass cross?
#
# **Goals.** You will be able to count the messages that transport gradients; say where the backward pass crosses to
# another worker, and when it hangs.
#
# **Before this:** [model_parallel](model_parallel.ipynb). **Takes** about 30 minutes.
#
# A network is spread over three workers, w0, w1 and w2. w0 calls the stages on the other workers by RPC. Then one line,
# `dist_autograd.backward`, computes the gradients of all parameters on all workers. **How many messages transport
# gradients from one worker to another, and why?**
#
# w1 and w2 have a stage each, and w0 has a remote reference to it. `w1.rpc_sync().forward(x)` calls the stage on w1 and
# waits for the result. `w1.remote().forward(x)` leaves the result on w1 until `to_here()` fetches it. w0 itself has
# `head`, a linear layer, and `x`, five rows of eight numbers. A *case* is one way to compute a loss from these. Each
# case runs its backward pass in its own context.

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
    """Run these on w0, and keep the trace of each: its messages, and with graph=True its autograd graph."""
    run = Cluster(WORKERS, rpc=True, graph=True).run({"w0": drive}, cases, timeout=60)
    recorded.update({case.__name__: run.trace.within(case.__name__) for case in cases})


# %% [markdown]
# ## One call
#
# A worker's autograd knows only the operations of that worker. So when a tensor that needs a gradient is sent to
# another worker, the forward pass adds a **send** function to the sender's graph and a **recv** function to the
# receiver's. Both have the same number. In the backward pass, the recv sends the gradient, and the send receives it.
#
# In the pictures, time goes to the right and each band is a worker. In the first, `x` needs no gradient. Follow the
# gradient from the loss. Where does it end? In the second, `x` needs one. Where is the third piece?


# %%
def needs_no_gradient(w1, w2, head, x):
    return w1.rpc_sync().forward(x).sum()


def needs_gradient(w1, w2, head, x):
    return w1.rpc_sync().forward(x.clone().requires_grad_()).sum()


watch(needs_no_gradient, needs_gradient)
for case in ("needs_no_gradient", "needs_gradient"):
    axes = draw.autograd(recorded[case])


# %%
def crossings(name):
    """(from, to, bytes) of every gradient that goes to another worker, in no order."""
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
# The gradient ends at the parameters of w1. The forward pass sends *two* tensors, `x` and the result, but `x` needs no
# gradient, so there is no send on w0. The graph has **two pieces**, one on each worker. If `x` needs a gradient, w0 has
# two pieces, which are connected only through w1. Each arrow between bands is a message, with its bytes and the shape
# of the gradient, which is that of the tensor sent forward. The first gradient takes only 4 bytes: all numbers in the
# gradient of a sum are 1, and torch sends that 1 once. The gradient of `x` has 5 · 8 different numbers of 4 bytes.
#
# ## The same value twice
#
# w0 uses a result of w1 in two places. In the first case w0 fetches it once; in the second it fetches it for each use.
# Both give the same loss. **Predict first:** how many messages with a gradient does the second case take? In the
# pictures, do the two gradients meet on w0 or on w1?

# %%
my_messages = lessons.predict("distributed_autograd.fetched twice", None)


def used_twice(w1, w2, head, x):
    out = w1.remote().forward(x).to_here()
    return (out * 2).sum() + (out * 3).sum()


def fetched_twice(w1, w2, head, x):
    out = w1.remote().forward(x)
    return (out.to_here() * 2).sum() + (out.to_here() * 3).sum()


watch(used_twice, fetched_twice)
for case in ("used_twice", "fetched_twice"):
    axes = draw.autograd(recorded[case])
if my_messages:
    print(my_messages.against(len(crossings("fetched_twice"))))
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
# If the result is fetched once, there is one recv. It waits for both gradients, adds them, and sends **one** message.
# If it is fetched twice, there are two recvs, each with its own send on w1: **two** messages of the same size. The
# gradients meet on w1, before `Tanh`, which runs once. (In the player, choose *graph*: nodes fill as they run.) So
# fetch a value once, and keep it.
#
# ## Three workers
#
# The next three cases compute the same: `head` on w0, then the stage of w1, then that of w2. In `nested`, w0 calls w1,
# and w1 calls w2. In `piped`, w0 fetches each result and sends it on. In `handed_on`, w2 gets a reference, and fetches
# the result from w1. **Predict first:** which case sends the fewest messages with gradients?

# %%
my_fewest = lessons.predict("distributed_autograd.fewest", None, choices=("nested", "piped", "handed_on"))


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
for case in ("nested", "handed_on"):
    axes = draw.autograd(recorded[case])
for name in ("nested", "piped", "handed_on"):
    ways = ", ".join(f"{src} to {dst} {size} B" for src, dst, size in sorted(crossings(name)))
    print(f"{name:10} {len(crossings(name))} crossings: {ways}")

# %% tags=["check"]
ways = {name: Counter((src, dst) for src, dst, _ in crossings(name)) for name in ("nested", "piped", "handed_on")}
assert ways["nested"] == Counter([("w0", "w1"), ("w1", "w2"), ("w2", "w1"), ("w1", "w0")])
assert ways["piped"] == Counter([("w0", "w2"), ("w2", "w0"), ("w0", "w1"), ("w1", "w0")])
assert ways["handed_on"] == Counter([("w0", "w2"), ("w2", "w1"), ("w1", "w0")])
assert sorted(size for *_, size in crossings("nested")) == [4, 4, 160, 160]
my_fewest and my_fewest.against("handed_on")


# %% [markdown]
# In `nested` the result came back from w2 to w0 through w1. Its gradient takes the same path, although w1 computed
# nothing with it: on w1 a send is next to a recv, with no operation in between. In `handed_on` w2 fetches from w1,
# which saves one crossing: the large gradient goes directly from w2 to w1.
#
# ## All eight
#
# The last case sends one tensor to two workers. The table shows the nodes on each worker, the pieces, the crossings in
# the graph, and `BACKWARD_AUTOGRAD_REQ`, the messages with gradients in the logs of torch's RPC agents. The last two
# columns are counted in different ways. Do they agree?


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
print(f"{'case':18}{'w0':>4}{'w1':>4}{'w2':>4}{'pieces':>8}{'crossings':>11}{'messages':>10}")
for name in recorded:
    counts = "".join(f"{count:4}" for count in nodes(name))
    told = f"{pieces(name):8}{len(crossings(name)):11}{len(backward_messages(name)):10}"
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
# They agree in every case, pair by pair and in bytes. So the rule is short: **every message with a tensor that needs a
# gradient is answered by one message with its gradient**, however often the tensor is used, as long as it is used. If a
# message does *not* contribute to the loss, its gradient is never sent, and torch waits for it for ever.
#
# ## Fetched and not used
#
# This is the exception, run with a time limit: a value is fetched twice, and only one of the two reaches the loss.
# Which worker waits, and for what?


# %%
def one_unused(w1, w2, head, x):
    hidden = w1.remote().forward(head(x))
    used, _ = hidden.to_here(), hidden.to_here()
    return used.sum()


stuck = Cluster(WORKERS, rpc=True, graph=True).run({"w0": drive}, [one_unused], timeout=6, check=False)
print(stuck.error)

# %% tags=["check"]
(wait,) = hangs(stuck.trace)
assert wait.operation.op == "BACKWARD_AUTOGRAD_REQ"
assert [stuck.trace.label(end.rank) for end in wait.operation.ends] == ["w0", "w1"]

# %% [markdown]
# w1 sent two values and expects two gradients. The sentence names the one that has arrived: w1 "has it and has not
# begun", because it waits for the other. w0 will never send that one, because its value is in no loss. So use what you
# fetch.
#
# ## A parameter that is sent itself
#
# This mistake causes no error. w0 sends three tensors that need a gradient: a plain one, an `nn.Parameter`, and that
# parameter times 1. **Predict first:** for which of them does `get_gradients` on w0 contain *no* gradient?

# %%
NAMES = ("plain", "Parameter", "Parameter · 1")
my_lost = lessons.predict("distributed_autograd.no gradient", None, choices=NAMES)


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

# %% tags=["Q10", "check"]
assert found == {
    "plain": (True, False, True),
    "Parameter": (True, True, False),
    "Parameter · 1": (True, False, True),
}
my_lost and my_lost.against("Parameter")

# %% [markdown]
# The parameter has none. It arrives on w1 as a leaf, with no connection to the parameter on w0. No error is raised, and
# the optimizer on w0 has nothing to apply. The parameter times 1 is an ordinary result, so its gradient returns.
#
# ## Exercise
#
# In this ninth case, `detach()` gives the same numbers without their history. How many messages with a gradient are
# there? Write your number instead of `None`, and run the cell. Then draw it with `draw.autograd(recorded["ninth"])`,
# and remove the `detach()`. What is added to the picture?


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
