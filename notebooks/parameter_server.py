# ---
# jupyter:
#   dlearn:
#     ids: [PS1, PS2, PS3, PS5, PS7, Q9, Q12]
#     minutes: 0.4
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # A parameter server: every message
#
# **Goals.** You will be able to count the messages of an iteration over RPC; say where the gradients live; compare
# designs by their bytes.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 50 minutes.
#
# The model lives on one process, the *server*; two *trainers* hold the images. A trainer sends its images over, gets
# the outputs back, and computes the loss. **Which messages does one iteration of training have, and where do the
# gradients live?** Here you record every one of them, also those that nobody asked for.

# %%
import warnings

import networkx as nx
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import ProfilerActivity, profile

from dlearn import Cluster, draw, lessons, messages, operations, play, span
from dlearn.analysis import autograd_graph, iteration, iterations, reconcile
from dlearn.lessons import charts, digits

# %% [markdown]
# ## The job
#
# `Net` is the model. A trainer only has a `Stub`, whose `forward` calls the server. Both trainers use the same net:
# what a cell defines is there on all three processes, and `the_net` runs on the server, so it gives the server's.

# %%
LR = 0.1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images):  # [B, 1, 8, 8] -> [B, 10]
        return self.fc(max_pool2d(relu(self.conv(images)), 2).flatten(1))

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def as_vector(self):
        return parameters_to_vector(self.parameters()).detach()


Net.shared = Net()


def the_net():
    return Net.shared


class Stub(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = rpc.remote("ps", the_net)

    def forward(self, images):
        return self.net.rpc_sync().forward(images)


# %% [markdown]
# The training loop is what torch's documentation recommends: forward, loss, backward and step in a *context* of
# distributed autograd. The two barriers are between the trainers alone: nobody may change the parameters while the
# other still needs them for its backward pass.
#
# **Predict first:** how many messages does one iteration of one trainer have? Write down who sends what.

# %%
my_guess = lessons.predict("parameter_server.messages of a trainer", None)


def train(batch_size):
    from torch.distributed.optim import DistributedOptimizer

    images, labels = digits.shard(dist.get_rank() - 1, 2)  # rank 0 is the server
    trainers = dist.new_group([1, 2], use_local_synchronization=True)
    model = Stub()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.net.rpc_sync().parameter_rrefs(), lr=LR)
    for step in range(3):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        with span(f"iteration {step}"), dist_autograd.context() as context:
            loss = cross_entropy(model(images[batch]), labels[batch])
            dist_autograd.backward(context, [loss])
            dist.barrier(trainers)
            optimizer.step(context)
        dist.barrier(trainers)
    return loss.item()


B = 16
WORKERS = ["ps", "trainer1", "trainer2"]

with Cluster(WORKERS, rpc=True) as cluster:
    run = cluster.run({"trainer1": train, "trainer2": train}, B)
one = iteration(run.trace)
if my_guess:
    print(my_guess.against(len(one.steps)))
print(f"for each trainer it is {len(one.steps)}, for both {len(one.messages)}")
not_measured = reconcile(run.trace).not_measured  # why the kernel's counters cannot be read, or nothing

# %% [markdown]
# ## You were told 4
#
# Input there, output back, gradient there, step there: the usual answer, and indeed four messages do all that the
# program asked for. Here is what the other ten are for. *Payload* is what torch packs; the columns on the right are
# bytes on the wire.

# %%
print("\n".join(one.sentences()))
print()
for row in one.rows():
    print(f"{row[0]:>2}  {row[1]:9}  {row[2]:29}  {row[3]:7}  {row[4]:>7}  {row[5]:>7}  {row[6]:>14}  {row[7]:>14}")

# %% [markdown]
# - Each request has its reply, also where there is nothing to say.
# - Each call on the net passes a reference to it (an *RRef*). The owner counts references: it accepts each new one, and
#   that is acknowledged.
# - A context ends on both sides: the trainer tells the server, and the server tells all whom *it* knows, which is the
#   trainer again.

# %% tags=["check"]
asked = [step for step in one.steps if not step.control]

assert (len(asked), len(one.steps), len(one.messages)) == (4, 14, 28)
assert [step.phase for step in asked] == ["forward", "forward", "backward", "optimizer"]
assert all(None not in step.messages for step in one.steps)  # each of them for both trainers
assert run.trace.rpc.complete

# %% [markdown]
# ## Who is first?
#
# Two trainers, one server: the order of their calls is a matter of luck, unless you hold them. **Predict first:** you
# let the two first calls of trainer2 through, and none of trainer1's. Who waits for whom?

# %%
held = Cluster(WORKERS, rpc=True, hold=True).run({"trainer1": train, "trainer2": train}, B)
held.release("trainer2", 2)
held.waiting

# %%
for name, now in held.ranks.items():
    print(f"{name:9} {now}")

# %% [markdown]
# Neither waits for the other: a trainer needs only the server. It meets the other one at the barrier before the
# optimizer's step, and not before. [race_by_hand](race_by_hand.ipynb) makes a server lose an update that way.

# %% tags=["check"]
assert {passed.rank for passed in held.schedule} == {"trainer2"}
assert held.ranks["trainer1"].startswith("waits at the gate")
assert held.free().join(60).results.keys() == run.results.keys()

# %% [markdown]
# ## Picture
#
# Step through them with the arrow keys. Watch the two trainers: the server serves both at the same time, so their
# messages mix, but each trainer's own fourteen keep their order.

# %%
play.player(run.trace, messages=one.messages, title="You were told 4; for each trainer it is 14")

# %% [markdown]
# ## Bytes, as the kernel counts them
#
# Now one trainer alone, and with `measure="phase"` the kernel's counters are read after each phase. **Predict
# first:** which phase sends the most? And which of them grow with the batch?


# %%
def alone(design, batch_size, steps=3):
    """What one trainer does, by one of the designs below, `steps` times."""
    rpc.rpc_sync("ps", fresh_net)
    images, labels = digits.shard(0, 2)
    iterate = design()
    for step in range(steps):
        with span(f"iteration {step}"):
            batch = slice(step * batch_size, (step + 1) * batch_size)
            iterate(images[batch], labels[batch])
    return rpc.rpc_sync("ps", parameters).tolist()


def fresh_net():
    Net.shared = Net()


def parameters():
    return the_net().as_vector()


def four_calls():
    from torch.distributed.optim import DistributedOptimizer

    model = Stub()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.net.rpc_sync().parameter_rrefs(), lr=LR)

    def iterate(images, labels):
        with dist_autograd.context() as context:
            loss = cross_entropy(model(images), labels)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)

    return iterate


# %%
def settled(run):
    """The last iteration all of whose messages came before the counters were read at the end of their phase."""
    found = [iteration(run.trace, number) for number in range(iterations(run.trace))]
    return next((one for one in reversed(found) if all(abs(p.residue_bytes or 0) < 100 for p in one.phases)), None)


phases = {}
with Cluster(["ps", "trainer1"], rpc=True, measure="phase") as cluster:
    for batch_size in (16, 64):
        while not phases.get(batch_size):  # a busy machine may be late in all three: once more, then
            phases[batch_size] = settled(cluster.run({"trainer1": alone}, four_calls, batch_size))

for batch_size, one in phases.items():
    print(f"B = {batch_size}")
    for row in one.phase_rows():
        print("   ", "".join(f"{cell:>12}" for cell in row))
print(f"not measured: {not_measured}" if not_measured else "measured by the kernel")

# %% [markdown]
# *Residue* is what the prediction leaves over: a few bytes, because numbers are packed in varying size; none is told of
# the optimizer, whose call C++ packs. *Observer* is what the recorder itself adds. Forward and backward grow with the
# batch, the rest never does: the step says "step", not by how much. The gradient that comes back is as large as the
# output that went there, and the gradients of the parameters never travel.
#
# Compare the predicted bytes with the kernel's: four bytes a message at most.

# %% tags=["check"]
for batch_size, one in phases.items():
    assert len(one.phases) == 8
    packed_by_python = [each for each in one.phases if each.phase != "optimizer"]
    assert not_measured or all(abs(each.residue_bytes) <= 4 * each.message_count for each in packed_by_python)
    images, outputs, gradients, step = [
        sum(tensor.payload_bytes for tensor in each.messages[0].tensors) for each in one.story
    ]
    assert images == batch_size * 64 * 4
    assert outputs == gradients == batch_size * 10 * 4
    assert step == 0

fixed = [[p.predicted_bytes for p in phases[b].phases if p.phase in ("optimizer", "cleanup")] for b in phases]
assert fixed[0] == fixed[1]

# %% [markdown]
# ## The graph, in pieces
#
# Backward follows the graph that forward has left. Half of it is on the server. **Predict first:** in how many pieces
# is it, if the images need no gradient? And if they do?
#
# In the picture, count what is between the thick arrows: each stretch on one worker is a piece.


# %%
def one_pass(needs_gradient):
    images, labels = digits.shard(0, 2)
    model = Stub()
    with dist_autograd.context() as context:
        batch = images[:B].clone().requires_grad_(needs_gradient)
        dist_autograd.backward(context, [cross_entropy(model(batch), labels[:B])])


def pieces(trace):
    graph = autograd_graph(trace)
    graph.remove_edges_from([(a, b) for a, b, kind in graph.edges(data="kind") if kind == "wire"])
    return nx.number_weakly_connected_components(graph)


graphs = {}
with Cluster(["ps", "trainer1"], rpc=True, graph=True) as cluster:
    for needs_gradient in (False, True):
        graphs[needs_gradient] = cluster.run({"trainer1": one_pass}, needs_gradient).trace

axes = draw.autograd(graphs[False])

# %%
axes = draw.autograd(graphs[True])

# %% [markdown]
# Two pieces: the loss on the trainer, and the net on the server. If the images need a gradient there is a third, back
# on the trainer, and one more message crosses: the gradient of the images, from the server.

# %% tags=["check"]
assert {needs_gradient: pieces(trace) for needs_gradient, trace in graphs.items()} == {False: 2, True: 3}


def backward_messages(trace):
    return sum(message.op.startswith("BACKWARD_AUTOGRAD") for message in messages(trace))


assert (backward_messages(graphs[False]), backward_messages(graphs[True])) == (2, 4)  # each request has its reply

# %% [markdown]
# ## Where do the gradients live?
#
# Two trainers, one net, both after their backward pass and before any step. **Predict first:** what is in
# `param.grad` on the server: the gradient of trainer 1, that of trainer 2, their sum, or nothing?


# %%
def gradients_there(context):
    net = the_net()
    mine = dist_autograd.get_gradients(context)
    return [parameter.grad for parameter in net.parameters()], [mine[each].norm().item() for each in net.parameters()]


def after_backward():
    images, labels = digits.shard(dist.get_rank() - 1, 2)
    trainers = dist.new_group([1, 2], use_local_synchronization=True)
    model = Stub()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [cross_entropy(model(images[:B]), labels[:B])])
        dist.barrier(trainers)
        found = rpc.rpc_sync("ps", gradients_there, (context,))
        dist.barrier(trainers)
    return found


def alone_gives(rank):
    images, labels = digits.shard(rank - 1, 2)
    net = Net()
    cross_entropy(net(images[:B]), labels[:B]).backward()
    return [parameter.grad.norm().item() for parameter in net.parameters()]


run = Cluster(WORKERS, rpc=True).run({"trainer1": after_backward, "trainer2": after_backward})
for name, (grad, norms) in run.results.items():
    if name != "ps":
        print(f"{name}: param.grad {grad}; in its context, norms {[round(norm, 3) for norm in norms]}")

# %% [markdown]
# Nothing at all. Each iteration has its own context on the server, with its own gradients, and
# `optimizer.step(context)` takes them from there. So two trainers never mix theirs, and no call of `zero_grad` is
# needed.

# %% tags=["check"]
for rank in (1, 2):
    grad, norms = run.results[f"trainer{rank}"]
    assert grad == [None] * 4
    assert torch.allclose(torch.tensor(norms), torch.tensor(alone_gives(rank)), rtol=1e-4)

# %% [markdown]
# The *parameters* are shared, and torch watches over them. Why do our trainers wait for each other before they step?
# Below, trainer 2 does a whole iteration while trainer 1 is between its forward and its backward. **Predict first:**
# what does trainer 1 get?


# %%
def in_between():
    images, labels = digits.shard(dist.get_rank() - 1, 2)
    trainers = dist.new_group([1, 2], use_local_synchronization=True)
    iterate = four_calls()
    dist.barrier(trainers)
    if dist.get_rank() == 2:
        dist.barrier(trainers)
        iterate(images[:B], labels[:B])
        dist.barrier(trainers)
        return None
    with dist_autograd.context() as context:
        loss = cross_entropy(Stub()(images[:B]), labels[:B])
        dist.barrier(trainers)
        dist.barrier(trainers)
        try:
            dist_autograd.backward(context, [loss])
        except RuntimeError as error:
            return str(error)
    return "nothing wrong"


refused = Cluster(WORKERS, rpc=True).run({"trainer1": in_between, "trainer2": in_between}).results["trainer1"]
print(refused.split("Hint")[0])

# %% [markdown]
# Its graph still needs the old parameters, and the step has overwritten them. So trainers that share a net this way
# need an order. Servers without one hand out copies instead: that is the next lesson, [hogwild](hogwild.ipynb).

# %% tags=["check"]
assert "modified by an inplace operation" in refused

# %% [markdown]
# ## Fewer messages?
#
# The trainer has no layer of its own, its `forward` is a stub. So is all this ceremony needed? Three other designs:
#
# - `hooked`: a hook on each parameter steps as soon as its gradient is there, *inside* the backward message;
# - `one_call`: images and labels go to the server, which does forward, backward and step itself;
# - `pull_push`: the trainer gets the parameters, does all the work, and sends the gradients back.


# %%
def hook_steps():
    for parameter in the_net().parameters():

        def step(gradient, parameter=parameter):
            parameter.data.add_(gradient, alpha=-LR)

        parameter.register_hook(step)


def hooked():
    model = Stub()
    rpc.rpc_sync("ps", hook_steps)

    def iterate(images, labels):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [cross_entropy(model(images), labels)])

    return iterate


def learn(images, labels):
    net = the_net()
    cross_entropy(net(images), labels).backward()
    torch.optim.SGD(net.parameters(), lr=LR).step()
    net.zero_grad()


def one_call():  # clone: torch sends a small slice with the whole tensor that it was cut from
    return lambda images, labels: rpc.rpc_sync("ps", learn, (images, labels.clone()))


# %%
def update(gradients):
    net = the_net()
    vector_to_parameters(net.as_vector().add_(gradients, alpha=-LR), net.parameters())


def pull_push():
    net = Net()

    def iterate(images, labels):
        vector_to_parameters(rpc.rpc_sync("ps", parameters), net.parameters())
        net.zero_grad()
        cross_entropy(net(images), labels).backward()
        rpc.rpc_sync("ps", update, (parameters_to_vector(p.grad for p in net.parameters()),))

    return iterate


# %% [markdown]
# **Predict first:** how many messages does one iteration of each design take? Do all four end with the same parameters?

# %%
DESIGNS = [four_calls, hooked, one_call, pull_push]
counts, trained, travels = {}, {}, {}
with Cluster(["ps", "trainer1"], rpc=True) as cluster:
    for design in DESIGNS:
        run = cluster.run({"trainer1": alone}, design, B)
        part = messages(run.trace.within("iteration 2"))
        counts[design.__name__], trained[design.__name__] = len(part), torch.tensor(run.results["trainer1"])
        sent = [f"{t.dtype}{list(t.shape)}" for message in part for t in message.tensors]
        print(f"{design.__name__:10} {len(part):>2} messages, tensors: {', '.join(sent)}")

# %% [markdown]
# The step can ride inside the backward message, which saves its call, and the references that go with it. If the
# server does everything, a request and its reply are all. The price: a hook steps whether or not the trainer wants it
# to (no clipping over all gradients, no optimizer that it knows), and with `one_call` the trainer has nothing to say,
# and two of them would add up in one `param.grad`. What the ceremony buys is that each trainer may have layers of its
# own.

# %% tags=["check"]
assert counts == {"four_calls": 14, "hooked": 10, "one_call": 2, "pull_push": 4}
assert all(torch.allclose(trained["four_calls"], values, atol=1e-6) for values in trained.values())
assert not torch.equal(trained["four_calls"], Net().as_vector())

# %% [markdown]
# ## Does the data leave the trainer?
#
# "With a parameter server the data never leaves the trainer" is true of pull and push alone: parameters go there,
# gradients come back, 2 · 4P bytes for P parameters, whatever the batch. In the remote forward the images travel: per
# image 64 numbers there, 10 outputs back, 10 gradients there.
#
# **Predict first:** with 1,370 parameters, for which batches is the remote forward the cheaper one?

# %%
P = sum(parameter.numel() for parameter in Net().parameters())
per_image = (64 + 10 + 10) * 4


def measured_bytes(cluster, design, batch_size):
    """Bytes of one iteration on the wire, both ways: what eight iterations have more than two.

    As the kernel counts them; as predicted, where it cannot be asked.
    """

    def total(steps):
        whole = reconcile(cluster.run({"trainer1": alone}, design, batch_size, steps).trace).whole
        return whole.predicted_bytes if not_measured else whole.measured_bytes - whole.observer_bytes

    return (total(8) - total(2)) / 6


measured = {}
with Cluster(["ps", "trainer1"], rpc=True) as cluster:
    for design in (four_calls, pull_push):
        for batch_size in (8, 64):
            measured[design.__name__, batch_size] = measured_bytes(cluster, design, batch_size)
            print(f"{design.__name__:10}  B = {batch_size:>2}: {measured[design.__name__, batch_size]:>9,.0f} B")

slope = (measured["four_calls", 64] - measured["four_calls", 8]) / (64 - 8)
break_even = 8 + (measured["pull_push", 8] - measured["four_calls", 8]) / slope
print(f"break-even: B = {break_even:.1f}; by payload alone {2 * 4 * P / per_image:.1f}")

# %% [markdown]
# Both sides of the break-even, measured: the two points in the middle are runs of their own.

# %%
below, above = int(break_even), int(break_even) + 1
checked = {}
with Cluster(["ps", "trainer1"], rpc=True) as cluster:
    for design in (four_calls, pull_push):
        for batch_size in (below, above):
            checked[design.__name__, batch_size] = measured_bytes(cluster, design, batch_size)

series = {}
for design, label in ((four_calls, "remote forward"), (pull_push, "pull and push")):
    sizes = {8: measured, below: checked, above: checked, 64: measured}
    kilobytes = [found[design.__name__, batch_size] / 1e3 for batch_size, found in sizes.items()]
    series[label] = charts.Series(list(sizes), kilobytes)
charts.lines(
    series,
    title=f"Above {below} images, pull and push is cheaper",
    x="images in a batch",
    y="kB per iteration, both ways",
)

# %% tags=["check"]
assert abs(slope - per_image) < 0.02 * per_image
assert abs(measured["pull_push", 8] - measured["pull_push", 64]) < 100
assert 2 * 4 * P < measured["pull_push", 8] < 2 * 4 * P + 2000
assert not_measured or checked["four_calls", below] < checked["pull_push", below]
assert not_measured or checked["four_calls", above] > checked["pull_push", above]

# %% [markdown]
# The more parameters for each byte of data, the further the break-even moves to the right: large tables, small
# batches and few outputs speak for the remote forward. And gradients tell more about the data than most people think:
# that it stays at home does not make it secret.
#
# ## Is RPC alive, and can torch's profiler see it?
#
# PyTorch's documentation (of 2.9, for one) says of RPC that its APIs "are stable and in maintenance mode", and
# discourages what CUDA cannot do there. So learn here how such a system talks; for a new one, look at process groups
# first.
#
# And its profiler? **Predict first:** three calls, profiled on the trainer that makes them. In how many of its events
# is there a word of RPC?


# %%
def profiled():
    with warnings.catch_warnings(record=True) as told, profile(activities=[ProfilerActivity.CPU]) as seen:
        warnings.simplefilter("always")
        with span("profiled"):
            for _ in range(3):
                rpc.rpc_sync("server", torch.add, (torch.ones(3), 1))
    return [event.key for event in seen.key_averages()], [each.category for each in told]


calls = Cluster(["server", "trainer"], rpc=True).run({"trainer": profiled})
names, told = calls.results["trainer"]
asked = [each for each in operations(calls.trace.within("profiled")) if each.op == "rpc_sync"]
print(f"the profiler's events: {', '.join(names)}; dlearn's: {len(asked)} calls")

# %% [markdown]
# None. It sees that `torch.ones` was computed here, and nothing that was sent; on the server it sees nothing at all. It
# says so, on stderr: it "will profile the caller, but not the worker".

# %% tags=["check"]
assert not any("rpc" in each.lower() or "send" in each.lower() for each in names)
assert "aten::add" not in names  # that was computed on the server
assert "will profile the caller, but not the worker" in calls.output["trainer"]
assert len(asked) == 3
assert not {DeprecationWarning, FutureWarning} & {*told}

# %% [markdown]
# ## Exercise
#
# Three trainers, and the images need a gradient. How many messages does one iteration of all three have now? One more
# crossing is a request and its reply, and nothing else changes. Then: a net of 27,990 parameters, and images and
# outputs as here: by payload alone, up to how many images is the remote forward cheaper? Write your two numbers
# instead of `None`.

# %% tags=["exercise"]
my_answers = {"messages": None, "images": None}
lessons.answer("parameter_server.three_trainers", my_answers)

# %% tags=["answer"]
one_crossing = backward_messages(graphs[True]) - backward_messages(graphs[False])
right = {"messages": 3 * (counts["four_calls"] + one_crossing), "images": 2 * 4 * 27_990 // per_image}
assert lessons.answer("parameter_server.three_trainers", right).right
