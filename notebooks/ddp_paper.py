# ---
# jupyter:
#   dlearn:
#     ids: [DD1, DD8, DD9, DD13, DD17]
#     minutes: 2.0
#     needs: []
#     peak_mb: 1000
# ---

# %% [markdown]
# # The paper on DDP, run again
#
# **Goals.** You will be able to test a published claim by a run; tell "confirmed" from "not tested"; name a missing
# control.
#
# **Before this:** [ddp_overlap](ddp_overlap.ipynb), [gradient_accumulation](gradient_accumulation.ipynb).
# **Takes** about 40 minutes.
#
# *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (Li et al., VLDB 2020, [arXiv
# 2006.15704](https://arxiv.org/abs/2006.15704)) explains the design of DistributedDataParallel, with measurements on
# 256 GPUs. How much of it can you see on a laptop? This lesson is a reference and belongs to none of the three paths:
# run the claims that you need.
#
# It has eighteen claims. Other lessons test thirteen of them: [ddp_step_by_step](ddp_step_by_step.ipynb) buckets, their
# rebuilding, the constructor and the mean (DD3, DD10, DD14); [ddp_overlap](ddp_overlap.ipynb) when gradients are ready,
# and how they overlap with computing (DD2, DD4); [museum_of_hangs](museum_of_hangs.ipynb) another order, and a gradient
# that is left out (DD5); [gradient_accumulation](gradient_accumulation.ipynb) `no_sync` (DD6);
# [ring_all_reduce](ring_all_reduce.ipynb) what each rank sends if there are more (DD7); [ddp_hooks](ddp_hooks.ipynb)
# dropped layers, interface, options and hooks (DD11, DD15, DD16, DD18); [compression](compression.ipynb) compressed
# gradients (DD12). Here are the others. Each is tested on real ranks, and its verdict is **computed** from the run:
#
# - **confirmed**: every check holds.
# - **partly tested**: all checks that could run hold, but some could not run; the reason is given. That confirms
#   nothing, because the missing part may be the claim itself.
# - **not confirmed here**: a check does not hold. That is a statement about this machine and this run.
# - **cannot be tested here**; the reason is given.
#
# Checks of bytes, counts and orders are exact. A check of times has at least ten samples, and holds only if the whole
# 95 % interval of the median is on the claim's side (the sign test). This machine has two cores. With more than two
# ranks, ranks take turns, and latency depends on that.
#
# Outside a notebook, `python -m ddp_claims --out DIR` runs everything, with figures. The claims are in the repository's
# folder `ddp_claims`, beside the library, and not in the wheel: install dlearn from a checkout, as `make` does.

# %%
from ddp_claims import CLAIMS, claim

findings = []


def find(id, exact):
    """Run a claim; assert its first checks, so many as are exact: bytes and counts are the same on every machine."""
    finding = claim(id).find()
    assert all(check.holds for check in finding.result.checks[:exact]), finding
    finding.result.picture.figure.set_dpi(78)  # many pictures: a small file
    findings.append(finding)
    return finding


[f"{each.id}: {each.says}" for each in CLAIMS]

# %% [markdown]
# ## Why buckets?
#
# What does an element cost in a small message, and in a large one?

# %% tags=["DD1"]
find("DD1", exact=1)  # as many bytes; the rest are times

# %% [markdown]
# Every all-reduce has a fixed cost (calls, headers, wake-ups), so gradients should travel together, in buckets.
#
# ## Where the time goes

# %% tags=["DD8"]
find("DD8", exact=1)  # order and sum of the parts; the rest are times

# %% [markdown]
# If one process group cannot use the whole link, why not use several in turn? Torch no longer has such round-robin
# groups, but a communication hook can do the same: it sends each bucket through the next group. gloo sends a large
# tensor in parts, and waits for the other side between them. Over 1 Gbit/s and 10 ms that is slow. Are three groups
# faster?

# %% tags=["DD9"]
find("DD9", exact=2)  # bytes, weights and turns; the rest are times

# %% [markdown]
# ## Less frequent synchronisation
#
# What does less frequent synchronisation cost, not in bytes, but in the loss? The paper also gives a reason: more
# gradients add up before a step, so the step is longer. Which run could show that the longer step is *not* the reason?

# %% tags=["DD13"]
find("DD13", exact=1)  # all-reduces and steps; the rest are losses

# %% [markdown]
# ## Three rules
#
# The paper ends with advice.

# %% tags=["DD17"]
find("DD17", exact=1)  # gradients sent; the rest are times

# %% [markdown]
# ## All verdicts

# %%
from ddp_claims import Report

Report(tuple(findings))

# %% tags=["check"]
assert [each.claim.id for each in findings] == [each.id for each in CLAIMS]

# %% [markdown]
# ## Exercises
#
# 1. DD1's knee depends on the machine. Make the message in `ddp_claims/message_size.py` larger. Do elements become
#    cheaper?
# 2. Choose a claim that is *not confirmed here*. Which machine would test it fairly, and what would you change in the
#    run?
