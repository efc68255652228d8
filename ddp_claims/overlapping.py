"""DD4: communication that happens during the backward pass, and what it saves (the paper's figure 6)."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ddp_claims.comm_hooks import wait_for_each
from ddp_claims.figures import dots
from ddp_claims.samples import Samples, no_network, ranks_on_cores, ratios
from ddp_claims.training import backward, first_digits, seconds_in_turn, sgd_step, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, record
from dlearn.analysis import Overlap, overlap, traffic
from dlearn.lessons import models

RANKS = 2
STEPS = 32
KINDS = ("with", "without")
BATCH_SIZE = 256
NETWORK = "100 Mbit/s"
"""ConvNet's 111,960 bytes take 9 ms there, about as long as its backward pass."""


def train(folder: str) -> dict[str, list[float]]:
    """Return seconds of each step with and without overlap; record as many in `folder`."""
    batch = first_digits(BATCH_SIZE)
    made = {kind: under_ddp(models.ConvNet, bucket_cap_mb=models.SMALL_BUCKETS) for kind in KINDS}
    made["without"].register_comm_hook(None, wait_for_each)
    passes = {kind: partial(backward, model, batch) for kind, model in made.items()}
    steps = {kind: sgd_step(made[kind], passes[kind], lr=0.1) for kind in KINDS}
    seconds = seconds_in_turn(steps, rounds=STEPS)
    for kind in KINDS:
        with record(Path(folder) / kind):
            for _ in range(STEPS):
                dist.barrier()
                steps[kind]()
    return seconds


class Seen(NamedTuple):
    """What was seen on one kind of network."""

    seconds: dict[str, list[float]]
    faster: Samples
    hidden: dict[str, Samples]
    traces: dict[str, Trace]


def run_on(network: str | None) -> Seen:
    """Train over this network, or on the loopback interface."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = Cluster(RANKS, record=False, network=network).run(train, folder).results[0]
        traces = {kind: Trace.load(Path(folder) / kind) for kind in KINDS}
    hidden = {kind: Samples(tuple(hidden_shares(overlap(trace)))) for kind, trace in traces.items()}
    return Seen(seconds, ratios(seconds["without"], seconds["with"]), hidden, traces)


def hidden_shares(found: Overlap) -> Iterator[float]:
    """Return the hidden share of the communication of each step on each rank."""
    return (share.hidden for step in found.steps for share in step.shares if share.hidden is not None)


@paper_claim(
    "DD4",
    "overlap of computation with communication",
    paper="section 3.2.3, figure 6",
    says="All-reduces that run during the backward pass hide communication and make a step faster"
    " (there by 38.0 and 35.2 % with NCCL, 26.8 and 21.5 % with gloo).",
    runs=f"ConvNet, {BATCH_SIZE} digits a rank, against a communication hook that waits for each bucket, step by step",
)
def overlapped() -> Result:
    """Test on loopback, and over a network where a transfer needs no core of a rank."""
    near = run_on(None)
    far = None if no_network() else run_on(NETWORK)
    shown = far or near
    where = f"over {NETWORK}" if far else "on the loopback interface"
    sent = {kind: traffic(trace).total_bytes for kind, trace in shown.traces.items()}
    checks = (
        Check(
            "both ways send the same bytes",
            f"{sent['with']:,} B with overlap, {sent['without']:,} B without, in {STEPS} steps",
            sent["with"] == sent["without"] > 0,
        ),
        Check(
            f"communication is hidden behind the backward pass, {where}",
            f"{shown.hidden['with'].text('%', scale=100, digits=0)} of it;"
            f" {shown.hidden['without'].text('%', scale=100, digits=0)} with a hook that waits",
            shown.hidden["with"].interval[0] > shown.hidden["without"].interval[1],
        ),
        Check(
            f"a step without overlap takes longer, {where}",
            f"{shown.faster.text('times')} as long",
            shown.faster.interval[0] > 1,
        ),
    )
    kinds = [(NETWORK, far), ("loopback", near)] if far else [("loopback", near)]
    low, high = shown.hidden["with"].interval
    picture = dots(
        {
            f"{name}\n{kind} overlap": [1e3 * each for each in kept.seconds[kind]]
            for name, kept in kinds
            for kind in KINDS
        },
        title=f"Without overlap a step takes {shown.faster.with_interval} times as long {where}",
        y="ms a step",
        between=[f"{kept.faster.with_interval} times" for _, kept in kinds],
        notes=[
            f"{where.capitalize()}, {shown.hidden['with'].median:.0%} of the communication is hidden behind the"
            f" backward pass (95%: {low:.0%} to {high:.0%})."
        ],
    )
    loopback = f"; on the loopback interface, where a transfer takes cores, too: {near.faster.text('times')} as long"
    return Result(checks, picture, f"{ranks_on_cores(RANKS)}, gloo, {STEPS} pairs of steps{loopback if far else ''}")
