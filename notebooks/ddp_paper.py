# ---
# jupyter:
#   dlearn:
#     ids: [DD1, DD2, DD3, DD4, DD5, DD6, DD7, DD8, DD9, DD10, DD11, DD12, DD13, DD14, DD15, DD16, DD17, DD18]
#     minutes: 3.0
#     needs: []
#     peak_mb: 1000
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The paper on DDP, run again
#
# **Goals.** You will be able to judge a published claim by a run; tell confirmed from not tested; name the control
# that is missing.
#
# **Before this:** [ddp_overlap](ddp_overlap.ipynb), [gradient_accumulation](gradient_accumulation.ipynb).
# **Takes** about 55 minutes.
#
# *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (Li et al., VLDB 2020,
# [arXiv 2006.15704](https://arxiv.org/abs/2006.15704)) says why DistributedDataParallel is built as it is. It was
# measured on 256 GPUs. How much of it can be seen on a laptop?
#
# Eighteen claims, each a run on real ranks, each with a verdict that is **computed** from what was seen:
#
# - **confirmed**: every check holds.
# - **partly tested**: all that could run hold, and something could not, with the reason. That confirms nothing: what is
#   missing may be the claim itself.
# - **not confirmed here**: a check does not hold. That is a statement about this machine, and this run.
# - **cannot be tested here**, with the reason.
#
# Checks of bytes, counts and orders are exact. A check of times has at least ten samples, and holds only where the
# whole 95 % interval of the median lies on the claim's side (the sign test). There are two cores here: with more ranks
# than that, ranks take turns, and latency is about whose turn it is.
#
# Outside a notebook, all of it, with figures: `python -m ddp_claims --out DIR`. The claims stand in the repository's
# folder `ddp_claims`, beside the library: install dlearn from a checkout, as `make` does. The wheel has none of them.
#
# **Predict first**, for each claim, before you run its cell: confirmed, or not?

# %%
from ddp_claims import CLAIMS, claim

findings = []


def find(id, verdict=None, exact=0):
    """Run a claim; its verdict where every machine has the same one, and its first checks where these are exact."""
    finding = claim(id).find()
    assert verdict in (None, finding.verdict), finding
    assert all(check.holds for check in finding.result.checks[:exact]), finding
    finding.result.picture.figure.set_dpi(78)  # eighteen pictures: a small file
    findings.append(finding)
    return finding


[f"{each.id}: {each.says}" for each in CLAIMS]

# %% [markdown]
# ## Why buckets?
#
# Start with the two observations that everything else is built on. First: what does an element cost in a small
# message, and in a large one?

# %%
find("DD1")

# %% [markdown]
# A message has a price of its own: calls, headers, wake-ups. It has to be paid once per all-reduce, so gradients should
# travel together. But not too late: when do they become ready?

# %%
found = find("DD2")
assert all(check.holds for check in found.result.checks if "registration" in check.says)  # orders: exact
found

# %% [markdown]
# All along the backward pass, from the last layer to the first. Waiting for all of them wastes the time until
# then; sending each by itself pays for each message. So: buckets, in the reverse order of the layers.

# %%
find("DD3", "confirmed")  # bytes and counts: exact

# %% [markdown]
# What is that good for? While one bucket travels, the next one is computed.
#
# Over the loopback interface "travelling" is copying, done by the same two cores that compute: there is little to
# hide. So the ranks get a network of 100 Mbit/s, if this machine lets us choose one. **Predict first:** on
# which of the two does overlap pay?

# %%
find("DD4", exact=1)  # as many bytes; the rest are times

# %% [markdown]
# ## What can go wrong
#
# All ranks must reduce the same buckets in the same order. The paper draws two failures (its figure 3). Does the order
# in which gradients become *ready* matter, or that in which buckets are *launched*?

# %%
find("DD5", "confirmed")

# %% [markdown]
# The lesson [museum_of_hangs](museum_of_hangs.ipynb) has these, and a dozen others.
#
# ## Sending less often, and to more
#
# With `no_sync`, gradients of several passes are added up before they are sent. How many bytes does an iteration send
# then?

# %%
find("DD6", "confirmed")

# %% [markdown]
# And with more ranks? Each rank sends $2(n-1)/n$ times the gradients: nearly as many bytes on 8 ranks as on 4.

# %%
find("DD7", "partly tested")  # bytes: exact; a nearly linear speed-up cannot be seen on so few cores

# %% [markdown]
# ## Where the time goes

# %%
find("DD8")

# %% [markdown]
# If one process group cannot use the whole link, why not several, in turn? Torch once had such groups, and has them no
# more. A communication hook does the same: one bucket to each group. gloo sends a large tensor in parts, and waits for
# the other side between them; over 1 Gbit/s and 10 ms that is long. **Predict first**, with three groups: faster?

# %%
find("DD9", exact=2)  # bytes, weights and turns; the rest are times

# %% [markdown]
# ## Future work then, default now
#
# The paper's section 6 names what could come. First: predict the order of the gradients. Today's DDP watches one
# backward pass, and then builds its buckets anew.

# %%
find("DD10", "confirmed")

# %% [markdown]
# Second: layers that are dropped, or parameters that a branch leaves out. What does it cost to find them?

# %%
find("DD11", "confirmed")

# %% [markdown]
# Third: compressed gradients. How many bytes less, and what does the loss say?

# %%
find("DD12", exact=4)  # bytes; the rest are losses

# %% [markdown]
# And what does it cost to synchronise less often? Not in bytes, but in what is learnt. The paper gives a reason, too:
# more gradients add up before a step, so the step is long. **Predict first:** which run would show that the long step
# is *not* the reason?

# %%
find("DD13")

# %% [markdown]
# ## The interface
#
# DDP promises that a script changes in a few lines, and that all ranks start and stay equal.

# %%
find("DD14", "confirmed")

# %%
find("DD15", "confirmed")

# %% [markdown]
# Its knobs, one by one:

# %%
find("DD16", "partly tested")  # no second device

# %% [markdown]
# ## Three rules
#
# At its end the paper gives advice.

# %%
find("DD17")

# %% [markdown]
# ## How does DDP see all this?
#
# By hooks, at the nodes of the graph that autograd builds.

# %%
find("DD18", "confirmed")

# %% [markdown]
# ## All of it

# %%
from ddp_claims import Report

Report(tuple(findings))

# %% tags=["check"]
assert [each.claim.id for each in findings] == [each.id for each in CLAIMS]
about_times_or_losses = {"DD1", "DD2", "DD4", "DD8", "DD9", "DD12", "DD13", "DD17"}
failed = {each.claim.id for each in findings if each.verdict == "not confirmed here"}
assert failed <= about_times_or_losses  # bytes, counts and orders are the same on every machine

# %% [markdown]
# ## Exercises
#
# 1. DD1's knee depends on the machine. Make the message of `ddp_claims/message_size.py` larger: does an
#    element become cheaper still?
# 2. DD4 over `10 Mbit/s`: how much can be hidden at most, if the transfer takes ten times as long as the backward
#    pass? Change `NETWORK` in `overlapping.py` and try.
# 3. A claim that is *not confirmed here*: which machine would you need to test it fairly, and what would you change in
#    the run?
