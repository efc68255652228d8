"""DD4: communication that happens during the backward pass, and what it saves (the paper's figure 6)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.comm_hooks import wait_for_each
from ddp_claims.conditions import no_network, ranks_on_cores
from ddp_claims.figures import dots
from ddp_claims.samples import Samples, ratios
from ddp_claims.verdicts import Check, Claim, Result
from dlearn.analysis.ddp.overlap import Overlap, overlap
from dlearn.analysis.volume.traffic import traffic
from dlearn.cluster import Cluster
from dlearn.lessons import digits, models
from dlearn.recorder import record
from dlearn.trace import Trace

RANKS = 2
STEPS = 32
KINDS = ("with", "without")
BATCH_SIZE = 256
NETWORK = "100 Mbit/s"
"""ConvNet's 111,960 bytes take 9 ms there, about as long as its backward pass."""


def steps(folder: str) -> dict[str, list[float]]:
    """Return seconds of each step with and without overlap; record as many in `folder`."""
    images, labels = (part[:BATCH_SIZE] for part in digits.shard(dist.get_rank(), dist.get_world_size()))
    trained: dict[str, tuple[DistributedDataParallel, torch.optim.Optimizer]] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = DistributedDataParallel(models.ConvNet(), bucket_cap_mb=models.SMALL_BUCKETS)
        if kind == "without":
            model.register_comm_hook(None, wait_for_each)
        trained[kind] = model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(kind: str) -> float:
        model, optimizer = trained[kind]
        optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return time.perf_counter() - start

    for kind in KINDS * 2:  # Step 0 has one bucket, and step 1 builds the others.
        step(kind)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(STEPS):
        for kind in KINDS:
            seconds[kind].append(step(kind))
    for kind in KINDS:
        with record(Path(folder) / kind):
            for _ in range(STEPS):
                step(kind)
    return seconds


class Heartbeat(NamedTuple):
    """What was seen on one kind of network."""

    seconds: Mapping[str, list[float]]
    faster: Samples
    hidden: dict[str, Samples]
    traces: dict[str, Trace]


def place(seconds: Mapping[str, list[float]], folder: str) -> Heartbeat:
    traces = {kind: Trace.load(Path(folder) / kind) for kind in KINDS}
    hidden = {kind: Samples(tuple(shares_of(overlap(trace)))) for kind, trace in traces.items()}
    return Heartbeat(seconds, ratios(seconds["without"], seconds["with"]), hidden, traces)


def shares_of(found: Overlap) -> Iterator[float]:
    """Return the hidden share of the communication of each step on each rank."""
    return (share.hidden for step in found.steps for share in step.shares if share.hidden is not None)


def overlapped() -> Result:
    """Test on loopback, and over a network where a transfer needs no core of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        near = place(Cluster(RANKS, record=False).run(steps, folder).results[0], folder)
    far = None
    if not no_network():
        with tempfile.TemporaryDirectory() as folder:
            far = place(Cluster(RANKS, record=False, network=NETWORK).run(steps, folder).results[0], folder)
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


DD4 = Claim(
    id="DD4",
    title="overlap of computation with communication",
    paper="section 3.2.3, figure 6",
    says="All-reduces that run during the backward pass hide communication and make a step faster"
    " (there by 38.0 and 35.2 % with NCCL, 26.8 and 21.5 % with gloo).",
    runs=f"ConvNet, {BATCH_SIZE} digits a rank, against a communication hook that waits for each bucket, step by step",
    test=overlapped,
)
