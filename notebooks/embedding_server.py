# ---
# jupyter:
#   dlearn:
#     ids: [PS4]
#     minutes: 0.2
#     needs: []
#     peak_mb: 900
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # An embedding table on a server: what crosses the wire?
#
# **Goals.** You will be able to predict what a lookup in a remote table sends, there and back.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 30 minutes.
#
# A table has 50,000 rows of 64 numbers, 12,800,000 bytes, and lives on a server. A trainer holds 16 bags of 8 indices,
# and needs the sum of the 8 rows of each bag. Then it trains, and the table's gradient has to get to the server. **How
# many bytes is that?** The whole table, the rows that are used, or less?

# %%
import matplotlib.pyplot as plt
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from dlearn import Cluster, lessons, messages, play, span
from dlearn.analysis import iteration, reconcile

ROWS, WIDTH = 50_000, 64  # of numbers of 4 bytes
BAGS, EACH = 16, 8

# %% [markdown]
# The server's part. With `sparse=True` the gradient of the table holds only the rows that were used.


# %%
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.at_first = self.bag.weight.detach().clone()

    def forward(self, indices, offsets):
        return self.bag(indices, offsets)

    def parameter_rrefs(self):
        return [rpc.RRef(self.bag.weight)]

    def gradient(self, context):
        return dist_autograd.get_gradients(context)[self.bag.weight]

    def about_gradient(self, context):
        """Its layout and shape, how many rows it holds, and their bytes, those of the indices included."""
        held = self.gradient(context)
        return held.layout, tuple(held.shape), held._nnz(), held._values().nbytes + held._indices().nbytes

    def changed_rows(self):
        return (self.bag.weight != self.at_first).any(1).sum().item()


def some_bags(each):
    """Indices of rows, one after the other, and where each bag begins."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(ROWS, (BAGS * each,), generator=generator), torch.arange(0, BAGS * each, each)


# %% [markdown]
# ## One iteration
#
# The trainer calls `forward` on the server, computes a loss from what comes back, goes backward through both, and lets
# the server's optimizer make its step. **Predict first:** how many bytes of tensors go out, come back, and go out again
# in the backward pass? Write your guesses instead of `None`.

# %%
my_guess = {"indices, to the server": None, "sums, to the trainer": None, "backward, to the server": None}


def train():
    table = rpc.remote("server", Table)
    optimizer = DistributedOptimizer(torch.optim.SGD, table.rpc_sync().parameter_rrefs(), lr=0.1)
    torch.manual_seed(2)
    head = nn.Linear(WIDTH, 1)
    indices, offsets = some_bags(EACH)
    with dist_autograd.context() as context:
        sums = table.rpc_sync().forward(indices, offsets)
        dist_autograd.backward(context, [head(sums).square().mean()])
        optimizer.step(context)
    return len(indices.unique()), table.rpc_sync().changed_rows()


def tensor_bytes(message):
    return sum(tensor.payload_bytes for tensor in message.tensors)


run = Cluster(["server", "trainer"], rpc=True, measure="phase").run({"trainer": train}, timeout=60)
told = iteration(run.trace)
carrying = [message for message in told.messages if message.tensors]
for (name, guess), message in zip(my_guess.items(), carrying, strict=True):
    print(f"{name:24}{tensor_bytes(message):6,} B  you guessed {guess!s:6}  {message.what}")

# %% [markdown]
# Three messages carry tensors. Out go the indices, 8 bytes each, and where each bag begins; back come 16 sums of 64
# numbers. And backward? Not the gradient of the table, but **the gradient of what came back**: it has the size of the
# sums. Only the server needs to know which rows they were made of, and it has known that since the forward pass.

# %% tags=["PS4", "check"]
assert [tensor_bytes(message) for message in carrying] == [
    BAGS * EACH * 8 + BAGS * 8,  # indices and offsets
    BAGS * WIDTH * 4,
    BAGS * WIDTH * 4,
]
assert [(run.trace.label(message.src), message.op) for message in carrying] == [
    ("trainer", "FORWARD_AUTOGRAD_REQ"),
    ("server", "FORWARD_AUTOGRAD_RESP"),
    ("trainer", "BACKWARD_AUTOGRAD_REQ"),
]

# %% [markdown]
# The whole iteration, step by step. Hide the control messages to see the story alone.

# %%
play.player(run.trace, messages=told.messages, title="One iteration: three messages carry tensors")

# %% [markdown]
# The kernel has counted the bytes of the connection, too. In the table below, look at *measured*: how much is added to
# the tensors above? And what does the step of the optimizer cost, which changes the table?

# %%
for phase, src, dst, *numbers in told.phase_rows():
    print(f"{phase:10} {src:8} {dst:8}", *(f"{number:>10}" for number in numbers))

# %% [markdown]
# Some hundred bytes are added in each phase: names, numbers of messages, framing. The step costs as little, in both
# directions, since the gradient is where the table is: it only has to be told to go. Afterwards just the 128 rows
# that were in the bags are different.
#
# (*observer* is what the recorder adds itself; *residue*, what prediction and kernel differ by, if C++ packed no call.)

# %% tags=["check"]
measured = {(each.phase, each.src): each.measured_bytes for each in told.phases}
if None not in measured.values():
    in_tensors = {("forward", 1): 1152, ("forward", 0): 4096, ("backward", 1): 4096}  # 1: the trainer
    assert all(0 < size - in_tensors.get(phase, 0) < 1000 for phase, size in measured.items())
    assert all(abs(each.residue_bytes) < 20 for each in told.phases if each.phase != "optimizer")
assert run.results["trainer"] == (128, 128)  # rows in the bags, rows that have changed
assert len(told.messages) == 14

# %% [markdown]
# ## What does the server hold?
#
# `get_gradients` on the server shows the gradient of the table. **Predict first:** what is its shape, and how many
# bytes does it hold?


# %%
def look():
    table = rpc.remote("server", Table)
    with dist_autograd.context() as context:
        sums = table.rpc_sync().forward(*some_bags(EACH))
        dist_autograd.backward(context, [sums.sum()])
        return table.rpc_sync().about_gradient(context)


layout, shape, rows, held_bytes = Cluster(["server", "trainer"], rpc=True).run({"trainer": look}).results["trainer"]
print(f"{layout}, shape {list(shape)}: {rows} rows, {held_bytes:,} B")

# %% [markdown]
# It has the shape of the whole table, and holds 128 rows of it with their indices. That is eight times the gradient
# that crossed, and a small part of the table. **It never travels.**

# %% tags=["check"]
assert (layout, shape, rows) == (torch.sparse_coo, (ROWS, WIDTH), BAGS * EACH)
assert held_bytes == 128 * (64 * 4 + 8) == 33_792
assert max(tensor_bytes(message) for message in told.messages) < held_bytes

# %% [markdown]
# ## Other ways to the same gradient
#
# Without distributed autograd, the trainer fetches the rows, adds them up and goes backward by itself, and pushes a
# gradient of the table to the server. It may push indices and rows, a sparse tensor, or a dense one.


# %%
class PushedTable(Table):
    def rows(self, indices):
        return self.bag.weight.detach()[indices]

    def push_rows(self, indices, values):
        self.push(sparse(indices, values))

    def push(self, gradient):
        self.bag.weight.grad = gradient

    def keep(self, context):
        self.kept = self.gradient(context).to_dense()

    def same(self):
        return torch.allclose(self.bag.weight.grad.to_dense(), self.kept)


def sparse(indices, values):
    return torch.sparse_coo_tensor(indices[None], values, (ROWS, WIDTH), check_invariants=True)


def push_indices_and_rows(table, indices, values):
    table.rpc_sync().push_rows(indices, values)


def push_sparse(table, indices, values):
    table.rpc_sync().push(sparse(indices, values))


def push_dense(table, indices, values):
    table.rpc_sync().push(torch.zeros(ROWS, WIDTH).index_add_(0, indices, values))


PUSHES = (push_indices_and_rows, push_sparse, push_dense)

# %% [markdown]
# **Predict first:** put the four ways in order, the cheapest first. How many times as many bytes does the dearest take?

# %%
my_order = []  # of "autograd", "push_indices_and_rows", "push_sparse", "push_dense"


def four_ways(each):
    table = rpc.remote("server", PushedTable)
    torch.manual_seed(2)
    head = nn.Linear(WIDTH, 1)
    indices, offsets = some_bags(each)

    def by_autograd(keep=False):
        with dist_autograd.context() as context:
            sums = table.rpc_sync().forward(indices, offsets)
            dist_autograd.backward(context, [head(sums).square().mean()])
            if keep:
                table.rpc_sync().keep(context)

    by_autograd(keep=True)  # once more than needed, to compare the others with it
    with span("autograd"):
        by_autograd()
    same = []
    for push in PUSHES:
        with span(push.__name__):
            rows = table.rpc_sync().rows(indices).requires_grad_()
            sums = rows.view(BAGS, each, WIDTH).sum(1)
            head(sums).square().mean().backward()
            push(table, indices, rows.grad)
        same.append(table.rpc_sync().same())
    return same


# %% [markdown]
# All four go backward from the same loss. Does the same gradient arrive in each?


# %%
def watch(each):
    """The three tensor messages of each way: what it is, from whom, bytes. And the run."""
    run = Cluster(["server", "trainer"], rpc=True, measure="phase").run({"trainer": four_ways}, each, timeout=60)
    ways = {}
    for way in ("autograd", *(push.__name__ for push in PUSHES)):
        found = [message for message in messages(run.trace.within(way)) if message.tensors]
        ways[way] = [(run.trace.label(message.src), tensor_bytes(message)) for message in found]
    return ways, run


ways, run = watch(EACH)
print("the same gradient in all four:", all(run.results["trainer"]))

# %% [markdown]
# In the figure, each way has three bars: what goes out, what comes back, and the gradient. The scale is logarithmic:
# from one line to the next it is ten times as much. Which bar differs the most?


# %%
def draw_bars(ways):
    _, axes = plt.subplots(figsize=(9, 4.4), dpi=110, facecolor="white", layout="constrained")
    for place, (way, sent) in enumerate(ways.items()):
        kinds = ["indices out", "sums back" if way == "autograd" else "rows back", "gradient out"]
        for line, (_, size) in enumerate(sent):
            y = 4 * place + line
            axes.barh(y, size, height=0.9, color=["#9aa5b8", "#c9ced8", "#3b5b92"][line])
            axes.text(size * 1.15, y, f"{size:,} B  {kinds[line]}", va="center", fontsize=10)
    axes.set_yticks([4 * place + 1 for place in range(len(ways))], [way.replace("_", " ") for way in ways], fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(100, 10**9)
    axes.set_xticks([10**power for power in (2, 3, 4, 5, 6, 7)], ["100 B", "1 kB", "10 kB", "100 kB", "1 MB", "10 MB"])
    axes.minorticks_off()
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Bytes of tensors in one iteration (logarithmic)", loc="left", fontsize=12, fontweight="bold")
    return axes


axes = draw_bars(ways)

# %% [markdown]
# The dense gradient, of course: it is the whole table, nearly all of it zeros. A sparse tensor is indices and rows,
# and costs what these cost. Autograd is cheapest both ways, since the *sums* travel, not the rows.
#
# And on the wire? The trainer's side of the connection, as the kernel counted it:

# %%
wire = reconcile(run.trace)
totals = {way: sum(size for _, size in sent) for way, sent in ways.items()}
for part in wire.parts:
    measured = next((pair.measured_bytes for pair in part.pairs if pair.src == 1), None)
    if part.what in ways and measured is not None:
        tensors = sum(size for sender, size in ways[part.what] if sender == "trainer")
        added = measured - sum(pair.observer_bytes for pair in part.pairs if pair.src == 1) - tensors
        print(f"{part.what:22} tensors out {tensors:>12,} B, on the wire {tensors + added:>12,} B: added {added:>6,} B")
        assert 1000 < added < 2000
print(wire.not_measured)
for way, total in totals.items():
    print(f"{way:22} {total:>12,} B of tensors, out and back, {total / totals['autograd']:8,.1f} times")
if my_order:
    print("your order:", "right" if sorted(my_order, key=totals.get) == my_order else "not yet")

# %% [markdown]
# Between one and two thousand bytes are added in each way, whatever the tensors are: to small ones, that is much.

# %% tags=["check"]
ROWS_BYTES = BAGS * EACH * WIDTH * 4
assert run.results["trainer"] == [True, True, True]
assert ways == {
    "autograd": [("trainer", 1152), ("server", 4096), ("trainer", 4096)],
    "push_indices_and_rows": [("trainer", 1024), ("server", ROWS_BYTES), ("trainer", 1024 + ROWS_BYTES)],
    "push_sparse": [("trainer", 1024), ("server", ROWS_BYTES), ("trainer", 1024 + ROWS_BYTES)],
    "push_dense": [("trainer", 1024), ("server", ROWS_BYTES), ("trainer", 12_800_000)],
}
assert totals["autograd"] < totals["push_sparse"] == totals["push_indices_and_rows"] < totals["push_dense"]

# %% [markdown]
# ## Exercise
#
# Now a bag has 64 indices instead of 8. How many bytes is the gradient that goes out, with autograd, and if indices
# and rows are pushed? Write your two numbers instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = {"autograd": None, "pushed": None}
lessons.answer("embedding_server.longer_bags", my_answer)

# %% tags=["answer"]
longer, _ = watch(64)
sent = {"autograd": longer["autograd"][2][1], "pushed": longer["push_indices_and_rows"][2][1]}
assert lessons.answer("embedding_server.longer_bags", sent).right

# %% [markdown]
# And the other way round: which bags would make it cheaper to push indices and rows?
#
# *Text and figures: CC BY 4.0. Code: MIT.*
