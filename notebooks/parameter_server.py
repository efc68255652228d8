# ---
# jupyter:
#   dlearn:
#     ids: [PS1, PS3, PS5, PS7, Q9, Q12]
#     minutes: 0.4
#     needs: []
#     peak_mb: 700
# ---

# %% [markdown]
# # A parameter server: every message
#
# **Goals.** You will be able to count the messages of an iteration over RPC; say where the gradients are stored;
# compare designs by their bytes.
#
# **Before this:** [send_and_receive](send_and_receive.ipynb). **Takes** about 40 minutes.
#
# The model is stored in one process, the *server*; two *trainers* have the images. A trainer sends its images to the
# server, gets the outputs back, and computes the loss. **Which messages does one iteration of training take, and where
# are the gradients stored?** Here you record every message.
#
# `Net` is the model. A trainer only has a `Stub`, whose `forward` calls the server by RPC (remote procedure call). What
# a cell defines exists in all three processes. But `the_net` runs on the server, so both trainers use the server's net.

# %%
import warnings

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import ProfilerActivity, profile

from dlearn import Cluster, draw, lessons, messages, operations, play, span
from dlearn.analysis import iteration, reconcile
from dlearn.lessons import digits

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
# distributed autograd. Only the trainers take part in the two barriers. Without them, one trainer could change the
# parameters while the other still needs them for its backward pass.
#
# **Predict first:** how many messages does one iteration of one trainer take? In the player, step through the messages
# with the arrow keys. The server serves both trainers at the same time, so their messages mix.

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
print(f"for each trainer it is {len(one.steps)}, for both {len(one.messages)}", *one.sentences(), sep="\n")
play.player(run.trace, messages=one.messages, title="The usual answer is 4; each trainer needs 14")

# %% tags=["PS1", "check"]
asked = [step for step in one.steps if not step.control]

assert (len(asked), len(one.steps), len(one.messages)) == (4, 14, 28)
assert [step.phase for step in asked] == ["forward", "forward", "backward", "optimizer"]
assert all(None not in step.messages for step in one.steps)  # each of them for both trainers
assert run.trace.rpc.complete
ops, twice = [step.op for step in one.steps], ("RREF_CHILD_ACCEPT", "RREF_ACK", "CLEANUP_AUTOGRAD_CONTEXT_REQ")
assert all(ops.count(op) == 2 for op in (*twice, "CLEANUP_AUTOGRAD_CONTEXT_RESP"))

# %% [markdown]
# The usual answer is 4: the input, the output, the gradient, and the request for a step. These four messages do what
# the program asked for. The other ten are replies and bookkeeping:
#
# - Each request has a reply, even if the reply is empty.
# - Each call on the net passes a reference to it (an *RRef*). The owner counts references: it accepts each new one, and
#   the other side acknowledges that.
# - A context ends on both sides: the trainer notifies the server, and the server notifies the workers that *it* knows
#   of, which is the trainer again.
#
# The backward pass follows the graph that the forward pass has built, and half of it is on the server:
# [distributed_autograd](distributed_autograd.ipynb) draws it.
#
# ## Where are the gradients stored?
#
# Both trainers have finished their backward pass on the one net, and none has taken a step. **Predict first:** what is
# in `param.grad` on the server?

# %%
CHOICES = ("trainer 1's gradient", "trainer 2's gradient", "their sum", "nothing")
my_grad = lessons.predict("parameter_server.what is in grad", None, choices=CHOICES)


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

# %% tags=["PS3", "check"]
for rank in (1, 2):
    grad, norms = run.results[f"trainer{rank}"]
    assert grad == [None] * 4
    assert torch.allclose(torch.tensor(norms), torch.tensor(alone_gives(rank)), rtol=1e-4)
my_grad and my_grad.against("nothing")

# %% [markdown]
# Nothing. Each iteration has its own context on the server, with its own gradients, and `optimizer.step(context)` reads
# them there. So the gradients of two trainers never mix, and no call of `zero_grad` is needed.
#
# ## Fewer messages?
#
# The trainer has no layers of its own, only a stub. Three other designs need fewer messages:
#
# - `hooked`: a hook on each parameter takes the step as soon as its gradient is ready, *inside* the backward message;
# - `one_call`: the trainer sends images and labels, and the server does forward, backward and step itself;
# - `pull_push`: the trainer gets the parameters, does all the work, and sends the gradients back.
#
# **Predict first:** how many messages does one iteration of `one_call` take?


# %%
my_count = lessons.predict("parameter_server.messages of one_call", None)


def alone(design, batch_size, steps=3):
    """Make `steps` iterations on one trainer, by one of the designs below."""
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
axes = draw.sequence(run.trace.within("iteration 2"))  # of the last design
my_count and my_count.against(counts["one_call"])

# %% tags=["PS5", "check"]
assert counts == {"four_calls": 14, "hooked": 10, "one_call": 2, "pull_push": 4}
assert all(torch.allclose(trained["four_calls"], values, atol=1e-6) for values in trained.values())
assert not torch.equal(trained["four_calls"], Net().as_vector())

# %% [markdown]
# `hooked` saves the call for the step, and the references that go with it. `one_call` needs only a request and its
# reply. Both have a price. A hook takes its step whether the trainer wants it or not (so it cannot clip over all
# gradients). With `one_call`, the gradients of two trainers would add up in one `param.grad`. Only `four_calls` lets a
# trainer have layers of its own.
#
# ## Does the data leave the trainer?
#
# "With a parameter server the data never leaves the trainer" is true only for pull and push: the trainer gets
# parameters and sends gradients, 2 · 4P bytes for P parameters, whatever the batch size. In a remote forward the images
# travel. For each image, the trainer sends 64 numbers, gets 10 outputs, and sends 10 gradients. With 1,370 parameters,
# up to which batch size does the remote forward send less?

# %%
P = sum(parameter.numel() for parameter in Net().parameters())
per_image = (64 + 10 + 10) * 4
not_measured = reconcile(run.trace).not_measured  # why the kernel's counters cannot be read, or nothing


def measured_bytes(cluster, design, batch_size):
    """Bytes of one iteration on the wire, both ways, from the difference between eight iterations and two.

    They are the kernel's counts, or predicted where it has no counters.
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
sizes = int(break_even), int(break_even) + 1  # just below it, and just above
with Cluster(["ps", "trainer1"], rpc=True) as cluster:
    near = [[measured_bytes(cluster, design, size) for size in sizes] for design in (four_calls, pull_push)]

# %% tags=["PS7", "check"]
assert P == 1_370
assert abs(slope - per_image) < 0.02 * per_image
assert abs(measured["pull_push", 8] - measured["pull_push", 64]) < 100
assert 2 * 4 * P < measured["pull_push", 8] < 2 * 4 * P + 1500
assert not_measured or (near[0][0] < near[1][0] and near[0][1] > near[1][1])

# %% [markdown]
# The more parameters a model has, the larger the batches for which the remote forward sends less. It suits large
# tables, small batches and few outputs. (Gradients reveal much of the data, so pull and push keeps no secrets.)
#
# ## Is RPC alive, and can torch's profiler see it?
#
# PyTorch's documentation (of 2.9, for one) says of RPC that its APIs "are stable and in maintenance mode". So use it to
# learn how such a system communicates; for a new system, look at process groups first. The trainer now makes three RPC
# calls under torch's profiler. How many of its events name one of them?


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

# %% tags=["Q9", "Q12", "check"]
assert not any("rpc" in each.lower() or "send" in each.lower() for each in names)
assert "aten::add" not in names  # that was computed on the server
assert "will profile the caller, but not the worker" in calls.output["trainer"]
assert len(asked) == 3
assert not {DeprecationWarning, FutureWarning} & {*told}
assert "deprecated" not in calls.output["trainer"]  # when RPC began

# %% [markdown]
# None. The profiler shows that `torch.ones` was computed here, but nothing that was sent. It says on stderr that it
# "will profile the caller, but not the worker".
#
# ## Exercises
#
# 1. There are three trainers, and the images need a gradient, which is sent by one more request with its reply. How
#    many messages does one iteration of all three take? And with a net of 27,990 parameters, and images and outputs as
#    here: by payload alone, up to how many images does the remote forward send less? Write two numbers instead of
#    `None`.
# 2. Write a server with sends and receives. The docstring says what it must do.

# %% tags=["exercise"]
my_answers = {"messages": None, "images": None}
lessons.answer("parameter_server.three_trainers", my_answers)

# %% tags=["answer"]
one_crossing = sum(step.op.startswith("BACKWARD_AUTOGRAD") for step in one.steps)  # a request and its reply
right = {"messages": 3 * (counts["four_calls"] + one_crossing), "images": 2 * 4 * 27_990 // per_image}
assert lessons.answer("parameter_server.three_trainers", right).right


# %% tags=["exercise"]
def my_server(parameters, gradient_of, steps, rate):
    """Keep `parameters` on rank 0. In each step rank 0 sends them to all others; these send back
    `gradient_of(parameters, step)`, and rank 0 takes an SGD step with the mean, in place. Send tensors only.
    """
    return  # replace this by your server and your workers


lessons.check("parameter_server", my_server, student="")  # your name: it chooses the data
