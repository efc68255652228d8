# ---
# jupyter:
#   dlearn:
#     ids: [DD5, Q4]
#     minutes: 2.2
#     needs: []
#     peak_mb: 600
# ---

# %% [markdown]
# # A museum of hangs
#
# **Goals.** You will be able to read who waits for whom; tell a hang from a silent wrong result; repair uneven
# batches.
#
# **Before this:** [quickstart](quickstart.ipynb). **Takes** about 35 minutes.
#
# A distributed program that is wrong often says nothing: it stands still. After half an hour a timeout ends
# it, with a message about "recv" that names no rank and no line. Here are twenty such programs, on real
# ranks: some hang, some die, and, worse, some return a wrong number without an error.
#
# Each gets a diagnosis in one sentence: **who waits for whom, in which call, and what did the other never
# do?**
#
# ## A layer that one rank leaves out
#
# A model of three layers under DDP. Rank 1 does not use layer `b` in its third step (a `dropout` of layers, a
# branch that depends on the data). **Predict first:** which rank hangs, and where: in the step without `b`, or
# later? What does rank 1 do meanwhile?

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn import Cluster, Trace, draw, explain, lessons


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, use_b):
        h = self.a(x).relu()
        h = self.b(h) if use_b else h
        return self.c(h)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.0158)  # a bucket for each layer, 16,640 B
    for step in range(3):
        leave_out = dist.get_rank() == 1 and step == 2
        model(torch.randn(8, 64), not leave_out).sum().backward()


run = Cluster(2, hang_after=1).run(train, timeout=3, check=False)

# %% [markdown]
# The line came after one second of silence, *while it hung*: `hang_after=1`. Two seconds later the time was
# over (`timeout=3`), the ranks were ended, and the run has an error, in the same words:

# %%
print(run.error)

# %% tags=["check"]
assert "rank 0 waits for rank 1 in all_reduce #11 (bucket 1: b.bias, b.weight; In[" in run.error.what
assert "]:25)" in run.error.what  # the line of `train` that calls backward
assert "rank 1 never produced the gradients of b.bias, b.weight in backward pass 3" in run.error.what
assert "it has returned from its function" in run.error.what
assert "nothing has happened for 1 s: rank 0 waits for rank 1 in all_reduce #11" in run.output[0]

# %% [markdown]
# Rank 1 is *done*: its backward pass returned, and so did its function. DDP waits only for all-reduces that it
# has begun, and without the gradients of `b` it never began the one of their bucket. So the rank that did
# nothing wrong is the one that hangs. (With one step more, rank 1 raises at its next forward pass.)
#
# In the picture, look at the end of rank 0's lane: two bars are hatched (waiting) and have a red end. What did rank 1
# never do, of each of the two? And count the all-reduces of the first step, and of the second.

# %%
axes = draw.timeline(run.trace.where(kind="collective", op="all_reduce"))

# %% [markdown]
# (The first step has one bucket with everything in it. Then DDP knows in which order the gradients come, and
# builds three.)
#
# ## How is it known?
#
# Each rank notes when a gradient becomes ready. Here are those of the last backward pass:

# %%
last = {}
for rank in (0, 1):
    ready = run.trace.where(kind="gradient", rank=rank).events
    last[rank] = [event.parameter for event in ready if event.backward == ready[-1].backward]
    print(f"rank {rank}:", *last[rank])

# %% [markdown]
# Everything was in the files when the ranks were ended: a line is written when a call *begins*, and another
# when it ends. So the question can be asked later, on another machine, without torch. These are the last sentences of
# the explanation:

# %%
story = explain(Trace.load(run.folder / "trace")).sentences
print(*story[-2:], sep="\n")

# %% tags=["check"]
assert {"a.weight", "b.weight", "c.weight"} < set(last[0])
assert {"a.weight", "c.weight"} < set(last[1])
assert not any(name.startswith("b.") for name in last[1])
assert story[-1].removesuffix(".") in run.error.what

# %% [markdown]
# You get the same sentence for a job of your own: `dlearn run --hang-after 60 train.py`, or `with
# dlearn.record("traces/mine", hang_after=60):`.
#
# ## Wrong order
#
# The paper on DDP warns: if ranks reduce in different orders, the result is wrong, or it hangs. Is that so?
#
# First the order in which gradients become *ready*. On rank 1 the two branches are computed the other way
# round. **Predict first:** wrong, hang, or neither?


# %%
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if dist.get_rank() == 0:
            left, right = self.left(x), self.right(x)
        else:
            right, left = self.right(x), self.left(x)
        return left + right


def gradients_in_another_order():
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.0158)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


ordered = Cluster(2).run(gradients_in_another_order)
for rank in (0, 1):
    ready = ordered.trace.where(kind="gradient", rank=rank).events[-4:]
    sent = ordered.trace.where(kind="collective", op="all_reduce", rank=rank).events[-2:]
    print(f"rank {rank}: ready:", *(each.parameter for each in ready), "| sent:", *(each.seq for each in sent))

# %% [markdown]
# Neither. The gradients became ready in different orders, but DDP *launches* its buckets by their number,
# the same on all ranks: one that is ready too early waits for its turn.

# %% tags=["check"]
from dlearn import operations

first, second = (ordered.trace.where(kind="gradient", rank=rank).events[-4:] for rank in (0, 1))
reduced = [each.bucket.index for each in operations(ordered.trace) if each.bucket is not None]

assert [each.parameter for each in first] != [each.parameter for each in second]
assert reduced[-2:] == [0, 1]
assert ordered.results[0] == ordered.results[1]
assert ordered.error is None

# %% [markdown]
# Now the order of *launching*, by hand. Both tensors have one number. **Predict first:** the sums should be
# 2 and 20. What comes out?


# %%
def swapped():
    loss, accuracy = torch.tensor([1.0]), torch.tensor([10.0])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        dist.all_reduce(accuracy)
    else:
        dist.all_reduce(accuracy)
        dist.all_reduce(loss)
    return loss.item(), accuracy.item()


wrong = Cluster(2).run(swapped)
print(wrong.results)
print(*explain(wrong.trace).sentences[-2:], sep="\n")

# %% [markdown]
# 11 and 11, and no error: gloo matches calls by their number and nothing else. That the lines differ is all
# that can be seen from outside. It is an observation and no verdict: a correct program may do the same. The
# lesson is to keep collectives out of branches.

# %% tags=["check"]
import re

from dlearn import analysis

assert wrong.results == {0: (11.0, 11.0), 1: (11.0, 11.0)}
assert [found.why for found in analysis.mismatches(wrong.trace)] == ["sites", "sites"]
told = re.search(r"rank 0 called all_reduce #1 at In.*:(\d+), rank 1 at In.*:(\d+)", str(explain(wrong.trace)))
assert told.groups() == ("4", "7")

# %% [markdown]
# ## Two buckets, and threads
#
# PowerSGD compresses the gradients of each bucket: a *communication hook* of DDP, with callbacks that send
# again when the first answer has come. With one bucket that works on gloo. With two it is a race: the callbacks of
# one bucket run on gloo's own threads, while the training thread begins the other bucket. So the order of
# launching differs from rank to rank. Nothing is wrong with this code:

# %%
from dlearn.lessons import museum

powersgd = museum.visit(museum.exhibit("powersgd_with_two_buckets"))
print(powersgd.exhibit.source)
print(powersgd.sentence)

# %% tags=["check"]
assert powersgd.exhibit.is_told_by(powersgd.sentence)
assert "with different sizes" in powersgd.sentence or "all ranks called it" in powersgd.sentence
threads = {event.thread for event in powersgd.run.trace.where(op="all_reduce").events}
assert "" in threads  # the training thread,
assert len(threads) > 1  # and gloo's

# %% [markdown]
# That is the failure that the paper warns of, in torch as it is today. A race decides between two ways to hang, and
# the sentence tells which it was:
#
# - **Another order.** "The ranks called it with different sizes", one of them *for bucket 0*, the other *for bucket
#   1*: what one rank sends for one bucket meets what the other sends for the other. Often one of the two sizes is 0
#   (nothing is left uncompressed), that rank's call returns at once, and the other rank waits alone. If both send
#   something, gloo may abort (SIGABRT).
# - **No thread left.** "All ranks called it, and it does not end", and it was called *on thread Dummy-1* or
#   *Dummy-2*: so Python calls threads that it did not start, and these two are gloo's. Each waits, in a callback, for
#   its own all-reduce, which would need a thread of gloo's to run on.
#
# ## Calls that call back
#
# With RPC each worker has a few threads (eight here) for what others ask of it. A function that is called, calls
# back, and waits for the answer, holds its thread meanwhile. **Predict first:** how deep can two workers call each
# other?

# %%
import inspect

from dlearn.lessons import hangs

cycle = museum.visit(museum.exhibit("rpc_cycle"))
print(inspect.getsource(hangs.ping_pong))
print(cycle.sentence)

# %% tags=["check"]
assert cycle.exhibit.is_told_by(cycle.sentence)
pending = [each for each in cycle.run.trace.rpc.exchanges if each.call is not None and each.call.pending]
assert len(pending) == 1 + 8 + 8  # rank 0's own, and one of each thread of both workers

# %% [markdown]
# Seventeen calls: one of the program, and one from each thread of both workers. The last has arrived, and no thread is
# left to run it.
#
# ## All of them
#
# Now the whole museum. Each runs on real ranks and is ended after three seconds; the seconds are those from the
# call that could not end to the sentence. What dies at once is told when the run has ended.

# %%
visits = []
for exhibit in museum.EXHIBITS:
    visited = museum.visit(exhibit)
    visits.append(visited)
    after = f" [after {visited.seconds:.1f} s]" if visited.seconds is not None else ""
    print(f"{exhibit.name}: {exhibit.what}{after}\n   {visited.sentence}\n")

# %% tags=["check"]
assert len(visits) == 20
for visited in visits:
    assert visited.exhibit.is_told_by(visited.sentence), visited.files
    if visited.hung:
        assert visited.sentence in visited.live, visited.live  # from the live cluster,
        assert visited.sentence in visited.error, visited.error  # at its end, and from the files: the same

# %% [markdown]
# ## One of them, live
#
# Until now each was ended by a timeout. In your own notebook, a cell that takes longer than two seconds shows a row for
# each rank, and after three seconds of waiting the sentence appears there, while it hangs. A held job hangs for as long
# as you like to look (lead it there yourself in [deadlock_by_hand](deadlock_by_hand.ipynb)): here both sends of the
# circle were let through.

# %%
live = Cluster(2, hold=True).run(hangs.send_send_cycle)
live.release(0)
live.release(1)
live

# %%
print(live.hang)

# %% tags=["check"]
assert len(live.waiting) == 0  # nothing is at the gate: both are inside of torch
assert live.ranks.keys() == {0, 1}
assert all("in send #1" in now for now in live.ranks.values())
assert "rank 0" in live.hang
assert "rank 1" in live.hang
live.end()

# %% [markdown]
# ## What bare torch says
#
# The same functions, without any hook of dlearn, with a timeout of one second instead of half an hour; then again
# with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, torch's own way to find such mistakes. The table quotes the last line of
# each rank. Look for the names of ranks, of operations, of parameters, of lines.

# %%
table = museum.table(visits)
table

# %% [markdown]
# Without DETAIL no message of a hang names a rank, a call or a line. With DETAIL, torch compares what the
# ranks call before each collective, and names the rank that is late. That finds five of the twenty, beside
# the rank that was killed. It is blind to swapped calls of equal shape, to a sum that is summed again, to
# sends and receives; and with torch 2.13, DDP on gloo ends with a segmentation fault under it.

# %% tags=["check"]
rows = {row.visit.exhibit.name: row for row in table.rows}

for row in table.rows:
    if row.visit.exhibit.ends == "hangs" and "SIG" not in row.torch:  # PowerSGD may abort
        messages = [line.partition(": ")[2] for line in row.torch.splitlines()]
        assert not any("rank " in message or "#" in message or ".py" in message for message in messages)
assert "Timed out waiting 1000ms" in rows["skipped_all_reduce"].torch
assert "Ranks 1 failed to pass monitoredBarrier" in rows["skipped_all_reduce"].detail
found = [name for name, row in rows.items() if "mismatch between" in row.detail or "failed to pass" in row.detail]
assert {*found} - {"dead_rank"} == {
    "skipped_all_reduce",
    "all_reduce_against_broadcast",
    "swapped_of_different_shape",
    "different_dtype",
    "rank_asleep",
}
assert "mismatch between collectives" in rows["swapped_of_different_shape"].detail
assert "(11.0, 11.0)" in rows["swapped_of_equal_shape"].detail  # wrong, and not noticed
assert "18.0" in rows["double_all_reduce"].detail  # 6 would be right

# %% [markdown]
# ## Exercise
#
# Rank 0 has three batches, rank 1 has two. **Who is stuck?** Run it, read the sentence, and repair it. (DDP has
# `join()` for this: `with model.join():` around the loop, and a rank that is done takes part in the all-reduces of
# the others. Or stop both at the smaller number.)


# %%
def passes(run):
    """How many backward passes each rank has made, as its gradients show; "hangs" if one waits for ever."""
    ready = [run.trace.where(kind="gradient", rank=rank).events for rank in (0, 1)]
    return "hangs" if run.error else [len({each.backward for each in events}) for events in ready]


# %% tags=["exercise"]
def uneven():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    batches = 3 if dist.get_rank() == 0 else 2
    for _ in range(batches):
        model(torch.randn(4, 8)).sum().backward()
    return batches


run = Cluster(2).run(uneven, timeout=3, check=False)
print(run.error or f"both have returned: {run.results}")
lessons.answer("museum_of_hangs.uneven", passes(run))


# %% tags=["answer"]
def repaired():
    model = DistributedDataParallel(nn.Linear(8, 1))
    with model.join():
        for _ in range(3 - dist.get_rank()):
            model(torch.randn(4, 8)).sum().backward()


assert "rank 0 waits for rank 1" in run.error.what
assert "rank 1 never began backward pass 3" in run.error.what
assert lessons.answer("museum_of_hangs.uneven", passes(Cluster(2).run(repaired))).right
assert not lessons.answer("museum_of_hangs.uneven", passes(Cluster(2).run(dist.get_rank))).right  # trains nothing
