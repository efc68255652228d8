# ---
# jupyter:
#   dlearn:
#     ids: [PS4]
#     minutes: 0.2
#     needs: []
#     peak_mb: 900
# ---

# %% [markdown]
# # An embedding table on a server: what crosses the wire?
#
# **Goals.** You will be able to predict what a lookup in a remote table sends in both directions.
#
# **Before this:** [parameter_server](parameter_server.ipynb). **Takes** about 30 minutes.
#
# A table of 50,000 rows with 64 numbers, 12,800,000 bytes, is stored on a server. A trainer has 16 bags of 8 indices,
# and needs the sum of the 8 rows of each bag. Then it trains, and the server needs the table's gradient. **How many
# bytes travel: the whole table, the rows that are used, or less?** With `sparse=True` the gradient of the table holds
# only the rows that were used.

# %%
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from dlearn import Cluster, lessons, messages, span
from dlearn.analysis import iteration, reconcile
from dlearn.lessons import charts

ROWS, WIDTH = 50_000, 64  # of numbers of 4 bytes
BAGS, EACH = 16, 8


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
        """Layout, shape, number of stored rows, and bytes (with those of the indices) of a gradient."""
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
# The trainer calls `forward` on the server, computes a loss from the result, runs the backward pass through both, and
# asks the server's optimizer to take a step. **Predict first:** how many bytes does the trainer send in the backward
# pass? Write your number instead of `None`. Below the messages, look at *measured*, the kernel's count. How many bytes
# are added to the tensors?

# %%
my_backward = lessons.predict("embedding_server.backward", None)


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
for message in carrying:
    print(f"{tensor_bytes(message):6,} B  {message.what}")
for phase, src, dst, *numbers in told.phase_rows():
    print(f"{phase:10} {src:8} {dst:8}", *(f"{number:>10}" for number in numbers))
my_backward and my_backward.against(tensor_bytes(carrying[2]))

# %% [markdown]
# Three messages contain tensors. The trainer sends the indices, 8 bytes each, and the offset of each bag; 16 sums of 64
# numbers come back. In the backward pass the trainer does not send the gradient of the table, but **the gradient of the
# sums**, which has their size. Only the server needs to know which rows were summed, and it knows since the forward
# pass.
#
# Each phase adds some hundred bytes: names, message numbers, framing. The step sends no more than that, because the
# gradient is already on the server. Afterwards only the 128 rows that were in the bags have changed. (*observer* is
# what the recorder adds; *residue* is the kernel's count minus the prediction.)

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
# `get_gradients` on the server shows the gradient of the table. **Predict first:** how many bytes does it hold?

# %%
my_held = lessons.predict("embedding_server.held gradient", None)


def look():
    table = rpc.remote("server", Table)
    with dist_autograd.context() as context:
        sums = table.rpc_sync().forward(*some_bags(EACH))
        dist_autograd.backward(context, [sums.sum()])
        return table.rpc_sync().about_gradient(context)


layout, shape, rows, held_bytes = Cluster(["server", "trainer"], rpc=True).run({"trainer": look}).results["trainer"]
print(f"{layout}, shape {list(shape)}: {rows} rows, {held_bytes:,} B")
my_held and my_held.against(held_bytes)

# %% [markdown]
# It has the shape of the whole table, but contains only 128 rows with their indices. That is eight times the gradient
# that was sent, and a small part of the table. **It never travels.**

# %% tags=["check"]
assert (layout, shape, rows) == (torch.sparse_coo, (ROWS, WIDTH), BAGS * EACH)
assert held_bytes == 128 * (64 * 4 + 8) == 33_792
assert max(tensor_bytes(message) for message in told.messages) < held_bytes

# %% [markdown]
# ## Other ways to the same gradient
#
# Without distributed autograd, the trainer fetches the rows, adds them, runs the backward pass by itself, and pushes a
# gradient of the table to the server: as indices and rows, as a sparse tensor, or as a dense one. **Predict first:**
# which of the four ways sends the fewest bytes of tensors, out and back?


# %%
FOUR = ("autograd", "push_indices_and_rows", "push_sparse", "push_dense")
my_cheapest = lessons.predict("embedding_server.fewest bytes", None, choices=FOUR)


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


# %%
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


# %%
def watch(each):
    """Return what the three tensor messages of a way are, from which worker, their bytes; and the run."""
    run = Cluster(["server", "trainer"], rpc=True, measure="phase").run({"trainer": four_ways}, each, timeout=60)
    ways = {}
    for way in ("autograd", *(push.__name__ for push in PUSHES)):
        found = [message for message in messages(run.trace.within(way)) if message.tensors]
        ways[way] = [(run.trace.label(message.src), tensor_bytes(message)) for message in found]
    return ways, run


ways, run = watch(EACH)
print("the same gradient in all four:", all(run.results["trainer"]))
totals = {way: sum(size for _, size in sent) for way, sent in ways.items()}
my_cheapest and my_cheapest.against(min(totals, key=totals.get))

# %% [markdown]
# In the figure, each way has three bars: what the trainer sends first, what comes back, and the
# gradient. The scale is logarithmic. Which bar differs the most?

# %%
sizes = {way: [size for _, size in sent] for way, sent in ways.items()}
names = ("indices out", "sums or rows back", "gradient out")
columns = zip(names, zip(*sizes.values(), strict=True), strict=True)
axes = charts.bars(
    [way.replace("_", " ") for way in ways],
    [charts.Part(name, column) for name, column in columns],
    title=f"A dense gradient takes {sizes['push_dense'][2]:,} B,"
    f" a sparse one {sizes['push_sparse'][2]:,}, that of autograd {sizes['autograd'][2]:,}",
    y="bytes of tensors in one iteration",
    text=lambda size: f"{size / 1000:,.1f} kB",
)
axes.set(yscale="log", ylim=(100, 5e7))
axes.minorticks_off()

# %% [markdown]
# The dense gradient: it has the size of the whole table, and nearly all of it is zeros. A sparse tensor consists of
# indices and rows, and has their size. Autograd sends the fewest bytes both ways: it sends *sums*, not rows.
#
# The kernel also counts the trainer's connection. Each way adds one to two thousand bytes, whatever the tensors are:

# %%
wire = reconcile(run.trace)
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
# Now a bag has 64 indices instead of 8. How many bytes does the trainer send for the gradient, with autograd, and if it
# pushes indices and rows? Write your two numbers instead of `None`, and run the cell.

# %% tags=["exercise"]
my_answer = {"autograd": None, "pushed": None}
lessons.answer("embedding_server.longer_bags", my_answer)

# %% tags=["answer"]
longer, _ = watch(64)
sent = {"autograd": longer["autograd"][2][1], "pushed": longer["push_indices_and_rows"][2][1]}
assert lessons.answer("embedding_server.longer_bags", sent).right

# %% [markdown]
# For which bags would pushing indices and rows send less than autograd?
